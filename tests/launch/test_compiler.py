"""The first start on a machine compiles what planning needs, beside the workers."""

from __future__ import annotations

from pathlib import Path

from tests.launch.conftest import Launch
from varuna.plan.compiled import LOOPS

SCRIPT = """
    import os, sys, time
    from pathlib import Path

    place, loops = Path(os.environ["NUMBA_CACHE_DIR"]), sys.argv[1:]
    while not all(list(place.rglob(f"{loop}-*.nbc")) for loop in loops):
        time.sleep(0.05)
    print("all are there")
"""


def test_it_is_done_while_workers_are_at_work(launch: Launch, tmp_path: Path) -> None:
    """A worker would wait for ever if it was not; and the fixture looks whether a process is left."""
    command = launch(SCRIPT, *LOOPS, workers=1, environ={"NUMBA_CACHE_DIR": str(tmp_path / "numba")})
    done = command.wait(120)
    assert done.code == 0, done.stderr
    assert "all are there" in done.stdout


def test_it_ends_with_the_job(launch: Launch, tmp_path: Path) -> None:
    done = launch("print(1)", workers=2, environ={"NUMBA_CACHE_DIR": str(tmp_path / "numba")}).wait()
    assert done.code == 0, done.stderr
    assert not list(tmp_path.rglob("kernel.*.nbc"))
