"""Measures what a model's sections cost on this worker's device, before parameters are given to stages.

Where the whole model and one set of its activations fit, all sections run one after another, as in a pipeline
of one stage: a section finds the caches as cold as in a run, and sections of one kind give several samples per
pass. Otherwise one section of each kind is given storage, run on made-up inputs, and released; workers share
the kinds.

Micro-batch sizes 1, 2, 4, ... until throughput rises no more, memory is short or time is up. Weights are not
changed; see ``undisturbed.py`` for what is put back.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from varuna.errors import VarunaError, WorkerFailed
from varuna.partition import Partition, Section, ValueSpec
from varuna.partition.materialise import InitWeights
from varuna.plan.profile import TaskCosts
from varuna.run.fingerprint import kinds_of
from varuna.run.measure_jitter import ComputeJitter, jitter_of
from varuna.run.measure_pass import (
    Batch,
    Chain,
    SectionTimes,
    timed_pass,
    weighed_pass,
)
from varuna.run.measure_size import Samples, SizeRun, costs_of
from varuna.run.partitions import Partitions
from varuna.run.precision import AutocastSpec
from varuna.run.startup import is_on_meta
from varuna.run.undisturbed import drop_gradients, placed, undisturbed

BUDGET_S = 4.5
"""Seconds that measuring may take; small models need far less. On a CPU they are this process's own: on a busy
machine fewer sizes would be measured otherwise, and none that is not measured can be chosen."""

MEASURED_AS = 3
"""Raised when tasks run differently from before: profiles of then do not stand for those of now."""

_MOST_DELAY = 4
"""But all together not longer than so many times that."""

_LEAST_GAIN = 0.03
"""Twice the micro-batch size must raise throughput by this share, or the next larger one is the last measured:
a single measurement may have been disturbed."""

_MEMORY_SHARE = 0.6
"""Of the memory that is free, how much a measurement may take."""

AGAIN = 3.0
"""Where nobody waits for a first step (``varuna profile``): for how many times as long all sizes are timed
again, in turn, so that seconds in which the machine was busy count for all alike, and for little."""

_MOST_PASSES = 8


@dataclass(frozen=True, kw_only=True)
class MeasureRequest:
    """What is measured and within which limits.

    Attributes:
        model, partitions: the user's model and its sections.
        autocast, seed, device, init_weights: as in the run.
        example: tensors of a few samples by key; sizes are made of it by repetition.
        batch_size: of the global batch: no micro-batch is larger.
        micro_batch_sizes: measure these, all of them; empty: choose.
        memory_bytes: free on the device, for this worker.
        share_index, num_shares: this worker among those that share the kinds of sections.
        budget_s: see ``BUDGET_S``.
        again: see ``AGAIN``.
    """

    model: nn.Module
    partitions: Partitions
    autocast: AutocastSpec
    seed: int
    device: torch.device
    init_weights: InitWeights | None
    example: Mapping[str, Tensor]
    batch_size: int
    micro_batch_sizes: tuple[int, ...] = ()
    memory_bytes: int
    share_index: int = 0
    num_shares: int = 1
    budget_s: float = BUDGET_S
    again: float = 0.0


@dataclass(frozen=True, kw_only=True)
class KindCosts:
    """Costs of one kind of section (``fingerprint.kinds_of``), by ascending micro-batch size.

    ``jitter`` is that of the passes in which it was measured.
    """

    kind: int
    costs: tuple[TaskCosts, ...]
    jitter: ComputeJitter


def measure_sections(request: MeasureRequest) -> list[KindCosts]:
    """Costs of the kinds of sections that this worker measured (all, or its share of them).

    Raises:
        WorkerFailed: the model raised.
    """
    reference = request.partitions.reference
    kinds = kinds_of(reference)
    if _fits_whole(request, reference):
        if request.device.type != "cpu":
            request.model.to(request.device)
        with undisturbed(request.model, request.device):
            found = _measure(request, range(len(kinds)), kinds, share=1.0)
        return found
    first_of = {kind: kinds.index(kind) for kind in sorted(set(kinds))}
    mine = [kind for kind in first_of if kind % request.num_shares == request.share_index % len(first_of)]
    found = []
    for kind in mine:
        section = reference.sections[first_of[kind]]
        with (
            placed(request.model, section, request.device, request.seed, request.init_weights),
            undisturbed(request.model, request.device),
        ):
            found += _measure(request, [first_of[kind]], kinds, share=1 / len(mine))
    return found


def _fits_whole(request: MeasureRequest, reference: Partition) -> bool:
    """Weights that are here already, gradients, activations of one sample (an upper bound)."""
    if is_on_meta(request.model):
        return False
    parameters = sum(parameter.nbytes for parameter in request.model.parameters())
    is_here = request.device.type == "cpu"
    needed = parameters * (1 if is_here else 2) + sum(
        section.activation_bytes for section in reference.sections
    )
    return needed < _MEMORY_SHARE * request.memory_bytes


# --- one chain of sections ------------------------------------------------------------------


def _measure(
    request: MeasureRequest, indices: Sequence[int], kinds: Sequence[int], *, share: float
) -> list[KindCosts]:
    """Sections ``indices`` (neighbours) at every micro-batch size that is worth it, in a share of the time."""
    clock = time.process_time if request.device.type == "cpu" else time.monotonic
    budget = _Budget(share * request.budget_s, clock)
    started_s = time.monotonic()
    runs: dict[int, SizeRun] = {}
    limit_bytes = _MEMORY_SHARE * request.memory_bytes
    for size in _sizes(request):
        found = {known: run.samples for known, run in runs.items()}
        if not request.micro_batch_sizes and not _is_worthwhile(found, size, budget, limit_bytes):
            break
        try:
            runs[size] = _run_of(request, indices, kinds, size, budget)
        except VarunaError:
            raise
        except Exception as error:
            drop_gradients(list(request.model.parameters()))
            if runs and _is_out_of_memory(error):
                break
            if size == 1 and request.batch_size > 1:  # one sample alone is too few for batch normalisation
                continue
            raise WorkerFailed(
                f"{type(error).__name__} while sections {indices[0]} to {indices[-1]} were measured with "
                f"micro-batches of {size}: {error}"
            ) from error
    now_s = time.monotonic()
    end_s = now_s + request.again * (now_s - started_s)
    while runs and time.monotonic() < end_s:
        for run in runs.values():
            run.time_once(split=True)
    jitter = jitter_of([run.passes for run in runs.values()])
    return [
        KindCosts(
            kind=kind, costs=tuple(costs_of(size, runs[size].samples[kind]) for size in runs), jitter=jitter
        )
        for kind in sorted({kinds[index] for index in indices})
    ]


def _run_of(
    request: MeasureRequest, indices: Sequence[int], kinds: Sequence[int], size: int, budget: _Budget
) -> SizeRun:
    """One micro-batch size, weighed, and timed a few times."""
    chain = Chain(
        partition=request.partitions.get(None, size, training=True),
        first_section=indices[0],
        end_section=indices[-1] + 1,
        autocast=request.autocast,
        seed=request.seed,
        device=request.device,
    )
    batch = _batch(request, chain.sections[0], size)
    started_s = budget.clock()
    if budget.num_sizes == 0:  # libraries start up, gradients come to be
        timed_pass(chain, batch, [SectionTimes() for _ in indices])
    run = SizeRun(
        chain=chain,
        batch=batch,
        kinds=[kinds[index] for index in indices],
        sizes=weighed_pass(chain, batch),
        times=[SectionTimes() for _ in indices],
    )
    budget.begin_size()
    while budget.wants_pass(run.num_passes):
        run.time_once(split=budget.wants_split(run.num_passes + 1))
    budget.end_size(budget.clock() - started_s)
    return run


def _is_out_of_memory(error: Exception) -> bool:
    """Of a device, or of the processor, whose allocator has no exception of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _sizes(request: MeasureRequest) -> Iterator[int]:
    if request.micro_batch_sizes:
        yield from sorted(set(request.micro_batch_sizes))
        return
    size = 1
    while size <= request.batch_size:
        yield size
        size *= 2


def _batch(request: MeasureRequest, first: Section, size: int) -> Batch:
    """The example's samples again and again; made-up values where sections before are left out."""
    inputs = {}
    for spec in request.partitions.signature.tensors:
        tensor = request.example[spec.key]
        if spec.has_batch_dim:
            tensor = tensor[torch.arange(size) % tensor.shape[0]]
        inputs[spec.key] = tensor.to(request.device)
    received = tuple(_made_up(value, size, request.device) for value in first.received)
    return Batch(inputs=inputs, received=received, num_samples=size)


def _made_up(value: ValueSpec, num_samples: int, device: torch.device) -> Tensor:
    """Noise; zeros where it may be an index; True where it may be a mask."""
    shape = list(value.shape)
    if value.batch_dim is not None:
        shape[value.batch_dim] = num_samples
    made = torch.zeros(shape, dtype=value.dtype, device=device)
    if value.dtype.is_floating_point:
        made.normal_()
    elif value.dtype == torch.bool:
        made.fill_(True)
    return made


# --- how much is enough ---------------------------------------------------------------------


class _Budget:
    """Shares out the seconds of one chain: a few passes per size, fewer where they are slow."""

    def __init__(self, total_s: float, clock: Callable[[], float]) -> None:
        self.num_sizes = 0
        self.clock = clock
        self._total_s = total_s
        self._last_s = time.monotonic() + _MOST_DELAY * total_s
        self._started_s = clock()
        self._size_started_s = self._started_s
        self._last_size_s = 0.0

    def begin_size(self) -> None:
        """The timed passes of one size begin."""
        self._size_started_s = self.clock()

    def wants_pass(self, num_done: int) -> bool:
        """Whether one more pass is to be timed."""
        spent_s = self.clock() - self._size_started_s
        if num_done < 2:
            return num_done == 0 or spent_s < self._total_s / 4
        return num_done < _MOST_PASSES and spent_s < self._total_s / 12

    def wants_split(self, num_done: int) -> bool:
        """Whether backward in two parts is to be timed after this pass; once if time is short."""
        return num_done <= (4 if self.clock() - self._size_started_s < self._total_s / 40 else 1)

    def end_size(self, took_s: float) -> None:
        """A size is done, everything included."""
        self.num_sizes += 1
        self._last_size_s = took_s

    def allows_double(self) -> bool:
        """Whether there is time for twice the last size; two sizes are always measured."""
        if self.num_sizes < 2:
            return True
        spent_s = self.clock() - self._started_s
        return spent_s + 2 * self._last_size_s < self._total_s and time.monotonic() < self._last_s


def _is_worthwhile(
    found: Mapping[int, Mapping[int, Samples]], size: int, budget: _Budget, limit_bytes: float
) -> bool:
    """Whether ``size`` is to be measured after those that were."""
    if not found:
        return True
    if not budget.allows_double():
        return False
    last = max(found)
    if _kept_bytes(found[last]) * size / last > limit_bytes:
        return False
    newest = sorted(found)[-3:]
    if len(newest) < 3:
        return True
    each_s = [_seconds(found[known]) / known for known in newest]
    return any(after < before * (1 - _LEAST_GAIN) for before, after in pairwise(each_s))


def _kept_bytes(samples: Mapping[int, Samples]) -> int:
    sizes = [size for kind in samples.values() for size in kind.sizes]
    return sum(size.activation_bytes for size in sizes) + max(size.workspace_bytes for size in sizes)


def _seconds(samples: Mapping[int, Samples]) -> float:
    return sum(
        statistics.median(times.forward_s) + statistics.median(times.backward_s)
        for kind in samples.values()
        for times in kind.times
    )
