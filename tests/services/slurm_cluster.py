"""A real Slurm on this machine: munged, slurmctld and several slurmd, with files and ports of their own."""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from tests.launch.jobs import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "squeue", "scontrol")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
_CONFIG = """\
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmdSpoolDir={directory}/spool-%n
StateSaveLocation={directory}/state
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdTimeout=10
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=20 PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> list[str]:
    """What a Slurm needs that is not installed."""
    return [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]


class Slurm:
    """One that runs.

    Attributes:
        nodes: names of its machines.
        environ: variables with which its commands find it.
    """

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self.nodes = tuple(names)
        self.name = f"varuna{os.getpid()}"
        self.environ = {"SLURM_CONF": str(directory / "slurm.conf"), "PATH": _PATH}
        self._directory = directory
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        ports = _free_ports(1 + len(names))
        lines = [
            f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.{number} Port={port} CPUs=2"
            for number, (name, port) in enumerate(zip(names, ports[1:], strict=True), 11)
        ]
        (directory / "state").mkdir()
        (directory / "slurm.conf").write_text(
            _CONFIG.format(
                name=self.name,
                host=socket.gethostname(),
                user=getpass.getuser(),
                directory=directory,
                ports=ports,
                nodes="\n".join(lines),
            )
        )

    def start(self) -> None:
        """Start all of it, and wait until every machine is there."""
        key = self._directory / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(1024))
        where = [f"--{what}={self._directory / file}" for what, file in _MUNGE.items()]
        self._run("munged", "--foreground", "--force", f"--key-file={key}", *where)
        wait_until((self._directory / "munge.sock").exists, 10, "munged")
        self._run("slurmctld", "-D", "-i", "-c")
        for node in self.nodes:
            self.start_node(node)
        wait_until(lambda: self.ask("sinfo", "-h", "-o", "%T %D") == f"idle {len(self.nodes)}", 30, self.log())

    def start_node(self, node: str) -> None:
        """A machine is switched on."""
        (self._directory / f"spool-{node}").mkdir(exist_ok=True)
        self._run("slurmd", "-D", "-N", node, name=node)

    def lose_node(self, node: str) -> None:
        """A machine loses its power: everything on it ends at once, and nobody is told."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        for process in self.processes(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def ask(self, *command: str) -> str:
        """What a command prints."""
        done = subprocess.run(
            command, env={**os.environ, **self.environ}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def states(self, name: str) -> dict[str, str]:
        """Jobs of a name, and tasks of arrays, with their states."""
        lines = self.ask("squeue", "-h", "-r", f"--name={name}", "-o", "%i %T").splitlines()
        return dict(line.split() for line in lines)  # type: ignore[misc]

    def processes(self, node: str = "", job_name: str = "") -> list[psutil.Process]:
        """What runs on one machine or on all, for one job or for all; slurmstepd, which has it, included."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                environ = process.environ()
                mine = environ.get("SLURM_CLUSTER_NAME") == self.name
                mine &= job_name in ("", environ.get("SLURM_JOB_NAME"))
                if mine and node in ("", environ.get("SLURMD_NODENAME")):
                    found[process.pid] = process
                    for parent in process.parents():
                        if parent.name() == "slurmstepd":
                            found[parent.pid] = parent
        return [one for one in found.values() if one.status() != psutil.STATUS_ZOMBIE]

    def log(self) -> str:
        """What the controller says."""
        path = self._directory / "slurmctld.log"
        return path.read_text()[-3000:] if path.exists() else "slurmctld has not begun"

    def stop(self) -> None:
        """End all of it."""
        with contextlib.suppress(AssertionError):
            self.ask("scancel", "--user", getpass.getuser())
        try:
            wait_until(lambda: not self.processes(), 20, "jobs end")
        finally:
            for process in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            for daemon in reversed(self._daemons.values()):
                daemon.send_signal(signal.SIGTERM)
            for daemon in self._daemons.values():
                daemon.wait(20)

    def _run(self, program: str, *arguments: str, name: str = "") -> None:
        path = shutil.which(program, path=_PATH)
        assert path is not None
        with (self._directory / f"{name or program}.out").open("ab") as output:
            self._daemons[name or program] = subprocess.Popen(
                [path, *arguments],
                env={**os.environ, **self.environ},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )


_MUNGE = {
    "socket": "munge.sock",
    "pid-file": "munged.pid",
    "log-file": "munged.log",
    "seed-file": "munged.seed",
}


@contextlib.contextmanager
def slurm(directory: Path, *names: str) -> Iterator[Slurm]:
    """One with these machines."""
    made = Slurm(directory, names)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [one.getsockname()[1] for one in sockets]
