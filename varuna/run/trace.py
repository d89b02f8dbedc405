"""Records chosen steps of a real run, and brings what all workers did together on worker 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from varuna.plan.spans import StepSpans, WorkerTrace
from varuna.run.clocks import align_clocks, machine_identity
from varuna.run.generation import Generation


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Steps of all workers, on worker 0's clock.

    Attributes:
        workers: in order.
        clock_accuracy_s: how far clocks of different machines may be apart; 0 on one machine.
    """

    workers: tuple[WorkerTrace, ...]
    clock_accuracy_s: float


Deliver = Callable[[Recording], None]


class TraceCollector:
    """A ``SpanListener`` that keeps some steps.

    Every worker of the job has one, for the same steps: bringing them together is a collective.

    Args:
        steps: which to keep.
        current: the generation at work.
        deliver: called on worker 0 with what was recorded so far, after the last of ``steps`` and after each
            ``train`` that ran some of them.
    """

    def __init__(self, steps: range, current: Callable[[], Generation], deliver: Deliver) -> None:
        self._steps = steps
        self._current = current
        self._deliver = deliver
        self._recorded: list[StepSpans] = []
        self._num_delivered = 0

    def wants(self, step_index: int) -> bool:
        """Whether this step is one of those to keep."""
        return step_index in self._steps

    def record(self, step_index: int, spans: StepSpans) -> None:
        """Keep a step; after the last one, bring all together."""
        self._recorded.append(spans)
        if step_index == self._steps[-1]:
            self.collect()

    def collect(self) -> None:
        """Bring together what has been recorded, if any of it is new. Every worker calls it at the same step.

        If there is nothing at all, ``deliver`` gets a recording of no workers.

        Raises:
            PeerLost: a worker is gone.
        """
        generation = self._current()
        rank = generation.world.rank
        if not self._recorded and rank == 0:
            self._deliver(Recording(workers=(), clock_accuracy_s=0.0))
        if len(self._recorded) == self._num_delivered:
            return
        self._num_delivered = len(self._recorded)
        group = generation.groups.all
        offsets = align_clocks(group, rank, machine=machine_identity())
        own = WorkerTrace(
            worker_index=rank,
            position=generation.plan.position_of(rank),
            steps=_moved(self._recorded, offsets[group.ranks.index(rank)].offset_s),
        )
        traces = group.all_gather_bytes(msgspec.json.encode(own))
        if rank == 0:
            self._deliver(
                Recording(
                    workers=tuple(msgspec.json.decode(trace, type=WorkerTrace) for trace in traces),
                    clock_accuracy_s=max(offset.accuracy_s for offset in offsets),
                )
            )


def _moved(steps: Sequence[StepSpans], offset_s: float) -> tuple[StepSpans, ...]:
    """The same steps on a clock that shows ``offset_s`` more."""
    return tuple(replace(step, started_s=step.started_s + offset_s) for step in steps)
