"""From one generation to the next: what members report, what they are told. Values; standard library only.

A *generation* is one membership with one plan. A member whose generation has ended *halts*: it reports where it
stands (``HaltReport``) and waits for a ``Verdict``.
"""

from __future__ import annotations

from dataclasses import dataclass

from varuna.spec import Plan


@dataclass(frozen=True, kw_only=True)
class NonFiniteSource:
    """Where a non-finite loss was seen first."""

    worker_index: int
    micro_batch_index: int


@dataclass(frozen=True, kw_only=True)
class Committed:
    """What a step's commit returned: sums over all workers, the same numbers on every one.

    Attributes:
        step_index: the step.
        loss_sum, weight, num_samples: of the global batch.
        squared_norm: of the whole gradient, with loss scale; may be nan.
        non_finite_source: the first non-finite loss, if there was one.
        pause: a member asked to end the generation after this step.
    """

    step_index: int
    loss_sum: float
    weight: float
    num_samples: int
    squared_norm: float
    non_finite_source: NonFiniteSource | None = None
    pause: bool = False


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
    """

    generation: int
    rank: int
    size: int
    plan: Plan
    transfers: tuple[SectionTransfer, ...]
    state_rank: int
    next_step: int


@dataclass(frozen=True, kw_only=True)
class HaltReport:
    """Where a member stands when its generation has ended here.

    Attributes:
        generation: the one that ended.
        num_applied: steps whose update has been made here; the next step's index.
        reduced_step: a step whose gradients are reduced here and whose commit did not return.
        committed: the newest commit that returned here.
        held_sections: what this worker has, up to date.
        reason: why it halted, for people.
    """

    generation: int
    num_applied: int
    reduced_step: int | None
    committed: Committed | None
    held_sections: tuple[int, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a halted member does next.

    Attributes:
        formation: the next generation.
        committed: the outcome of the step that it had reduced, if that step's commit completed somewhere.
    """

    formation: Formation
    committed: Committed | None = None
