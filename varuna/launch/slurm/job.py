"""A job under Slurm: one array, each of whose tasks is one machine. What its files say, and what follows. Pure.

DIRECTORY/job.json        what was asked for (``SlurmJob``)
DIRECTORY/job.sh          the script for sbatch; join-N.sh those of machines that were added
DIRECTORY/manager/        what the manager knows; the job's token, and where the manager is now
DIRECTORY/tasks/ID        a task that was started, under its Slurm job id
DIRECTORY/manager-task    the Slurm job id of the task that runs the manager
DIRECTORY/logs/           of agents; DIRECTORY/slurm-*.out is what tasks print
DIRECTORY/done            there once the job has ended well
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from varuna.errors import ConfigError
from varuna.launch.host import TOKEN_NAME
from varuna.morph.whereabouts import URL_NAME, place_of

JOB_NAME = "job.json"
STATE_NAME = "manager"
NOTICE_S = 60
"""How long before its time limit a task is told; Slurm may do it up to a minute earlier."""

_SOON_S = 300.0
_MOST_NODES = 100_000
_PLAIN = re.compile(r"[\w@%+=:,./*\[\]-]+", re.ASCII)


class SlurmJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was asked for, as tasks read it.

    Attributes:
        name: of the job.
        directory: where the user's script runs.
        python: the interpreter.
        srun: the user's srun command with options.
        agent: flags of ``varuna agent``, then the script and its arguments.
        environ: variables of agents, besides those that Slurm passes on.
        sbatch: the user's options of sbatch.
        min_nodes: with so many machines training begins.
        workers: on each machine; None for one per GPU.
        replaces: a new worker for each one that is lost; None for the usual.
        settle_s: see ``Policy``.
    """

    name: str
    directory: str
    python: str
    srun: tuple[str, ...]
    agent: tuple[str, ...]
    environ: dict[str, str]
    sbatch: tuple[str, ...]
    min_nodes: int
    workers: int | None
    replaces: bool | None
    settle_s: float


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """How many machines: training begins with the fewest."""

    least: int
    most: int


def read_nodes(text: str) -> Nodes:
    """``4``, or ``2-8`` as in sbatch.

    Raises:
        ConfigError: it is neither.
    """
    match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", text)
    if match is not None:
        least, most = int(match[1]), int(match[2] or match[1])
        if 1 <= least <= most <= _MOST_NODES:
            return Nodes(least=least, most=most)
    raise ConfigError(f"--nodes {text!r}: write 4, or 2-8 to begin with 2 and go on with up to 8.")


# --- the script ------------------------------------------------------------------------------


def batch_script(
    job: SlurmJob, directory: Path, options: Sequence[str], num_nodes: int, *, founds: bool
) -> str:
    """What sbatch is given: one task a machine.

    Args:
        job: what was asked for.
        directory: of the job.
        options: the user's of sbatch, which come last and so win.
        num_nodes: machines.
        founds: the first task of the array runs the manager, too; otherwise they join one that runs.

    Raises:
        ConfigError: an option that cannot be written down.
    """
    if "%" in str(directory) or not str(directory).isprintable():
        raise ConfigError(f"Slurm cannot write to {str(directory)!r}: give a --log-dir without %.")
    ours = [
        f"--job-name={job.name}",
        f"--array=0-{num_nodes - 1}",
        "--nodes=1",
        "--ntasks=1",
        "--requeue",
        f"--signal=TERM@{NOTICE_S}",  # to the step, which is the agent; the manager stays until that has left
        f"--output={directory}/slurm-%A_%a.out",
        "--open-mode=append",
    ]
    words = [job.python, "-m", "varuna", "slurm", "task", *(["--founds"] if founds else []), str(directory)]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {_directive(option)}" for option in (*ours, *options)),
        "",
        f"cd {shlex.quote(job.directory)} && exec {shlex.join(words)}",
    ]
    return "\n".join(lines) + "\n"


def _directive(option: str) -> str:
    """An option as sbatch reads it from a script."""
    if _PLAIN.fullmatch(option):
        return option
    if not option.isprintable():
        raise ConfigError(f"sbatch cannot be given {option!r} in a script: it must be one printable line.")
    name, equals, value = option.partition("=")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{escaped}"'


# --- a task ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task of an array, as Slurm describes it in its environment.

    Attributes:
        job_id: Slurm's, which no other task has; the same after a requeue.
        is_first: of its array.
        num_restarts: how often it was requeued.
        node: the machine.
        num_cpus: of the machine that it has.
    """

    job_id: str
    is_first: bool
    num_restarts: int
    node: str
    num_cpus: int


def task_of(environ: Mapping[str, str]) -> Task:
    """The task that this process is.

    Raises:
        ConfigError: it is none, or has several machines.
    """
    job_id, node = environ.get("SLURM_JOB_ID", ""), environ.get("SLURMD_NODENAME", "")
    if not job_id.isdecimal() or not node:
        raise ConfigError(
            "This is what a batch script runs, and there is no Slurm job around it. Use `varuna run --slurm`."
        )
    if environ.get("SLURM_JOB_NUM_NODES", "1") != "1":
        raise ConfigError(
            f"This Slurm job has {environ['SLURM_JOB_NUM_NODES']} machines, but each task of the array is one. "
            f"Give `varuna run --slurm` the number with --nodes, and leave --nodes=1 in the script."
        )
    return Task(
        job_id=job_id,
        is_first=environ.get("SLURM_ARRAY_TASK_ID", "0") == environ.get("SLURM_ARRAY_TASK_MIN", "0"),
        num_restarts=int(environ.get("SLURM_RESTART_COUNT") or 0),
        node=node,
        num_cpus=int(environ.get("SLURM_CPUS_ON_NODE") or 1),
    )


def agent_command(job: SlurmJob, directory: Path, task: Task) -> list[str]:
    """The step that a task runs, with all that the task has: steps are whom Slurm tells to end."""
    step = ["--nodes=1", "--ntasks=1", f"--cpus-per-task={task.num_cpus}", "--mpi=none", "--export=ALL"]
    step += ["--input=none", "--unbuffered"]
    state = directory / STATE_NAME
    agent = ["--manager", place_of(state / URL_NAME), "--token-file", str(state / TOKEN_NAME)]
    agent += [
        "--name",
        task.node,
        "--log-dir",
        str(directory / "logs" / f"{task.node}-{task.job_id}.{task.num_restarts}"),
    ]
    if job.workers is not None:
        agent += ["--workers", str(job.workers)]
    return [*job.srun, *step, job.python, "-m", "varuna", "agent", *agent, *job.agent]


# --- what Slurm says -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """What Slurm says of a task.

    Attributes:
        state: such as RUNNING, CANCELLED.
        may_requeue: the user and the site allow it.
        end_s: when it has to end, Unix time; None for never.
        is_preempted: another job takes its machine.
    """

    state: str
    may_requeue: bool
    end_s: float | None
    is_preempted: bool


def read_job_info(text: str) -> JobInfo | None:
    """From ``scontrol show job --oneliner``; None if it says nothing of a job."""
    found = dict(re.findall(r"(?:^|\s)(JobState|Requeue|EndTime|PreemptTime)=(\S+)", text))
    if "JobState" not in found:
        return None
    return JobInfo(
        state=found["JobState"],
        may_requeue=found.get("Requeue") == "1",
        end_s=_unix_s(found.get("EndTime", "")),
        is_preempted=_unix_s(found.get("PreemptTime", "")) is not None,
    )


def read_node_address(text: str) -> str:
    """By what other machines reach a node, from ``scontrol show node --oneliner``; empty if it is not said."""
    match = re.search(r"(?:^|\s)NodeAddr=(\S+)", text)
    return match[1] if match else ""


def comes_back(info: JobInfo | None, now_s: float) -> bool:
    """Whether a task whose workers have left in order is to be requeued by itself.

    At its time limit Slurm does not requeue a task, nor one that ends by itself while it is preempted. One that
    was cancelled, or told by a person to leave, stays away.
    """
    if info is None or info.state != "RUNNING" or not info.may_requeue:
        return False
    return info.is_preempted or (info.end_s is not None and info.end_s - now_s <= _SOON_S)


def begins_anew(journal_s: float, started_s: Mapping[str, float], running: Collection[str]) -> bool:
    """Whether nobody is left of those whom a manager knew, so that one that is started again begins anew.

    Args:
        journal_s: when the manager has last written something down.
        started_s: when the other tasks were started last, by job id, on the same clock.
        running: job ids of tasks that run.
    """
    return not any(at_s <= journal_s for job_id, at_s in started_s.items() if job_id in running)


def _unix_s(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:  # Unknown, None, N/A
        return None
