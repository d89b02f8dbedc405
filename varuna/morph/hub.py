"""Between the manager's decisions and its connections: what arrives is decided on, what follows is delivered.

No sockets here: a connection is something that messages are put into. Everything runs in one thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from varuna.clock import Clock
from varuna.errors import ProtocolError
from varuna.morph.event_log import EventLog
from varuna.morph.heartbeat import Heartbeats, Suspect
from varuna.morph.instructions import Instruction, Send, StepsCommitted, StepsUndone, Tell
from varuna.morph.messages import (
    AgentLost,
    Alive,
    Beat,
    Described,
    FromAgent,
    FromWatch,
    FromWorker,
    LeaveAsked,
    StartWorker,
    ToAgent,
    Welcome,
    WorkerExited,
    WorkerLost,
    decode_from_agent,
    decode_from_worker,
    encode,
)
from varuna.morph.phases import Phase
from varuna.morph.record import WorkerStatus
from varuna.morph.state import Manager

HEARTBEAT_LIMIT_S = 10.0
"""A worker that is silent for so long is fenced."""

START_PATIENCE = 6
"""A worker that is in no generation yet gets so many times the limit: it imports, captures and compiles."""

RECONNECT_S = 5.0
"""What workers get beyond that to find a manager that was started again."""

ALIVE_S = 1.0
"""Agents hear of the manager so often."""

LOST_S = 3.0
"""An agent whose connection has ended and that has not come back for so long is gone, its workers with it."""


class Books(Protocol):
    """Where what happened is written down.

    Attributes:
        problem: why nothing is written any more, for people; empty while all is well.
    """

    problem: str

    def received(self, sender: str, message: FromWorker | FromAgent | FromWatch, now_s: float) -> None:
        """A message that the manager has handled."""

    def ticked(self, now_s: float) -> None:
        """The time was told to the manager, and something followed."""

    def follow(self, instructions: Sequence[Instruction]) -> None:
        """What followed."""


class Connection:
    """One side's line: what is put into ``queue`` is sent, in order; None closes it."""

    def __init__(self, name: str) -> None:
        self.name = name  # never used twice: to the heartbeats, each connection is an incarnation
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.close_reason = ""

    def send(self, data: bytes) -> None:
        """Send it when it can be sent."""
        self.queue.put_nowait(data)

    def close(self, reason: str) -> None:
        """Close it, after what was put in before."""
        self.close_reason = reason
        self.queue.put_nowait(None)


class Hub:
    """The manager and its connections.

    Args:
        manager: who decides.
        books: what is written down; None for nothing.
        clock: the manager's.
        heartbeat_limit_s: see ``HEARTBEAT_LIMIT_S``.
        welcome: what every agent is told first; None for nothing.
        described: called when the manager has heard what the job is, and at once if it knows.
    """

    def __init__(
        self,
        manager: Manager,
        clock: Clock,
        *,
        books: Books | None = None,
        heartbeat_limit_s: float = HEARTBEAT_LIMIT_S,
        welcome: Welcome | None = None,
        described: Callable[[Described], object] = lambda _: None,
    ) -> None:
        self._described = described
        self.manager = manager
        self.events = EventLog()
        self._clock = clock
        self._books = books
        self._hearts = Heartbeats(heartbeat_limit_s)
        self._num_connections = 0
        self._workers: dict[str, Connection] = {}
        self._agents: dict[str, Connection] = {}
        self._welcome = welcome
        self._machines: dict[str, str] = {}  # of agents
        self._away_s: dict[str, float] = {}  # since when agents are not connected
        self._was_silent = False
        self._alive_s = clock.now_s()  # when agents were last told that the manager is
        self._expect_members()
        for name in manager.job.agents:
            self._away_s[name] = clock.now_s() + RECONNECT_S
        if manager.job.description is not None:
            described(manager.job.description)

    # --- connections ------------------------------------------------------------------------

    def refusal_of(self, incarnation: str) -> str:
        """Why a worker may not connect; empty if it may."""
        worker = self.manager.job.workers.get(incarnation)
        if worker is None or worker.status is not WorkerStatus.GONE:
            return ""
        return worker.gone_reason or "its process has ended"

    def worker_connected(self, incarnation: str) -> Connection:
        """A worker is here, perhaps again."""
        connection = self._connected(self._workers, incarnation)
        self._hearts.expect(incarnation, connection.name, self._clock.now_s())
        return connection

    def agent_connected(self, name: str, machine: str = "") -> Connection:
        """An agent is here, perhaps again; ``machine`` is where, if that is not its name."""
        self._machines[name] = machine or name
        self._away_s.pop(name, None)
        return self._connected(self._agents, name, self._welcome)

    def worker_gone(self, incarnation: str, connection: Connection, *, in_order: bool) -> None:
        """A worker's connection has ended; ``in_order`` if it said so itself: it will not beat any more."""
        self._disconnected(self._workers, incarnation, connection)
        if in_order:
            self._hearts.fence(incarnation, connection.name, "it has closed its connection")

    def agent_gone(self, name: str, connection: Connection) -> None:
        """An agent's connection has ended."""
        self._disconnected(self._agents, name, connection)
        if name not in self._agents:
            self._away_s[name] = self._clock.now_s()

    def close(self) -> None:
        """Close all connections."""
        self.events.close()
        for connection in (*self._workers.values(), *self._agents.values()):
            connection.close("the manager ends")

    @property
    def connected(self) -> frozenset[str]:
        """Workers and agents that are connected."""
        return frozenset(self._workers) | frozenset(self._agents)

    # --- what arrives -----------------------------------------------------------------------

    def from_worker(self, incarnation: str, connection: Connection, data: bytes) -> None:
        """A worker's message.

        Raises:
            ProtocolError: it is none; nothing has changed.
        """
        message = decode_from_worker(data)
        if self._workers.get(incarnation) is not connection:
            return  # another connection of this worker has taken its place
        self._hearts.beat(incarnation, connection.name, self._clock.now_s())
        if not isinstance(message, Beat):
            self._take(incarnation, message)

    def from_agent(self, name: str, data: bytes) -> None:
        """An agent's message.

        Raises:
            ProtocolError: it is none; nothing has changed.
        """
        self._take(name, decode_from_agent(data))

    def ask_to_leave(self, wanted: LeaveAsked) -> tuple[str, ...]:
        """A person asks workers to leave; which ones that are.

        Raises:
            ProtocolError: there is no such worker or machine; nothing has changed.
        """
        alive = [
            worker
            for worker in self.manager.job.workers.values()
            if worker.status not in (WorkerStatus.GONE, WorkerStatus.LEAVING)
        ]
        asked = tuple(
            worker.incarnation
            for worker in alive
            if worker.incarnation == wanted.incarnation or (wanted.machine and worker.machine == wanted.machine)
        )
        if not asked:
            known = ", ".join(worker.incarnation for worker in alive) or "none"
            what = wanted.incarnation or f"machine {wanted.machine}"
            raise ProtocolError(f"No living worker is {what!r}. Living workers: {known}.")
        agent = self.manager.job.workers[asked[0]].agent
        self._take(agent, wanted)
        return asked

    def add_workers(self, count: int, machine: str = "") -> str:
        """Have an agent start newcomers; which one does.

        Raises:
            ProtocolError: no such agent is connected; nothing has changed.
        """
        offers = self.manager.job.offers
        names = [
            name
            for name in self._agents
            if machine in ("", self._machines[name]) and (name not in offers or offers[name].num_workers)
        ]
        if not names:
            what = f"the agent of machine {machine!r}" if machine else "no agent"
            raise ProtocolError(f"Workers cannot be added: {what} is {'not ' if machine else ''}connected.")
        name = min(names, key=self._num_living)
        text = f"{count} more worker{'s' if count > 1 else ''} asked of {name}"
        self._tell("adding", text, {"count": float(count)})
        self._agents[name].send(encode(StartWorker(count=count)))
        return self._machines[name]

    def tick(self) -> None:
        """Look at the time; call it a few times in the heartbeat's limit."""
        now_s = self._clock.now_s()
        for suspect in self._hearts.suspects(now_s):
            self._suspected(suspect)
        self._look_for_lost(now_s)
        if now_s >= self._alive_s + ALIVE_S:
            self._alive_s = now_s
            for connection in self._agents.values():
                connection.send(encode(Alive()))
        instructions = self.manager.tick(now_s)
        if instructions and self._books is not None:
            self._books.ticked(now_s)
        self._deliver(instructions)

    # --- what follows -----------------------------------------------------------------------

    def _take(self, sender: str, message: FromWorker | FromAgent | FromWatch) -> None:
        now_s = self._clock.now_s()
        instructions = self.manager.handle(sender, message, now_s)
        if self._books is not None:
            self._books.received(sender, message, now_s)
        if isinstance(message, WorkerExited):
            self._forget(message.incarnation)
        self._deliver(instructions)
        if isinstance(message, Described):
            self._described(message)

    def _deliver(self, instructions: Sequence[Instruction]) -> None:
        """Written down before anybody hears of it."""
        if instructions and self._books is not None:
            self._books.follow(instructions)
        if self._books is not None and self._books.problem:
            problem, self._books = self._books.problem, None
            self._tell("journal", problem)
        for instruction in instructions:
            match instruction:
                case Send():
                    self._send(instruction)
                case Tell():
                    self._tell(instruction.kind, instruction.text, instruction.figures)
                case StepsCommitted():
                    for index in range(instruction.first_step, instruction.end_step):
                        self.events.add("step", f"step {index}", instruction.generation, step_index=index)
                case StepsUndone():
                    first_step = instruction.first_step
                    text = f"steps from {first_step} on have to be run again"
                    self._tell("undone", text, {"first_step": float(first_step)})

    def _send(self, instruction: Send) -> None:
        """Whoever is away is told again when it comes back: ``Manager.repeat_for``."""
        to_agent = isinstance(instruction.message, ToAgent)
        connection = (self._agents if to_agent else self._workers).get(instruction.recipient)
        if connection is not None:
            connection.send(encode(instruction.message))

    def _tell(self, kind: str, text: str, figures: Mapping[str, float] | None = None) -> None:
        self.events.add(kind, text, self.manager.job.generation.number, figures=figures)

    def _connected(
        self, connections: dict[str, Connection], name: str, welcome: Welcome | None = None
    ) -> Connection:
        self._num_connections += 1
        connection = Connection(f"connection {self._num_connections}")
        old = connections.get(name)
        if old is not None:
            old.close("another connection has taken its place")
        connections[name] = connection
        if welcome is not None:
            connection.send(encode(welcome))
        for instruction in self.manager.repeat_for(name):
            if isinstance(instruction, Send):
                self._send(instruction)
        return connection

    @staticmethod
    def _disconnected(connections: dict[str, Connection], name: str, connection: Connection) -> None:
        if connections.get(name) is connection:
            del connections[name]

    # --- liveness ---------------------------------------------------------------------------

    def _expect_members(self) -> None:
        """A manager that was started again waits for those it knows."""
        now_s = self._clock.now_s()
        for worker in self.manager.job.with_status(WorkerStatus.READY, WorkerStatus.MEMBER):
            limit_s = self._hearts.limit_s + RECONNECT_S
            self._hearts.expect(worker.incarnation, "none yet", now_s, limit_s=limit_s)

    def _look_for_lost(self, now_s: float) -> None:
        """Agents that do not come back. Their workers are gone, too, if they are not heard, and others are."""
        job = self.manager.job
        for agent in [name for name, since_s in self._away_s.items() if now_s >= since_s + LOST_S]:
            if agent in job.offers and job.phase is Phase.FOUNDING:
                self._take("", AgentLost(agent=agent))
            for worker in list(job.workers.values()):
                is_lost = worker.agent == agent and worker.incarnation not in self._workers
                if is_lost and worker.status is not WorkerStatus.GONE and self._workers:
                    reason = "its connection has ended, and its agent's"
                    self._forget(worker.incarnation)
                    self._take("", WorkerLost(incarnation=worker.incarnation, reason=reason))

    def _num_living(self, agent: str) -> int:
        workers = self.manager.job.workers.values()
        return sum(one.agent == agent and one.status is not WorkerStatus.GONE for one in workers)

    def _suspected(self, suspect: Suspect) -> None:
        """Fence it, unless nobody would be left: then nobody gains by it, and it may yet come back."""
        worker = self.manager.job.workers.get(suspect.worker)
        starts = worker is None or worker.status is WorkerStatus.STARTED
        if starts and suspect.silent_s < START_PATIENCE * self._hearts.limit_s:
            return
        reason = f"no sign of life for {suspect.silent_s:.1f} s"
        if suspect.all_are_silent or len(self._hearts.live()) == 1:
            if not self._was_silent:
                self._tell("silence", f"{suspect.worker}: {reason}; nobody else is heard either, so all wait")
            self._was_silent = True
            return
        self._was_silent = False
        self._forget(suspect.worker)
        self._take("", WorkerLost(incarnation=suspect.worker, reason=reason))
        connection = self._workers.get(suspect.worker)
        if connection is not None:
            connection.close(reason)

    def _forget(self, incarnation: str) -> None:
        connection = self._hearts.live().get(incarnation)
        if connection is not None:
            self._hearts.fence(incarnation, connection, "it is gone")
