"""What the manager's decisions ask its shell to do. Values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from varuna.generations import SampleShare
from varuna.morph.messages import ToAgent, ToWorker


@dataclass(frozen=True, kw_only=True)
class Send:
    """A message to a worker (by incarnation) or to an agent (by name); which of the two, its type says."""

    recipient: str
    message: ToWorker | ToAgent


@dataclass(frozen=True, kw_only=True)
class Tell:
    """A decision or an event for people, in one line.

    Attributes:
        text: the line.
        kind: a word to filter by.
        figures: its numbers by name, for programs.
    """

    text: str
    kind: str
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepsCommitted:
    """Steps ``first_step <= i < end_step`` have happened in this generation: for the ledger.

    ``num_samples`` is what a worker said of them; None where the commit is known from what halted members hold.
    """

    generation: int
    first_step: int
    end_step: int
    num_samples: int | None = None


@dataclass(frozen=True, kw_only=True)
class StepsUndone:
    """Steps from ``first_step`` on live in nobody's weights any more: out of the ledger, they come again."""

    first_step: int


@dataclass(frozen=True, kw_only=True)
class SamplesTold:
    """Somebody has told which samples it has read for a step that has happened: for the ledger."""

    step_index: int
    samples: SampleShare


Instruction = Send | Tell | StepsCommitted | StepsUndone | SamplesTold
