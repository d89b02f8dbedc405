"""A manager that comes back elsewhere: agents and workers that know of the file with its URL find it."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.e2e.jobs import SCRIPTS, Warm
from tests.e2e.machines import Cluster
from tests.e2e.morphing import NUM_STEPS
from tests.launch.jobs import wait_until
from varuna.morph.whereabouts import place_of


def test_a_manager_moves_while_the_job_runs(jobs: Warm, tmp_path: Path, cache: Path) -> None:
    (cache / "captures").mkdir(exist_ok=True)
    cluster = Cluster(jobs, tmp_path, captures=cache / "captures", limit=6)
    try:
        url = cluster.url  # once it is known, the token's file is there, too
        for name in ("a", "b"):
            start(cluster, name)
        cluster.steps_done(5)
        members = cluster.members()
        cluster.signal("manager", signal.SIGKILL)
        cluster.join("manager")
        cluster.limit(20)
        cluster._address = "127.0.0.2"
        cluster.start_manager()
        assert cluster.url.startswith("http://127.0.0.2:")
        assert cluster.url.rpartition(":")[2] != url.rpartition(":")[2]
        wait_until(lambda: all(one.is_connected for one in cluster.status().workers), 120, "all are back")
        assert cluster.members() == members
        cluster.steps_done(18)
        cluster.signal("b", signal.SIGTERM)
        cluster.event("notice", "is asked to leave")
        cluster.limit(26)
        assert cluster.join("b") == 128 + signal.SIGTERM
        start(cluster, "c")
        cluster.event("ready", "c.")
        cluster.limit(NUM_STEPS)
        cluster.ends_well("a", "c")
        cluster.is_exact()
    finally:
        cluster.abandon()


def start(cluster: Cluster, name: str) -> None:
    """An agent that knows only of the file."""
    command = ["agent", "--manager", place_of(cluster.state / "url"), "--token-file", "state/token"]
    command += ["--name", name, "--workers", "2", "--stages", "2", "--micro-batch-size", "2"]
    command += ["--log-dir", f"logs-{name}", str(SCRIPTS / "machines.py"), str(NUM_STEPS)]
    cluster._start(name, command, {})
