"""`varuna run --slurm`: real machines of Slurm come and go; the weights are those of an undisturbed run."""

from __future__ import annotations

import functools
import json
import os
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.cases import jobs as cases
from tests.e2e.jobs import REPOSITORY, SCRIPTS
from tests.e2e.machines import Cluster
from tests.e2e.morphing import EXACT, NUM_STEPS, check_step, undisturbed
from tests.launch.jobs import wait_until
from tests.services.slurm_cluster import Slurm, missing, slurm
from varuna.errors import ConfigError
from varuna.launch.token import read_token
from varuna.morph.client import RunClient, run_at

pytestmark = pytest.mark.services

ODD = "two words, 'single', \"double\", $HOME `id` \\n\nand a second line; é"


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    assert missing() == [], "run scripts/test-services.sh, which installs them"
    with slurm(tmp_path_factory.mktemp("slurm"), "n1", "n2", "n3", "n4") as made:
        yield made


class SlurmRun(Cluster):
    """A job that was submitted."""

    def __init__(self, there: Slurm, directory: Path, captures: Path, *, limit: int) -> None:
        self.there = there
        self.directory = directory
        self.job_directory = directory / "job"
        self.state = self.job_directory / "manager"
        self.job_id = ""
        self._num_seen = 0
        self._client = None
        (directory / "cache").mkdir()
        (directory / "cache" / "captures").symlink_to(captures)
        self.limit(limit)

    def varuna(self, *arguments: str, **environ: str) -> str:
        """A command that ends well; what it says."""
        variables = {
            **os.environ,
            **self.there.environ,
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "VARUNA_CACHE_DIR": str(self.directory / "cache"),
            "VARUNA_CLOUD": "none",
            "VARUNA_FIND_SLOW": "0",
            "VARUNA_SETTLE_S": "0.5",
            **environ,
        }
        done = subprocess.run(
            [sys.executable, "-m", "varuna", *arguments],
            cwd=self.directory,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stderr + done.stdout

    def run(
        self, *flags: str, script: str = "machines.py", arguments: Sequence[str] = (), **environ: str
    ) -> None:
        """Submit it."""
        command = ["run", "--slurm", "--workers", "2", "--stages", "2", "--micro-batch-size", "2"]
        command += ["--log-dir", "job", *flags, str(SCRIPTS / script), str(NUM_STEPS), *arguments]
        self.job_id = job_id_in(self.varuna(*command, **environ))

    @property
    def client(self) -> RunClient:
        """Of the manager, wherever it is now."""
        token = read_token({}, self.state / "token")

        def look() -> bool:
            try:
                run = run_at((self.state / "url").read_text().strip(), token)
            except (ConfigError, OSError):
                return False
            self._client = RunClient(run)
            return True

        if self._client is None:
            wait_until(look, 60, f"the manager answers\n{self.printed()}")
        assert self._client is not None
        return self._client

    def manager_moves(self) -> None:
        """From now on another one is asked."""
        self._client = None
        self._num_seen = 0

    def steps_done(self, num_steps: int) -> None:
        """Until so many steps have happened; processes start slowly here."""
        wait_until(lambda: self.status().num_committed >= num_steps, 90, f"{num_steps} steps")

    def machines(self) -> set[str]:
        """Those with members."""
        return set(self.members().values())

    def node_of(self, task: int) -> str:
        """The machine of a task."""
        return self.there.ask("squeue", "-h", "-j", f"{self.job_id}_{task}", "-o", "%N")

    @property
    def name(self) -> str:
        """Of the job, as Slurm knows it."""
        return str(json.loads((self.job_directory / "job.json").read_text())["name"])

    def states(self) -> list[str]:
        """Of the job's tasks that have not ended."""
        return sorted(self.there.states(self.name).values())

    def printed(self) -> str:
        """What all tasks have printed."""
        return "\n".join(path.read_text() for path in sorted(self.job_directory.glob("slurm-*.out")))

    def joins(self, *machines: str) -> None:
        """Until two workers of one of these machines are ready."""
        for _ in range(2):
            wait_until(lambda: self._is_ready(machines), 90, f"{machines} joins")

    def _is_ready(self, machines: Sequence[str]) -> bool:
        for event in self.client.events(after=self._num_seen):
            self._num_seen = event.number
            if event.kind == "ready" and event.text.startswith(tuple(f"{name}." for name in machines)):
                return True
        return False

    def waits(self, job_id: str, task: int) -> None:
        """Until a task is in the queue again."""
        state = functools.partial(self.there.ask, "squeue", "-h", "-j", f"{job_id}_{task}", "-o", "%T")
        wait_until(lambda: state() == "PENDING", 60, f"{job_id}_{task} is requeued\n{self.printed()}")

    def starts_now(self, job_id: str, task: int, *updates: str) -> None:
        """Slurm keeps a requeued task for two minutes; on another machine it may start at once."""
        self.there.ask("scontrol", "update", f"JobId={job_id}_{task}", *updates, "StartTime=now")

    def is_over(self) -> None:
        """No task is left, and no process."""
        done = self.job_directory / "done"
        wait_until(lambda: done.exists() and not self.states(), 90, "all tasks have ended")
        self.leaves_nothing()

    def leaves_nothing(self) -> None:
        """No process."""
        wait_until(lambda: not self.there.processes(job_name=self.name), 20, "no process is left")

    def abandon(self) -> None:
        """End it, whatever it does."""
        self.there.ask("scancel", "--name", self.name)
        wait_until(lambda: not self.there.processes(job_name=self.name), 30, "tasks end")


def job_id_in(said: str) -> str:
    """The id that Slurm has given, as a command tells it."""
    job_id = said.partition("Slurm job ")[2].partition(";")[0]
    assert job_id.isdecimal(), said
    return job_id


Start = Callable[..., SlurmRun]


@pytest.fixture
def start(there: Slurm, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    captures = tmp_path_factory.getbasetemp() / "slurm-captures"
    captures.mkdir(exist_ok=True)
    made: list[SlurmRun] = []

    def start(*flags: str, limit: int, **options: object) -> SlurmRun:
        made.append(SlurmRun(there, tmp_path, captures, limit=limit))
        made[0].run(*flags, **options)  # type: ignore[arg-type]
        return made[0]

    yield start
    for run in made:
        run.abandon()


@pytest.mark.timeout(400)
def test_machines_come_and_go(start: Start, there: Slurm, tmp_path: Path) -> None:
    """Two found the job, one leaves with notice, one is added, and is lost without a word."""
    job = start(
        "--nodes",
        "2",
        "--exclusive",
        "--time",
        "30",
        script="hosts.py",
        arguments=("an argument", "'q'"),
        limit=8,
        ODD=ODD,
    )
    job.steps_done(5)
    first, second = job.node_of(0), job.node_of(1)
    assert job.machines() == {first, second}
    no_secret_is_seen(job)
    there.ask("scancel", "--signal=TERM", f"{job.job_id}_1")
    job.event("notice", f"{second}.")
    job.limit(16)
    wait_until(lambda: job.machines() == {first}, 30, "one has left")
    added = job_id_in(job.varuna("slurm", "add", "job", "--nodes", "1", "--nodelist", "n4", ODD=ODD))
    job.joins("n4")
    job.limit(24)
    wait_until(lambda: job.machines() == {first, "n4"}, 60, "another takes part")
    there.lose_node("n4")
    wait_until(lambda: job.machines() == {first}, 20, "it is lost")
    job.limit(30)
    job.waits(added, 0)
    job.starts_now(added, 0, "ReqNodeList=n3")
    job.joins("n3")
    job.limit(NUM_STEPS)
    job.is_over()
    job.is_exact()
    odd = [path.read_text() for path in tmp_path.glob("odd-*")]
    assert len(odd) == 8
    assert set(odd) == {f"{ODD}an argument|'q'"}
    there.start_node("n4")


def no_secret_is_seen(job: SlurmRun) -> None:
    """Neither on a command line, nor in a file that others may read."""
    token = (job.state / "token").read_text().strip()
    modes = {
        job.job_directory: 0o700,
        job.state: 0o700,
        job.state / "token": 0o600,
        job.job_directory / "job.json": 0o600,
    }
    assert {path: stat.S_IMODE(path.stat().st_mode) for path in modes} == modes
    processes = job.there.processes()
    assert len(processes) >= 10
    assert not any(token in shlex.join(process.cmdline()) for process in processes)
    with_token = {
        path for path in job.directory.rglob("*") if path.is_file() and token.encode() in path.read_bytes()
    }
    assert with_token - {job.directory / "cache" / "runs" / f"{job.client.run.run_id}.json"} == {
        job.state / "token"
    }


@pytest.mark.timeout(400)
def test_the_manager_is_preempted_and_comes_back_elsewhere(start: Start, there: Slurm) -> None:
    """Another job takes its machine: its workers leave in order, the others train on, and are found again."""
    job = start("--nodes", "2", "--exclusive", limit=8)
    job.steps_done(5)
    first, second = job.node_of(0), job.node_of(1)
    url = (job.state / "url").read_text()
    urgent = there.ask(
        "sbatch",
        "--parsable",
        "-p",
        "urgent",
        "--exclusive",
        f"--nodelist={first}",
        "--output=/dev/null",
        "--wrap=sleep 300",
    )
    try:
        job.event("notice", f"{first}.")
        job.limit(20)
        job.waits(job.job_id, 0)
        job.starts_now(job.job_id, 0, f"ExcNodeList={first},{second}")
        assert "the machine has to go, and with it the manager; training goes on meanwhile" in job.printed()
        wait_until(lambda: (job.state / "url").read_text() != url, 60, "the manager is elsewhere")
        job.manager_moves()
        job.joins(job.node_of(0))
        job.limit(NUM_STEPS)
        job.is_over()
        job.is_exact()
        assert "begins anew" not in job.printed()
    finally:
        there.ask("scancel", urgent)


@pytest.mark.timeout(400)
def test_the_time_is_over_and_the_job_goes_on_from_its_checkpoint(start: Start) -> None:
    """Its only machine has to go: its task is requeued, and begins anew where it has saved."""
    saved = ("--checkpoint", "saved", "--checkpoint-every", "5", "--env", "VARUNA_GRACE_S=3")
    job = start("--time=60", "--signal=TERM@25", *saved, limit=12)
    job.steps_done(12)
    first = job.node_of(0)
    job.there.ask("scontrol", "update", f"JobId={job.job_id}_0", "EndTime=now+30seconds")
    job.waits(job.job_id, 0)
    job.starts_now(job.job_id, 0, "TimeLimit=60", f"ExcNodeList={first}")
    assert "this task is requeued" in job.printed()
    job.limit(NUM_STEPS)
    job.is_over()
    assert "it begins anew, from the newest checkpoint" in job.printed()
    first_steps = [
        json.loads(path.read_text().partition("\n")[0])["index"] for path in job.directory.glob("steps-*")
    ]
    # a save that comes due while the one before is still being written is left out
    assert sorted(first_steps) in ([0, 0, 5, 5], [0, 0, 10, 10])
    ends_as_undisturbed(job.directory)


def ends_as_undisturbed(directory: Path) -> None:
    """All steps that were seen, and the final weights."""
    expected_state, expected = undisturbed()
    seen = set()
    for path in directory.glob("steps-*.jsonl"):
        for line in path.read_text().splitlines():
            check_step(json.loads(line), expected[json.loads(line)["index"]])
            seen.add(json.loads(line)["index"])
    assert seen == set(range(NUM_STEPS))
    state = cases.decode(json.loads((directory / "state.json").read_text()))
    for name, value in expected_state.items():
        difference = (state[name] - value).abs().max() / value.abs().max().clamp_min(1e-30)
        assert difference <= EXACT, (name, float(difference))


def test_an_exit_code_comes_back_and_nothing_is_left(start: Start, there: Slurm) -> None:
    job = start("--nodes", "1", script="hosts.py", limit=NUM_STEPS, ODD="exit")
    wait_until(lambda: not job.states(), 60, "it ends")
    assert "ExitCode=7:0" in there.ask("scontrol", "show", "job", "-o", job.job_id)
    assert "the job has failed" in job.printed()
    job.leaves_nothing()


def test_scancel_ends_all_of_it(start: Start, there: Slurm) -> None:
    job = start("--nodes", "2", limit=NUM_STEPS - 1)
    job.steps_done(5)
    there.ask("scancel", job.job_id)
    wait_until(lambda: not job.states(), 60, "it ends")
    job.leaves_nothing()
    assert "requeued" not in job.printed()
    assert signal.SIGTERM.name in job.printed()


def test_what_slurm_does_not_want(there: Slurm, tmp_path: Path) -> None:
    job = SlurmRun(there, tmp_path, tmp_path, limit=0)
    with pytest.raises(AssertionError, match=r"Slurm refuses .*job.sh: .*invalid partition"):
        job.run("--partition", "nowhere")
    assert not job.job_directory.exists()
    assert not there.ask("squeue", "-h")
