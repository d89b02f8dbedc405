"""The manager's state machine: who is in, what happened, what follows. Pure: the time is passed in.

    manager = Manager(plan_for)
    for instruction in manager.handle(sender, message, now_s): ...     # a message from a worker or an agent
    for instruction in manager.tick(now_s): ...                        # a few times a second

Every message may come again, and late: what was done already is not done twice, what belongs to an earlier
generation is ignored, and what a worker says after it is gone or was fenced changes nothing. Messages of one
sender come in order; those of different senders in any.

``phases.py`` has the states of the job, ``ending.py`` what follows when a generation is over.
"""

from __future__ import annotations

from typing import assert_never

from varuna.morph.ending import Endings
from varuna.morph.instructions import Instruction
from varuna.morph.judging import judge, note_busy
from varuna.morph.messages import (
    Abort,
    Beat,
    CheckpointComplete,
    Described,
    Formed,
    FromAgent,
    FromWatch,
    FromWorker,
    Halted,
    JobEnded,
    Leave,
    LeaveAsked,
    Pause,
    Ready,
    StepDone,
    StopWorker,
    WorkerExited,
    WorkerLost,
    WorkerStarted,
)
from varuna.morph.phases import ENDED, Phase
from varuna.morph.planning import PlanFor
from varuna.morph.policy import Policy
from varuna.morph.record import JobRecord, Leaving, WorkerRecord, WorkerStatus
from varuna.morph.slowness import WINDOW

_NUM_REMEMBERED = 20
"""Recent steps, morphs and arrivals that decisions look at."""


class Manager(Endings):
    """Decides membership and plan of one job.

    Args:
        plan_for: the plan for a number of workers; must answer the same whenever it is asked the same.
        policy: limits.
        job: what is known already, from the journal.
    """

    def __init__(
        self, plan_for: PlanFor, *, policy: Policy | None = None, job: JobRecord | None = None
    ) -> None:
        super().__init__(plan_for, policy or Policy(), job or JobRecord())

    def handle(
        self, sender: str, message: FromWorker | FromAgent | FromWatch, now_s: float
    ) -> tuple[Instruction, ...]:
        """What follows from a message.

        Args:
            sender: the worker's incarnation, or the agent's name; empty for the manager's own watch.
            message: what it said.
            now_s: seconds of the manager's clock, which never goes back.
        """
        self._out = []
        if isinstance(message, Beat):
            return ()
        if isinstance(message, WorkerLost):
            self._on_lost(message, now_s)
        elif isinstance(message, CheckpointComplete):
            self._on_checkpoint(message)
        elif isinstance(message, WorkerStarted | WorkerExited | LeaveAsked):
            self._on_agent(sender, message, now_s)
        else:
            self._on_worker(sender, message, now_s)
        return tuple(self._out)

    def tick(self, now_s: float) -> tuple[Instruction, ...]:
        """What follows from the time. Without an instruction, nothing has changed."""
        self._out = []
        job, policy, generation = self.job, self.policy, self.job.generation
        if job.phase is Phase.FOUNDING:
            if job.loss_s is not None and now_s >= job.loss_s + policy.founding_grace_s:
                self._fail(
                    "a worker was lost before the first generation was formed; start the job again", now_s
                )
        elif job.phase is Phase.RUNNING:
            if job.wait_until_s is not None and now_s >= job.wait_until_s:
                self._consider(now_s)
        elif job.phase is Phase.PAUSING:
            if generation.reports and job.stopped_s is not None:
                if now_s >= job.stopped_s + policy.pause_grace_s:
                    self._end_generation("some members have paused and others have not", now_s)
            elif soonest := self._soonest_leaver():
                name, deadline_s = soonest
                if deadline_s - now_s <= policy.leave_margin_s:
                    left_s = max(0.0, deadline_s - now_s)
                    self._end_generation(f"{name} will be gone in {left_s:.1f} s, before the step ends", now_s)
        elif job.phase is Phase.ENDING:
            if now_s >= job.since_s + policy.halt_limit_s and not self._some_ended_well():
                for member in self._unreported():
                    self._fence(member, f"no report for {policy.halt_limit_s:g} s after it was told to give up")
                self._decide(now_s)
        elif job.phase is Phase.FORMING and now_s >= job.since_s + policy.forming_limit_s:
            self._end_generation(f"generation {generation.number} has not opened in time", now_s)
        return tuple(self._out)

    def repeat_for(self, recipient: str) -> tuple[Instruction, ...]:
        """What a worker or an agent that has connected again may have missed. Changes nothing.

        Forms are repeated when the worker says again where it stands.
        """
        self._out = []
        job = self.job
        worker = job.workers.get(recipient)
        if worker is not None:
            generation = job.generation
            if worker.status is WorkerStatus.LEAVING or worker.is_fenced:
                self._send(recipient, Leave(reason=worker.gone_reason or job.reason or "it was asked to leave"))
            elif worker.status is WorkerStatus.MEMBER and recipient not in generation.reports:
                if job.phase is Phase.PAUSING:
                    self._send(recipient, Pause(generation=generation.number))
                elif job.phase is Phase.ENDING:
                    self._send(recipient, Abort(generation=generation.number, reason=job.reason))
        elif recipient in job.agents:
            for worker in job.workers.values():
                if worker.agent == recipient and worker.is_fenced:
                    self._send(recipient, StopWorker(incarnation=worker.incarnation))
            if job.phase in ENDED:
                self._send(recipient, JobEnded(failure=job.reason if job.phase is Phase.FAILED else ""))
        return tuple(self._out)

    def _on_checkpoint(self, message: CheckpointComplete) -> None:
        known = self.job.checkpoint
        if known is None or message.next_step >= known.next_step:
            self.job.checkpoint = message

    # --- what workers say -------------------------------------------------------------------

    def _on_worker(
        self, sender: str, message: Described | Ready | Formed | StepDone | Halted, now_s: float
    ) -> None:
        worker = self.job.workers.get(sender)
        if worker is None:  # its agent's word is still under way
            worker = self.job.workers[sender] = WorkerRecord(incarnation=sender)
        if worker.status is WorkerStatus.GONE:
            if worker.ended_well and isinstance(message, StepDone):
                self._on_step_done(worker, message)  # its end was heard of first
            elif worker.is_fenced:
                self._send(sender, Leave(reason=worker.gone_reason))
            return
        if self.job.phase in ENDED or worker.status is WorkerStatus.LEAVING:
            if isinstance(message, Ready | Halted):
                self._send(sender, Leave(reason=self.job.reason or "it was asked to leave"))
            return
        if isinstance(message, Described):
            self._on_described(message, now_s)
        elif isinstance(message, Ready):
            self._on_ready(worker, message, now_s)
        elif isinstance(message, Formed):
            self._on_formed(worker, message, now_s)
        elif isinstance(message, StepDone):
            self._on_step_done(worker, message)
            self._judge(worker, message, now_s)
        elif isinstance(message, Halted):
            self._on_halted(worker, message, now_s)
        else:
            assert_never(message)

    def _on_described(self, message: Described, now_s: float) -> None:
        if self.job.phase is Phase.FOUNDING and self.job.description is None:
            self.job.description = message
            self._found_if_complete(now_s)

    def _on_ready(self, worker: WorkerRecord, message: Ready, now_s: float) -> None:
        job = self.job
        if worker.status is WorkerStatus.MEMBER:
            self._repeat_form(worker)
            return
        if worker.status is not WorkerStatus.STARTED:
            return
        worker.status, worker.digest, worker.ready_s = WorkerStatus.READY, message.digest, now_s
        job.arrivals_s = [*job.arrivals_s, now_s][-_NUM_REMEMBERED:]
        self._tell("ready", f"{worker.incarnation} is ready to join")
        if job.phase is Phase.WAITING:
            self._decide(now_s)
        elif job.phase is Phase.RUNNING:
            self._consider(now_s)

    def _on_formed(self, worker: WorkerRecord, message: Formed, now_s: float) -> None:
        generation = self.job.generation
        if message.generation != generation.number or worker.incarnation in generation.reports:
            return
        if generation.members and worker.incarnation not in generation.members:
            return
        generation.formed.add(worker.incarnation)
        worker.has_state = True
        if self.job.phase is Phase.FOUNDING:
            if message.plan is not None and generation.plan is None:
                generation.plan = message.plan
            self._found_if_complete(now_s)
        elif self.job.phase is Phase.FORMING:
            self._open_if_formed(now_s)

    def _on_step_done(self, worker: WorkerRecord, message: StepDone) -> None:
        job, members = self.job, self.job.generation.members
        if message.generation != job.generation.number or (members and worker.incarnation not in members):
            return
        if message.step_index >= job.num_committed:
            job.durations_s = [*job.durations_s, message.duration_s][-_NUM_REMEMBERED:]
        self._witness(message.step_index, message.committed)
        self._commit_until(message.step_index + 1, message.num_samples)

    def _judge(self, worker: WorkerRecord, message: StepDone, now_s: float) -> None:
        note_busy(self.job, worker, message)
        if self.job.phase is Phase.RUNNING and message.step_index % WINDOW == WINDOW - 1:
            news = judge(self.job, now_s)
            for text in news:
                self._tell("slow", text)
            if news:
                self._consider(now_s)

    def _on_halted(self, worker: WorkerRecord, message: Halted, now_s: float) -> None:
        job, report, name = self.job, message.report, worker.incarnation
        generation = job.generation
        if report.generation < generation.number:
            self._repeat_form(worker)
            return
        if report.generation > generation.number or name in generation.reports:
            return
        if generation.members and name not in generation.members:
            return
        generation.reports[name] = report
        worker.has_state = worker.has_state or report.committed_step is not None  # "formed" may have got lost
        self._witness(report.committed_step, report.committed)
        if job.stopped_s is None:
            job.stopped_s = now_s
        if job.phase is Phase.FOUNDING:
            self._found_if_complete(now_s)
        elif job.phase in (Phase.PAUSING, Phase.ENDING):
            self._decide_if_all(now_s)
        elif job.phase in (Phase.RUNNING, Phase.FORMING, Phase.FINISHING):
            self._end_generation(f"{name} halted: {report.reason}", now_s)

    # --- what agents say --------------------------------------------------------------------

    def _on_agent(self, sender: str, message: WorkerStarted | WorkerExited | LeaveAsked, now_s: float) -> None:
        if sender not in self.job.agents:
            self.job.agents.append(sender)
        if isinstance(message, WorkerStarted):
            self._on_started(sender, message, now_s)
        elif isinstance(message, WorkerExited):
            self._on_exited(sender, message, now_s)
        elif isinstance(message, LeaveAsked):
            self._on_leave_asked(message, now_s)
        else:
            assert_never(message)

    def _on_started(self, sender: str, message: WorkerStarted, now_s: float) -> None:
        job = self.job
        worker = job.workers.setdefault(message.incarnation, WorkerRecord(incarnation=message.incarnation))
        worker.agent, worker.machine = sender, message.machine
        if job.phase in ENDED:
            self._send(sender, JobEnded(failure=job.reason if job.phase is Phase.FAILED else ""))
        elif worker.is_fenced:
            self._send(sender, StopWorker(incarnation=worker.incarnation))
        if job.phase is Phase.FOUNDING and worker.founding_rank is None:
            worker.founding_rank = message.rank
            if message.rank is not None and worker.status is WorkerStatus.GONE:
                self._on_member_gone(worker, now_s)
            else:
                self._found_if_complete(now_s)

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
                self._fail(f"{name} {worker.gone_reason}", now_s)
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
        for worker in asked:
            known = worker.leaving
            if known is None:
                within = f" within {message.deadline_s:g} s" if deadline_s is not None else ""
                self._tell("notice", f"{worker.incarnation} is asked to leave{within} ({message.source})")
            elif deadline_s is None or (known.deadline_s is not None and known.deadline_s <= deadline_s):
                continue
            worker.leaving = Leaving(source=message.source, deadline_s=deadline_s)
            if worker.status is not WorkerStatus.MEMBER and worker.founding_rank is None:
                self._dismiss(worker, "it was asked to leave before it had joined")
        if asked and job.phase is Phase.RUNNING:
            self._consider(now_s)


def _ending_of(message: WorkerExited) -> str:
    if message.failure:
        return f"failed: {message.failure}"
    if message.code < 0:
        return f"was ended by signal {-message.code}"
    return f"exited with code {message.code}"
