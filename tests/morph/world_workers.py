"""What workers of a ``World`` do by themselves: obey, form, move sections, run steps, halt, finish."""

from __future__ import annotations

import functools
import json

from tests.morph import world_parts
from tests.morph.world_parts import BATCH_SIZE, Action, Record, Worker
from varuna.generations import HaltReport
from varuna.morph.messages import (
    Abort,
    CheckpointComplete,
    Finished,
    Form,
    Formed,
    FromWorker,
    Halted,
    Leave,
    Pause,
    Ready,
    StepDone,
)
from varuna.morph.record import WorkerStatus


class WorldWorkers:
    """Workers' part of ``World``, whose attributes these are."""

    workers: dict[str, Worker]
    generations: dict[int, Record]
    ledger: list[int]
    saved: list[CheckpointComplete]
    num_steps: int
    newest_commit: int
    tells_commits: bool

    def _receive(self, worker: Worker) -> None:
        message = worker.inbox.popleft()
        if isinstance(message, Pause):
            worker.asked_pause.add(message.generation)
        elif isinstance(message, Abort):
            worker.aborted.add(message.generation)
        else:
            worker.orders.append(message)

    def _follow(self, worker: Worker) -> None:
        order = worker.orders.popleft()
        if isinstance(order, Leave):
            self._exit(worker, 0)
        elif order.formation.generation > worker.newest_form:
            worker.newest_form = order.formation.generation
            self._take(worker, order)

    def _own_actions(self, worker: Worker) -> list[Action]:
        act = functools.partial
        if worker.mode == "starting":
            return [act(self._become_ready, worker)]
        if worker.mode in ("ready", "halted", "finished"):
            found = [act(self._follow, worker)] if worker.orders else []
            if worker.mode == "finished" and worker.generation in worker.aborted:
                found.append(act(self._halt, worker, "its script is over"))
            return found
        found = []
        record = self.generations[worker.generation]
        is_broken = worker.generation in worker.aborted
        others = [self.workers[name] for name in record.members if name != worker.name]
        if not worker.returned and (is_broken or any(world_parts.is_lost(other, worker) for other in others)):
            found.append(act(self._halt, worker, "a peer is lost"))
        if is_broken and not worker.returned:
            return found
        if worker.mode == "meeting":
            if record.met >= set(record.members):
                found.append(act(self._begin_moving, worker))
        elif worker.mode == "moving":
            found += self._transfers(worker, record)
        elif worker.mode == "opening":
            if record.moved >= set(record.members):
                found.append(act(self._formed, worker))
        elif worker.returned:
            found.append(act(self._update_done, worker))
        elif worker.num_applied == self.num_steps:
            found.append(act(self._finish, worker))
        elif not worker.reduced:
            begun = record.begun.setdefault(worker.num_applied, set())
            if worker.name not in begun:
                found.append(act(begun.add, worker.name))
            elif begun >= set(record.members):
                found.append(act(self._reduce, worker, record))
        elif set(record.contributed.get(worker.num_applied, {})) >= set(record.members):
            found.append(act(self._return_commit, worker, record))
        return found

    # --- what a worker does -----------------------------------------------------------------

    def _say(self, worker: Worker, message: FromWorker, *, is_state: bool = True) -> None:
        if isinstance(message, Halted | Finished) and message.report.generation == 0:
            worker.outbox.append(world_parts.DESCRIBED)  # worker 0 may be lost before it was heard
        worker.outbox.append(message)
        if is_state:
            worker.state = message

    def _become_ready(self, worker: Worker) -> None:
        worker.mode = "ready"
        self._say(worker, Ready(digest="d"))

    def _take(self, worker: Worker, form: Form) -> None:
        formation = form.formation
        if worker.reduced:
            if form.committed:
                step = json.loads(form.committed)["step_index"]
                assert step == worker.num_applied
                worker.committed_step, worker.committed = step, form.committed
                self._update(worker)
                self._tell_step(worker, worker.generation, step)
            worker.reduced = False
        if form.checkpoint:
            worker.num_applied, worker.versions = formation.next_step, {}
            worker.committed_step, worker.committed = None, ""
        assert not worker.has_state or worker.num_applied == formation.next_step, (worker, formation)
        worker.checkpoint = form.checkpoint
        worker.formation, worker.plan, worker.generation = formation, formation.plan, formation.generation
        worker.mode, worker.num_moved, worker.returned = "meeting", 0, False
        self.generations[formation.generation].met.add(worker.name)

    def _begin_moving(self, worker: Worker) -> None:
        assert worker.formation is not None
        state_holder = self.generations[worker.generation].members[worker.formation.state_rank]
        if worker.checkpoint:
            worker.versions = dict.fromkeys(world_parts.wanted_sections(worker), worker.formation.next_step)
            worker.has_state = True
        elif not worker.has_state:
            assert self.workers[state_holder].has_state, "the job's state is taken from one that has none"
        given = {one.section_index for one in worker.formation.transfers if one.source == worker.formation.rank}
        self._keep_only(worker, world_parts.wanted_sections(worker) | given)
        worker.mode = "moving"

    def _keep_only(self, worker: Worker, sections: set[int]) -> None:
        worker.versions = {index: count for index, count in worker.versions.items() if index in sections}

    def _transfers(self, worker: Worker, record: Record) -> list[Action]:
        """The next transfer of this worker, if the other side is at it too; it is carried out on both."""
        formation = worker.formation
        assert formation is not None
        mine = world_parts.own_transfers(worker)
        if worker.num_moved == len(mine):
            return [functools.partial(self._end_moving, worker, record)]
        transfer = mine[worker.num_moved]
        if transfer.source != formation.rank:
            return []
        other = self.workers[record.members[transfer.destination]]
        theirs = (
            world_parts.own_transfers(other)
            if other.generation == worker.generation and other.mode == "moving"
            else ()
        )
        if not other.is_alive or other.num_moved >= len(theirs) or theirs[other.num_moved] != transfer:
            return []

        def move() -> None:
            index = transfer.section_index
            assert index not in other.versions, "it was there already"
            assert worker.versions[index] == formation.next_step, "state of another step"
            other.versions[index] = worker.versions[index]
            worker.num_moved += 1
            other.num_moved += 1

        return [move] if not other.frozen else []

    def _end_moving(self, worker: Worker, record: Record) -> None:
        self._keep_only(worker, world_parts.wanted_sections(worker))
        assert set(worker.versions) == world_parts.wanted_sections(worker)
        worker.mode = "opening"
        record.moved.add(worker.name)

    def _formed(self, worker: Worker) -> None:
        if worker.formation is not None:
            if not worker.has_state:
                worker.num_applied = worker.num_seen = worker.formation.next_step
            self._return(worker)
        worker.has_state = True
        worker.mode, worker.reduced, worker.returned = "running", False, False
        plan = worker.plan if worker.generation == 0 else None
        self._say(worker, Formed(generation=worker.generation, plan=plan))

    def _reduce(self, worker: Worker, record: Record) -> None:
        worker.reduced = True
        wish = worker.generation in worker.asked_pause
        record.contributed.setdefault(worker.num_applied, {})[worker.name] = wish

    def _return_commit(self, worker: Worker, record: Record) -> None:
        step = worker.num_applied
        known = self.manager.job.workers.get(worker.name)
        if known is None or known.status is not WorkerStatus.GONE:
            assert worker.generation >= self.newest_commit, "two generations train at once"
            self.newest_commit = worker.generation
        pause = any(record.contributed[step].values())
        worker.reduced, worker.returned = False, True
        worker.committed_step = step
        worker.committed = json.dumps({"step_index": step, "pause": pause})

    def _update(self, worker: Worker) -> None:
        for index, count in worker.versions.items():
            assert count == worker.num_applied, f"{worker.name}: section {index} has had {count} updates"
            worker.versions[index] = count + 1
        worker.num_applied += 1

    def _update_done(self, worker: Worker) -> None:
        generation, step = worker.generation, worker.num_applied
        self._update(worker)
        worker.returned = False
        self._tell_step(worker, generation, step)
        if json.loads(worker.committed)["pause"]:
            self._halt(worker, "asked to pause")
        else:
            self._return(worker)

    def _return(self, worker: Worker) -> None:
        """The script sees a step."""
        if worker.num_applied > worker.num_seen:
            worker.num_seen, worker.was_first = worker.num_applied, world_parts.rank_of(worker) == 0

    def _tell_step(self, worker: Worker, generation: int, step: int) -> None:
        done = StepDone(
            generation=generation,
            step_index=step,
            duration_s=1.0,
            busy_s=world_parts.busy_s(worker),
            num_samples=BATCH_SIZE,
            committed=worker.committed if self.tells_commits else "",
            samples=world_parts.samples_of(worker, step),
        )
        self._say(worker, done, is_state=False)

    def _finish(self, worker: Worker) -> None:
        worker.mode = "finished"
        self._say(worker, Finished(report=self._report(worker, "its script is over", is_finished=True)))

    def _halt(self, worker: Worker, reason: str) -> None:
        report = self._report(worker, reason, is_finished=worker.mode == "finished")
        worker.mode = "halted"
        self._say(worker, Halted(report=report))

    def _report(self, worker: Worker, reason: str, *, is_finished: bool) -> HaltReport:
        # a newcomer knows its step count only once it has been in a generation that opened
        num_applied = worker.num_applied if worker.has_state else 0
        return HaltReport(
            generation=worker.generation,
            num_applied=num_applied,
            reduced_step=worker.num_applied if worker.reduced else None,
            committed_step=worker.committed_step,
            committed=worker.committed,
            held_sections=tuple(sorted(worker.versions)),
            reason=reason,
            is_finished=is_finished,
            was_first=is_finished and worker.was_first,
        )
