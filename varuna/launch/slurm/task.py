"""One task of a Slurm array, which is one machine: an agent as a step, and in one of the tasks the manager.

Slurm tells the step when the machine has to go; what runs here, in the batch script's place, stays until the
agent has left. Then it asks to be requeued, if the time is over or another job wants the machine.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from varuna.config import MorphConfig
from varuna.launch.devices import visible_gpus
from varuna.launch.host import TOKEN_NAME, ManagerHost, ManagerSettings, locked
from varuna.launch.launcher import SIGNALS
from varuna.launch.machine import AWAY_CODE
from varuna.launch.output import say
from varuna.launch.processes import adopt_orphans
from varuna.launch.retries import Retries
from varuna.launch.signals import SignalInbox
from varuna.launch.slurm.ask import address_of, is_waited_for, job_info, requeue, running_jobs
from varuna.launch.slurm.job import STATE_NAME, SlurmJob, Task, agent_command, begins_anew, comes_back, task_of
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
from varuna.launch.slurm.submit import read_job
from varuna.launch.token import VARIABLE, read_token

LEFT = 128 + signal.SIGTERM
"""What an agent exits with that was told to leave."""

_AGENT = "the agent beside the manager"
_LOOK_S = 0.5
_END_S = 10.0
_LOCK_PATIENCE_S = 150.0


def run_task(directory: Path, environ: Mapping[str, str], *, founds: bool) -> int:
    """Be one of a job's machines; returns the exit code of the task. From the main thread only.

    Raises:
        ConfigError: there is no job in the directory, or no Slurm around this process; see ``run_manager``.
    """
    job, task = read_job(directory), task_of(environ)
    if is_done(directory):
        say(f"the job in {directory} is done")
        return 0
    environ = {name: value for name, value in {**environ, **job.environ}.items() if name != VARIABLE}
    command = agent_command(job, directory, task)
    if founds and task.is_first:
        code, has_left = _manage(job, directory, task, command, environ)
    else:
        note_task(directory, task.job_id)
        with SignalInbox(SIGNALS):  # Slurm tells the step, too, which is then waited for
            code = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL).wait()
        has_left = code == LEFT
        if code == AWAY_CODE and is_waited_for(manager_task(directory), environ):
            say("the manager's task waits for a machine: this one is requeued")
            requeue(task.job_id, environ)
    if code and has_left and comes_back(job_info(task.job_id, environ), time.time()):
        say("this task is requeued, and joins the job again")
        requeue(task.job_id, environ)
    return code


def _manage(
    job: SlurmJob, directory: Path, task: Task, command: Sequence[str], environ: Mapping[str, str]
) -> tuple[int, bool]:
    """The exit code of the job, or of the signal that came first; and whether this machine has to go."""
    adopt_orphans()
    state = directory / STATE_NAME
    note_manager_task(directory, task.job_id)
    with locked(state, _LOCK_PATIENCE_S), SignalInbox(SIGNALS) as inbox:
        written_s = journal_s(state)
        if written_s is not None:
            others = {one: at_s for one, at_s in tasks_started_s(directory).items() if one != task.job_id}
            running = running_jobs(environ)
            if running is not None and begins_anew(written_s, others, running):
                say("nobody is left who was in this job: it begins anew, from the newest checkpoint")
                set_aside(state)
        note_task(directory, task.job_id)
        host = _TaskHost(
            _settings(job, state, task, environ),
            read_token({}, state / TOKEN_NAME),
            environ,
            inbox,
            command,
        )
        try:
            code = host.run()
        finally:
            host.close()
    if code == 0:
        note_done(directory)
    return code, host.has_left


def _settings(job: SlurmJob, state: Path, task: Task, environ: Mapping[str, str]) -> ManagerSettings:
    per_machine = job.workers or max(1, visible_gpus(environ))
    morph = MorphConfig.from_env(environ, True, job.replaces)
    assert morph is not None
    return ManagerSettings(
        host=address_of(task.node, environ),
        port=0,
        state_dir=state,
        min_workers=known_min_workers(state) or job.min_nodes * per_machine,
        settle_s=job.settle_s,
        morph=morph,
    )


class _TaskHost(ManagerHost):
    """The manager's host that also runs the agent of its own machine, and stays until that has left."""

    def __init__(
        self,
        settings: ManagerSettings,
        token: str,
        environ: Mapping[str, str],
        inbox: SignalInbox,
        command: Sequence[str],
    ) -> None:
        super().__init__(settings, token, environ, inbox)
        self.has_left = False
        self._environ = environ
        self._command = command
        self._agent: subprocess.Popen[bytes] | None = None
        self._retries = Retries()
        self._signum: signal.Signals | None = None

    def greet(self) -> None:
        """See ``ManagerHost``."""
        say(f"the manager of the job in {self.settings.state_dir.parent} is at {self.url}")

    def on_time(self, now_s: float) -> float:
        """See ``ManagerHost``."""
        if self._agent is not None:
            code = self._agent.poll()
            if code is not None:
                self._agent = None
                self._agent_ended(code, now_s)
        elif self.exit_code is None and not self.has_left and not self._retries.waits(_AGENT, now_s):
            self._agent = subprocess.Popen(self._command, env=self._environ, stdin=subprocess.DEVNULL)
        return _LOOK_S

    def signalled(self, signum: signal.Signals, now_s: float) -> None:
        """Slurm ends this task: its agent, which knows it, too, needs the manager to leave in order."""
        if self._signum is None:
            say(f"{signum.name}: the manager ends when the workers of this machine have left")
        self._signum = signum
        self.has_left = True
        if self._agent is None:
            self.end(128 + signum, now_s)

    def close(self) -> None:
        """See ``ManagerHost``."""
        if self._agent is not None:
            try:
                self.has_left |= self._agent.wait(_END_S if self.exit_code is not None else 0.0) == LEFT
            except subprocess.TimeoutExpired:
                self._agent.terminate()
                self._agent.wait()
            self._agent = None
        super().close()

    def _agent_ended(self, code: int, now_s: float) -> None:
        if self.exit_code is not None:
            self.has_left |= code == LEFT
        elif self._signum is not None:
            self.end(128 + self._signum, now_s)
        elif code == LEFT:
            self._own_workers_have_left(now_s)
        else:
            wait_s = self._retries.failed(_AGENT, now_s)
            say(f"{_AGENT} ended with exit code {code}; it is started again in {wait_s:g} s")

    def _own_workers_have_left(self, now_s: float) -> None:
        self.has_left = True
        if comes_back(job_info(task_of(self._environ).job_id, self._environ), time.time()):
            say("the machine has to go, and with it the manager; training goes on meanwhile")
            self.end(LEFT, now_s)
        else:
            say("the workers of this machine have left; the manager stays until the job is over")
