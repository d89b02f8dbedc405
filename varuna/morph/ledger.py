"""The ledger: for every step that has happened, which samples it used, and whether those are right. Pure.

Each entry has a digest of the ids of its samples and is chained to the entry before it, so that none can be
changed, left out or put in later without breaking the chain. Which samples a step must use is a pure function
of four numbers (``varuna.order``): ``audit`` computes it again and compares. So does it with what workers have
told of the samples that they have read (``ToldShare``); what a worker could not tell any more is missing there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from varuna.order import digest_of, sample_ids

FIRST_LINK = hashlib.sha256(b"varuna ledger 1").hexdigest()
"""What the first entry is chained to."""


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The numbers that say which samples a step uses, and the step with which the job began."""

    dataset_length: int
    batch_size: int
    seed: int
    first_step: int = 0

    def digest_of(self, step_index: int) -> str:
        """Digest of the sample ids of a step."""
        return digest_of(self.ids_of(step_index))

    def ids_of(self, step_index: int) -> list[int]:
        """Sample ids of a step, in their order."""
        return sample_ids(step_index, self.dataset_length, self.batch_size, self.seed)


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
class ToldShare:
    """What a worker has told of the samples that it has read for a step.

    Attributes:
        step_index: the step.
        first, end: positions ``first <= i < end`` of the global batch.
        digest: of their ids.
    """

    step_index: int
    first: int
    end: int
    digest: str


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
    entries: Iterable[LedgerEntry],
    order: SampleOrder,
    num_steps: int | None = None,
    shares: Iterable[ToldShare] = (),
) -> tuple[Finding, ...]:
    """What is wrong: steps lost, repeated or out of order, other samples than an undisturbed run uses.

    Args:
        entries: as they were written.
        order: of the job.
        num_steps: with which step the ledger should end, counted from 1; None for any.
        shares: what workers have told, by step and position.

    Returns:
        Nothing if every step from the first on happened exactly once, with exactly its samples.
    """
    findings: list[Finding] = []
    expected, link, generation = order.first_step, FIRST_LINK, 0
    for entry in entries:
        step = entry.step_index
        if step != expected:
            findings.append(Finding(step_index=step, text=_misplaced(step, expected)))
        if entry.generation < generation:
            text = f"step {step} is of generation {entry.generation}, after one of generation {generation}"
            findings.append(Finding(step_index=step, text=text))
        if entry.num_samples != order.batch_size:
            text = f"step {step} counted {entry.num_samples} samples instead of {order.batch_size}"
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
    for step, told in groupby(shares, key=lambda share: share.step_index):
        findings += _audit_told(step, list(told), expected, order)
    return tuple(findings)


def _audit_told(step: int, shares: Sequence[ToldShare], end_step: int, order: SampleOrder) -> Iterator[Finding]:
    if not order.first_step <= step < end_step:
        yield Finding(step_index=step, text=f"workers read samples for step {step}, which is not in the ledger")
        return
    ids = order.ids_of(step)
    end = 0
    for share in shares:
        where = f"positions {share.first} to {share.end - 1} of its batch"
        if share.first < end:
            yield Finding(step_index=step, text=f"step {step} used samples twice: {where} overlap others")
        if not 0 <= share.first < share.end <= len(ids):
            yield Finding(step_index=step, text=f"step {step} has no {where}")
        elif digest_of(ids[share.first : share.end]) != share.digest:
            text = f"step {step} read other samples than an undisturbed run would at {where}"
            yield Finding(step_index=step, text=text)
        end = max(end, share.end)


def num_told(shares: Iterable[ToldShare], order: SampleOrder) -> int:
    """Steps of which workers have told all samples. Shares by step and position."""
    steps = groupby(shares, key=lambda share: share.step_index)
    return sum(sum(share.end - share.first for share in told) == order.batch_size for _, told in steps)


def _misplaced(step: int, expected: int) -> str:
    if step < expected:
        return f"step {step} comes again, where step {expected} should be"
    if step == expected + 1:
        return f"step {expected} is missing"
    return f"steps {expected} to {step - 1} are missing"
