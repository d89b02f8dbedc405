"""`varuna run --ray`: real Ray, whose nodes come and go while the job runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from tests.e2e.jobs import REPOSITORY, SCRIPTS, Warm
from tests.e2e.machines import Cluster
from tests.e2e.morphing import NUM_STEPS
from tests.launch.jobs import MARK, wait_until
from varuna.errors import ConfigError

pytestmark = pytest.mark.services

ENDING_S = 20
START_S = 150  # every node's agent imports torch, several on a core


class Ray:
    """A cluster on this machine; see ``ray_nodes``."""

    def __init__(self, directory: str, *flags: str) -> None:
        self._errors = Path(directory, "cluster.err")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.services.ray_nodes", *flags],
            cwd=REPOSITORY,
            env={**os.environ, "RAY_TMPDIR": directory, "ERRORS": str(self._errors), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = str(self._read()["address"])

    def ask(self, **request: Any) -> Any:
        """The answer to a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def processes(self) -> list[str]:
        """Of agents and their workers, on all nodes."""
        found = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                command = " ".join(process.cmdline())
                if process.status() != psutil.STATUS_ZOMBIE and "varuna" in command:
                    found.append(command)
        return found

    def end(self) -> None:
        """All of it."""
        left = self.ask(end=True) if self._process.poll() is None else []
        self._process.kill()
        self._process.communicate()
        assert left == []

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self._errors.read_text()
        return json.loads(line)


@contextlib.contextmanager
def cluster(*flags: str) -> Iterator[Ray]:
    """A cluster for as long as the block runs."""
    directory = tempfile.mkdtemp(prefix="ray-")  # the names of its sockets must be short
    try:
        ray = Ray(directory, *flags)
        try:
            yield ray
        finally:
            ray.end()
    finally:
        shutil.rmtree(directory)


@pytest.fixture(scope="module")
def ray() -> Iterator[Ray]:
    with cluster() as made:
        yield made


class Commands:
    """What ``Warm`` does, with an interpreter each: a process that takes part in Ray cannot be forked."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._started: dict[int, subprocess.Popen[bytes]] = {}

    def start(
        self,
        directory: Path,
        name: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        *,
        namespace: str,
    ) -> int:
        """A `varuna` command; its process id."""
        assert not namespace
        with (directory / f"{name}.out").open("wb") as out, (directory / f"{name}.err").open("wb") as err:
            started = subprocess.Popen(
                [sys.executable, "-m", "varuna", *arguments],
                cwd=directory,
                env={**os.environ, **environ, MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self._started[started.pid] = started
        return started.pid

    def join(self, pid: int) -> int:
        """Its exit code."""
        return self._started.pop(pid).wait(60)

    def left(self) -> list[str]:
        """Processes that have outlived the commands by a while; they are ended."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self._living(), ENDING_S)
        left = self._living()
        for process in left:
            process.kill()
        return [str(process) for process in left]

    def _living(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


class OnRay(Cluster):
    """A job whose agents are started by `varuna run --ray`."""

    def __init__(self, directory: Path, captures: Path, ray: Ray) -> None:
        self.ray = ray
        super().__init__(cast(Warm, Commands()), directory, captures=captures, limit=8)
        self.state = directory / "logs"

    def start_manager(self) -> None:
        """The one command that there is."""

    def run(self, *flags: str, odd: str = "") -> None:
        """Start it."""
        usual = ["--ray", self.ray.address, "--stages", "1", "--micro-batch-size", "2"]
        usual += ["--log-dir", "logs", "--env", "ODD", "--env", f"TMPDIR={self.directory}"]
        usual += ["--env", f"VARUNA_CACHE_DIR={self.directory / 'cache'}"]
        environ = {"VARUNA_SETTLE_S": "0.5", "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "ODD": odd}
        self._start("manager", ["run", *usual, *flags, str(SCRIPTS / "hosts.py"), str(NUM_STEPS)], environ)

    def trains(self) -> None:
        """Until it does; while everything starts, the manager may be slow to answer."""

        def does() -> bool:
            with contextlib.suppress(ConfigError):
                return self.status().num_committed >= 5
            return False

        wait_until(does, START_S, "the job trains")

    def works_on(self, *names: str, within_s: float = 30) -> None:
        """Until the members of the job are on these nodes."""
        wait_until(lambda: set(self.members().values()) == set(names), within_s, f"{names} work")

    def ends(self) -> int:
        """Its exit code; nothing may be left of it."""
        code = self.join("manager")
        assert self._warm.left() == []
        wait_until(lambda: not self.ray.processes(), ENDING_S, "nothing is left on any node")
        return code


Start = Callable[[Ray], OnRay]


@pytest.fixture
def start(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Makes the test's job."""
    made: list[OnRay] = []

    def start(ray: Ray) -> OnRay:
        made.append(OnRay(tmp_path, tmp_path_factory.mktemp("captures"), ray))
        return made[0]

    yield start
    for job in made:
        job.abandon()


def test_nodes_come_and_go_while_the_job_runs(start: Start, ray: Ray) -> None:
    """Found on three nodes; one loses its power, one is drained, one is added."""
    for name in ("a", "b", "c"):
        ray.ask(add=name)
    job = start(ray)
    job.run("--nodes", "3")
    job.trains()
    job.works_on("a", "b", "c")
    ray.ask(kill="b")
    job.limit(18)
    job.works_on("a", "c")
    job.steps_done(18)
    ray.ask(drain="c", seconds=40)
    told = job.event("notice", "c.").text
    left = re.search(r"is asked to leave within (\d+) s", told)
    assert left is not None, told
    assert 20 < int(left[1]) <= 40  # some of it has gone by since the node was told
    job.limit(28)
    job.works_on("a")
    wait_until(lambda: not ray.ask(alive="c"), 20, "the node ends, since nothing is left there")
    ray.ask(add="d")
    job.event("ready", "d.", within_s=START_S)
    lost = ("varuna: b is not in the Ray cluster any more", "varuna: b has no agent: ")
    wait_until(lambda: any(text in job.told("manager") for text in lost), START_S, "Ray sees that b is gone")
    job.limit(NUM_STEPS)
    assert job.ends() == 0, job.told("manager")
    job.is_exact()
    told = job.told("manager")
    assert "varuna: c is drained by Ray and leaves the job within" in told
    assert "[d] varuna: d is in run job-" in told
    assert (job.state / "machine-d.log").exists()


@pytest.fixture
def node(ray: Ray) -> Iterator[str]:
    """A node, which has one of the resource that it is called by."""
    name = f"node-{uuid.uuid4().hex[:4]}"
    ray.ask(add=name)
    yield name
    ray.ask(kill=name)


def test_an_exit_code_comes_back_and_nothing_is_left(start: Start, ray: Ray, node: str) -> None:
    job = start(ray)
    job.run("--ray-resources", f"{node}=1,CPU=1", odd="exit")
    assert job.ends() == 7, job.told("manager")
    assert "the job has failed" in job.told("manager")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_command(start: Start, ray: Ray, node: str, signum: signal.Signals) -> None:
    job = start(ray)
    job.run("--ray-resources", f"{node}=1", "--workers", "2")
    job.trains()
    job.signal("manager", signum)
    assert job.ends() == (130 if signum == signal.SIGINT else -signal.SIGKILL)


def test_nodes_are_asked_of_the_autoscaler_and_given_back(start: Start) -> None:
    with cluster("--scales") as scaled:
        assert scaled.ask(nodes=True) == 0
        job = start(scaled)
        job.run("--nodes", "2")
        job.trains()
        assert len(set(job.members().values())) == 2
        assert scaled.ask(nodes=True) == 2
        job.limit(NUM_STEPS)
        assert job.ends() == 0, job.told("manager")
        job.is_exact()
        wait_until(lambda: scaled.ask(nodes=True) == 0, 60, "the autoscaler takes its nodes back")


def test_no_such_cluster(tmp_path: Path) -> None:
    """Nothing is started, and no folder made."""
    (tmp_path / "train.py").touch()
    wrong = {
        "ray://127.0.0.1:1": "ray job submit",
        "127.0.0.1:1": "nothing answers at 127.0.0.1:1",
        "no-such-host.invalid:6379": "nothing answers at no-such-host.invalid:6379",
        "local": "is no address",
    }
    for address, told in wrong.items():
        done = subprocess.run(
            [sys.executable, "-m", "varuna", "run", "--ray", address, "--log-dir", "logs", "train.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert told in done.stderr
        assert not (tmp_path / "logs").exists()
