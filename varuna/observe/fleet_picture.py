"""A replayed fleet as a picture: machines, plans, throughput over time. Needs matplotlib (extra ``plot``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from varuna.observe.picture import new_figure, save_figure
from varuna.plan.fleet_result import Activity, FleetInterval, FleetResult

COLOURS = {
    Activity.TRAINING: "#4c78a8",
    Activity.MORPH: "#f58518",
    Activity.REDONE: "#e45756",
    Activity.RESTORE: "#b279a2",
    Activity.WAITING: "#d8d4d2",
    Activity.UNFINISHED: "#9ecae9",
}
"""Per activity; spare machines are the gap between the machines' line and those in use."""

_WIDTH_INCHES, _HEIGHT_INCHES = 12.0, 7.0
_HOUR_S = 3600.0
_LABEL_SHARE = 0.03  # of the picture's width that the name of a plan takes


def write_fleet_picture(path: Path, result: FleetResult, *, title: str = "") -> None:
    """Draw it and write it in the format of the file's ending.

    Raises:
        ConfigError: matplotlib is missing, the ending is unknown, or it cannot be written there.
    """
    figure = new_figure(path, width_inches=_WIDTH_INCHES, height_inches=_HEIGHT_INCHES)
    machines, plans, speed = figure.subplots(3, 1, sharex=True)
    _draw_machines(machines, result)
    _draw_plans(plans, result)
    _draw_speed(speed, result)
    for axes in (machines, plans, speed):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
    speed.set_xlim(0, result.duration_s / _HOUR_S)
    speed.set_xlabel("hours")
    machines.set_title(title or result.trace, loc="left", fontsize=9)
    save_figure(figure, path)


def _draw_machines(axes: Any, result: FleetResult) -> None:
    """Machines there, and those at work in the colour of what they do."""
    times = [*(count.time_s for count in result.counts), result.duration_s]
    counts = [count.num_machines for count in result.counts]
    hours = [time_s / _HOUR_S for time_s in times]
    axes.step(hours, [*counts, counts[-1]], where="post", color="black", linewidth=0.8, label="there")
    for activity, colour in COLOURS.items():
        items = [item for item in result.intervals if item.activity is activity]
        starts, ends = [item.start_s / _HOUR_S for item in items], [item.end_s / _HOUR_S for item in items]
        if activity is Activity.WAITING:
            for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
                axes.axvspan(start, end, color=colour, label="_" * (index > 0) + activity.value)
        elif items:
            widths = [end - start for start, end in zip(starts, ends, strict=True)]
            heights = [item.num_machines for item in items]
            axes.bar(starts, heights, width=widths, align="edge", color=colour, label=activity.value)
    axes.set_ylabel("machines")
    axes.legend(ncols=7, fontsize=7, frameon=False, loc="lower right", bbox_to_anchor=(1, 1))


def _draw_plans(axes: Any, result: FleetResult) -> None:
    """Stages and pipelines of the plan in force; long-lived plans with their name."""
    stages = [item.num_stages for item in result.intervals]
    pipelines = [item.num_pipelines for item in result.intervals]
    _steps(axes, result.intervals, stages, "#4c78a8", "stages P")
    _steps(axes, result.intervals, pipelines, "#f58518", "pipelines D")
    highest = max(*stages, *pipelines, 1)
    for item in result.intervals:
        if item.end_s - item.start_s > _LABEL_SHARE * result.duration_s and item.num_stages:
            middle = (item.start_s + item.end_s) / 2 / _HOUR_S
            name = f"{item.num_stages}x{item.num_pipelines}"
            axes.text(middle, 1.05 * highest, name, ha="center", fontsize=6)
    axes.set_ylabel("plan (PxD)")
    axes.legend(ncols=2, fontsize=7, frameon=False, loc="lower right", bbox_to_anchor=(1, 1))


def _draw_speed(axes: Any, result: FleetResult) -> None:
    """Throughput while training, and the average of what counts."""
    speeds = [item.samples_per_s for item in result.intervals]
    _steps(axes, result.intervals, speeds, "#4c78a8", "while training")
    axes.axhline(result.samples_per_s, color="black", linewidth=0.8, linestyle=":", label="average that counts")
    axes.set_ylabel("samples/s")
    axes.legend(ncols=2, fontsize=7, frameon=False, loc="lower right", bbox_to_anchor=(1, 1))


def _steps(
    axes: Any, intervals: Sequence[FleetInterval], values: Sequence[float], colour: str, label: str
) -> None:
    times = [item.start_s / _HOUR_S for item in intervals] + [intervals[-1].end_s / _HOUR_S]
    axes.step(times, [*values, values[-1]], where="post", color=colour, linewidth=0.8, label=label)
