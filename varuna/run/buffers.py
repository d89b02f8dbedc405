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

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import groupby

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
        for holders, shared in self._shared.items():
            flat = self._groups.of(holders).place(torch.cat([self._share, shared.contribution(self._before)]))
            self._groups.of(holders).all_reduce_sum(flat)
            if round(flat[0].item()) != self._num_micro_batches:
                raise PlanError(
                    f"Several stages of one pipeline change the same buffers ({', '.join(shared.names[:3])}), "
                    f"so their values cannot be joined. Move the cut so that one stage holds all uses of that "
                    f"module, or use fewer stages."
                )
            shared.set(flat[1:], self._before)

    @cached_property
    def _share(self) -> Tensor:
        """How many micro-batches this pipeline has: those of all must be the global batch's."""
        device = next(iter(self._buffers.values())).device
        return torch.tensor([len(self._micro_batches)], dtype=torch.float64, device=device)

    @cached_property
    def _shared(self) -> Mapping[tuple[int, ...], _Shared]:
        """What others hold too, by its holders, in the same order on all of them."""
        names: dict[tuple[int, ...], list[str]] = {}
        for name in self._buffers:
            if len(self._holders[name]) > 1:
                names.setdefault(self._holders[name], []).append(name)
        return {
            holders: _Shared(
                {name: self._buffers[name] for name in names[holders]},
                self._rules,
                self._micro_batches,
                self._num_micro_batches,
            )
            for holders in sorted(names)
        }


class _Shared:
    """Buffers that the same workers hold: one flat tensor in float64, so that a step takes few operations."""

    def __init__(
        self,
        buffers: Mapping[str, Tensor],
        rules: Mapping[str, BufferRule],
        share: range,
        num_micro_batches: int,
    ) -> None:
        # Neighbours have the same dtype: numbers are converted a run at a time.
        self._buffers = dict(sorted(buffers.items(), key=lambda item: str(item[1].dtype)))
        self.names = list(self._buffers)
        sizes = [buffer.numel() for buffer in self._buffers.values()]
        device = next(iter(self._buffers.values())).device

        def spread(of_rule: Callable[[BufferRule], float]) -> Tensor:
            """A number of each buffer's rule, for every element."""
            values = torch.tensor([of_rule(rules[name]) for name in self.names], dtype=torch.float64)
            return values.repeat_interleave(torch.tensor(sizes)).to(device)

        self._is_affine = spread(lambda rule: rule.kind == "affine").bool()
        self._decayed = spread(lambda rule: float(rule.decay) ** len(share))
        self._kept = spread(lambda rule: float(rule.decay) ** num_micro_batches)
        self._weight = spread(
            lambda rule: (
                float(rule.decay) ** (num_micro_batches - share.stop)
                if rule.kind == "affine"
                else len(share) / num_micro_batches
            )
        )

    def contribution(self, before: Mapping[str, Tensor]) -> Tensor:
        """What this pipeline adds, flat; ``before``: the values before the step, by name."""
        now = self._flat(self._buffers)
        grown = now - self._decayed * self._flat(before)
        return torch.where(self._is_affine, grown, now) * self._weight

    def set(self, total: Tensor, before: Mapping[str, Tensor]) -> None:
        """The buffers, from the sum of all contributions and what is left of the values before the step."""
        total = total.to(self._kept.device)
        joined = torch.where(self._is_affine, total + self._kept * self._flat(before), total)
        start = 0
        with torch.no_grad():
            for buffer in self._buffers.values():
                value = joined[start : start + buffer.numel()].view(buffer.shape)
                start += buffer.numel()
                buffer.copy_(value if buffer.is_floating_point() else value.round())

    def _flat(self, buffers: Mapping[str, Tensor]) -> Tensor:
        parts = []
        for _, names in groupby(self.names, key=lambda name: self._buffers[name].dtype):
            parts.append(torch.cat([buffers[name].detach().reshape(-1) for name in names]).double())
        return torch.cat(parts)
