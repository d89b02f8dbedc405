"""The simulator on real models: steps of a GPT and a ResNet on two cores, against what a profile predicts.

In each round ``varuna profile`` comes first, with one worker and with two, as a job of so many is; then
jobs of one and two workers run with given layouts. Each one's step (the median of its steps) is compared with
what the profile of the same round predicts for the plan that it used; errors, and both times, are medians over
the rounds. Each worker's peak memory is compared once, in the last round. Whoever else uses the machine
disturbs this more than any other figure here.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from varuna.plan.cluster import Cluster
from varuna.plan.predict import predict
from varuna.plan.profile_file import read_plan, read_profile

MODELS = ("gpt", "resnet")
NUM_WARM_UP = 3
MEDIAN_TARGET, MEMORY_TARGET = 0.02, 0.10


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a run is told."""

    num_workers: int
    num_stages: int
    micro_batch_size: int
    schedule: str
    recompute: bool

    def flags(self) -> list[str]:
        """Of ``varuna run``."""
        return [
            "-w", str(self.num_workers), "-p", str(self.num_stages), "-b", str(self.micro_batch_size),
            "--schedule", self.schedule, "--recompute" if self.recompute else "--no-recompute",
        ]  # fmt: skip


LAYOUTS = (
    Layout(num_workers=1, num_stages=1, micro_batch_size=2, schedule="varuna", recompute=False),
    Layout(num_workers=1, num_stages=1, micro_batch_size=8, schedule="varuna", recompute=False),
    Layout(num_workers=2, num_stages=2, micro_batch_size=1, schedule="varuna", recompute=True),
    Layout(num_workers=2, num_stages=2, micro_batch_size=2, schedule="varuna", recompute=False),
    Layout(num_workers=2, num_stages=2, micro_batch_size=2, schedule="1f1b", recompute=True),
    Layout(num_workers=2, num_stages=2, micro_batch_size=4, schedule="gpipe", recompute=False),
    Layout(num_workers=2, num_stages=2, micro_batch_size=2, schedule="zero-bubble", recompute=False),
    Layout(num_workers=2, num_stages=1, micro_batch_size=4, schedule="varuna", recompute=False),
)


def varuna(*arguments: str) -> None:
    """Run the command; its output is shown if it fails."""
    command = [sys.executable, "-W", "ignore", "-m", "varuna", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def run_once(model: str, layout: Layout, folder: Path, num_steps: int) -> float:
    """Median step of one job; what it wrote stays in the folder."""
    folder.mkdir(exist_ok=True)
    script = ["-m", "benchmarks.real_job", model, str(folder), "--steps", str(num_steps)]
    varuna("run", *layout.flags(), "--no-check", *script)
    steps = json.loads((folder / "0.json").read_text())["step_s"]
    return statistics.median(steps[NUM_WARM_UP:])


def profile_path(folder: Path, num_workers: int, index: int) -> Path:
    """Where the profile of a round is, measured with so many workers."""
    return folder / f"profile-{num_workers}-{index}.json"


def rows_of(
    model: str, folder: Path, rounds: Sequence[Sequence[float]]
) -> tuple[list[list[object]], list[float], list[float]]:
    """Rows, errors of step times and of memory. ``rounds``: the measured step of every layout in each round."""
    profiles = {
        size: [read_profile(profile_path(folder, size, index)) for index in range(len(rounds))]
        for size in (1, 2)
    }
    rows: list[list[object]] = []
    errors, memory_errors = [], []
    for index, layout in enumerate(LAYOUTS):
        plan = read_plan(folder / str(index) / "plan.json")
        cluster = Cluster.parse(f"1x{layout.num_workers}")
        predictions = [predict(plan, profile, cluster, num_runs=20) for profile in profiles[layout.num_workers]]
        pairs = [(found.step_s, steps[index]) for found, steps in zip(predictions, rounds, strict=True)]
        predicted_s, measured_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        errors.append(statistics.median(predicted / measured for predicted, measured in pairs) - 1)
        of_stages = []
        for stage in (stage for pipeline in predictions[-1].pipelines for stage in pipeline.stages):
            found = json.loads((folder / str(index) / f"{stage.worker_index}.json").read_text())
            of_stages.append(stage.peak_memory_bytes / found["memory_bytes"] - 1)
        memory_errors += of_stages
        rows.append(
            [
                model, layout.num_workers, layout.num_stages, layout.micro_batch_size, layout.schedule,
                "yes" if layout.recompute else "no", predicted_s, measured_s, f"{errors[-1]:+.1%}",
                " ".join(f"{error:+.1%}" for error in of_stages),
            ]
        )  # fmt: skip
    return rows, errors, memory_errors


def measure(
    model: str, folder: Path, num_rounds: int, num_steps: int
) -> tuple[list[list[object]], list[float], list[float]]:
    """One model, in all layouts."""
    folder.mkdir()
    rounds = []
    for index in range(num_rounds):
        for size in (1, 2):
            flags = ["-w", str(size), "--micro-batch-sizes", "1,2,4,8"]
            job = ["-m", "benchmarks.real_job", model, str(folder)]
            varuna("profile", *flags, "-o", str(profile_path(folder, size, index)), *job)
        rounds.append([run_once(model, layout, folder / str(i), num_steps) for i, layout in enumerate(LAYOUTS)])
        print(f"{model}, round {index + 1} of {num_rounds}", file=sys.stderr, flush=True)
    return rows_of(model, folder, rounds)


def main() -> None:
    options = report.arguments(__doc__ or "", repeats=3, steps=12)
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[list[object]] = []
    errors, memory_errors = [], []
    with tempfile.TemporaryDirectory() as root:
        os.environ["VARUNA_CACHE_DIR"] = f"{root}/cache"
        for model in MODELS:
            of_model = measure(model, Path(root) / model, options.repeats, options.steps)
            rows += of_model[0]
            errors += of_model[1]
            memory_errors += of_model[2]
    sizes, memory = sorted(map(abs, errors)), max(map(abs, memory_errors))
    notes = (
        f"Step time: error median {statistics.median(sizes):.1%} (target at most {MEDIAN_TARGET:.0%}), largest "
        f"{sizes[-1]:.1%}. Peak memory: largest error {memory:.1%} (at most {MEMORY_TARGET:.0%})."
    )
    header = [
        "model", "workers", "P", "m", "schedule", "recompute", "predicted s", "measured s", "error",
        "memory error per stage",
    ]  # fmt: skip
    report.report("Simulator on real models", report.table(header, rows), options.log, notes)


if __name__ == "__main__":
    main()
