"""A choice as text and as JSON: the candidates, and why each is not the one."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from varuna.plan.choose import Choice
from varuna.plan.considered import Candidate
from varuna.plan.render import format_bytes

COLUMNS = ("P x D", "m", "N", "schedule", "step", "bubble", "communication", "memory", "recompute", "why not")

NOTE = (
    "P stages x D pipelines, m samples a micro-batch, N micro-batches of a pipeline. Steps with >= are lower "
    "bounds, the others simulated. Communication: what a step would save if it took no time."
)


def candidate_rows(candidates: Sequence[Candidate]) -> list[tuple[str, ...]]:
    """A row of text per candidate, under ``COLUMNS``."""
    return [_row(candidate) for candidate in candidates]


def select(candidates: Sequence[Candidate], num_rows: int) -> list[Candidate]:
    """The simulated ones first, then the closest bounds, then, for each P, one that does not fit."""
    fitting = [row for row in candidates if row.step_s < float("inf")]
    simulated = [row for row in fitting if row.simulated][:num_rows]
    bounded = [row for row in fitting if not row.simulated][: max(5, num_rows - len(simulated))]
    too_large: dict[int, Candidate] = {}
    for row in candidates:
        if row.step_s == float("inf"):
            too_large.setdefault(row.num_stages, row)
    return [*simulated, *bounded, *list(too_large.values())[:num_rows]]


def choice_json(choice: Choice) -> str:
    """Plan, prediction without spans, candidates and reason. A step time of null: it does not fit."""
    names = ("plan", "prediction", "candidates", "reason")
    numbers = {name: msgspec.to_builtins(getattr(choice, name)) for name in names}
    for pipeline in numbers["prediction"]["pipelines"]:
        for stage in pipeline["stages"]:
            del stage["spans"]
    return msgspec.json.format(msgspec.json.encode(numbers), indent=2).decode()


def _row(row: Candidate) -> tuple[str, ...]:
    deeper = f" (+1: {row.num_deeper})" if row.num_deeper else ""
    layout = " (replicas together)" if row.layout == "replicas" else ""
    return (
        f"{row.num_stages} x {row.num_pipelines}{deeper}{layout}",
        str(row.micro_batch_size),
        str(row.num_micro_batches),
        row.schedule,
        _step(row),
        "" if row.bubble is None else f"{row.bubble:.1%}",
        "" if row.communication_s is None else _seconds(row.communication_s),
        format_bytes(row.memory_bytes) if row.memory_bytes else "",
        f"{row.num_recompute} of {row.num_stages}" if row.simulated else "",
        row.rejected or "chosen",
    )


def _step(row: Candidate) -> str:
    if row.step_s == float("inf"):
        return ""
    return _seconds(row.step_s) if row.simulated else f">= {_seconds(row.step_s)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1000:.4g} ms"
