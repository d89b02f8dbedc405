"""How a job ends, well or not; the base of ``Manager``.

A worker whose script is over stays until the scripts of all members are: if one is lost in the last step, what
the others need to mend it may be here. The job is done once all are over. It has failed if nobody was worker 0,
which saves what was trained, from its last step or call to the end of its script.
"""

from __future__ import annotations

from collections.abc import Mapping

from varuna.morph.instructions import Instruction, Send, Tell
from varuna.morph.messages import JobEnded, Leave, ToAgent, ToWorker
from varuna.morph.phases import TRANSITIONS, Phase
from varuna.morph.planning import PlanFor
from varuna.morph.policy import Policy
from varuna.morph.record import JobRecord, WorkerRecord, WorkerStatus


class Finishing:
    """The end of a job.

    Attributes:
        job: all that is known; plain values.
        policy: limits.
    """

    def __init__(self, plan_for: PlanFor, policy: Policy, job: JobRecord) -> None:
        self.job = job
        self.policy = policy
        self._plan_for = plan_for
        self._out: list[Instruction] = []

    # --- saying -----------------------------------------------------------------------------

    def _send(self, recipient: str, message: ToWorker | ToAgent) -> None:
        self._out.append(Send(recipient=recipient, message=message))

    def _tell(self, kind: str, text: str, figures: Mapping[str, float] | None = None) -> None:
        self._out.append(Tell(text=text, kind=kind, figures=figures or {}))

    def _enter(self, phase: Phase, reason: str, now_s: float) -> None:
        assert phase in TRANSITIONS[self.job.phase] or phase is self.job.phase, (self.job.phase, phase)
        self.job.phase, self.job.reason, self.job.since_s = phase, reason, now_s

    def _dismiss(self, worker: WorkerRecord, reason: str) -> None:
        worker.status, worker.gone_reason = WorkerStatus.LEAVING, reason
        self._send(worker.incarnation, Leave(reason=reason))

    # --- scripts that are over --------------------------------------------------------------

    def _note_finished(self, worker: WorkerRecord, *, was_first: bool) -> None:
        """The script of a member is over."""
        self.job.generation.finished.add(worker.incarnation)
        self.job.is_saved = self.job.is_saved or was_first

    def _see_finished(self, now_s: float) -> None:
        """What follows if scripts are over, in a generation that is at work."""
        job = self.job
        if not job.generation.finished:
            return
        if job.phase is not Phase.FINISHING:
            reason = f"the script of {min(job.generation.finished)} is over"
            self._enter(Phase.FINISHING, reason, now_s)
            self._tell("finishing", reason)
        self._finish_if_over(now_s)

    @property
    def _is_over(self) -> bool:
        """The scripts of all living members are over."""
        finished = self.job.generation.finished
        return bool(finished) and all(member.incarnation in finished for member in self.job.members())

    def _finish_if_over(self, now_s: float) -> None:
        if not self._is_over:
            return
        if not self.job.is_saved:
            self._fail("worker 0 was lost after the last step, before its script had ended", now_s)
            return
        self._enter(Phase.DONE, "the script has ended on all workers", now_s)
        self._tell("done", self.job.reason)
        self._end_job("")

    # --- the end ----------------------------------------------------------------------------

    def _fail(self, reason: str, now_s: float, *, code: int = 1) -> None:
        self._enter(Phase.FAILED, reason, now_s)
        self.job.exit_code = code
        self._tell("failed", reason)
        self._end_job(reason)

    def _end_job(self, failure: str) -> None:
        generation = self.job.generation
        for worker in self.job.workers.values():
            waits = worker.incarnation in generation.reports or worker.incarnation in generation.finished
            is_newcomer = worker.status in (WorkerStatus.READY, WorkerStatus.STARTED)
            if is_newcomer or (waits and worker.status is WorkerStatus.MEMBER):
                self._dismiss(worker, failure or "the job is done")
        for agent in self.job.agents:
            self._send(agent, JobEnded(failure=failure, code=self.job.exit_code))
