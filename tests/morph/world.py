"""A world for the manager: workers that behave as ``varuna.run.member`` does, agents, and the network.

No thread, no clock: ``World.actions`` lists what could happen next, whoever drives the world picks. A worker's
sections carry the number of updates they have had, so an update lost or made twice shows at once.
"""

from __future__ import annotations

import functools
from collections import deque

import msgspec

from tests.morph import world_parts
from tests.morph.world_parts import DESCRIBED, Action, Message, Record, Worker
from tests.morph.world_workers import WorldWorkers
from varuna.morph.instructions import Instruction, SamplesTold, Send, StepsCommitted, StepsUndone, Tell
from varuna.morph.journal import Journal
from varuna.morph.messages import (
    CheckpointComplete,
    Described,
    Form,
    FromAgent,
    JobEnded,
    LeaveAsked,
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


class World(WorldWorkers):
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
        step, sequence = len(self.ledger), len(self.saved) + 1
        complete = CheckpointComplete(next_step=step, sequence=sequence, address=f"step-{step}")
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
