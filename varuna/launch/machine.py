"""``varuna agent``: one machine of a job whose manager is elsewhere.

It offers workers and starts those that the manager asks for: the founders of the job, together with other
machines, or newcomers. It stays until the job is over, and ends as the job does; a signal asks it to leave,
which its workers do within the grace that is left. While the manager is away, its workers go on.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from varuna.launch.agent import Agent
from varuna.launch.job import LocalJob, WorkerPlace
from varuna.launch.launcher import SIGNALS, Launcher
from varuna.launch.morphing import manager_environ
from varuna.launch.notices import MachineNotices
from varuna.launch.orders import LauncherOrders
from varuna.launch.output import say
from varuna.launch.preflight.gather import address_towards, interfaces
from varuna.launch.preflight.network import interface_of
from varuna.launch.processes import adopt_orphans
from varuna.launch.protocol import Exited, StoreReady
from varuna.launch.signals import SignalInbox
from varuna.launch.supervise import Supervisor
from varuna.morph.client import check_url
from varuna.morph.link import Refusal
from varuna.morph.messages import JobEnded, StartFounders, StartWorker, StopWorker, Welcome
from varuna.morph.notices import NoticeWithdrawn
from varuna.morph.whereabouts import check_place, manager_url

AWAY_LIMIT_S = 300.0
"""A machine without workers gives up a manager that does not answer for so long: it may be started again
elsewhere, which takes two minutes where Slurm does it."""

AWAY_CODE = os.EX_TEMPFAIL
"""What it exits with then, so that whoever starts machines can tell that from the job's own end."""

GONE_GRACE_S = 10.0
"""What workers get to leave when the launcher that started this agent from another machine is gone."""

_SAY_AWAY_S = 10.0
_SAY_ABSENT_S = 30.0  # of one that has not answered yet: it may just be starting
_LOOK_S = 1.0


@dataclass(frozen=True, kw_only=True)
class MachineJob:
    """What a machine offers to a job, and how it reaches its manager.

    Attributes:
        job: what to run here; ``num_workers`` are offered.
        url: of the manager, as this machine reaches it, or of a file that has it, see ``whereabouts``.
        token: the job's.
        machine: this machine's name.
        address: what other machines reach this one by; empty for the one from which it reaches the manager.
        grace_s: seconds from a signal to the end; None reads ``VARUNA_GRACE_S``.
        orders: of the launcher that started this agent from another machine; None for a person's.
    """

    job: LocalJob
    url: str
    token: str
    machine: str
    address: str = ""
    grace_s: float | None = None
    orders: LauncherOrders | None = None


def run_agent(offered: MachineJob, environ: Mapping[str, str]) -> int:
    """Be one of a job's machines until the job is over; returns its exit code. From the main thread only.

    Raises:
        ConfigError: the URL, or a variable, cannot be.
    """
    adopt_orphans()
    check_place(offered.url)
    with SignalInbox((*SIGNALS, signal.SIGUSR1)) as inbox:
        launcher = _MachineLauncher(offered, environ, inbox)
        try:
            return launcher.run()
        finally:
            launcher.close()


class _MachineLauncher(Launcher):
    """Starts what the manager asks for."""

    def __init__(self, offered: MachineJob, environ: Mapping[str, str], inbox: SignalInbox) -> None:
        supervisor = Supervisor(0, is_managed=True, stays=True)
        super().__init__(offered.job, environ, inbox, supervisor, offered.token)
        if offered.grace_s is not None:
            self.grace = replace(self.grace, sigterm_s=offered.grace_s, usr1_s=offered.grace_s)
        self._offered = offered
        self._founding: StartFounders | None = None  # waits for workers of an earlier attempt to end
        self._attempt = -1
        self._num_answered = 0  # offers
        self._is_welcome = False
        self._is_over = False  # the manager has said so: it need not hear of anything any more
        self._heard_s = time.monotonic()
        self._has_said_away = False
        name = f"{offered.machine}-{secrets.token_hex(3)}"
        self._line: Agent | None = Agent(offered.url, offered.token, offered.machine, name=name)
        self.agent = self._line
        self._watched = [] if offered.orders is None else [offered.orders]
        for orders in self._watched:
            self.selector.register(orders, selectors.EVENT_READ)
        self.notices = MachineNotices(self._line, environ)

    def close(self) -> None:
        """See ``Launcher``."""
        super().close()
        if self._line is not None:
            self._line.close(is_remote=not self._is_over)
            self._line = None

    def zygote_ready(self) -> None:
        """See ``Launcher``."""
        assert self.agent is not None
        self.agent.offer(self.job.num_workers)

    def service_ready(self, report: StoreReady) -> None:
        """See ``Launcher``."""
        raise AssertionError(f"no store is started here: {report}")

    def service_exited(self, report: Exited) -> None:
        """See ``Launcher``."""
        raise AssertionError(f"neither store nor manager is started here: {report}")

    def signalled(self, signum: signal.Signals, now_s: float) -> None:
        """A first signal asks this machine to leave, a second one ends it at once."""
        self._leave(signum, self.grace.usr1_s if signum == signal.SIGUSR1 else self.grace.sigterm_s, now_s)

    def _leave(self, signum: signal.Signals, grace_s: float, now_s: float) -> None:
        assert self.agent is not None
        if not self.supervisor.leave(signum, grace_s, now_s):
            self.supervisor.stop_requested(signum, now_s)
            return
        if self.living:
            say(f"{signum.name}: the workers of this machine leave the job, within {grace_s:g} s")
        for worker_index in self.living:
            self.agent.worker_has_to_go(worker_index, grace_s, signum.name)

    def on_time(self, now_s: float) -> float | None:
        """See ``Launcher``."""
        assert self.agent is not None
        wait_s = super().on_time(now_s)
        if self.agent.is_connected:
            self._heard_s, self._has_said_away = now_s, False
        away_s = now_s - self._heard_s
        patience_s = _SAY_AWAY_S if self._is_welcome else _SAY_ABSENT_S
        if away_s >= patience_s and not self._has_said_away and not self._is_over:
            self._has_said_away = True
            goes_on = "; the workers go on" if self.living else ""
            say(f"the manager at {self._offered.url} does not answer{goes_on}; trying again")
        if away_s >= AWAY_LIMIT_S and not self.living:
            reason = f"the manager at {self._offered.url} has not answered for {away_s:.0f} s"
            self.supervisor.job_failed(reason, now_s, AWAY_CODE)
        return _LOOK_S if wait_s is None else min(wait_s, _LOOK_S)

    def obey(self, now_s: float) -> None:
        """See ``Launcher``."""
        assert self.agent is not None
        self._obey_launcher(now_s)
        for order in self.agent.orders():
            match order:
                case Welcome():
                    self._welcome(order, now_s)
                case StartFounders():
                    if order.attempt > self._attempt:
                        self._attempt, self._founding = order.attempt, order
                case StartWorker():
                    if not order.offer or order.offer > self._num_answered:
                        self._num_answered = max(self._num_answered, order.offer)
                        self.start_newcomers(order.count)
                case StopWorker():
                    self.stop_worker(self.agent.worker_index_of(order.incarnation))
                case JobEnded():
                    self._is_over = True
                    if order.failure:
                        self.supervisor.job_failed(order.failure, now_s, order.code)
                    else:
                        self.supervisor.job_ended()
                case Refusal():
                    reason = f"the manager at {self._offered.url} refuses this machine: {order.reason}"
                    self.supervisor.job_failed(reason, now_s)
                case _:
                    self.hear(order)
                    if isinstance(order, NoticeWithdrawn) and not self.living:
                        self.agent.offer(self.job.num_workers)
        self._found()

    def _obey_launcher(self, now_s: float) -> None:
        orders = self._offered.orders
        for order in orders.read() if orders is not None else ():
            if order.word == "leave":
                within_s = self.grace.sigterm_s if order.within_s is None else order.within_s
                self._leave(signal.SIGTERM, within_s, now_s)
            elif order.word == "stop":
                self.supervisor.stop_requested(signal.SIGINT, now_s)
            elif not self.supervisor.is_ending and not self._is_over:
                self._leave(signal.SIGHUP, min(GONE_GRACE_S, self.grace.sigterm_s), now_s)
        if orders is not None and orders.is_over and orders in self._watched:
            self._watched.remove(orders)
            self.selector.unregister(orders)

    def environ_of(self, place: WorkerPlace) -> dict[str, str]:
        """See ``Launcher``."""
        assert self.agent is not None
        environ = manager_environ(self._offered.url, self.agent, place.worker_index)
        if self._offered.address:
            environ["VARUNA_ADDRESS"] = self._offered.address
        return environ

    def _welcome(self, welcome: Welcome, now_s: float) -> None:
        if self._is_welcome and welcome.run_id != self.job.run_id:
            reason = f"the manager at {self._offered.url} has another job now, {welcome.run_id}"
            self.supervisor.job_failed(reason, now_s)
            return
        host = check_url(manager_url(self._offered.url))
        if not self._is_welcome:
            address = self._offered.address or self.environ.get("VARUNA_ADDRESS") or address_towards(host)
            where = f"{address} ({interface_of(interfaces(), address) or 'no interface here'})"
            name, run_id = self._offered.machine, welcome.run_id
            say(f"{name} is in run {run_id}, reached at {where}; logs go to {self.job.log_dir}")
        self._is_welcome = True
        self.job = replace(self.job, run_id=welcome.run_id)
        self.store = StoreReady(host=host, port=welcome.store_port)

    def _found(self) -> None:
        """Start founders, once those of an earlier attempt have ended."""
        order = self._founding
        if order is None or self.living or self.supervisor.is_ending:
            return
        self._founding = None
        for index in range(order.count):
            rank = order.first_rank + index
            place = WorkerPlace(
                worker_index=self.next_index(rank),
                rank=rank,
                size=order.size,
                local_rank=index,
                local_size=order.count,
                attempt=order.attempt,
            )
            if self.supervisor.worker_added(place.worker_index, founds=True):
                self.start_worker(place)
