"""Buffers that forward changes (BatchNorm's statistics, counters): one rule that gives the plain run's values.

Within a pipeline buffers change micro-batch by micro-batch, in order. At the end of the step the pipelines'
copies are joined so that the result is that of one process running micro-batches 0..N-1 one after another.

``affine`` buffers follow ``r <- decay * r + c_k`` (BatchNorm: decay is 1 - momentum; counters: decay 1).
Pipeline d started from r_0 and ran the n_d micro-batches before end_d, which left r_d. Then

    r_N = decay^N r_0 + sum over d of decay^(N - end_d) (r_d - decay^n_d r_0)

which needs only r_d: one all-reduce, in float64, among the workers that hold the buffer. ``mean`` buffers (any
other change) become the mean over pipelines weighted by their micro-batches; for those the result does depend
on the number of pipelines.

The values before the step are kept until the next one, so that a step can be undone (``restore``). With one
pipeline that copy is the whole cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from varuna.errors import PlanError
from varuna.partition.section import BufferRule
from varuna.run.groups import Groups


class BufferSync:
    """The changing buffers of one worker in one generation.

    Args:
        buffers: those that sections held here change, by name; changed in place.
        rules: how each changes.
        holders: for every changing buffer of the model, the workers that hold it (one per pipeline); the same
            mapping on every worker.
        groups: the generation's groups.
        micro_batches: this worker's pipeline's share of the global batch's micro-batches.
        num_micro_batches: N of the global batch.
    """

    def __init__(
        self,
        buffers: Mapping[str, Tensor],
        rules: Mapping[str, BufferRule],
        holders: Mapping[str, Sequence[int]],
        groups: Groups,
        *,
        micro_batches: range,
        num_micro_batches: int,
    ) -> None:
        self._holders = {name: tuple(sorted(set(ranks))) for name, ranks in holders.items()}
        self._buffers = {name: buffers[name] for name in self._holders if name in buffers}
        assert len(self._buffers) == len(buffers), set(buffers) - set(self._holders)
        self._rules = dict(rules)
        self._groups = groups
        self._micro_batches = micro_batches
        self._num_micro_batches = num_micro_batches
        self._before: dict[str, Tensor] = {}

    def prepare(self) -> None:
        """Make the groups; every worker of the generation calls it."""
        self._groups.prepare(self._holders.values())

    def begin(self) -> None:
        """Keep the values before the step."""
        self._before = {name: buffer.detach().clone() for name, buffer in self._buffers.items()}

    def keep(self) -> None:
        """The step is committed: the values before it are not needed any more."""
        self._before = {}

    def restore(self) -> None:
        """Undo: the values of the last ``begin``, unless ``keep`` was called since."""
        with torch.no_grad():
            for name, value in self._before.items():
                self._buffers[name].copy_(value)

    def combine(self) -> None:
        """Join the pipelines' copies: the plain run's values, bit-equal on every holder.

        Raises:
            PeerLost: a holder is gone; ``restore`` still works.
        """
        shared: dict[tuple[int, ...], list[str]] = {}
        for name in self._buffers:
            if len(self._holders[name]) > 1:
                shared.setdefault(self._holders[name], []).append(name)
        for holders in sorted(shared):
            self._combine(holders, shared[holders])

    def _combine(self, holders: tuple[int, ...], names: Iterable[str]) -> None:
        names = list(names)
        group = self._groups.of(holders)
        share = torch.tensor([len(self._micro_batches)], dtype=torch.float64)
        parts = [share, *(self._contribution(name).to(share.device) for name in names)]
        flat = group.place(torch.cat(parts))
        group.all_reduce_sum(flat)
        if round(flat[0].item()) != self._num_micro_batches:
            raise PlanError(
                f"Several stages of one pipeline change the same buffers ({', '.join(names[:3])}), so their "
                f"values cannot be joined. Move the cut so that one stage holds all uses of that module, or "
                f"use fewer stages."
            )
        start = 1
        with torch.no_grad():
            for name in names:
                buffer = self._buffers[name]
                total = flat[start : start + buffer.numel()].view(buffer.shape).to(buffer.device)
                start += buffer.numel()
                joined = total + self._kept_part(name)
                buffer.copy_(joined if buffer.is_floating_point() else joined.round())

    def _contribution(self, name: str) -> Tensor:
        """What this pipeline adds, flat, float64."""
        rule, share = self._rules[name], self._micro_batches
        now = self._buffers[name].detach().double().flatten()
        if rule.kind == "mean":
            return now * (len(share) / self._num_micro_batches)
        grown = now - float(rule.decay) ** len(share) * self._before[name].double().flatten()
        weight: float = rule.decay ** (self._num_micro_batches - share.stop)
        return grown * weight

    def _kept_part(self, name: str) -> Tensor | float:
        """What is left of the value before the step."""
        rule = self._rules[name]
        if rule.kind == "mean":
            return 0.0
        kept: float = rule.decay**self._num_micro_batches
        return self._before[name].double() * kept
