"""A slow worker is found, gets less, gets nothing, and is taken back when it is well again."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.conftest import Start
from tests.e2e.morphing import NUM_STEPS


def set_pace(directory: Path, name: str, seconds: float) -> None:
    (directory / "part").write_text(str(seconds))
    (directory / "part").rename(directory / name)


def test_a_slow_worker_gets_less_then_nothing_and_comes_back(start: Start, tmp_path: Path) -> None:
    """What a micro-batch takes is mostly a sleep, so that it does not depend on the machine."""
    set_pace(tmp_path, "pace", 0.03)
    set_pace(tmp_path, "pace-1", 0.055)
    run = start(stages=1, limit=18, script="hooked.py", environ={"VARUNA_FIND_SLOW": "1", "VARUNA_REST_S": "1"})
    slow = run.event("slow", ".1.").text
    assert " is slow: " in slow
    assert " s for a micro-batch, its peers " in slow
    shared = run.event("decision", "micro-batches are shared anew").text
    assert f"{slow.split()[0]} at " in shared
    set_pace(tmp_path, "pace-1", 0.2)
    run.limit(34)
    run.event("slow", f"{slow.split()[0]} is slow: ")
    left_out = run.event("decision", " is left out").text
    assert left_out.startswith(f"{slow.split()[0]}, at ")
    run.event("running", "3 of 4 workers")
    positions = {worker.incarnation: worker.position for worker in run.status().workers}
    assert positions[slow.split()[0]] == "spare"
    set_pace(tmp_path, "pace-1", 0.03)
    run.event("decision", f"{slow.split()[0]} was slow and is given another try")
    run.limit(NUM_STEPS)
    run.event("running", "4 of 4 workers")
    run.ends_well()
    for worker in range(4):
        assert len(run.steps(worker)) == NUM_STEPS
    run.is_exact()
