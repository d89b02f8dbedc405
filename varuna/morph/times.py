"""What a morph took: from when the first member stood still until the next generation was open everywhere."""

from __future__ import annotations

from collections.abc import Mapping

from varuna.generations import FormingTimes
from varuna.morph.record import JobRecord

PARTS = {
    "stop_s": "stop",
    "decide_s": "decide",
    "reform_s": "re-form",
    "transfer_s": "transfer",
    "rebuild_s": "rebuild",
}
"""Parts of a morph, as figures of an event and as words: all members stop, it is decided how they go on, they
meet in new groups, sections change hands, stages and streams are made anew."""


def morph_times(job: JobRecord, now_s: float) -> dict[str, float]:
    """Seconds by part, and ``stood_s`` in all, of the morph that ends now.

    Deciding is what the member that reported last waited for its order. Meeting, transfer and rebuilding are
    those of the member for which transfer took longest: what the others do meanwhile is wait for it.
    """
    assert job.stopped_s is not None
    times = list(job.generation.formed.values())
    slowest = max(times, key=lambda one: one.transfer_s, default=FormingTimes())
    return {
        "stood_s": now_s - job.stopped_s,
        "stop_s": job.since_s - job.stopped_s,
        "decide_s": min((one.wait_s for one in times if one.wait_s > 0), default=0.0),
        "reform_s": slowest.meet_s,
        "transfer_s": slowest.transfer_s,
        "rebuild_s": slowest.open_s,
    }


def render_times(times: Mapping[str, float]) -> str:
    """For people, in one line."""
    parts = ", ".join(f"{word} {times[name]:.2f}" for name, word in PARTS.items())
    return f"training stood still for {times['stood_s']:.2f} s ({parts})"
