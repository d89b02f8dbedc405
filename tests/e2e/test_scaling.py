"""A real manager that asks for machines: whoever is asked starts one, and it takes part."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.jobs import Warm
from tests.e2e.machines import Cluster
from tests.e2e.morphing import NUM_STEPS
from tests.launch.jobs import wait_until


class Scaled(Cluster):
    """Its manager runs a command that keeps what it is told; the test is who starts machines."""

    def start_manager(self) -> None:
        self._client = None
        flags = ["--state", "state", "--min-workers", "4", "--settle", "0.2"]
        asks = ["--scale-command", "cat >> asked; echo no quota; exit 7", "--scale-every", "1"]
        self._start("manager", ["manager", "--listen", "127.0.0.1:0", *flags, *asks], {})

    def asked(self) -> list[dict[str, object]]:
        path = self.directory / "asked"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def cluster(jobs: Warm, tmp_path: Path, cache: Path) -> Iterator[Scaled]:
    (cache / "captures").mkdir(exist_ok=True)
    made = Scaled(jobs, tmp_path, captures=cache / "captures", limit=8)
    yield made
    made.abandon()


def test_a_machine_is_lost_and_asked_for_and_comes(cluster: Scaled) -> None:
    cluster.start_agent("a")
    cluster.start_agent("b")
    cluster.steps_done(5)
    asked_before = len(cluster.asked())  # while it waited for the machines
    for one in cluster.processes("b"):
        one.send_signal(signal.SIGKILL)
    cluster.join("b")
    cluster.limit(20)
    wait_until(lambda: len(cluster.asked()) > asked_before + 1, 120, "it asks, and again")
    last = cluster.asked()[-1]
    assert (last["workers_present"], last["workers_wanted"]) == (2, 4)
    assert str(last["why"]).startswith("2 of 4 workers are there: b.")
    assert str(last["run_id"]).startswith("job-")
    cluster.event("scaling", "asking for machines has failed: the command exited with code 7: no quota")
    cluster.start_agent("c")
    for _ in range(2):
        cluster.event("ready", "c.")
    cluster.limit(NUM_STEPS)
    cluster.ends_well("a", "c")
    cluster.is_exact()
