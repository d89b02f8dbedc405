"""What a newcomer finds, whatever its script does: its world, its place on the machine, its output."""

from __future__ import annotations

import json
from pathlib import Path

from tests.launch.conftest import Launch
from tests.launch.jobs import wait_until
from varuna.morph.client import RunClient
from varuna.morph.runs import find_run, living_runs

SCRIPT = """
    import json, os, select, sys, time
    from pathlib import Path
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "VARUNA_JOINS", "MASTER_PORT")
    world = {name: os.environ[name] for name in names}
    world["named"] = os.environ["VARUNA_INCARNATION"].split(".")[-2] == os.environ["RANK"]
    print(json.dumps(world), flush=True)
    rank = world["RANK"]
    Path(f"ready-{rank}").touch()
    if rank == "1":
        sys.exit()
    while not Path("end").exists():
        time.sleep(0.01)
"""


def test_a_newcomer_takes_the_place_of_one_that_is_gone(launch: Launch, tmp_path: Path) -> None:
    command = launch(SCRIPT, workers=2, options=("--show", "all"))
    cache = tmp_path / "cache"
    wait_until(lambda: living_runs(cache) and (tmp_path / "ready-1").exists(), 120, "the workers run")
    client = RunClient(find_run(cache), cache)
    wait_until(lambda: "gone" in [worker.status for worker in client.status().workers], 120, "worker 1 is gone")
    client.add_workers(2)
    wait_until(lambda: (tmp_path / "ready-2").exists() and (tmp_path / "ready-3").exists(), 120, "both come")
    (tmp_path / "end").touch()
    done = command.wait()
    assert done.code == 0, done.stderr
    lines = [line.removeprefix("[worker 2] ").removeprefix("[worker 3] ") for line in done.stdout.splitlines()]
    worlds = [json.loads(line) for line in lines if line.startswith("{")]
    by_rank = {world["RANK"]: world for world in worlds}
    assert sorted(by_rank) == ["0", "2", "3"]
    assert all(world["named"] for world in worlds)
    assert len({world["MASTER_PORT"] for world in worlds}) == 1
    first, second = by_rank["2"], by_rank["3"]
    assert (first["WORLD_SIZE"], first["LOCAL_RANK"], first["LOCAL_WORLD_SIZE"]) == ("3", "1", "2")
    assert (second["WORLD_SIZE"], second["LOCAL_RANK"], second["LOCAL_WORLD_SIZE"]) == ("4", "2", "3")
    assert [by_rank[rank]["VARUNA_JOINS"] for rank in ("0", "2", "3")] == ["0", "1", "1"]
    assert "[worker 2] {" in done.stdout
    assert '"2"' in (tmp_path / "logs" / "worker-2.log").read_text()


def test_without_a_manager_there_is_none_to_find(launch: Launch, tmp_path: Path) -> None:
    script = """
        import os
        print(repr(os.environ.get("VARUNA_MANAGER")), "VARUNA_INCARNATION" in os.environ)
    """
    outer = {"VARUNA_MANAGER": "http://127.0.0.1:9", "VARUNA_MORPH": "0"}
    done = launch(script, workers=2, environ=outer).wait()
    assert (done.code, done.stdout) == (0, "'' False\n"), done.stderr
    assert not (tmp_path / "cache" / "runs").exists()
