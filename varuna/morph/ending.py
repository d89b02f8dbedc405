"""What follows when a member is gone or a generation is over; half of ``Manager``, which adds the messages."""

from __future__ import annotations

from varuna.morph.arrange import Arrangement, Candidate, LostState, NoPlan, arrange
from varuna.morph.finishing import Finishing
from varuna.morph.instructions import StepsCommitted, StepsUndone
from varuna.morph.messages import (
    Abort,
    CheckpointComplete,
    Form,
    InScript,
    Pause,
    StartWorker,
    StopWorker,
)
from varuna.morph.phases import ENDED, Phase
from varuna.morph.record import GenerationRecord, WorkerRecord, WorkerStatus
from varuna.morph.recovery import LostSections, Recovery, recover
from varuna.morph.times import morph_times, render_times
from varuna.morph.wishes import num_used, wish_of

_NUM_COSTS = 20


class Endings(Finishing):
    """Membership from one generation to the next."""

    # --- the first generation ---------------------------------------------------------------

    def _found_if_complete(self, now_s: float) -> None:
        """Generation 0 is known when all its workers are, its plan, and what the job is."""
        job, generation = self.job, self.job.generation
        assert job.phase is Phase.FOUNDING
        if generation.plan is None or job.description is None:
            return
        founders = {
            worker.founding_rank: worker for worker in job.workers.values() if worker.founding_rank is not None
        }
        if len(founders) < generation.plan.num_workers:
            return
        generation.members = tuple(founders[rank].incarnation for rank in sorted(founders))
        predicted = job.description.micro_batch_s
        depths = [len(pipeline.stages) for pipeline in generation.plan.pipelines]
        if [len(row) for row in predicted] == depths:
            generation.step_s, generation.micro_batch_s = job.description.step_s, predicted
        for worker in founders.values():
            if worker.status is not WorkerStatus.GONE:
                worker.status = WorkerStatus.MEMBER
        gone = [worker for worker in founders.values() if worker.status is WorkerStatus.GONE]
        if lost := [worker.incarnation for worker in gone if not worker.ended_well]:
            self._end_generation(f"{', '.join(lost)} was lost", now_s)
        elif generation.reports:
            name, report = next(iter(generation.reports.items()))
            self._end_generation(f"{name} halted: {report.reason}", now_s)
        elif gone or self._is_over:
            for worker in gone:
                self._note_finished(worker, was_first=worker.founding_rank == 0)
            self._see_finished(now_s)
        else:
            self._open_if_formed(now_s)

    def _open_if_formed(self, now_s: float) -> None:
        job, generation = self.job, self.job.generation
        if any(member.incarnation not in generation.formed for member in job.members()):
            return
        assert generation.plan is not None
        num_members = len(generation.members)
        figures = {"members": float(num_members), "workers": float(num_used(generation.plan))}
        took = ""
        if job.phase is Phase.FORMING and job.stopped_s is not None:
            job.morph_costs_s = [*job.morph_costs_s, now_s - job.stopped_s][-_NUM_COSTS:]
            times = morph_times(job, now_s)
            figures |= times
            took = f"; {render_times(times)}"
        job.stopped_s = None
        job.durations_s = []
        num_pipelines = len(generation.plan.pipelines)
        text = (
            f"generation {generation.number} runs from step {max(generation.next_step, job.num_committed)} on: "
            f"{num_used(generation.plan)} of {num_members} workers, {num_pipelines} "
            f"pipeline{'' if num_pipelines == 1 else 's'}"
        )
        self._enter(Phase.RUNNING, text, now_s)
        self._tell("running", text + took, figures)
        if generation.finished:
            self._see_finished(now_s)
        else:
            self._consider(now_s)

    def _consider(self, now_s: float) -> None:
        """Whether the generation should end after its step."""
        wish = wish_of(self.job, self._plan_for, now_s)
        self.job.wait_until_s = wish.until_s
        if wish.reason:
            self._tell("decision", wish.reason)
        if wish.pause:
            self._enter(Phase.PAUSING, wish.reason, now_s)
            for member in self.job.members():
                self._send(member.incarnation, Pause(generation=self.job.generation.number))

    def _soonest_leaver(self) -> tuple[str, float] | None:
        """The member that has to be gone first, and when."""
        leavers = [
            (member.incarnation, member.leaving.deadline_s)
            for member in self.job.members()
            if member.leaving is not None and member.leaving.deadline_s is not None
        ]
        return min(leavers, key=lambda pair: pair[1], default=None)

    # --- somebody is gone -------------------------------------------------------------------

    def _fence(self, worker: WorkerRecord, reason: str) -> None:
        """From now on nothing it says counts; its agent is to kill it."""
        worker.status, worker.gone_reason, worker.is_fenced = WorkerStatus.GONE, reason, True
        self._tell("fenced", f"{worker.incarnation} is out: {reason}")
        if worker.agent:
            self._send(worker.agent, StopWorker(incarnation=worker.incarnation))

    def _on_member_gone(self, worker: WorkerRecord, now_s: float) -> None:
        job = self.job
        reason = f"{worker.incarnation} is gone: {worker.gone_reason}"
        self._tell("lost", reason)
        if job.phase is Phase.FOUNDING:
            job.loss_s = now_s if job.loss_s is None else job.loss_s
            self._found_if_complete(now_s)
        elif job.phase is Phase.ENDING:
            self._decide_if_all(now_s)
        elif job.phase is Phase.WAITING:
            self._decide(now_s)
        elif job.phase is Phase.FINISHING and self._is_over:
            self._finish_if_over(now_s)
        else:
            self._end_generation(reason, now_s)
        if job.phase not in ENDED and not job.generation.finished:
            self._replace(worker)

    def _replace(self, worker: WorkerRecord) -> None:
        job = self.job
        if not self.policy.replace_lost or not worker.agent or worker.leaving is not None:
            return
        if not worker.has_state:  # it was lost before it had joined
            job.num_lost_newcomers += 1
            if job.num_lost_newcomers >= self.policy.max_same_failures:
                self._tell(
                    "lost", f"{job.num_lost_newcomers} newcomers were lost one after the other: no more come"
                )
                return
        self._tell("adding", f"one more worker asked of {worker.agent}, for {worker.incarnation}")
        self._send(worker.agent, StartWorker())

    def _on_newcomer_gone(self, worker: WorkerRecord, failure: str, now_s: float) -> None:
        job = self.job
        self._tell("lost", f"newcomer {worker.incarnation} is gone: {worker.gone_reason}")
        if failure:
            job.newcomer_failures[failure] = job.newcomer_failures.get(failure, 0) + 1
            if job.phase is Phase.WAITING and job.newcomer_failures[failure] >= self.policy.max_same_failures:
                self._fail(f"newcomers fail one after the other: {failure}", now_s)
        else:
            self._replace(worker)

    def _on_ended_well(self, worker: WorkerRecord, now_s: float) -> None:
        """A member's process has ended well without waiting for the others."""
        job = self.job
        if job.generation.members:
            self._note_finished(worker, was_first=worker.incarnation == job.generation.members[0])
        if job.phase is Phase.FOUNDING:
            self._found_if_complete(now_s)
            founders = [one for one in job.workers.values() if one.founding_rank is not None]
            if job.phase is Phase.FOUNDING and all(one.status is WorkerStatus.GONE for one in founders):
                for founder in founders:
                    if founder.ended_well:
                        self._note_finished(founder, was_first=founder.founding_rank == 0)
                self._see_finished(now_s)
        elif job.phase is Phase.ENDING:
            self._decide_if_all(now_s)
        elif job.phase is Phase.WAITING:
            self._decide(now_s)
        else:
            self._see_finished(now_s)

    # --- a generation ends ------------------------------------------------------------------

    def _unreported(self) -> list[WorkerRecord]:
        reports = self.job.generation.reports
        return [member for member in self.job.members() if member.incarnation not in reports]

    def _late(self, now_s: float) -> list[WorkerRecord]:
        """Members that should have reported by now; while a script is in code of its own, there is no limit."""
        job, generation = self.job, self.job.generation
        if generation.finished:
            return []
        return [
            member
            for member in self._unreported()
            if member.incarnation not in generation.in_script
            and now_s
            >= max(job.since_s, generation.back_s.get(member.incarnation, 0.0)) + self.policy.halt_limit_s
        ]

    def _on_in_script(self, worker: WorkerRecord, message: InScript, now_s: float) -> None:
        generation, name = self.job.generation, worker.incarnation
        if message.generation != generation.number or name in generation.reports:
            return
        if not message.is_there:
            generation.in_script.discard(name)
            generation.back_s[name] = now_s
        elif name not in generation.in_script:
            generation.in_script.add(name)
            self._tell(
                "in script", f"{name} gives up when its script's own code, where it is now, has returned"
            )

    def _end_generation(self, reason: str, now_s: float) -> None:
        """Nobody waits any longer for what will not come: all are to give up and report."""
        self._enter(Phase.ENDING, reason, now_s)
        number = self.job.generation.number
        self._tell("ending", f"generation {number} ends: {reason}")
        for member in self._unreported():
            self._send(member.incarnation, Abort(generation=number, reason=reason))
        self._decide_if_all(now_s)

    def _decide_if_all(self, now_s: float) -> None:
        if not self._unreported():
            self._decide(now_s)

    def _decide(self, now_s: float) -> None:
        """All living members have reported: where they stand, and how they go on."""
        job, generation = self.job, self.job.generation
        assert job.description is not None
        if self._is_over:
            self._recover(job.members())
            self._finish_if_over(now_s)
            return
        recovery = self._recover(job.members())
        members = self._in_order(job.members())
        for member in members:
            if member.rests_until_s is not None and member.rests_until_s <= now_s:
                member.rests_until_s, member.speed = None, 1.0
        candidates = [
            Candidate(
                incarnation=member.incarnation,
                machine=member.machine,
                held=frozenset(generation.reports[member.incarnation].held_sections),
                has_state=member.has_state,
                speed=member.speed,
                rests=member.rests_until_s is not None,
                leaving=member.leaving is not None,
                deadline_s=None if member.leaving is None else member.leaving.deadline_s,
                store_address=generation.reports[member.incarnation].store_address,
                num_calls=generation.reports[member.incarnation].num_calls,
            )
            for member in members
        ]
        candidates += [
            Candidate(
                incarnation=newcomer.incarnation,
                machine=newcomer.machine,
                store_address=newcomer.store_address,
            )
            for newcomer in job.ready()
            if not generation.finished
        ]
        number = generation.number + 1
        result = arrange(number, recovery.next_step, candidates, job.description, self._plan_for)
        if generation.finished and not isinstance(result, Arrangement):
            over = ", ".join(sorted(generation.finished))
            why = result.reason if isinstance(result, NoPlan) else self._explain(result)
            self._fail(f"{why}; it is too late to begin anew: the script of {over} is over", now_s)
            return
        if isinstance(result, LostSections | LostState) and job.checkpoint is not None:
            where = f"step {job.checkpoint.next_step}, {job.checkpoint.address}"
            self._tell("going back", f"{self._explain(result)}; back to {where}")
            recovery = self._go_back(job.checkpoint)
            result = arrange(
                number, recovery.next_step, candidates, job.description, self._plan_for, from_checkpoint=True
            )
        if isinstance(result, NoPlan):
            if job.phase is not Phase.WAITING:
                self._tell("waiting", f"waiting for newcomers: {result.reason}")
            self._enter(Phase.WAITING, result.reason, now_s)
        elif isinstance(result, LostSections | LostState):
            self._fail(self._explain(result), now_s)
        else:
            self._form(result, recovery, now_s)

    def _in_order(self, members: list[WorkerRecord]) -> list[WorkerRecord]:
        """By rank; if worker 0 is lost, one follows it whose script is not over yet: worker 0 is who saves."""
        generation = self.job.generation
        if members and members[0].incarnation == generation.members[0]:
            return members
        return sorted(members, key=lambda member: member.incarnation in generation.finished)

    def _recover(self, members: list[WorkerRecord]) -> Recovery:
        """Where the living members stand; the books are brought in line with it."""
        job, generation = self.job, self.job.generation
        if not members:  # nobody is left: whatever follows begins where the generation began
            return Recovery(
                next_step=generation.next_step,
                committed="",
                rolling=frozenset(),
                current=frozenset(),
                stale=frozenset(),
            )
        reports = {member.incarnation: generation.reports[member.incarnation] for member in members}
        recovery = recover(
            reports,
            generation.next_step,
            committed_step=generation.committed_step,
            committed=generation.committed,
        )
        for name in sorted(recovery.stale):
            self._fence(job.workers[name], f"it is behind step {recovery.next_step} and cannot catch up")
        if not generation.finished:
            self._undo_from(recovery.next_step)
        self._commit_until(recovery.next_step)
        return recovery

    def _go_back(self, checkpoint: CheckpointComplete) -> Recovery:
        """All that members hold is void, and what has happened since the checkpoint."""
        self._undo_from(checkpoint.next_step)
        self._commit_until(checkpoint.next_step)  # made and saved by members while the manager was away
        nobody: frozenset[str] = frozenset()
        return Recovery(
            next_step=checkpoint.next_step,
            committed="",
            rolling=nobody,
            current=nobody,
            stale=nobody,
            checkpoint=checkpoint.address,
        )

    def _undo_from(self, step_index: int) -> None:
        if self.job.num_committed > step_index:
            self.job.num_committed = step_index
            self._out.append(StepsUndone(first_step=step_index))

    def _witness(self, step_index: int | None, committed: str) -> None:
        """Somebody has told what the commit of a step of this generation returned."""
        generation = self.job.generation
        if committed and step_index is not None and step_index > generation.committed_step:
            generation.committed_step, generation.committed = step_index, committed

    def _commit_until(self, end_step: int, num_samples: int | None = None) -> None:
        job = self.job
        if end_step > job.num_committed:
            first_step, job.num_committed = job.num_committed, end_step
            self._out.append(
                StepsCommitted(
                    generation=job.generation.number,
                    first_step=first_step,
                    end_step=end_step,
                    num_samples=num_samples,
                )
            )

    def _form(self, arrangement: Arrangement, recovery: Recovery, now_s: float) -> None:
        job = self.job
        if job.phase is Phase.WAITING:
            job.stopped_s = now_s
        for member in job.members():
            if member.incarnation not in arrangement.members:
                self._dismiss(member, "it was asked to leave, and nothing is needed of it any more")
        first = arrangement.formations[0]
        forms = {
            name: Form(
                formation=formation,
                committed=recovery.committed if name in recovery.rolling else "",
                checkpoint=recovery.checkpoint,
            )
            for name, formation in zip(arrangement.members, arrangement.formations, strict=True)
        }
        job.generation = GenerationRecord(
            number=first.generation,
            members=arrangement.members,
            plan=first.plan,
            step_s=arrangement.planned.step_s,
            micro_batch_s=arrangement.planned.micro_batch_s,
            next_step=first.next_step,
            givers=arrangement.givers,
            forms=forms,
        )
        job.wait_until_s = None
        for name, form in forms.items():
            job.workers[name].status = WorkerStatus.MEMBER
            self._send(name, form)
        text = (
            f"generation {first.generation}: {len(arrangement.members)} workers, "
            f"{len(first.transfers)} sections move, next step {first.next_step}"
        )
        self._enter(Phase.FORMING, text, now_s)
        self._tell("forming", "; ".join([text, *arrangement.notes]))

    def _repeat_form(self, worker: WorkerRecord) -> None:
        """A worker that says again where it stood has not heard how it goes on."""
        generation, name = self.job.generation, worker.incarnation
        form = generation.forms.get(name)
        if form is not None and name not in generation.formed and name not in generation.reports:
            self._send(name, form)

    def _explain(self, loss: LostSections | LostState) -> str:
        lost = [
            name for name in self.job.generation.members if self.job.workers[name].status is WorkerStatus.GONE
        ]
        who = ", ".join(f"{name} ({self.job.workers[name].gone_reason})" for name in lost)
        if isinstance(loss, LostState):
            return f"no worker is left that knows the learning rates and the step count; gone: {who}"
        sections = ", ".join(str(section) for section in loss.sections)
        return f"no worker is left that holds sections {sections}; gone: {who}"
