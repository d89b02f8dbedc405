"""What a launcher needs for workers to come and go: the manager's process, the agent, the run's file."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from varuna.config import MorphConfig, cache_dir
from varuna.errors import ConfigError
from varuna.launch.agent import Agent, machine_name
from varuna.launch.manager import MANAGER_NAME, ManagerProcess, ManyMachines
from varuna.launch.output import say
from varuna.launch.protocol import Channel, SendSignal
from varuna.morph.runs import RunInfo, write_run

_WATCHES_PER_LIMIT = 8


class Morphing:
    """A job's manager, and the line to it from where it was started. Call it from the launcher's thread.

    Args:
        config: what the user set.
        run_id: name of the run.
        token: the job's.
        environ: the launcher's.
        log_dir: where the manager's log and journal go.
        many: how the manager serves a job of many machines; None for one machine.
    """

    def __init__(
        self,
        config: MorphConfig,
        *,
        run_id: str,
        token: str,
        environ: Mapping[str, str],
        log_dir: Path,
        many: ManyMachines | None = None,
    ) -> None:
        self.watch_s = config.manager_limit_s / _WATCHES_PER_LIMIT
        self._run_file: Path | None = None
        self._has_told_of_journal = False
        self._manager = ManagerProcess(token, log_dir, config, many, run_id=run_id)
        machine = machine_name()
        self.agent = Agent(
            self._manager.url, token, machine, name=machine if many is None else f"{machine} (manager)"
        )
        run = RunInfo(
            run_id=run_id,
            url=self._manager.url,
            token=token,
            pid=os.getpid(),
            started_s=time.time(),
            journal=str(self._manager.journal_path),
        )
        self._announce(run, environ)

    def start_manager(self, channel: Channel) -> None:
        """Have the zygote fork the first manager."""
        self._manager.start(channel, time.monotonic())

    def environ_of(self, worker_index: int) -> dict[str, str]:
        """What a worker finds in its environment, so that it takes orders from the manager."""
        return manager_environ(self._manager.url, self.agent, worker_index)

    def watch_manager(self, channel: Channel, now_s: float) -> None:
        """Kill a manager that gives no sign of life any more; call it every ``watch_s`` or more often."""
        if silent_s := self._manager.silent_s(self.agent.num_heard, now_s):
            say(f"the manager is silent for {silent_s:.0f} s and is killed; training goes on meanwhile")
            channel.send(SendSignal(name=MANAGER_NAME, signum=signal.SIGKILL))
        if not self._has_told_of_journal and (aside := self._manager.lost_journal):
            self._has_told_of_journal = True
            say(
                f"the manager's journal cannot be written any more (a full disk?) and is set aside as {aside}; "
                f"training goes on, but a manager that ends now cannot be started again"
            )

    def manager_exited(self, code: int, channel: Channel, now_s: float) -> str:
        """The manager's process is gone: start it again; or say why there will be none any more."""
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        if aside := self._manager.lost_journal:
            self._manager.close()
            return (
                f"the manager has ended {how} and cannot be started again: its journal {aside} is incomplete."
            )
        if not self._manager.may_start_again(now_s):
            self._manager.close()
            return f"the manager has ended {how}, again and again; see {self._manager.log_path}."
        say(f"the manager has ended {how} and is started again; training goes on meanwhile")
        self._manager.start(channel, now_s)
        return ""

    def close(self) -> None:
        """The job is over: tell the manager, and take back what was announced."""
        if self._run_file is not None:
            self._run_file.unlink(missing_ok=True)
        self.agent.close()
        self._manager.close()

    def _announce(self, info: RunInfo, environ: Mapping[str, str]) -> None:
        try:
            self._run_file = write_run(info, cache_dir(environ))
        except (ConfigError, OSError) as error:
            say(f"`varuna status` and `varuna preempt` will not find this run: {error}")


def manager_environ(url: str, agent: Agent, worker_index: int) -> dict[str, str]:
    """What a worker finds in its environment, so that it takes orders from a manager."""
    return {"VARUNA_MANAGER": url, "VARUNA_INCARNATION": agent.incarnation_of(worker_index)}
