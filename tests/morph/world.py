"""A world for the manager: workers that behave as ``varuna.run.member`` does, agents, and the network.

No thread, no clock: ``World.actions`` lists what could happen next, whoever drives the world picks. A worker's
sections carry the number of updates they have had, so an update lost or made twice shows at once.
"""

from __future__ import annotations

import functools
import json
from collections import deque

import msgspec

from tests.morph import world_parts
from tests.morph.world_parts import BATCH_SIZE, DESCRIBED, Action, Message, Record, Worker
from varuna.generations import HaltReport
from varuna.morph.instructions import Instruction, SamplesTold, Send, StepsCommitted, StepsUndone, Tell
from varuna.morph.journal import Journal
from varuna.morph.messages import (
    Abort,
    CheckpointComplete,
    Described,
    Finished,
    Form,
    Formed,
    FromAgent,
    FromWorker,
    Halted,
    JobEnded,
    Leave,
    LeaveAsked,
    Pause,
    Ready,
    StartWorker,
    StepDone,
    StopWorker,
    WorkerExited,
    WorkerLost,
    WorkerStarted,
)
from varuna.morph.phases import ENDED
from varuna.morph.policy import Policy
from varuna.morph.record import JobRecord, WorkerStatus
from varuna.morph.state import Manager


class World:
    """Workers, agents, network and the manager.

    Args:
        num_founders: workers of generation 0.
        num_steps: after which a worker's script ends.
        least: workers without which there is no plan.
        stages: numbers of stages, by number of workers.
        policy: of the manager.
        journal: is told all that the manager is told.
        tells_commits: whether workers tell with each step what its commit returned.
    """

    def __init__(
        self,
        num_founders: int,
        *,
        num_steps: int = 5,
        least: int = 1,
        stages: tuple[int, ...] = (2, 1, 3),
        policy: Policy | None = None,
        journal: Journal | None = None,
        tells_commits: bool = True,
    ) -> None:
        self.plan_for = world_parts.planner(least, stages)
        self.policy = policy or Policy(replace_lost=False)
        self.journal = journal
        self.tells_commits = tells_commits
        if journal is None:
            self.manager = Manager(self.plan_for, policy=self.policy)
        else:
            self.manager = journal.restore(self.plan_for, self.policy).manager
        self.now_s = 0.0
        self.num_steps = num_steps
        self.workers: dict[str, Worker] = {}
        self.agents: dict[str, deque[FromAgent]] = {"m0": deque(), "m1": deque()}
        self.generations: dict[int, Record] = {}
        self.ledger: list[int] = []  # per step, the generation in which it was committed
        self.tells: list[Tell] = []
        self.log: list[tuple[str, Message | None, float]] = []  # what a journal would have
        self.ended_agents: set[str] = set()
        self.faults: list[str] = []
        self.newest_commit = 0
        self.saved: list[CheckpointComplete] = []
        plan = self.plan_for(max(num_founders, least), DESCRIBED).plan
        names = tuple(self._start(f"w{index}", index) for index in range(num_founders))
        self.generations[0] = Record(members=names, met=set(names), moved=set(names))
        for rank, name in enumerate(names):
            worker = self.workers[name]
            worker.mode, worker.generation, worker.plan = "opening", 0, plan
            stage = plan.stage_of(rank)
            if stage is not None:
                worker.versions = dict.fromkeys(range(stage.first_section, stage.end_section), 0)
        self.workers["w0"].outbox.append(DESCRIBED)

    # --- the manager ------------------------------------------------------------------------

    def deliver(self, sender: str, message: Message) -> None:
        record = self.manager.job.workers.get(sender)
        is_out = record is not None and record.status is WorkerStatus.GONE and not record.ended_well
        before = self.snapshot() if is_out else b""
        self.log.append((sender, message, self.now_s))
        instructions = self.manager.handle(sender, message, self.now_s)
        if self.journal is not None:
            self.journal.received(sender, message, self.now_s)
            self.journal.follow(instructions)
        self._obey(instructions)
        if is_out:
            assert self.snapshot() == before, f"{sender} is out, but its {message} changed something"

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        before = self.snapshot()
        instructions = self.manager.tick(self.now_s)
        if instructions:
            self.log.append(("", None, self.now_s))
            if self.journal is not None:
                self.journal.ticked(self.now_s)
                self.journal.follow(instructions)
        else:
            assert self.snapshot() == before, "time alone changed something, and nobody was told"
        self._obey(instructions)

    def snapshot(self) -> bytes:
        return msgspec.json.encode(self.manager.job, order="deterministic")

    def restart(self) -> None:
        """The manager dies and comes back with what its journal says."""
        fresh = Manager(self.plan_for, policy=self.policy)
        for sender, message, at_s in self.log:
            if message is None:
                fresh.tick(at_s)
            else:
                fresh.handle(sender, message, at_s)
        assert fresh.job == self.manager.job
        stored = msgspec.json.decode(msgspec.json.encode(self.manager.job), type=JobRecord)
        assert stored == self.manager.job
        if self.journal is None:
            self.manager = Manager(self.plan_for, policy=self.policy, job=stored)
        else:
            self.manager = self.journal.restore(self.plan_for, self.policy).manager
            assert self.manager.job == stored
        for worker in self.workers.values():
            if worker.is_alive:
                self.reconnect(worker)
        for agent in self.agents:
            self._obey(self.manager.repeat_for(agent))

    def reconnect(self, worker: Worker, *, is_lossy: bool = False) -> None:
        """A connection broke: both sides say again where they stand; what that replaces may be lost."""
        if is_lossy:
            kept = [message for message in worker.outbox if isinstance(message, StepDone | Described)]
            worker.outbox = deque(kept)
        if worker.state is not None:
            worker.outbox.append(worker.state)
        self._obey(self.manager.repeat_for(worker.name))

    def _obey(self, instructions: tuple[Instruction, ...]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Tell):
                self.tells.append(instruction)
            elif isinstance(instruction, StepsCommitted):
                assert instruction.first_step == len(self.ledger), (instruction, self.ledger)
                count = instruction.end_step - instruction.first_step
                self.ledger += [instruction.generation] * count
            elif isinstance(instruction, StepsUndone):
                assert instruction.first_step < len(self.ledger), (instruction, self.ledger)
                is_back = self.manager.job.checkpoint in self.saved
                assert is_back or not self.tells_commits, "a step is run again, though its outcome was told"
                del self.ledger[instruction.first_step :]
            elif isinstance(instruction, SamplesTold):
                assert instruction.step_index < len(self.ledger), (instruction, self.ledger)
            else:
                self._carry(instruction)

    def _carry(self, instruction: Send) -> None:
        message = instruction.message
        if isinstance(message, StopWorker):
            if self.workers[message.incarnation].is_alive:
                self._exit(self.workers[message.incarnation], -9)
        elif isinstance(message, JobEnded):
            self.ended_agents.add(instruction.recipient)
        elif isinstance(message, StartWorker):
            assert message.count == 1
            self.join(instruction.recipient)
        else:
            worker = self.workers[instruction.recipient]
            if isinstance(message, Form):
                number = message.formation.generation
                if number not in self.generations:
                    names = [
                        send.recipient for send in self._forms_of(number) if send.recipient in self.workers
                    ]
                    self.generations[number] = Record(members=tuple(names))
            worker.inbox.append(message)

    def _forms_of(self, number: int) -> list[Send]:
        generation = self.manager.job.generation
        assert generation.number == number
        return [Send(recipient=name, message=form) for name, form in generation.forms.items()]

    # --- what people and clouds do ----------------------------------------------------------

    def _start(self, name: str, rank: int | None, agent: str = "") -> str:
        agent = agent or f"m{len(self.workers) % 2}"
        self.workers[name] = Worker(name=name, agent=agent, is_newcomer=rank is None)
        self.agents[agent].append(WorkerStarted(incarnation=name, machine=agent, rank=rank))
        return name

    def join(self, agent: str = "") -> None:
        name = self._start(f"w{len(self.workers)}", None, agent)
        self.faults.append(f"join {name}")

    def kill(self, worker: Worker) -> None:
        self.faults.append(f"kill {worker.name} {worker.mode}")
        self._exit(worker, -9)

    def fail(self, worker: Worker) -> None:
        self.faults.append(f"fail {worker.name}")
        self._exit(worker, 1, "ValueError: the user's")

    def notice(self, worker: Worker, deadline_s: float, by_machine: bool = False) -> None:
        self.faults.append(f"notice {worker.name} {deadline_s}")
        self.agents[worker.agent].append(
            LeaveAsked(
                incarnation="" if by_machine else worker.name,
                machine=worker.agent if by_machine else "",
                deadline_s=deadline_s,
                source="test",
            )
        )

    def freeze(self, worker: Worker) -> None:
        self.faults.append(f"freeze {worker.name}")
        worker.frozen = True

    def lose(self, worker: Worker) -> None:
        """No heartbeat of a worker, which may be alive and well."""
        self.faults.append(f"lose {worker.name}")
        self.deliver("", WorkerLost(incarnation=worker.name, reason="no heartbeat"))

    def save(self) -> None:
        """A checkpoint of what has happened so far becomes complete."""
        members = self.manager.job.members()
        if not members:
            return
        self.faults.append(f"save {len(self.ledger)}")
        complete = CheckpointComplete(next_step=len(self.ledger), address=f"step-{len(self.ledger)}")
        self.saved.append(complete)
        self.deliver(members[0].incarnation, complete)

    def _exit(self, worker: Worker, code: int, failure: str = "") -> None:
        worker.is_alive = False
        worker.mode = "ended"
        worker.ended_well = code == 0
        worker.inbox.clear()
        self.agents[worker.agent].append(WorkerExited(incarnation=worker.name, code=code, failure=failure))

    # --- what can happen next ---------------------------------------------------------------

    def actions(self) -> list[Action]:
        """Everything that goes on by itself."""
        found: list[Action] = []
        for agent, queue in self.agents.items():
            if queue:
                found.append(functools.partial(self._deliver_agent, agent))
        for worker in self.workers.values():
            if worker.outbox and not worker.frozen:
                found.append(functools.partial(self._deliver_worker, worker))
            if not worker.is_alive or worker.frozen:
                continue
            if worker.inbox:
                found.append(functools.partial(self._receive, worker))
            found += self._own_actions(worker)
        return found

    def _deliver_agent(self, agent: str) -> None:
        self.deliver(agent, self.agents[agent].popleft())

    def _deliver_worker(self, worker: Worker) -> None:
        self.deliver(worker.name, worker.outbox.popleft())

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

    # --- to the end -------------------------------------------------------------------------

    def drain(self) -> None:
        """No more faults: let everything happen, in turn, until nothing more does."""
        for _ in range(60):
            for worker in list(self.workers.values()):
                if worker.frozen and worker.is_alive:
                    self.lose(worker)
            count = 0
            while actions := self.actions():
                actions[count % len(actions)]()
                count += 1
                assert count < 20_000, "it never comes to rest"
            if self.manager.job.phase in ENDED:
                return
            self.advance(5.0)
