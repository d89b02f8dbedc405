"""A job on this machine: store, workers, and where these may come and go (``LocalJob.morph``) a manager.

This process is then that manager's agent, too (``morphing.py``).
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Mapping

from varuna.launch.job import LocalJob, WorkerPlace
from varuna.launch.launcher import SIGNALS, STORE_NAME, Launcher
from varuna.launch.morphing import Morphing
from varuna.launch.notices import MachineNotices
from varuna.launch.output import say
from varuna.launch.processes import adopt_orphans
from varuna.launch.protocol import Exited, StartStore, StoreReady
from varuna.launch.signals import SignalInbox
from varuna.launch.supervise import Supervisor
from varuna.morph.link import Refusal
from varuna.morph.messages import JobEnded, StartFounders, StartWorker, StopWorker, Welcome

_HOST = "127.0.0.1"


def run_local(job: LocalJob, environ: Mapping[str, str]) -> int:
    """Run a job to its end and return its exit code. From the main thread only: it takes signals meanwhile.

    Workers' output and, when the job fails, the report go to this process's standard output and error.

    Raises:
        ConfigError: a variable that cannot be.
    """
    adopt_orphans()
    with SignalInbox(SIGNALS) as inbox:
        launcher = _LocalLauncher(job, environ, inbox)
        try:
            return launcher.run()
        finally:
            launcher.close()


class _LocalLauncher(Launcher):
    """Founds the job by itself."""

    def __init__(self, job: LocalJob, environ: Mapping[str, str], inbox: SignalInbox) -> None:
        supervisor = Supervisor(job.num_workers, is_managed=job.morph is not None)
        super().__init__(job, environ, inbox, supervisor, secrets.token_hex(16))
        self._morphing: Morphing | None = None
        if job.morph is not None:
            self._morphing = Morphing(
                job.morph, run_id=job.run_id, token=self.token, environ=environ, log_dir=job.log_dir
            )
            self.agent = self._morphing.agent
            self.notices = MachineNotices(self.agent, environ)

    def close(self) -> None:
        """See ``Launcher``."""
        if self.notices is not None:
            self.notices.close()
            self.notices = None
        if self._morphing is not None:
            self._morphing.close()
            self._morphing = None
        super().close()

    def zygote_ready(self) -> None:
        """See ``Launcher``."""
        if self._morphing is not None:
            self._morphing.start_manager(self.zygote.channel)
        self.zygote.channel.send(StartStore(host=_HOST))

    def service_ready(self, report: StoreReady) -> None:
        """See ``Launcher``."""
        self.store = report
        num_workers = self.job.num_workers
        for index in range(num_workers):
            self.start_worker(
                WorkerPlace(
                    worker_index=index, rank=index, size=num_workers, local_rank=index, local_size=num_workers
                )
            )

    def service_exited(self, report: Exited) -> None:
        """See ``Launcher``."""
        now_s = time.monotonic()
        if report.name == STORE_NAME:
            self.supervisor.store_lost(now_s)
            if not self.supervisor.is_ending:
                say("the process that hosted the first rendezvous store has died; the workers go on without it")
        elif self._morphing is not None and not self.supervisor.is_ending:
            lost = self._morphing.manager_exited(report.code, self.zygote.channel, now_s)
            if lost:
                say(lost)
                self.supervisor.manager_lost(lost, now_s)

    def signalled(self, signum: signal.Signals, now_s: float) -> None:
        """See ``Launcher``."""
        self.supervisor.stop_requested(signum, now_s)

    def on_time(self, now_s: float) -> float | None:
        """See ``Launcher``."""
        waits_s = [super().on_time(now_s)]
        if self._morphing is not None:
            self._morphing.watch_manager(self.zygote.channel, now_s)
            waits_s.append(self._morphing.watch_s)
        return min((wait_s for wait_s in waits_s if wait_s is not None), default=None)

    def obey(self, now_s: float) -> None:
        """See ``Launcher``."""
        if self.agent is None:
            return
        for order in self.agent.orders():
            match order:
                case StartWorker():
                    self.start_newcomers(order.count)
                case StopWorker():
                    self.stop_worker(self.agent.worker_index_of(order.incarnation))
                case JobEnded():
                    if order.failure:
                        self.supervisor.job_failed(order.failure, now_s)
                case Refusal():
                    raise AssertionError(f"the manager refuses its own launcher: {order.reason}")
                case Welcome() | StartFounders():
                    raise AssertionError(f"the manager of a job on one machine says {order}")
                case _:
                    self.hear(order)

    def environ_of(self, place: WorkerPlace) -> dict[str, str]:
        """See ``Launcher``."""
        return {} if self._morphing is None else self._morphing.environ_of(place.worker_index)
