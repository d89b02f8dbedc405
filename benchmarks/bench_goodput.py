"""What remains of a job on a fleet that comes and goes? Half an hour of a real trace, replayed with a real job.

    python -m benchmarks goodput           # traces in $VARUNA_TRACES, or --traces FOLDER

The trace is scaled to 6 workers and runs six times as fast; the job is ``sleeping_job``, steps of about a
second, whose stages sleep instead of computing, so that six of them fit on two cores; all else is real. One of
the four workers that go gets no notice. **Goodput** is samples over those of a job for which changes cost
nothing: once by steps as this run measured them, once by those that the profile predicts.

The simulator replays the same, with predicted steps and the morph cost that was measured, and then both whole
traces with as many workers as they have machines. Higher is better.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median

from benchmarks import report, sleeping_job
from benchmarks.emulated_plans import emulated_profile
from benchmarks.managed import REPOSITORY
from varuna.errors import PlanError
from varuna.morph.messages import Described
from varuna.morph.planning import plan_for
from varuna.plan.cluster import Cluster
from varuna.plan.fleet import FleetOptions, replay_fleet
from varuna.plan.fleet_plans import FleetPlan
from varuna.plan.fleet_result import FleetResult
from varuna.plan.fleet_trace import FleetTrace, read_trace
from varuna.plan.predict import predict
from varuna.plan.profile import LinkProfile, TaskCosts
from varuna.spec import SectionSpec
from varuna.testing.replay import replay
from varuna.testing.replay_account import ReplayResult
from varuna.testing.replay_report import morph_medians, render_replay
from varuna.testing.replay_schedule import scaled

WORKERS, STAGES = 6, 2
REPLAYED, OTHER = "bamboo-p3-48nodes.csv", "bamboo-g4dn.csv"
FROM_S, UNTIL_S = 3000, 4800  # the half hour of the trace with the most changes at this scale
NOTICE_S, SUDDEN_SHARE = 2.0, 0.1
TARGET, TARGET_ERROR, TARGET_WHOLE = 0.95, 0.05, 0.99
WHOLE_BATCH = 120  # with up to 32 workers a step then takes as long as that of the small job
_LATENCY_S, _BYTES_PER_S, _OVERHEAD_S = 0.0003, 1e9, 0.0005


class Planner:
    """A ``fleet_plans.Planner``: the plan that the manager would make, and its predicted step."""

    def __init__(self, batch_size: int) -> None:
        self._described = Described(
            sections=tuple(
                SectionSpec(
                    index=index, name=f"block {index}", parameter_names=(), parameter_bytes=0,
                    forward_flops=1.0, output_bytes=4 * sleeping_job.WIDTH,
                )
                for index in range(sleeping_job.BLOCKS)
            ),
            batch_size=batch_size, num_stages=STAGES, micro_batch_size=1, dataset_length=4096, seed=0,
        )  # fmt: skip
        cost = TaskCosts(
            micro_batch_size=1, forward_s=sleeping_job.FORWARD_S, recompute_s=sleeping_job.FORWARD_S,
            backward_s=sleeping_job.BACKWARD_S, output_bytes=4 * sleeping_job.WIDTH,
            gradient_bytes=4 * sleeping_job.WIDTH,
        )  # fmt: skip
        link = LinkProfile(latency_s=_LATENCY_S, bytes_per_s=_BYTES_PER_S)
        self._profile = emulated_profile([[cost]] * sleeping_job.BLOCKS, link, task_overhead_s=_OVERHEAD_S)

    @cache  # noqa: B019
    def __call__(self, num_machines: int) -> FleetPlan | None:
        """The plan for so many machines of one worker each."""
        if num_machines == 0:
            return None
        try:
            plan = plan_for(num_machines, self._described).plan
        except PlanError:
            return None
        step_s = predict(plan, self._profile, Cluster.parse(str(num_machines))).step_s
        return FleetPlan(plan=plan, devices_per_machine=1, step_s=step_s)


def real(trace: FleetTrace, options: FleetOptions) -> ReplayResult:
    """The replay with a real job."""
    arguments = ("--stages", str(STAGES), "--micro-batch-size", "1", "-m", "benchmarks.sleeping_job")
    with tempfile.TemporaryDirectory(prefix="varuna-bench-") as folder:
        environ = {**os.environ, "VARUNA_CACHE_DIR": f"{folder}/cache", "OMP_NUM_THREADS": "1"}
        logs = ("--log-dir", f"{folder}/logs")
        return replay(
            trace,
            [*logs, *arguments],
            options,
            cwd=REPOSITORY,
            environ=environ,
            say=lambda text: print(text, flush=True),
        )


def main() -> None:
    made = report.parser(__doc__ or "", speed=6, seed=6)
    made.add_argument(
        "--traces", type=Path, default=os.environ.get("VARUNA_TRACES"), help="folder of the traces"
    )
    made.add_argument("--from", type=int, default=FROM_S, dest="from_s", help=f"seconds, default {FROM_S}")
    made.add_argument("--until", type=int, default=UNTIL_S, dest="until_s", help=f"seconds, default {UNTIL_S}")
    given = made.parse_args()
    if given.traces is None:
        sys.exit(f"goodput: give the folder of {REPLAYED} and {OTHER} with --traces or VARUNA_TRACES.")
    whole = {name: read_trace(Path(given.traces) / name) for name in (REPLAYED, OTHER)}
    part = scaled(
        whole[REPLAYED], max_workers=WORKERS, from_s=given.from_s, until_s=given.until_s, speed=given.speed
    )
    options = FleetOptions(notice_s=NOTICE_S, sudden_share=SUDDEN_SHARE, seed=given.seed)
    result = real(part, options)
    print(render_replay(result), flush=True)
    morph_s = morph_medians(result).get("stood_s", 0.0)
    start_s = median(result.starts_s) if result.starts_s else 0.0
    options = replace(options, morph_s=morph_s, start_s=start_s)
    predicted = replay_fleet(part, Planner(result.batch_size), options)
    rows: list[list[object]] = [
        ["goodput by measured steps", result.goodput, TARGET],
        ["goodput by predicted steps", result.samples / predicted.ideal_samples, TARGET],
        ["simulated goodput", predicted.goodput, ""],
        [
            "simulated samples over real ones, less 1",
            predicted.samples / result.samples - 1,
            f"± {TARGET_ERROR}",
        ],
    ]
    for name, trace in whole.items():
        rows.append([f"simulated, all of {name}", simulated(trace, options).goodput, TARGET_WHOLE])
    notes = (
        f"Morph cost {morph_s:.2f} s, measured: the median pause of {len(result.morphs)} morphs; a newcomer "
        f"was ready after {start_s:.1f} s."
    )
    report.report("Goodput on a fleet that comes and goes", report.table(("what", "figure", "target"), rows),
                  given.log, notes)  # fmt: skip


def simulated(trace: FleetTrace, options: FleetOptions) -> FleetResult:
    """A whole trace, with as many workers as it has machines, in its own time and with 30 s of notice."""
    as_on_clouds = replace(FleetOptions(), morph_s=options.morph_s, start_s=options.start_s)
    return replay_fleet(trace, Planner(WHOLE_BATCH), as_on_clouds)


if __name__ == "__main__":
    main()
