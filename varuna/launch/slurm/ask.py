"""What Slurm is asked from within a task: how a job stands, which ones run, where a node is; and to requeue."""

from __future__ import annotations

import ipaddress
import socket
import subprocess
from collections.abc import Mapping

from varuna.errors import ConfigError
from varuna.launch.output import say
from varuna.launch.slurm.job import JobInfo, read_job_info, read_node_address

_TIMEOUT_S = 60.0
_ANY_PORT = 9  # nothing is sent


def job_info(job_id: str, environ: Mapping[str, str]) -> JobInfo | None:
    """How a task stands; None if Slurm does not say."""
    return read_job_info(_ask(["scontrol", "show", "job", "--oneliner", job_id], environ) or "")


def running_jobs(environ: Mapping[str, str]) -> frozenset[str] | None:
    """Ids of this user's jobs, and tasks of arrays, that run; None if Slurm does not say."""
    command = ["squeue", "--me", "--noheader", "--array", "--states=RUNNING", "--format=%A"]
    listed = _ask(command, environ)
    return None if listed is None else frozenset(listed.split())


def is_waited_for(job_id: str, environ: Mapping[str, str]) -> bool:
    """Whether a task is there, or will be: Slurm has it in its queue."""
    if not job_id:
        return False
    command = ["squeue", "--me", "--noheader", "--array", "--format=%A"]
    return job_id in (_ask(command, environ) or "").split()


def requeue(job_id: str, environ: Mapping[str, str]) -> None:
    """Have Slurm end a task and start it again when there is a machine for it."""
    _ask(["scontrol", "requeue", job_id], environ)


def address_of(node: str, environ: Mapping[str, str]) -> str:
    """The numeric address of this machine, by which Slurm's other nodes reach it.

    A name that means loopback on its own machine (Debian's ``/etc/hosts``) is of no use to others: then it is
    the address that faces the machine from which the job was submitted.

    Raises:
        ConfigError: it has none.
    """
    name = read_node_address(_ask(["scontrol", "show", "node", "--oneliner", node], environ) or "") or node
    try:
        address = _resolved(name)
        submitted = environ.get("SLURM_SUBMIT_HOST", "")
        means_itself = name != address and bool(ipaddress.ip_address(address).is_loopback)
        return _facing(submitted) if means_itself and submitted else address
    except OSError as error:
        raise ConfigError(f"Node {node} has no address: {name!r} means nothing here ({error}).") from error


def _resolved(name: str) -> str:
    return str(socket.getaddrinfo(name, _ANY_PORT, type=socket.SOCK_DGRAM)[0][4][0])


def _facing(name: str) -> str:
    family, kind, _, _, target = socket.getaddrinfo(name, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _ask(command: list[str], environ: Mapping[str, str]) -> str | None:
    """What a command of Slurm's prints; None, after a line that says why, if it fails."""
    try:
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        say(f"`{' '.join(command)}` says: {error.stderr.strip() or f'exit code {error.returncode}'}")
        return None
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"`{' '.join(command)}` does not answer: {error}")
        return None
    return done.stdout
