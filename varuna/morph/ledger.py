"""The ledger: for every step that has happened, which samples it used, and whether those are right. Pure.

Each entry has a digest of the ids of its samples and is chained to the entry before it, so that none can be
changed, left out or put in later without breaking the chain. Which samples a step must use is a pure function
of four numbers (``varuna.order``): ``audit`` computes it again and compares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from varuna.order import sample_ids

FIRST_LINK = hashlib.sha256(b"varuna ledger 1").hexdigest()
"""What the first entry is chained to."""


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The numbers that say which samples a step uses."""

    dataset_length: int
    batch_size: int
    seed: int

    def digest_of(self, step_index: int) -> str:
        """SHA-256 of the sample ids of a step, as 64-bit little-endian numbers in their order."""
        ids = sample_ids(step_index, self.dataset_length, self.batch_size, self.seed)
        return hashlib.sha256(np.asarray(ids, dtype="<u8").tobytes()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """One step that has happened.

    Attributes:
        step_index: the step.
        generation: in which it was committed.
        num_samples: of its global batch, as workers told.
        digest: of its sample ids.
        link: of all above and of the entry before.
    """

    step_index: int
    generation: int
    num_samples: int
    digest: str
    link: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong in a ledger; ``step_index`` is where."""

    step_index: int
    text: str


def next_entry(
    before: LedgerEntry | None, step_index: int, generation: int, num_samples: int, order: SampleOrder
) -> LedgerEntry:
    """The entry of a step, chained to the one before it."""
    digest = order.digest_of(step_index)
    return LedgerEntry(
        step_index=step_index,
        generation=generation,
        num_samples=num_samples,
        digest=digest,
        link=_link(FIRST_LINK if before is None else before.link, step_index, generation, num_samples, digest),
    )


def _link(before: str, step_index: int, generation: int, num_samples: int, digest: str) -> str:
    text = f"{before} {step_index} {generation} {num_samples} {digest}"
    return hashlib.sha256(text.encode()).hexdigest()


def audit(
    entries: Iterable[LedgerEntry], order: SampleOrder, num_steps: int | None = None
) -> tuple[Finding, ...]:
    """What is wrong: steps lost, repeated or out of order, other samples than an undisturbed run uses.

    Args:
        entries: as they were written.
        order: of the job.
        num_steps: how many steps there should be; None for as many as there are.

    Returns:
        Nothing if every step from 0 on happened exactly once, with exactly its samples.
    """
    findings: list[Finding] = []
    expected, link, generation = 0, FIRST_LINK, 0
    for entry in entries:
        step = entry.step_index
        if step != expected:
            findings.append(Finding(step_index=step, text=_misplaced(step, expected)))
        if entry.generation < generation:
            text = f"step {step} is of generation {entry.generation}, after one of generation {generation}"
            findings.append(Finding(step_index=step, text=text))
        if entry.num_samples != order.batch_size:
            text = f"step {step} used {entry.num_samples} samples instead of {order.batch_size}"
            findings.append(Finding(step_index=step, text=text))
        if step >= 0 and entry.digest != order.digest_of(step):
            text = f"step {step} used other samples than an undisturbed run would"
            findings.append(Finding(step_index=step, text=text))
        if entry.link != _link(link, step, entry.generation, entry.num_samples, entry.digest):
            text = f"the entry of step {step} does not follow from those before it: something was changed"
            findings.append(Finding(step_index=step, text=text))
        expected, link, generation = step + 1, entry.link, entry.generation
    if num_steps is not None and expected < num_steps:
        text = f"the ledger ends after step {expected - 1}; there should be {num_steps} steps"
        findings.append(Finding(step_index=expected, text=text))
    return tuple(findings)


def _misplaced(step: int, expected: int) -> str:
    if step < expected:
        return f"step {step} comes again, where step {expected} should be"
    if step == expected + 1:
        return f"step {expected} is missing"
    return f"steps {expected} to {step - 1} are missing"
