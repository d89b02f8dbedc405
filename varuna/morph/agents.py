"""What follows from what agents say, and from what is not heard of them; a part of ``Manager``."""

from __future__ import annotations

from typing import assert_never

from varuna.morph.ending import Endings
from varuna.morph.gathering import founders, is_gathering, may_found
from varuna.morph.messages import (
    AgentLost,
    FromAgent,
    JobEnded,
    LeaveAsked,
    LeaveWithdrawn,
    Offer,
    StartWorker,
    StopWorker,
    WorkerExited,
    WorkerLost,
    WorkerStarted,
)
from varuna.morph.phases import ENDED, Phase
from varuna.morph.record import GenerationRecord, Leaving, OfferRecord, WorkerRecord, WorkerStatus


class Agents(Endings):
    """Which workers there are, and which of them have to go."""

    def _on_agent(self, sender: str, message: FromAgent, now_s: float) -> None:
        if sender not in self.job.agents:
            self.job.agents.append(sender)
        if isinstance(message, Offer):
            self._on_offer(sender, message, now_s)
        elif isinstance(message, WorkerStarted):
            self._on_started(sender, message, now_s)
        elif isinstance(message, WorkerExited):
            self._on_exited(sender, message, now_s)
        elif isinstance(message, LeaveAsked):
            self._on_leave_asked(message, now_s)
        elif isinstance(message, LeaveWithdrawn):
            self._on_leave_withdrawn(message, now_s)
        else:
            assert_never(message)

    # --- workers that agents offer ----------------------------------------------------------

    def _on_offer(self, sender: str, message: Offer, now_s: float) -> None:
        job = self.job
        if job.phase in ENDED:
            self._send(sender, self._job_ended())
            return
        known = job.offers.get(sender)
        if known is not None and message.number <= known.number:
            return
        gathers = job.phase is Phase.FOUNDING and self.policy.min_workers > 0 and is_gathering(job)
        offer = job.offers[sender] = OfferRecord(num_workers=message.num_workers, number=message.number)
        if gathers:
            job.offered_s = now_s
            self._tell_gathering(f"{sender} offers {message.num_workers}")
        elif message.num_workers:
            offer.order = StartWorker(count=message.num_workers, offer=message.number)
            self._tell("adding", f"{sender} comes with {message.num_workers} more")
            self._send(sender, offer.order)

    def _gather(self, now_s: float) -> None:
        """Tell agents to start the founders, if there are enough."""
        job = self.job
        if not may_found(job, self.policy, now_s):
            return
        orders = founders(job.offers, job.attempt)
        for agent, order in orders.items():
            job.offers[agent].order = order
            self._send(agent, order)
        size = next(iter(orders.values())).size
        self._enter(Phase.FOUNDING, f"{size} workers of {len(orders)} agents found the job", now_s)
        self._tell("founding", job.reason)

    def _gather_again(self, why: str, now_s: float) -> None:
        """Nothing has been trained yet: the founders that are left end, and all is begun anew."""
        job = self.job
        for worker in job.workers.values():
            if worker.founding_rank is not None:
                worker.founding_rank = None
                if worker.status is not WorkerStatus.GONE:
                    self._fence(worker, f"founding begins anew: {why}")
        for offer in job.offers.values():
            offer.order = None
        job.generation, job.description, job.loss_s = GenerationRecord(number=0), None, None
        job.attempt, job.offered_s = job.attempt + 1, now_s
        self._tell_gathering(f"founding begins anew: {why}")

    def _tell_gathering(self, what: str) -> None:
        num_offered = sum(offer.num_workers for offer in self.job.offers.values())
        self.job.reason = f"{num_offered} of at least {self.policy.min_workers} workers are offered"
        self._tell("founding", f"{what}; {self.job.reason}")

    def _on_agent_lost(self, message: AgentLost, now_s: float) -> None:
        """Its offer is void. Whether its workers are alive, their own connections and heartbeats say."""
        job = self.job
        offer = job.offers.get(message.agent)
        if offer is None or job.phase is not Phase.FOUNDING:
            return
        del job.offers[message.agent]
        if offer.order is None:
            self._tell_gathering(f"{message.agent} is gone")
        elif job.generation.plan is None or job.description is None:
            self._gather_again(f"{message.agent} is gone", now_s)
        elif job.loss_s is None:  # its workers' loss may be survived
            job.loss_s = now_s
            self._tell("lost", f"{message.agent} is gone")

    # --- workers that are there -------------------------------------------------------------

    def _on_started(self, sender: str, message: WorkerStarted, now_s: float) -> None:
        job = self.job
        worker = job.workers.setdefault(message.incarnation, WorkerRecord(incarnation=message.incarnation))
        worker.agent, worker.machine, worker.pid = sender, message.machine, message.pid
        is_late = message.rank is not None and message.attempt != job.attempt
        if job.phase in ENDED:
            self._send(sender, self._job_ended())
        elif worker.is_fenced:
            self._send(sender, StopWorker(incarnation=worker.incarnation))
        elif is_late and worker.status is not WorkerStatus.GONE:
            self._fence(worker, "founding has begun anew")
        if job.phase is Phase.FOUNDING and worker.founding_rank is None and not is_late:
            worker.founding_rank = message.rank
            if message.rank is not None and worker.status is WorkerStatus.GONE:
                self._on_member_gone(worker, now_s)
            else:
                self._found_if_complete(now_s)
        self._dismiss_if_newcomer(worker)

    def _on_exited(self, sender: str, message: WorkerExited, now_s: float) -> None:
        name = message.incarnation
        worker = self.job.workers.setdefault(name, WorkerRecord(incarnation=name, agent=sender))
        if worker.status is WorkerStatus.GONE:
            worker.is_fenced = False  # it cannot come back
            return
        status, worker.status = worker.status, WorkerStatus.GONE
        worker.gone_reason = _ending_of(message)
        if self.job.phase in ENDED or status is WorkerStatus.LEAVING:
            return
        if status is WorkerStatus.MEMBER or worker.founding_rank is not None:
            if message.failure or message.code > 0:
                self._fail(f"{name} {worker.gone_reason}", now_s, code=max(1, message.code))
            elif message.code == 0:
                worker.ended_well = True
                self._on_ended_well(worker, now_s)
            else:
                self._on_member_gone(worker, now_s)
        else:
            self._on_newcomer_gone(worker, message.failure, now_s)

    def _on_lost(self, message: WorkerLost, now_s: float) -> None:
        name = message.incarnation
        worker = self.job.workers.setdefault(name, WorkerRecord(incarnation=name))
        if worker.status is WorkerStatus.GONE:
            return
        status = worker.status
        self._fence(worker, message.reason)
        if self.job.phase in ENDED or status is WorkerStatus.LEAVING:
            return
        if status is WorkerStatus.MEMBER or worker.founding_rank is not None:
            self._on_member_gone(worker, now_s)
        else:
            self._on_newcomer_gone(worker, "", now_s)

    # --- workers that have to go ------------------------------------------------------------

    def _on_leave_asked(self, message: LeaveAsked, now_s: float) -> None:
        job = self.job
        deadline_s = now_s + message.deadline_s if message.deadline_s > 0 else None
        asked = [
            worker
            for worker in job.workers.values()
            if worker.status not in (WorkerStatus.GONE, WorkerStatus.LEAVING)
            and (
                worker.incarnation == message.incarnation
                or (message.machine and worker.machine == message.machine)
            )
        ]
        ask, leaving = _name_of(message), Leaving(source=message.source, deadline_s=deadline_s)
        for worker in asked:
            known = worker.asked.get(ask)
            if known is not None and _end_s(known) <= _end_s(leaving):
                continue
            worker.asked[ask] = leaving
            if worker.leaving is None:
                within = f" within {_rounded(message.deadline_s)} s" if deadline_s is not None else ""
                self._tell("notice", f"{worker.incarnation} is asked to leave{within} ({message.source})")
            worker.leaving = min(worker.asked.values(), key=_end_s)
            self._dismiss_if_newcomer(worker)
        if asked and job.phase is Phase.RUNNING:
            self._consider(now_s)

    def _dismiss_if_newcomer(self, worker: WorkerRecord) -> None:
        """Nobody needs one that is to leave. While the job is founded, only its agent knows that it is one."""
        is_known = self.job.phase is not Phase.FOUNDING or worker.agent != ""
        if (
            worker.leaving is not None
            and worker.status not in (WorkerStatus.MEMBER, WorkerStatus.LEAVING, WorkerStatus.GONE)
            and worker.founding_rank is None
            and is_known
        ):
            self._dismiss(worker, "it was asked to leave before it had joined")

    def _on_leave_withdrawn(self, message: LeaveWithdrawn, now_s: float) -> None:
        """Whoever was told to leave already leaves all the same."""
        ask = _name_of(message)
        staying = [
            worker
            for worker in self.job.workers.values()
            if worker.machine == message.machine
            and worker.status not in (WorkerStatus.GONE, WorkerStatus.LEAVING)
            and worker.asked.pop(ask, None) is not None
        ]
        for worker in staying:
            worker.leaving = min(worker.asked.values(), key=_end_s, default=None)
            if worker.leaving is None:
                self._tell("notice", f"{worker.incarnation} may stay after all ({message.source})")
        if staying and self.job.phase is Phase.RUNNING:
            self._consider(now_s)

    def _job_ended(self) -> JobEnded:
        job = self.job
        return JobEnded(failure=job.reason if job.phase is Phase.FAILED else "", code=job.exit_code)


def _name_of(message: LeaveAsked | LeaveWithdrawn) -> str:
    return f"{message.source} {message.event_id}".rstrip()


def _rounded(seconds: float) -> str:
    """What is left of a grace, for people: some of it went by on the way here."""
    return f"{round(seconds)}" if seconds >= 10 else f"{round(seconds, 1):g}"


def _end_s(leaving: Leaving) -> float:
    return float("inf") if leaving.deadline_s is None else leaving.deadline_s


def _ending_of(message: WorkerExited) -> str:
    if message.failure:
        return f"failed: {message.failure}"
    if message.code < 0:
        return f"was ended by signal {-message.code}"
    return f"exited with code {message.code}"
