"""The command lines of ``varuna k8s render``, run as Kubernetes would: pods are processes, nodes are this one.

Without a cluster: what the manifests themselves mean to Kubernetes, ``tests/launch/test_k8s.py`` looks at.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from tests.e2e.jobs import SCRIPTS, Warm
from tests.e2e.machines import Cluster
from tests.e2e.morphing import NUM_STEPS
from tests.launch.jobs import wait_until
from tests.launch.test_k8s import expanded, outcome
from varuna.cli import main

TOKEN = "t" * 20
JOB = ("--image", "gpt", "--name", "state", "--pods", "2", "--workers", "2", "--settle", "0.2", "--stages", "2")


class Pods(Cluster):
    """A rendered job."""

    def __init__(self, warm: Warm, directory: Path, *, captures: Path, limit: int) -> None:
        script = (*JOB, "-b", "2", str(SCRIPTS / "machines.py"), str(NUM_STEPS))
        result = CliRunner().invoke(main, ["k8s", "render", *script], env={"VARUNA_TOKEN": TOKEN})
        self.documents = {one["kind"]: one for one in yaml.safe_load_all(result.output)}
        super().__init__(warm, directory, captures=captures, limit=limit)

    def start_manager(self) -> None:
        """The Deployment's pod; its volume is this test's folder, its address loopback."""
        self._client = None
        places = {"/var/lib/varuna": str(self.directory), "0.0.0.0:7000": "127.0.0.1:0"}
        self._start_pod("manager", "Deployment", places)

    def start_pod(self, name: str) -> None:
        """One of the Job's."""
        self._start_pod(name, "Job", {"http://state-manager:7000": self.url})

    def _start_pod(self, name: str, kind: str, places: dict[str, str]) -> None:
        [container] = self.documents[kind]["spec"]["template"]["spec"]["containers"]
        words = [expanded(word, {"VARUNA_POD": name}) for word in container["command"][1:]]
        for there, here in places.items():
            words = [word.replace(there, here) for word in words]
        environ = {one["name"]: expanded(one.get("value", TOKEN), {}) for one in container["env"]}
        self._start(name, words, {**environ, "TMPDIR": str(self.directory)})

    @property
    def job(self) -> dict[str, Any]:
        """The agents' manifest."""
        return self.documents["Job"]


@pytest.fixture
def pods(jobs: Warm, tmp_path: Path, cache: Path) -> Iterator[Pods]:
    (cache / "captures").mkdir(exist_ok=True)
    made = Pods(jobs, tmp_path, captures=cache / "captures", limit=8)
    yield made
    made.abandon()


def test_a_pod_is_taken_away_and_replaced_and_one_comes_too_late(pods: Pods) -> None:
    pods.start_pod("state-agents-0-aaaaa")
    pods.start_pod("state-agents-1-bbbbb")
    pods.steps_done(5)
    pods.signal("state-agents-1-bbbbb", signal.SIGTERM)
    pods.event("notice", "(SIGTERM)")
    pods.limit(20)
    code = pods.join("state-agents-1-bbbbb")
    assert outcome(pods.job, code) == "Ignore"
    pods.start_pod("state-agents-1-ccccc")
    for _ in range(2):
        pods.event("ready", "state-agents-1-ccccc.")
    pods.limit(28)
    wait_until(lambda: "state-agents-1-ccccc" in pods.members().values(), 120, "the new pod takes part")
    pods.limit(NUM_STEPS)
    assert [pods.join(f"state-agents-{name}") for name in ("0-aaaaa", "1-ccccc")] == [0, 0]
    pods.start_pod("state-agents-1-ddddd")  # as if the Job had not heard yet how the last one ended
    assert pods.join("state-agents-1-ddddd") == 0
    pods.signal("manager", signal.SIGTERM)
    assert pods.join("manager") == 0
    assert "SIGTERM: the manager ends.\n" in pods.told("manager")
    pods.is_exact()
