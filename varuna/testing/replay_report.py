"""A replayed job as text for people and as plain values for JSON."""

from __future__ import annotations

from statistics import median
from typing import Any

from varuna.morph.times import PARTS
from varuna.observe.text import human_duration
from varuna.plan.fleet_result import Activity
from varuna.testing.replay_account import ReplayResult

_ROWS = (
    ("training that counts", Activity.TRAINING, ""),
    ("  workers not in use yet, or not any more", None, "not in use"),
    ("  steps longer than the usual one", None, "slower steps"),
    ("re-planning", Activity.MORPH, "morph"),
    ("steps lost and done again", Activity.REDONE, "redone"),
    ("waiting for enough workers", Activity.WAITING, "waiting"),
    ("the step under way at the end", Activity.UNFINISHED, "unfinished"),
)
"""Title, activity whose seconds are shown, cause of lost samples."""


def render_replay(result: ReplayResult) -> str:
    """What was trained, and what kept it from being more."""
    counts = [count for _, count in result.counts]
    usual = ", ".join(f"{members}: {seconds:.2f}" for members, seconds in result.step_s.items())
    lines = [
        f"{result.trace}: {min(counts)} to {max(counts)} workers in {human_duration(result.duration_s)}, "
        f"{len(counts) - 1} changes",
        f"{result.samples} samples in {result.num_steps} steps; goodput {result.goodput:.1%} of the "
        f"{result.ideal_samples:.0f} samples that changes which cost nothing would give",
        f"usual step in seconds, by workers: {usual}",
        "",
        f"{'':<42}{'seconds':>10}{'samples lost':>15}",
    ]
    for title, activity, cause in _ROWS:
        seconds = "" if activity is None else f"{result.wall_s[activity]:.1f}"
        lost = f"{result.lost[cause] / result.ideal_samples:.1%}" if cause else ""
        lines.append(f"{title:<42}{seconds:>10}{lost:>15}".rstrip())
    total = 1 - result.goodput
    lines.append(f"{'all':<42}{result.duration_s:>10.1f}{f'{total:.1%}':>15}")
    if result.morphs:
        lines += ["", _morphs(result)]
    if result.starts_s:
        lines.append(
            f"a newcomer was ready after {median(result.starts_s):.1f} s (median of {len(result.starts_s)})"
        )
    return "\n".join(lines) + "\n"


def replay_values(result: ReplayResult) -> dict[str, Any]:
    """Everything but the single steps."""
    return {
        "trace": result.trace,
        "duration_s": result.duration_s,
        "counts": [list(pair) for pair in result.counts],
        "batch_size": result.batch_size,
        "num_steps": result.num_steps,
        "samples": result.samples,
        "ideal_samples": result.ideal_samples,
        "goodput": result.goodput,
        "step_s": {str(members): seconds for members, seconds in result.step_s.items()},
        "wall_s": {activity.value: seconds for activity, seconds in result.wall_s.items()},
        "lost_samples": dict(result.lost),
        "morphs": [dict(morph) for morph in result.morphs],
        "starts_s": list(result.starts_s),
    }


def morph_medians(result: ReplayResult) -> dict[str, float]:
    """Median seconds of a morph, in all (``stood_s``) and by part; empty without one."""
    if not result.morphs:
        return {}
    return {name: median(morph[name] for morph in result.morphs) for name in ("stood_s", *PARTS)}


def _morphs(result: ReplayResult) -> str:
    medians = morph_medians(result)
    parts = ", ".join(f"{word} {medians[name]:.2f}" for name, word in PARTS.items())
    longest = max(morph["stood_s"] for morph in result.morphs)
    return (
        f"{len(result.morphs)} generations after the first; median pause {medians['stood_s']:.2f} s ({parts}), "
        f"longest {longest:.2f} s"
    )
