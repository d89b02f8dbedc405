"""A soak: one job, hundreds of faults, and it must train what an undisturbed one trains.

    python -m varuna.testing.soak --faults 200 --seed 1

Workers are killed at every point of a step, two at once, while a generation forms, as newcomers; they freeze,
for a moment or for ever; their connections go dead; they are asked to leave, with and without a deadline; the
manager is killed and started again; the store in which the first generation met is killed. Newcomers take the
places. Which fault comes next is drawn by the seed. At the end the final weights are compared with those of the
same job in one process that nothing disturbs, every step must have happened once with its own samples, and no
process that lived through it may use more threads, descriptors or memory than at first.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from varuna.morph.ledger import audit
from varuna.morph.ledger_table import read_ledger
from varuna.testing.faults import FaultScript
from varuna.testing.soak_driver import NUM_WORKERS, Soak, Soaked

STEPS_PER_FAULT = 10
EXACT = 1e-12
"""Relative, of the largest weight of a tensor. Other orders of summation differ by 1e-16 a step."""

_END_S = 600.0
_JOB = "varuna.testing.soak_job"


def run_arguments(directory: Path, num_steps: int, num_workers: int = NUM_WORKERS) -> list[str]:
    """What follows ``varuna`` to run the job in a directory, 2 stages, micro-batches of 2 samples."""
    layout = ["--stages", "2" if num_workers > 1 else "1", "--micro-batch-size", "2", "--no-profile"]
    where = ["--log-dir", str(directory / "logs"), "-m", _JOB]
    return ["run", "--workers", str(num_workers), *layout, *where, str(num_steps), str(directory)]


def run_environ(directory: Path, script: FaultScript) -> dict[str, str]:
    """What to add to the environment of a soak's job."""
    return {"VARUNA_CACHE_DIR": str(directory / "cache"), "VARUNA_HEARTBEAT_S": "3", **script.environ()}


def findings(directory: Path, undisturbed: Path, num_steps: int, soaked: Soaked) -> list[str]:
    """What is not as it should be; see this module.

    Args:
        directory: of the job that went through the faults, over by now.
        undisturbed: of the same job in one process.
        num_steps: of both.
        soaked: what happened to it.
    """
    from safetensors.torch import load_file

    found = soaked.uses.growth()
    view = read_ledger(directory / "logs" / "journal.sqlite")
    found += [finding.text for finding in audit(view.entries, view.order, num_steps, view.shares)]
    if len(view.entries) != num_steps:
        found.append(f"the ledger has {len(view.entries)} steps, not {num_steps}")
    mine, theirs = load_file(directory / "state.safetensors"), load_file(undisturbed / "state.safetensors")
    if mine.keys() != theirs.keys():
        found.append(f"other tensors: {sorted(mine)} instead of {sorted(theirs)}")
    for name in mine.keys() & theirs.keys():
        difference = float((mine[name] - theirs[name]).abs().max() / theirs[name].abs().max())
        if not difference <= EXACT:
            found.append(f"{name} differs by {difference:.1e}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m varuna.testing.soak", description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="Default: another one each time.")
    parser.add_argument("--directory", type=Path, default=None, help="Kept; default: a temporary one.")
    given = parser.parse_args(arguments)
    seed = secrets.randbelow(1_000_000) if given.seed is None else given.seed
    _say(f"seed {seed}: {given.faults} faults")
    if given.directory is not None:
        return _soak(given.directory, given.faults, seed)
    with tempfile.TemporaryDirectory(prefix="varuna-soak-") as directory:
        return _soak(Path(directory), given.faults, seed)


def _soak(directory: Path, num_faults: int, seed: int) -> int:
    num_steps = STEPS_PER_FAULT * num_faults
    undisturbed = directory / "undisturbed"
    undisturbed.mkdir(parents=True)
    script = FaultScript(directory / "faults")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **run_environ(directory, script)}
    (undisturbed / "limit").write_text(str(num_steps))
    command = [sys.executable, "-m", "varuna"]
    alone = {name: value for name, value in environ.items() if name not in script.environ()}
    subprocess.run([*command, *run_arguments(undisturbed, num_steps, 1)], env=alone, check=True)
    soak = Soak(
        directory,
        script,
        directory / "cache",
        num_steps=num_steps,
        seed=seed,
        num_faults=num_faults,
        say=_say,
    )
    started_s = time.monotonic()
    job = subprocess.Popen([*command, *run_arguments(directory, num_steps)], env=environ)
    try:
        soaked = soak.run(lambda: job.poll() is None)
        code = job.wait(_END_S)
    finally:
        job.terminate()
        job.wait()
    found = [f"the job ended with code {code}"] if code else []
    found += [] if code else findings(directory, undisturbed, num_steps, soaked)
    _report(soaked, found, num_steps, time.monotonic() - started_s)
    return int(bool(found))


def _report(soaked: Soaked, found: Sequence[str], num_steps: int, duration_s: float) -> None:
    kinds = ", ".join(f"{count} × {kind}" for kind, count in sorted(soaked.counts.items()))
    sys.stdout.write(
        f"{soaked.num_faults} faults ({kinds}) in {soaked.num_generations} generations, {num_steps} steps, "
        f"{duration_s:.0f} s\n{soaked.uses.table()}\n"
    )
    for text in found:
        sys.stdout.write(f"wrong: {text}\n")
    if not found:
        sys.stdout.write("Weights and ledger are those of the undisturbed run; nothing has grown.\n")


def _say(text: str) -> None:
    sys.stderr.write(f"soak: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
