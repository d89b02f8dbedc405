"""What real fleets would have trained, under several assumptions, and how long the answer takes.

GPT-2 2.5B on V100 by the ready profile. Give the traces to replay: ``python -m benchmarks.bench_fleets FILE``.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from benchmarks.report import parser, report, table
from varuna.plan.estimate import load_profile
from varuna.plan.fleet import FleetOptions, replay_fleet
from varuna.plan.fleet_cost import on_demand_bill, spot_bill
from varuna.plan.fleet_plans import FleetPlanner
from varuna.plan.fleet_trace import read_trace

PROFILE = "gpt2-2.5b@v100@10gbit"
BATCH_SIZES = (8192, 1024)
SPOT, ON_DEMAND = 0.9, 3.06  # of a p3.2xlarge for an hour, roughly

DEFAULT = FleetOptions()
ASSUMPTIONS = {
    "defaults": DEFAULT,
    "5 s per re-plan": replace(DEFAULT, morph_s=5),
    "120 s per re-plan": replace(DEFAULT, morph_s=120),
    "120 s of notice": replace(DEFAULT, notice_s=120),
    "no notice at all": replace(DEFAULT, sudden_share=1),
    "5 s per re-plan, always 120 s of notice": replace(DEFAULT, morph_s=5, notice_s=120, sudden_share=0),
}

HEADER = (
    "batch", "assumed", "samples", "goodput", "re-planning", "redone", "from checkpoint", "waiting",
    "spare machines", "spot, per million", "on demand, per million", "answer in s",
)  # fmt: skip


def rows_of(path: Path, batch_size: int) -> list[tuple[object, ...]]:
    """One row per set of assumptions; the first one pays for choosing the plans."""
    rows: list[tuple[object, ...]] = []
    planner = FleetPlanner(load_profile(PROFILE), batch_size)
    for label, options in ASSUMPTIONS.items():
        start_s = time.perf_counter()
        result = replay_fleet(read_trace(path), planner, options)
        answer_s = time.perf_counter() - start_s
        spot = spot_bill(result, SPOT).cost_per_million
        steady = on_demand_bill(result, planner, ON_DEMAND).cost_per_million
        rows.append(
            (
                batch_size,
                label,
                f"{result.samples / 1e6:.3f} M",
                f"{result.goodput:.1%}",
                f"{result.wall.morph_s / result.duration_s:.1%}",
                f"{result.wall.redone_s / result.duration_s:.1%}",
                result.num_restores,
                f"{result.wall.waiting_s / result.duration_s:.1%}",
                f"{result.machines.spare_s / result.machines.total_s:.1%}",
                f"{spot or 0:.0f}",
                f"{steady or 0:.0f}",
                f"{answer_s:.2f}",
            )
        )
    return rows


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("traces", nargs="+", type=Path, help="files of traces")
    given = made.parse_args()
    FleetPlanner(load_profile(PROFILE), 64)(8)  # compiled code is loaded once, before anything is timed
    for path in given.traces:
        rows = [row for batch_size in BATCH_SIZES for row in rows_of(path, batch_size)]
        report(f"Fleet {path.name}: {PROFILE}", table(HEADER, rows), given.log)


if __name__ == "__main__":
    main()
