"""The manager's state machine: who is in, what happened, what follows. Pure: the time is passed in.

    manager = Manager(plan_for)
    for instruction in manager.handle(sender, message, now_s): ...     # a message from a worker or an agent
    for instruction in manager.tick(now_s): ...                        # a few times a second

Every message may come again, and late: what was done already is not done twice, what belongs to an earlier
generation is ignored, and what a worker says after it is gone or was fenced changes nothing. Messages of one
sender come in order; those of different senders in any.

``phases.py`` has the states of the job, ``agents.py`` what follows from what agents say, ``ending.py`` what
follows when a generation is over.
"""

from __future__ import annotations

from typing import assert_never

from varuna.generations import FormingTimes
from varuna.morph.agents import Agents
from varuna.morph.gathering import is_gathering
from varuna.morph.instructions import Instruction, SamplesTold
from varuna.morph.judging import judge, note_busy
from varuna.morph.messages import (
    Abort,
    AgentLost,
    Beat,
    CheckpointComplete,
    Described,
    Finished,
    Formed,
    FromAgent,
    FromWatch,
    FromWorker,
    Halted,
    InScript,
    Leave,
    LeaveAsked,
    LeaveWithdrawn,
    Offer,
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
from varuna.morph.record import JobRecord, WorkerRecord, WorkerStatus
from varuna.morph.slowness import WINDOW

_NUM_REMEMBERED = 20
"""Recent steps, morphs and arrivals that decisions look at."""


class Manager(Agents):
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
        elif isinstance(message, AgentLost):
            self._on_agent_lost(message, now_s)
        elif isinstance(message, Offer | WorkerStarted | WorkerExited | LeaveAsked | LeaveWithdrawn):
            self._on_agent(sender, message, now_s)
        else:
            self._on_worker(sender, message, now_s)
        return tuple(self._out)

    def tick(self, now_s: float) -> tuple[Instruction, ...]:
        """What follows from the time. Without an instruction, nothing has changed."""
        self._out = []
        job, policy, generation = self.job, self.policy, self.job.generation
        if job.phase is Phase.FOUNDING:
            if policy.min_workers and is_gathering(job):
                self._gather(now_s)
            elif job.loss_s is not None and now_s >= job.loss_s + policy.founding_grace_s:
                why = "a worker was lost before the first generation was formed"
                if policy.min_workers:
                    self._gather_again(why, now_s)
                else:
                    self._fail(f"{why}; start the job again", now_s)
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
            late = self._late(now_s)
            for member in late:
                self._fence(member, f"no report for {policy.halt_limit_s:g} s after it was told to give up")
            if late:
                self._decide_if_all(now_s)
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
            offer = job.offers.get(recipient)
            if offer is not None and offer.order is not None:
                self._send(recipient, offer.order)
            if job.phase in ENDED:
                self._send(recipient, self._job_ended())
        return tuple(self._out)

    # --- what workers say -------------------------------------------------------------------

    def _on_worker(
        self,
        sender: str,
        message: Described | Ready | Formed | StepDone | InScript | Halted | Finished | CheckpointComplete,
        now_s: float,
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
            if isinstance(message, Ready | Halted | Finished):
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
        elif isinstance(message, InScript):
            self._on_in_script(worker, message, now_s)
        elif isinstance(message, Halted):
            self._on_halted(worker, message, now_s)
        elif isinstance(message, Finished):
            self._on_finished(worker, message, now_s)
        elif isinstance(message, CheckpointComplete):
            self._on_checkpoint(message)
        else:
            assert_never(message)

    def _on_checkpoint(self, message: CheckpointComplete) -> None:
        """The newest counts. Its steps may be news, too: members train on, and save, without a manager."""
        job = self.job
        newest = 0 if job.checkpoint is None else job.checkpoint.sequence
        if message.is_found:
            if job.description is None:
                return
            newest = max(newest, job.description.last_save)  # what was there before may be of another job
        if message.sequence > newest:
            job.checkpoint = message
            self._tell("checkpoint", f"step {message.next_step} is saved: {message.address}")

    def _on_described(self, message: Described, now_s: float) -> None:
        if self.job.phase is Phase.FOUNDING and self.job.description is None:
            self.job.description = message
            self.job.generation.next_step = message.first_step
            self.job.num_committed = max(self.job.num_committed, message.first_step)
            self._found_if_complete(now_s)

    def _on_ready(self, worker: WorkerRecord, message: Ready, now_s: float) -> None:
        job = self.job
        if worker.status is WorkerStatus.MEMBER:
            self._repeat_form(worker)
            return
        if worker.status is not WorkerStatus.STARTED:
            return
        worker.status, worker.digest, worker.ready_s = WorkerStatus.READY, message.digest, now_s
        worker.store_address = message.store_address
        job.arrivals_s = [*job.arrivals_s, now_s][-_NUM_REMEMBERED:]
        self._tell("ready", f"{worker.incarnation} is ready to join")
        if job.phase is Phase.WAITING:
            self._decide(now_s)
        elif job.phase is Phase.RUNNING:
            self._consider(now_s)

    def _on_formed(self, worker: WorkerRecord, message: Formed, now_s: float) -> None:
        generation = self.job.generation
        if message.generation != generation.number:
            return
        if self.job.phase is Phase.FOUNDING and message.plan is not None and generation.plan is None:
            generation.plan = message.plan
        if worker.incarnation in generation.reports:  # whoever connects late tells its newest state first
            if self.job.phase is Phase.FOUNDING:
                worker.has_state = True
                self._found_if_complete(now_s)
            return
        if generation.members and worker.incarnation not in generation.members:
            return
        generation.formed[worker.incarnation] = message.times
        if not worker.has_state and worker.founding_rank is None:
            self.job.num_lost_newcomers = 0
        worker.has_state = True
        if self.job.phase is Phase.FOUNDING:
            self._found_if_complete(now_s)
        elif self.job.phase is Phase.FORMING:
            self._open_if_formed(now_s)

    def _on_step_done(self, worker: WorkerRecord, message: StepDone) -> None:
        job, members = self.job, self.job.generation.members
        if members and worker.incarnation not in members:
            return
        if message.generation == job.generation.number:
            if message.step_index >= job.num_committed:
                job.durations_s = [*job.durations_s, message.duration_s][-_NUM_REMEMBERED:]
            self._witness(message.step_index, message.committed)
            self._commit_until(message.step_index + 1, message.num_samples)
        if message.samples is not None and message.step_index < job.num_committed:
            self._out.append(SamplesTold(step_index=message.step_index, samples=message.samples))

    def _judge(self, worker: WorkerRecord, message: StepDone, now_s: float) -> None:
        note_busy(self.job, worker, message)
        if not self.policy.finds_slow:
            return
        if self.job.phase is Phase.RUNNING and message.step_index % WINDOW == WINDOW - 1:
            news = judge(self.job, now_s, self.policy.rest_s)
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
        if report.is_finished:
            self._note_finished(worker, was_first=report.was_first)
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

    def _on_finished(self, worker: WorkerRecord, message: Finished, now_s: float) -> None:
        job, report, name = self.job, message.report, worker.incarnation
        generation = job.generation
        if report.generation < generation.number:
            self._repeat_form(worker)
            return
        if report.generation > generation.number or name in generation.reports:
            return
        if generation.members and name not in generation.members:
            return
        generation.formed.setdefault(name, FormingTimes())  # "formed" may have got lost
        worker.has_state = True
        self._note_finished(worker, was_first=report.was_first)
        self._witness(report.committed_step, report.committed)
        self._commit_until(report.num_applied)
        if job.phase is Phase.FOUNDING:
            self._found_if_complete(now_s)
        elif job.phase is Phase.FORMING:
            self._open_if_formed(now_s)
        elif job.phase is Phase.ENDING:  # it has not heard
            self._send(name, Abort(generation=generation.number, reason=job.reason))
        elif job.phase in (Phase.RUNNING, Phase.PAUSING, Phase.FINISHING):
            self._see_finished(now_s)
