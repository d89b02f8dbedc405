"""From one generation to the next: what members report, what they are told. Values; standard library only.

A *generation* is one membership with one plan. A member whose generation has ended *halts*: it reports where it
stands (``HaltReport``) and waits for a ``Verdict``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from varuna.spec import Plan

Point = Literal[
    "start",
    "join",
    "step",
    "forward",
    "final backward",
    "reduce",
    "commit",
    "committed",
    "form",
    "transfer",
    "gather",
    "save",
    "manifest",
]
"""Where a worker can be: it starts, a newcomer is ready for a place, a step begins, a micro-batch's forward
begins, the last backward of the step begins, gradients are all there, they are reduced and the commit begins,
the commit has returned, a generation is being formed, a section is about to change hands, all have come to
gather the whole state on worker 0, a part of a checkpoint is about to be written (in a thread), all parts are
there and make it a checkpoint (likewise)."""


@dataclass(frozen=True, kw_only=True)
class SectionTransfer:
    """One section's state goes from a worker that holds it to one that will: ranks of the new generation."""

    section_index: int
    source: int
    destination: int


@dataclass(frozen=True, kw_only=True)
class Formation:
    """How the next generation begins, for one of its workers.

    Attributes:
        generation: its number, never used before.
        rank, size: this worker among its members, spares included.
        plan: its layout.
        transfers: in one order for all members: each takes part in its own, as source or destination.
        state_rank: the member whose learning-rate scheduler, loss scale and step count the others take.
        next_step: the step it begins with.
        store_address: ``host:port`` of the store in which its members meet: the one that rank 0 offered. Empty
            for a generation of one worker, which needs none.
        checkpoint: where sections and the job's state come from, if nobody has them any more: whatever a member
            holds is void, and the whole job stands before ``next_step``. Empty if they come from members.
    """

    generation: int
    rank: int
    size: int
    plan: Plan
    transfers: tuple[SectionTransfer, ...]
    state_rank: int
    next_step: int
    store_address: str = ""
    checkpoint: str = ""


@dataclass(frozen=True, kw_only=True)
class FormingTimes:
    """What a member's way into a generation took, in seconds.

    Attributes:
        wait_s: from its report to the order how to go on; 0 if that is not known.
        meet_s: until all had met and were one group.
        transfer_s: until its sections were here.
        open_s: until it was connected to its neighbours and loaded data.
    """

    wait_s: float = 0.0
    meet_s: float = 0.0
    transfer_s: float = 0.0
    open_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SampleShare:
    """Samples that a member has read for a step.

    Attributes:
        first, end: positions ``first <= i < end`` of the global batch.
        digest: of their ids in that order (``varuna.order.digest_of``).
    """

    first: int
    end: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What one member did in a step.

    Attributes:
        busy_s: seconds in which it ran tasks; 0 for a spare.
        samples: those that it read, on the first stage of each pipeline.
    """

    busy_s: float = 0.0
    samples: SampleShare | None = None


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """A step whose update has been made.

    Attributes:
        generation: in which it was committed.
        step_index: the step.
        duration_s: until the update was made, in however many generations.
        num_samples: of the global batch, as its commit has counted them.
        committed: what the commit returned, as text that only members read.
        work: done here for it.
    """

    generation: int
    step_index: int
    duration_s: float
    num_samples: int
    committed: str
    work: StepWork


@dataclass(frozen=True, kw_only=True)
class HaltReport:
    """Where a member stands when its generation has ended here.

    Attributes:
        generation: the one that ended.
        num_applied: steps whose update has been made here; the next step's index.
        reduced_step: a step whose gradients are reduced here and whose commit did not return.
        committed_step: the newest step whose commit returned here; None before the first.
        committed: what that commit returned, as text that only members read.
        held_sections: what this worker has, up to date.
        reason: why it halted, for people.
        store_address: ``host:port`` of the store that it offers for the next generation.
        num_calls: of those that no step depends on, how many are over here.
        is_finished: its script is over: it only stays to help others.
        was_first: it was worker 0 when its last step or call was over.
    """

    generation: int
    num_applied: int
    reduced_step: int | None
    committed_step: int | None
    committed: str
    held_sections: tuple[int, ...]
    reason: str
    store_address: str = ""
    num_calls: int = 0
    is_finished: bool = False
    was_first: bool = False


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a halted member does next.

    Attributes:
        formation: the next generation.
        committed: what the commit of the step that it had reduced returned elsewhere; empty if it did not.
    """

    formation: Formation
    committed: str = ""
