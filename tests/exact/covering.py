"""Which points of the product run by default: few, but every pair of layout, schedule and recompute."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from tests.exact import models
from tests.exact.harness import Run

LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (3, 1), (1, 3))
SCHEDULES = ("varuna", "1f1b", "gpipe", "zero-bubble")
RUNS_PER_MODEL = 3
RUNS_WITH_DROPOUT = 8


def product() -> list[Run]:
    """All of it."""
    return [
        Run(case=case.name, num_stages=stages, num_pipelines=pipelines, schedule=schedule, recompute=recompute)
        for case in models.CASES
        for stages, pipelines in LAYOUTS
        for schedule in SCHEDULES
        for recompute in (False, True)
    ]


def pairs(run: Run) -> Iterator[tuple[object, ...]]:
    """The pairs of values that a run covers."""
    layout = (run.num_stages, run.num_pipelines)
    yield from itertools.combinations((layout, run.schedule, run.recompute), 2)
    yield (run.case, "stages", run.num_stages > 1)
    yield (run.case, "recompute", run.recompute)
    yield (run.case, "split", run.schedule == "zero-bubble")
    if models.case(run.case).random:
        yield (run.case, layout)
        yield (run.case, run.schedule)


def covering_set() -> list[Run]:
    """Some runs of every model, each chosen to cover the pairs that were covered least so far."""
    count: Counter[tuple[object, ...]] = Counter()
    chosen: list[Run] = []
    everything = product()
    for turn in range(max(RUNS_PER_MODEL, RUNS_WITH_DROPOUT)):
        for case in models.CASES:
            if turn >= (RUNS_WITH_DROPOUT if case.random else RUNS_PER_MODEL):
                continue
            candidates = [run for run in everything if run.case == case.name and run not in chosen]
            best = min(candidates, key=lambda run: sum(2 * min(count[pair], 3) for pair in pairs(run)))
            chosen.append(best)
            count.update(pairs(best))
    return chosen
