"""What a morph took, by part."""

from __future__ import annotations

import pytest

from varuna.generations import FormingTimes
from varuna.morph.record import GenerationRecord, JobRecord
from varuna.morph.times import morph_times, render_times


def test_parts() -> None:
    formed = {
        "stays": FormingTimes(wait_s=0.25, meet_s=0.5, transfer_s=0.0, open_s=1.0),
        "stays too": FormingTimes(wait_s=0.125, meet_s=0.25, transfer_s=0.5, open_s=0.5),
        "comes": FormingTimes(meet_s=0.125, transfer_s=0.75, open_s=0.375),
    }
    job = JobRecord(stopped_s=10.0, since_s=10.5, generation=GenerationRecord(number=1, formed=formed))
    times = morph_times(job, 12.0)
    assert times == {
        "stood_s": 2.0,
        "stop_s": 0.5,
        "decide_s": 0.125,  # of the one that reported last
        "reform_s": 0.125,
        "transfer_s": 0.75,
        "rebuild_s": 0.375,
    }
    assert render_times(times) == (
        "training stood still for 2.00 s (stop 0.50, decide 0.12, re-form 0.12, transfer 0.75, rebuild 0.38)"
    )


def test_if_all_are_gone_when_it_opens() -> None:
    job = JobRecord(stopped_s=1.0, since_s=1.0, generation=GenerationRecord(number=1))
    assert morph_times(job, 2.0)["stood_s"] == pytest.approx(1.0)
