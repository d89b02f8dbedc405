"""Sums every gradient over the workers that hold its parameter: once a step, in buckets, while backward runs.

A bucket's all-reduce starts as soon as the last micro-batch's backward has made its last gradient. Each bucket
carries a flag per parameter, so that a gradient that is None everywhere stays None (the optimizer then skips
it, as in a plain loop) and one that is None only here becomes the others' sum.

Why nothing deadlocks: launching never blocks, and buckets of one group are launched in the same order by all
its members, whatever the order between groups. Why nothing is launched too early: the first step launches
after backward and counts how often each parameter's gradient is added to in one backward (more than once with
nested backwards); later steps wait for that count. Where backward is split, the last micro-batch's weight
gradients are the last task: all else has been added by then, and it foretells its own additions.

Why no hook raises: autograd keeps what a backward that fails has not come to, parameters included, until the
next one in the same thread; they could not be handed over before that. ``finish`` raises what came up.

Memory: a bucket takes the place of its gradients, which are freed when copied; after the sum the gradients are
views of it. A parameter with one holder is not touched.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from varuna.errors import OptimizerError, ProtocolError, RunError, VarunaError
from varuna.run.buckets import BucketSpec, GradientSpec, plan_buckets
from varuna.run.groups import Groups, Pending

DEFAULT_BUCKET_BYTES = 8 << 20
"""Fresh pages cost more than the network hop: at 160 MB of gradients, 8 MiB took half the time of 64 MiB."""


@dataclass
class _Bucket:
    """A bucket's spec, its parameters, and where it stands in this step."""

    spec: BucketSpec
    parameters: tuple[nn.Parameter, ...]
    missing: int = 0
    flat: torch.Tensor | None = None
    pending: Pending | None = None


@dataclass
class _Queue:
    """Buckets of one group in launch order; ``next_index`` is the next to launch."""

    buckets: list[_Bucket] = field(default_factory=list)
    next_index: int = 0


class GradientReducer:
    """Gradient sums of one worker in one generation.

    Args:
        parameters: those held here, by name.
        holders: for every parameter of the model, in order of use in forward, all workers that hold it through
            any section (a tied weight lives on several stages); the same mapping on every worker.
        groups: the generation's groups.
        bucket_bytes: size of a bucket.
        overlap: False launches everything after backward.

    One step: ``begin_step()``, any number of backwards, ``begin_final_backward()``, the last micro-batch's
    backward (or, if it is split, its weight gradients), ``finish()``. A worker whose step is given up calls
    ``cancel()``.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        holders: Mapping[str, Sequence[int]],
        groups: Groups,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        overlap: bool = True,
    ) -> None:
        self._holders = {name: tuple(sorted(set(ranks))) for name, ranks in holders.items()}
        self._parameters = {name: parameters[name] for name in self._holders if name in parameters}
        assert len(self._parameters) == len(parameters), set(parameters) - set(self._holders)
        self._groups = groups
        self._bucket_bytes = bucket_bytes
        self._overlap = overlap
        self._trainable: tuple[str, ...] | None = None
        self._queues: dict[tuple[int, ...], _Queue] = {}
        self._bucket_of: dict[str, _Bucket] = {}
        self._agreed: dict[tuple[int, ...], bytes] = {}
        self._additions: dict[str, int] = {}
        self._usual_additions: dict[str, int] | None = None
        self._handles: list[RemovableHandle] = []
        self._failure: VarunaError | None = None  # of a hook
        self._is_foretold = False
        self.num_reductions = 0
        """All-reduces launched since construction."""

    def prepare(self) -> None:
        """Make the groups; every worker of the generation calls it (else the first step does)."""
        self._groups.prepare(self._holders.values())

    def begin_step(self) -> None:
        """Before any forward of a step: plan buckets if requires_grad changed, and compare them among holders.

        Holders wait for each other here, so it must not happen inside the pipeline, where stages wait for each
        other too.

        Raises:
            ProtocolError: holders require gradients of different parameters.
        """
        self._refresh()

    def begin_final_backward(self, additions: Mapping[nn.Parameter, int] | None = None) -> None:
        """From here on a bucket is reduced as soon as all its gradients are complete.

        Args:
            additions: how often each gradient will still be added to, those not named not at all; by default
                as often as in the steps before.
        """
        self._refresh()
        self._additions = dict.fromkeys(self._bucket_of, 0)
        self._is_foretold = additions is not None
        expected = dict(self._usual_additions or {})
        if additions is not None:
            expected = {name: additions.get(self._parameters[name], 0) for name in self._bucket_of}
        if not self._overlap:
            expected = {}
        for queue in self._queues.values():
            for bucket in queue.buckets:
                names = bucket.spec.names
                complete = [name for name in names if self._is_foretold and expected.get(name) == 0]
                bucket.missing = len(names) - len(complete)
            self._launch_complete(queue)
        for name in self._bucket_of:
            hook = self._hook(name, expected.get(name, 0))
            parameter = self._parameters[name]
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Reduce what is left, wait, and put the sums into ``.grad``. Call it after the last backward.

        Raises:
            PeerLost: a holder is gone.
            OptimizerError: a gradient is sparse.
            RunError: a gradient came after its bucket had left.
        """
        if not self._handles:  # no final backward was announced: nothing ran here, or nothing is shared
            self._refresh()
        self._remove_hooks()
        _refuse_sparse(self._parameters.items())
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        for queue in self._queues.values():
            while queue.next_index < len(queue.buckets):
                self._launch(queue)
            queue.next_index = 0
        for queue in self._queues.values():
            for bucket in queue.buckets:
                _collect(bucket)
        if not self._is_foretold:
            usual = self._usual_additions or {}
            self._usual_additions = {name: max(usual.get(name, 0), n) for name, n in self._additions.items()}

    def squared_norm(self) -> float:
        """Sum of squares over the gradients of parameters whose first holder this worker is.

        Added up over workers it is the squared norm of the whole model's gradient, tied weights counted once.
        Call it after ``finish``; it may be inf or nan.
        """
        rank = self._groups.world.rank
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and self._holders[name][0] == rank:
                key = (parameter.grad.device, parameter.grad.dtype)
                by_kind.setdefault(key, []).append(parameter.grad)
        norms: list[float] = []
        for (_, dtype), gradients in by_kind.items():
            wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
            norms += torch.stack(torch._foreach_norm(gradients, 2, dtype=wide)).tolist()
        return math.fsum(norm * norm for norm in norms) if all(map(math.isfinite, norms)) else math.nan

    def drop_gradients(self) -> None:
        """Set every held parameter's ``.grad`` to None."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def cancel(self) -> None:
        """Give the step up: hooks removed, buckets and gradients dropped. The groups must not be used again."""
        self._remove_hooks()
        self._failure = None
        for queue in self._queues.values():
            queue.next_index = 0
            for bucket in queue.buckets:
                bucket.flat = bucket.pending = None
        self.drop_gradients()

    def _refresh(self) -> None:
        """Plan buckets for what requires a gradient now; users may freeze and unfreeze between steps."""
        trainable = tuple(name for name, parameter in self._parameters.items() if parameter.requires_grad)
        if trainable == self._trainable:
            return
        if self._trainable is None:
            self.prepare()
        self._trainable = trainable
        self._usual_additions = None
        self._queues = {}
        self._bucket_of = {}
        specs = (_spec(name, self._parameters[name], self._holders[name]) for name in trainable)
        for spec in plan_buckets(specs, self._bucket_bytes):
            bucket = _Bucket(spec=spec, parameters=tuple(self._parameters[name] for name in spec.names))
            self._queues.setdefault(spec.holders, _Queue()).buckets.append(bucket)
            self._bucket_of.update(dict.fromkeys(spec.names, bucket))
        self._compare_buckets()

    def _compare_buckets(self) -> None:
        """Fail on every holder, before gloo would abort the process, if holders planned different buckets.

        Only holders of what has changed meet: others, who share other parameters with them, know of nothing.
        """
        agreed, self._agreed = self._agreed, {}
        for holders in sorted(self._queues):
            plan = [(bucket.spec.names, bucket.spec.num_elements) for bucket in self._queues[holders].buckets]
            digest = hashlib.blake2b(repr(plan).encode(), digest_size=16).digest()
            self._agreed[holders] = digest
            if agreed.get(holders) == digest:
                continue
            digests = self._groups.of(holders).all_gather_bytes(digest)
            if len(set(digests)) > 1:
                odd = [rank for rank, other in zip(holders, digests, strict=True) if other != digest]
                raise ProtocolError(
                    f"Workers {list(holders)} hold the same parameters but want to reduce different gradients: "
                    f"{odd} differ from worker {self._groups.world.rank}. requires_grad must be the same on "
                    f"every worker."
                )

    def _hook(self, name: str, expected: int) -> Callable[[torch.Tensor], None]:
        """Counts additions; ``expected`` of them make a gradient complete, 0: that is not known."""
        bucket = self._bucket_of[name]
        queue = self._queues[bucket.spec.holders]

        def on_gradient(_parameter: torch.Tensor) -> None:
            self._additions[name] += 1
            if self._failure is not None:
                return
            if bucket.flat is not None:
                self._failure = _late(name)
            elif self._additions[name] == expected:
                bucket.missing -= 1
                try:
                    self._launch_complete(queue)
                except VarunaError as error:
                    self._failure = error

        return on_gradient

    def _launch_complete(self, queue: _Queue) -> None:
        """In the queue's order, up to the first bucket that is not complete."""
        while queue.next_index < len(queue.buckets) and not queue.buckets[queue.next_index].missing:
            self._launch(queue)

    def _launch(self, queue: _Queue) -> None:
        bucket = queue.buckets[queue.next_index]
        queue.next_index += 1
        spec = bucket.spec
        first = bucket.parameters[0]
        bucket.flat = torch.empty(spec.num_elements, dtype=first.dtype, device=first.device)
        gradients = [parameter.grad for parameter in bucket.parameters]
        _refuse_sparse(zip(spec.names, bucket.parameters, strict=True))
        views = [_view(bucket, index) for index in range(len(gradients))]
        present = [(view, grad) for view, grad in zip(views, gradients, strict=True) if grad is not None]
        if present:
            torch._foreach_copy_([view for view, _ in present], [grad for _, grad in present])
        for view, gradient in zip(views, gradients, strict=True):
            if gradient is None:
                view.zero_()
        flags = torch.tensor([float(gradient is not None) for gradient in gradients], dtype=first.dtype)
        bucket.flat[spec.first_flag :].copy_(flags)
        for parameter in bucket.parameters:
            parameter.grad = None
        bucket.pending = self._groups.of(spec.holders).start_all_reduce_sum(bucket.flat)
        self.num_reductions += 1

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _late(name: str) -> RunError:
    return RunError(
        f"The gradient of {name!r} was added to more often than in the steps before, after its reduction had "
        f"begun. Construct the reducer with overlap=False for a model with nested backward passes."
    )


def _refuse_sparse(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    for name, parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise OptimizerError(
                f"The gradient of {name!r} is sparse ({parameter.grad.layout}), which cannot be summed over "
                f"workers. Construct its module with sparse=False (torch.nn.Embedding's default)."
            )


def _spec(name: str, parameter: nn.Parameter, holders: tuple[int, ...]) -> GradientSpec:
    return GradientSpec(
        name=name,
        holders=holders,
        num_elements=parameter.numel(),
        element_bytes=parameter.element_size(),
        kind=f"{parameter.dtype} {parameter.device.type}",
    )


def _view(bucket: _Bucket, index: int) -> torch.Tensor:
    """The part of the flat tensor that is one parameter's gradient, channels last where the parameter is."""
    assert bucket.flat is not None
    parameter = bucket.parameters[index]
    start = bucket.spec.starts[index]
    if parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last):
        return bucket.flat.as_strided(parameter.size(), parameter.stride(), start)
    return bucket.flat[start : start + parameter.numel()].view(parameter.size())


def _collect(bucket: _Bucket) -> None:
    """Wait for a bucket's sum and make the gradients views of it."""
    assert bucket.pending is not None
    assert bucket.flat is not None
    bucket.pending.wait()
    flags = bucket.flat[bucket.spec.first_flag :].tolist()
    for index, parameter in enumerate(bucket.parameters):
        parameter.grad = _view(bucket, index) if flags[index] > 0 else None
    bucket.flat = bucket.pending = None
