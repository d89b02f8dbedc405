"""What a launcher needs for workers to come and go: the manager's process, the agent, the run's file."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Mapping
from pathlib import Path

from varuna.config import MorphConfig, cache_dir
from varuna.errors import ConfigError
from varuna.launch.agent import Agent, Order, machine_name
from varuna.launch.manager import ManagerProcess
from varuna.launch.output import say
from varuna.morph.link import Refusal
from varuna.morph.runs import RunInfo, write_run


class Morphing:
    """Manager and agent of one local job. Everything is called from the launcher's thread.

    Args:
        config: what the user set.
        run_id: name of the run.
        token: the job's.
        environ: the launcher's.
        log_dir: where the manager's log and journal go.
        selector: where its descriptors are waited for.
    """

    def __init__(
        self,
        config: MorphConfig,
        *,
        run_id: str,
        token: str,
        environ: Mapping[str, str],
        log_dir: Path,
        selector: selectors.BaseSelector,
    ) -> None:
        self._selector = selector
        self._run_file: Path | None = None
        self._has_ended = False
        self._manager = ManagerProcess(
            token, environ, log_dir, ("--heartbeat-limit", str(config.heartbeat_limit_s))
        )
        self._manager.start(time.monotonic())
        selector.register(self._manager, selectors.EVENT_READ)
        self.agent = Agent(self._manager.url, token, machine_name())
        selector.register(self.agent, selectors.EVENT_READ)
        self._announce(
            RunInfo(run_id=run_id, url=self._manager.url, token=token, pid=os.getpid(), started_s=time.time()),
            environ,
        )

    def environ_of(self, worker_index: int, *, joins: bool) -> dict[str, str]:
        """What a worker finds in its environment, so that it takes orders from the manager."""
        return {
            "VARUNA_MANAGER": self._manager.url,
            "VARUNA_INCARNATION": self.agent.incarnation_of(worker_index),
            "VARUNA_JOINS": str(int(joins)),
        }

    def look_after_manager(self, now_s: float) -> str:
        """Start it again if it has died; why there will be none any more, or an empty text."""
        if self._has_ended or not self._manager.is_gone:
            return ""
        self._selector.unregister(self._manager)
        how = self._manager.reap()
        if not self._manager.may_start_again(now_s):
            self._has_ended = True
            self._manager.close()
            return f"the manager has ended {how}, again and again; see {self._manager.log_path}."
        say(f"the manager has ended {how} and is started again; training goes on meanwhile")
        self._manager.start(now_s)
        self._selector.register(self._manager, selectors.EVENT_READ)
        return ""

    def orders(self) -> list[Order]:
        """What the manager asks."""
        orders: list[Order] = []
        for order in self.agent.orders():
            if isinstance(order, Refusal):
                raise AssertionError(f"the manager refuses its own launcher: {order.reason}")
            orders.append(order)
        return orders

    def close(self) -> None:
        """End the manager and remove the run's file."""
        if self._run_file is not None:
            self._run_file.unlink(missing_ok=True)
        self.agent.close()
        self._manager.close()

    def _announce(self, info: RunInfo, environ: Mapping[str, str]) -> None:
        try:
            self._run_file = write_run(info, cache_dir(environ))
        except (ConfigError, OSError) as error:
            say(f"`varuna status` and `varuna preempt` will not find this run: {error}")
