"""One node's agent, as the command sees it that had it started there through Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from varuna.launch.orders import Header, Order, encode_header, encode_order
from varuna.launch.output import write_stderr, write_stdout
from varuna.launch.ray.actor import Heard
from varuna.launch.ray.cluster import NotNow, RayCluster, RayTrouble
from varuna.launch.ray.nodes import Node, NodeNeeds, Placed


@dataclass(frozen=True, kw_only=True)
class RayCommand:
    """What to run on every node.

    Attributes:
        directory: where; see ``NodeAgent``.
        agent: arguments of ``varuna agent``, but for the machine's own; the script and its arguments last.
        header: what it is told on standard input.
    """

    directory: str
    agent: tuple[str, ...]
    header: Header


@dataclass(frozen=True, kw_only=True)
class AgentEnd:
    """How an agent has ended.

    Attributes:
        code: its exit code; None if nobody knows it.
        reason: why not, or why it did not start.
    """

    code: int | None
    reason: str = ""


class RayMachine:
    """An agent on a node, from the wish to have it there to its end.

    Args:
        cluster: where.
        command: what to run.
        node: on which node.
        name: what the machine is called in the job.
        needs: what is taken of the node.
        log_dir: what it prints goes there, to ``machine-NAME.log``, besides to this terminal behind its name.
        now_s: on the monotonic clock.
    """

    def __init__(
        self,
        cluster: RayCluster,
        command: RayCommand,
        node: Node,
        *,
        name: str,
        needs: NodeNeeds,
        log_dir: Path,
        now_s: float,
    ) -> None:
        self.name = name
        self.node_id = node.node_id
        self.was_told = False
        self.ended: AgentEnd | None = None
        self._placed_s = now_s
        self._runs = False
        self._cluster = cluster
        own = ("--name", name, "--from-launcher", "--workers", str(needs.workers(node)))
        self._actor = cluster.place(node, needs.taken(node), (*own, *command.agent), command.directory)
        self._header = encode_header(command.header)
        self._waits_for = self._call()
        log = log_dir / f"machine-{name.replace('/', '_')}.log"
        self._stdout, self._stderr = (_Lines(f"[{name}] ", log, sink) for sink in (write_stdout, write_stderr))

    def placed(self, now_s: float) -> Placed:
        """How it stands."""
        waits_s = None if self._runs else now_s - self._placed_s
        return Placed(node_id=self.node_id, name=self.name, waits_s=waits_s, was_told=self.was_told)

    def look(self) -> None:
        """Take what has come of it."""
        while self.ended is None and self._cluster.is_ready(self._waits_for):
            try:
                answer = self._cluster.answer(self._waits_for)
            except NotNow:  # Ray says so at once, or when the actor is lost
                self._waits_for = self._call()
                return
            except RayTrouble as trouble:
                self.ended = AgentEnd(code=None, reason=str(trouble))
                return
            if self._runs:
                self._hear(msgspec.msgpack.decode(answer, type=Heard))
            elif answer:
                self.ended = AgentEnd(code=None, reason=answer)
            else:
                self._runs = True
            self._waits_for = self._call()

    def tell(self, order: Order) -> None:
        """Ask it to leave the job, or to stop."""
        self.was_told = True
        self._actor.tell.remote(encode_order(order))

    def close(self) -> None:
        """End it, if it has not ended, and give back what it has taken of its node."""
        self._cluster.kill(self._actor)
        self._stdout.close()
        self._stderr.close()

    def _call(self) -> Any:
        """What it is asked next."""
        return self._actor.read.remote() if self._runs else self._actor.start.remote(self._header)

    def _hear(self, heard: Heard) -> None:
        self._stdout.feed(heard.stdout)
        self._stderr.feed(heard.stderr)
        if heard.code is not None:
            self.ended = AgentEnd(code=heard.code)

    @staticmethod
    def wait(cluster: RayCluster, machines: Sequence[RayMachine], timeout_s: float) -> None:
        """Wait for anything to come of these machines."""
        if machines:
            cluster.wait([machine._waits_for for machine in machines], timeout_s)


class _Lines:
    """Passes on lines that come in pieces: to a log, and behind a prefix to a sink."""

    def __init__(self, prefix: str, log: Path, sink: Callable[[bytes], None]) -> None:
        self._prefix = prefix.encode()
        self._log = log
        self._sink = sink
        self._partial = b""

    def feed(self, data: bytes) -> None:
        """Something has come."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        if lines:
            with self._log.open("ab") as log:
                log.writelines(line + b"\n" for line in lines)
        for line in lines:
            self._sink(self._prefix + line + b"\n")

    def close(self) -> None:
        """No more will come; the last line may lack its end."""
        if self._partial:
            self.feed(b"\n")
