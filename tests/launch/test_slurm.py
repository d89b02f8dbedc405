"""A job under Slurm, without Slurm: command lines, scripts, what is read of Slurm's answers, what follows."""

from __future__ import annotations

import shlex
import stat
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from varuna.cli import main
from varuna.cli.sbatch import Divided, divide
from varuna.errors import ConfigError
from varuna.launch.slurm.job import (
    JobInfo,
    Nodes,
    SlurmJob,
    Task,
    agent_command,
    batch_script,
    begins_anew,
    comes_back,
    read_job_info,
    read_node_address,
    read_nodes,
    task_of,
)
from varuna.launch.slurm.state import (
    is_done,
    journal_s,
    known_min_workers,
    manager_task,
    note_done,
    note_manager_task,
    note_task,
    set_aside,
    tasks_started_s,
)
from varuna.launch.slurm.submit import read_job, write_job

KNOWN = {"--slurm": False, "--nodes": True, "--workers": True, "-w": True, "-m": False, "--no-check": False}
ODD = "two words, 'single', \"double\", $HOME, `id`, \\n é"
JOB = SlurmJob(
    name="train-1",
    directory="/shared/two words",
    python="/venv/bin/python",
    srun=("srun",),
    agent=("--show", "first", "train.py", ODD),
    environ={"A": ODD},
    sbatch=("--partition=gpu",),
    min_nodes=1,
    workers=None,
    replaces=None,
    settle_s=10.0,
)
TASK = Task(job_id="17", is_first=True, num_restarts=2, node="gpu-3", num_cpus=8)


# --- command lines --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "own", "sbatch", "rest"),
    [
        ("--slurm train.py --partition x", "--slurm", "", "train.py --partition x"),
        ("--partition gpu --slurm train.py", "--slurm", "--partition=gpu", "train.py"),
        ("--gpus=8 --exclusive --nice --time 4 t.py", "", "--gpus=8 --exclusive --nice --time=4", "t.py"),
        ("--exclusive=user -w 4 --nodes 2 t.py 1", "-w 4 --nodes 2", "--exclusive=user", "t.py 1"),
        ("-w4 -mw 4 -m mod --time 1", "-w4 -mw 4 -m", "", "mod --time 1"),
        ("--nodes=2 --no-check --nice=-5 -- --time 1", "--nodes=2 --no-check", "--nice=-5", "-- --time 1"),
        ("--nice -w 1", "-w 1", "--nice", ""),
        ("--priority -3 t.py", "", "--priority=-3", "t.py"),
        ("--workers", "--workers", "", ""),
        ("", "", "", ""),
    ],
)  # fmt: skip
def test_options_of_sbatch_among_ours(words: str, own: str, sbatch: str, rest: str) -> None:
    found = divide(words.split(), KNOWN)
    assert found == Divided(own=tuple(own.split()), sbatch=tuple(sbatch.split()), rest=tuple(rest.split()))


@pytest.mark.parametrize(
    "words", ["--time", "--time --exclusive t.py", "--wrap x", "--chdir=/x t.py", "--wait t.py"]
)
def test_options_of_sbatch_that_cannot_be(words: str) -> None:
    with pytest.raises(ConfigError, match=r"has no value. Write --time=VALUE|cannot be given: "):
        divide(words.split(), KNOWN)


def invoke(*arguments: str, environ: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, list(arguments), env=environ or {}, prog_name="varuna")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script."""
    monkeypatch.chdir(tmp_path)
    for name in (
        "VARUNA_SBATCH",
        "VARUNA_SRUN",
        "VARUNA_CHECKPOINT",
        "VARUNA_SETTLE_S",
        "VARUNA_REMOTE_PYTHON",
    ):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").write_text("")
    return tmp_path


def test_a_script_is_printed_and_its_job_kept(here: Path) -> None:
    flags = ["--nodes", "2-8", "--partition", "spot", "--comment", ODD, "-w", "4", "--env", f"X={ODD}"]
    done = invoke(
        "run",
        "--slurm",
        "--print",
        *flags,
        "--checkpoint",
        "saved",
        "--log-dir",
        "gpt",
        "train.py",
        ODD,
        "--nodes",
        "9",
    )
    assert done.exit_code == 0, done.output
    assert "#SBATCH --array=0-7\n" in done.stdout
    assert "#SBATCH --partition=spot\n" in done.stdout
    job = read_job(here / "gpt")
    assert (job.min_nodes, job.workers) == (2, 4)
    assert job.agent == ("--show", "first", "train.py", ODD, "--nodes", "9")
    assert job.environ["X"] == ODD
    assert job.environ["VARUNA_CHECKPOINT"] == "saved"
    assert sorted(path.name for path in (here / "gpt").iterdir()) == ["job.json", "manager"]
    modes = [
        here / "gpt",
        here / "gpt" / "manager",
        here / "gpt" / "job.json",
        here / "gpt" / "manager" / "token",
    ]
    assert [stat.S_IMODE(path.stat().st_mode) for path in modes] == [0o700, 0o700, 0o600, 0o600]
    more = invoke("slurm", "add", "gpt", "--nodes", "2", "--print", "--time", "10")
    assert more.exit_code == 0, more.output
    assert "#SBATCH --array=0-1\n" in more.stdout
    assert "#SBATCH --partition=spot\n" in more.stdout
    assert more.stdout.index("--comment=") < more.stdout.index("#SBATCH --time=10\n")
    assert "--founds" not in more.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "--nodes", "2", "train.py"], "--nodes 2 is about Slurm and Ray. Add --slurm"),
        (["run", "--print", "train.py"], "--print is about Slurm"),
        (["run", "--partition", "gpu", "train.py"], "No such option"),
        (
            ["run", "--slurm", "--hosts", "train.py", "train.py"],
            "--slurm and --hosts are two ways to find machines",
        ),
        (["run", "--slurm", "gone.py"], "No file 'gone.py'"),
        (["run", "--slurm", "--nodes", "4-2", "train.py"], "--nodes '4-2': write 4, or 2-8"),
        (["run", "--slurm", "--time", "train.py"], "Missing argument 'SCRIPT'"),
        (["run", "--slurm", "--comment=a\nb", "train.py"], "it must be one printable line"),
        (["run", "--slurm", "--log-dir", "a%b", "train.py"], "give a --log-dir without %"),
        (["run", "--slurm", "--log-dir", "train.py/x", "train.py"], "Nothing can be written to "),
        (["slurm", "add", "gone"], "There is no job in "),
        (["slurm", "task", "gone"], "There is no job in "),
    ],
)
@pytest.mark.usefixtures("here")
def test_flags_that_cannot_be(arguments: Sequence[str], told: str) -> None:
    done = invoke(*arguments, environ={"VARUNA_SBATCH": "/bin/true"})
    assert done.exit_code == 2
    assert told in done.output


def test_what_comes_of_handing_it_over(here: Path) -> None:
    """With programs that are not sbatch; the real one is in ``tests/services``."""
    missing = invoke(
        "run", "--slurm", "--log-dir", "a", "train.py", environ={"VARUNA_SBATCH": "/nowhere/sbatch"}
    )
    assert "/nowhere/sbatch cannot be run: " in missing.output
    refused = invoke("run", "--slurm", "--log-dir", "b", "train.py", environ={"VARUNA_SBATCH": "/bin/false"})
    assert f"Slurm refuses {here}/b/job.sh: exit code 1" in refused.output
    assert [path.name for path in here.iterdir()] == ["train.py"]
    said = "sh -c 'echo \"7;here $VARUNA_TOKEN\"'"
    environ = {"VARUNA_SBATCH": said, "VARUNA_TOKEN": "a-token-0123456789"}
    done = invoke("run", "--slurm", "--log-dir", "c", "train.py", environ=environ)
    assert done.exit_code == 0
    assert f"varuna: Slurm job 7; its files are in {here}/c" in done.output
    taken = invoke("run", "--slurm", "--log-dir", "c", "train.py", environ=environ)
    assert f"{here}/c belongs to a job already. `varuna slurm add {here}/c`" in taken.output
    assert [invoke("slurm", "add", "c", environ=environ).exit_code for _ in range(2)] == [0, 0]
    assert {path.name for path in (here / "c").glob("*.sh")} == {"job.sh", "join.sh", "join-2.sh"}


@pytest.mark.parametrize(
    ("text", "nodes"),
    [("4", Nodes(least=4, most=4)), ("2-8", Nodes(least=2, most=8)), ("1-1", Nodes(least=1, most=1))],
)
def test_numbers_of_nodes(text: str, nodes: Nodes) -> None:
    assert read_nodes(text) == nodes


@pytest.mark.parametrize("text", ["", "0", "-1", "0-3", "8-2", "2-", "a", "2k", "9999999", "2:8"])
def test_no_numbers_of_nodes(text: str) -> None:
    with pytest.raises(ConfigError, match="--nodes"):
        read_nodes(text)


# --- the script, and a task -----------------------------------------------------------------

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=train-1
#SBATCH --array=0-3
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --requeue
#SBATCH --signal=TERM@60
#SBATCH --output=/shared/jobs/gpt/slurm-%A_%a.out
#SBATCH --open-mode=append
#SBATCH --partition=gpu
#SBATCH --comment="a \\"b\\" # \\\\c"

cd '/shared/two words' && exec /venv/bin/python -m varuna slurm task --founds /shared/jobs/gpt
"""


def test_the_script() -> None:
    options = ("--partition=gpu", '--comment=a "b" # \\c')
    assert batch_script(JOB, Path("/shared/jobs/gpt"), options, 4, founds=True) == SCRIPT


def test_the_step() -> None:
    command = agent_command(JOB, Path("/shared/a b"), TASK)
    assert shlex.join(command).startswith(
        "srun --nodes=1 --ntasks=1 --cpus-per-task=8 --mpi=none --export=ALL --input=none --unbuffered "
        "/venv/bin/python -m varuna agent --manager file:///shared/a%20b/manager/url "
        "--token-file '/shared/a b/manager/token' --name gpu-3 --log-dir '/shared/a b/logs/gpu-3-17.2' "
        "--show first train.py "
    )
    assert command[-1] == ODD
    assert "--workers" not in command
    own = msgspec.structs.replace(JOB, workers=2, srun=("srun", "--container-image=x"))
    assert agent_command(own, Path("/shared"), TASK)[:3] == ["srun", "--container-image=x", "--nodes=1"]
    assert "--workers 2 --show" in shlex.join(agent_command(own, Path("/shared"), TASK))


def test_the_task_that_a_process_is() -> None:
    array = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MIN": "3", "SLURM_RESTART_COUNT": "2"}
    environ = {"SLURM_JOB_ID": "17", "SLURMD_NODENAME": "gpu-3", "SLURM_CPUS_ON_NODE": "8", **array}
    assert task_of(environ) == TASK
    assert not task_of({**environ, "SLURM_ARRAY_TASK_ID": "4"}).is_first
    alone = task_of({"SLURM_JOB_ID": "17", "SLURMD_NODENAME": "gpu-3"})
    assert (alone.is_first, alone.num_restarts, alone.num_cpus) == (True, 0, 1)
    with pytest.raises(ConfigError, match="there is no Slurm job around it"):
        task_of({})
    with pytest.raises(ConfigError, match="This Slurm job has 4 machines"):
        task_of({**environ, "SLURM_JOB_NUM_NODES": "4"})


# --- what Slurm says ------------------------------------------------------------------------

RUNNING = (
    "JobId=12 ArrayJobId=12 ArrayTaskId=1 JobName=a UserId=me(0) JobState=RUNNING Reason=None Requeue=1 "
    "StartTime=2026-11-30T00:24:29 EndTime=2026-11-30T00:25:22 Deadline=N/A PreemptTime={} SuspendTime=None"
)


def info(
    state: str = "RUNNING", *, end_s: float | None = None, requeues: bool = True, preempted: bool = False
) -> JobInfo:
    return JobInfo(state=state, may_requeue=requeues, end_s=end_s, is_preempted=preempted)


def test_what_slurm_says_of_a_job() -> None:
    told = read_job_info(RUNNING.format("None"))
    assert told is not None
    assert told.end_s is not None
    assert told == info(end_s=told.end_s)
    preempted = read_job_info(RUNNING.format("2026-11-30T00:25:02"))
    assert preempted == info(end_s=told.end_s, preempted=True)
    assert read_job_info("JobState=CANCELLED Requeue=0 EndTime=Unknown") == info("CANCELLED", requeues=False)
    assert read_job_info("slurm_load_jobs error: Invalid job id specified") is None
    assert read_node_address("NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.7 NodeHostName=n1") == "10.0.0.7"
    assert read_node_address("") == ""


def test_who_comes_back_by_itself() -> None:
    assert comes_back(info(end_s=1060.0), 1000.0)
    assert comes_back(info(end_s=9000.0, preempted=True), 1000.0)
    assert not comes_back(info(end_s=9000.0), 1000.0)  # a person has told it to leave
    assert not comes_back(info(), 1000.0)
    assert not comes_back(info("CANCELLED", end_s=1001.0), 1000.0)
    assert not comes_back(info("COMPLETING", end_s=1001.0), 1000.0)
    assert not comes_back(info(end_s=1060.0, requeues=False), 1000.0)
    assert not comes_back(None, 1000.0)


def test_a_manager_begins_anew_if_nobody_of_before_is_left() -> None:
    assert begins_anew(100.0, {}, ())
    assert not begins_anew(100.0, {"1": 50.0, "2": 150.0}, ("1", "2"))
    assert begins_anew(100.0, {"1": 50.0, "2": 150.0}, ("2",))
    assert begins_anew(100.0, {"1": 150.0}, ("1", "9"))


# --- the directory --------------------------------------------------------------------------


def test_what_tasks_leave_for_one_another(tmp_path: Path) -> None:
    write_job(JOB, tmp_path / "job")
    directory = tmp_path / "job"
    assert read_job(directory) == JOB
    state = directory / "manager"
    assert (manager_task(directory), tasks_started_s(directory), journal_s(state)) == ("", {}, None)
    assert not is_done(directory)
    assert known_min_workers(state) == 0
    note_task(directory, "17")
    note_manager_task(directory, "17")
    (state / "journal.sqlite").write_text("")
    (state / "manager.json").write_text('{"run_id": "r", "min_workers": 3}')
    assert manager_task(directory) == "17"
    assert known_min_workers(state) == 3
    (state / "manager.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        known_min_workers(state)
    written_s = journal_s(state)
    assert written_s is not None
    assert tasks_started_s(directory)["17"] <= written_s
    note_task(directory, "17")
    assert tasks_started_s(directory)["17"] >= written_s
    token = (state / "token").read_text()
    for _ in range(2):
        set_aside(state)
        assert journal_s(state) is None
        (state / "journal.sqlite").write_text("")
    assert {path.name for path in state.glob("before-*")} == {"before-1", "before-2"}
    assert (state / "token").read_text() == token
    note_done(directory)
    assert is_done(directory)
