"""One step as a picture: PNG, SVG or PDF. Needs matplotlib (the ``plot`` extra)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varuna.errors import ConfigError
from varuna.observe.timeline import pick_step
from varuna.observe.trace import category, process_name
from varuna.plan.spans import COMMIT, REDUCE, UPDATE, Span, WorkerTrace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "forward": "#4c78a8",
    "recompute": "#9ecae9",
    "backward": "#f58518",
    "weight": "#ffbf79",
    REDUCE: "#54a24b",
    COMMIT: "#bab0ac",
    UPDATE: "#b279a2",
}
"""Per category; told apart by people who see red and green alike, and in grey."""

ENDINGS = (".png", ".svg", ".pdf")
_LETTER_SHARE = 0.004  # of the picture's width that a letter of a task's name takes
_ROW_INCHES, _WIDTH_INCHES, _MARGIN_INCHES = 0.3, 14.0, 1.2


def write_picture(
    path: Path, traces: Sequence[WorkerTrace], *, title: str = "", step_index: int | None = None
) -> None:
    """Draw one step of all workers, a row each, and write it in the format of the file's ending.

    Args:
        path: ends in .png, .svg or .pdf.
        traces: workers whose clocks agree.
        title: above the picture.
        step_index: which step; None is the first one.

    Raises:
        ConfigError: matplotlib is missing, the ending is unknown, or it cannot be written there.
    """
    height_inches = _ROW_INCHES * len(traces) + _MARGIN_INCHES
    figure = new_figure(path, width_inches=_WIDTH_INCHES, height_inches=height_inches)
    _, steps = pick_step(traces, step_index)
    zero_s = min(step.started_s for step in steps)
    rows = [step.all_spans(later_s=step.started_s - zero_s) for step in steps]
    axes = figure.add_subplot()
    _draw(axes, rows)
    axes.set_yticks(range(len(traces)), [process_name(trace) for trace in traces], fontsize=7)
    axes.set_title(title, loc="left", fontsize=9)
    save_figure(figure, path)


def new_figure(path: Path, *, width_inches: float, height_inches: float) -> Figure:
    """An empty figure for a file of this name.

    Raises:
        ConfigError: matplotlib is missing, or the ending is unknown.
    """
    if path.suffix.lower() not in ENDINGS:
        raise ConfigError(f"A picture cannot be written to {path}: its name must end in {', '.join(ENDINGS)}.")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "Pictures need matplotlib, which is not installed. Run `pip install 'varuna[plot]'`."
        ) from error
    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Write it. Raises ConfigError if that cannot be done there."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"Cannot write the picture {path}: {error.strerror}.") from error


def _draw(axes: Any, rows: Sequence[Sequence[Span]]) -> None:
    """Bars of all workers, names in those with room, the time axis, the legend."""
    end_s = max((span.end_s for spans in rows for span in spans), default=0.0) or 1.0
    drawn: dict[str, Any] = {}
    for row, spans in enumerate(rows):
        for name, colour in COLOURS.items():
            bars = [(span.start_s, span.end_s - span.start_s) for span in spans if category(span) == name]
            if bars:
                drawn[name] = axes.broken_barh(
                    bars, (row - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.3
                )
        for span in spans:
            if span.task is not None and span.end_s - span.start_s > _LETTER_SHARE * len(span.name) * end_s:
                middle_s = (span.start_s + span.end_s) / 2
                axes.text(middle_s, row, span.name, ha="center", va="center", fontsize=5)
    axes.set_xlim(0, end_s)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)
    names = [name for name in COLOURS if name in drawn]
    axes.legend(
        [drawn[name] for name in names], names, ncols=max(1, len(names)), fontsize=7, frameon=False,
        loc="lower right", bbox_to_anchor=(1, 1),
    )  # fmt: skip
