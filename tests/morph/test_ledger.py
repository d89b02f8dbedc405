"""The ledger: every step once, with its samples; and the audit sees whatever is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from varuna.morph.ledger import LedgerEntry, SampleOrder, audit, next_entry
from varuna.order import sample_ids

ORDER = SampleOrder(dataset_length=37, batch_size=8, seed=5)


def written(num_steps: int, *, order: SampleOrder = ORDER, start: int = 0) -> list[LedgerEntry]:
    entries: list[LedgerEntry] = []
    for step in range(start, num_steps):
        entries.append(next_entry(entries[-1] if entries else None, step, step // 3, 8, order))
    return entries


def test_a_whole_ledger_has_no_findings() -> None:
    assert audit(written(12), ORDER, 12) == ()
    assert audit([], ORDER) == ()


def test_the_digest_is_of_the_ids_in_their_order() -> None:
    digests = {ORDER.digest_of(step) for step in range(10)}
    assert len(digests) == 10
    assert sorted(sample_ids(0, 8, 8, 5)) == sorted(sample_ids(0, 8, 8, 6))
    one, other = (SampleOrder(dataset_length=8, batch_size=8, seed=seed) for seed in (5, 6))
    assert one.digest_of(0) != other.digest_of(0), "the same samples in another order"


def test_a_lost_step() -> None:
    entries = written(6)
    del entries[2]
    texts = [finding.text for finding in audit(entries, ORDER)]
    assert texts[0] == "step 2 is missing"
    assert "does not follow" in texts[1], "the chain shows it too"
    assert len(texts) == 2


def test_several_lost_steps() -> None:
    assert "steps 0 to 2 are missing" in audit(written(6, start=3), ORDER)[0].text


def test_a_repeated_step() -> None:
    entries = written(4)
    entries.append(next_entry(entries[-1], 3, 1, 8, ORDER))
    (finding,) = audit(entries, ORDER)
    assert finding.text == "step 3 comes again, where step 4 should be"
    assert finding.step_index == 3


def test_too_few_steps() -> None:
    (finding,) = audit(written(4), ORDER, 6)
    assert finding.text == "the ledger ends after step 3; there should be 6 steps"


def test_other_samples() -> None:
    findings = audit(written(2, order=replace(ORDER, seed=6)), ORDER)
    assert [finding.text for finding in findings] == [
        "step 0 used other samples than an undisturbed run would",
        "step 1 used other samples than an undisturbed run would",
    ]


def test_a_smaller_batch() -> None:
    entries = [next_entry(None, 0, 0, 6, ORDER)]
    assert [finding.text for finding in audit(entries, ORDER)] == ["step 0 counted 6 samples instead of 8"]


def test_a_generation_never_goes_back() -> None:
    first = next_entry(None, 0, 4, 8, ORDER)
    findings = audit([first, next_entry(first, 1, 3, 8, ORDER)], ORDER)
    assert [finding.text for finding in findings] == ["step 1 is of generation 3, after one of generation 4"]


@pytest.mark.parametrize(
    "change", [{"generation": 1}, {"num_samples": 7}, {"digest": ORDER.digest_of(9)}, {"link": "0" * 64}]
)
def test_a_changed_entry_breaks_the_chain(change: dict[str, object]) -> None:
    entries = written(5)
    entries[1] = replace(entries[1], **change)  # type: ignore[arg-type]
    assert any("step 1" in one.text and "does not follow" in one.text for one in audit(entries, ORDER)) or any(
        "step 2" in one.text and "does not follow" in one.text for one in audit(entries, ORDER)
    )
