"""Nodes of a Ray cluster, and what follows for a job's agents from how they are. Pure: works without Ray."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from varuna.errors import ConfigError

PATIENCE_S = 30.0
"""An agent that Ray has not placed for so long (its node is busy) does not count as one of those wanted."""

_SHORTEST_S = 0.1  # a deadline that has passed
_NUM_ID_LETTERS = 6


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node that is alive.

    Attributes:
        node_id: Ray's.
        host: the name that it was started with, or its host name; several nodes may have it.
        resources: all that it has, by name.
        is_draining: it goes away, and takes nothing new.
        leave_s: seconds until it goes; None if it does not, or nobody has said when.
    """

    node_id: str
    host: str
    resources: Mapping[str, float]
    is_draining: bool = False
    leave_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Placed:
    """An agent that was started.

    Attributes:
        node_id: where.
        name: of the machine, as the job knows it.
        waits_s: for Ray to start it; None once it runs.
        was_told: that it has to leave.
    """

    node_id: str
    name: str
    waits_s: float | None = None
    was_told: bool = False


@dataclass(frozen=True, kw_only=True)
class NodeNeeds:
    """What the job takes of nodes.

    Attributes:
        reserved: on each node, by name of the resource; a node that has less is not used.
        all_gpus: every GPU of a node, instead of the number in ``reserved``.
        num_workers: on each; None for one per GPU that is taken, or one.
        most: nodes; None for all.
    """

    reserved: Mapping[str, float]
    all_gpus: bool = False
    num_workers: int | None = None
    most: int | None = None

    def fits(self, node: Node) -> bool:
        """Whether a node has what is needed, busy or not."""
        return all(node.resources.get(name, 0.0) >= number for name, number in self.reserved.items())

    def taken(self, node: Node) -> dict[str, float]:
        """What an agent takes of a node that fits."""
        gpus = {"GPU": node.resources["GPU"]} if self.all_gpus else {}
        return {**self.reserved, **gpus}

    def workers(self, node: Node) -> int:
        """How many there are on a node that fits."""
        return self.num_workers or max(1, int(self.taken(node).get("GPU", 1)))


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A node goes away: its agent has to leave.

    Attributes:
        name: the machine's.
        within_s: how long it has; None if nobody has said.
    """

    name: str
    within_s: float | None


@dataclass(frozen=True, kw_only=True)
class Follows:
    """What follows from a look at the cluster.

    Attributes:
        start: nodes on which an agent is to start.
        notices: agents that have to leave.
        gone: machines whose node is not there any more.
        given_up: agents that Ray has not placed and that are not wanted any more.
    """

    start: tuple[Node, ...] = ()
    notices: tuple[Notice, ...] = ()
    gone: tuple[str, ...] = ()
    given_up: tuple[str, ...] = ()


def follow(
    placed: Sequence[Placed], nodes: Sequence[Node], needs: NodeNeeds, *, not_yet: Collection[str] = ()
) -> Follows:
    """From agents that were started, and the nodes that there are, to what is to be done.

    Args:
        placed: agents that have not ended, one a node at most.
        nodes: those that are alive.
        needs: the job's.
        not_yet: ids of nodes on which an agent has failed, and that have to wait.
    """
    there = {node.node_id: node for node in nodes}
    alive = [one for one in placed if one.node_id in there]
    leaving = [one for one in alive if there[one.node_id].is_draining]
    staying = [one for one in alive if one not in leaving and not one.was_told]
    running = [one for one in staying if one.waits_s is None]
    waiting = [one for one in staying if one.waits_s is not None]
    has_enough = needs.most is not None and len(running) >= needs.most
    patient = [one for one in waiting if one.waits_s is not None and one.waits_s < PATIENCE_S]
    taken = {one.node_id for one in placed}
    free = [
        node
        for node in sorted(nodes, key=lambda node: (node.host, node.node_id))
        if needs.fits(node)
        and not node.is_draining
        and node.node_id not in taken
        and node.node_id not in not_yet
    ]
    room = None if needs.most is None else max(0, needs.most - len(running) - len(patient))
    return Follows(
        start=tuple(free[:room]),
        notices=tuple(
            Notice(name=one.name, within_s=there[one.node_id].leave_s)
            for one in leaving
            if one.waits_s is None and not one.was_told
        ),
        gone=tuple(one.name for one in placed if one.node_id not in there),
        given_up=tuple(
            one.name for one in (*leaving, *(waiting if has_enough else ())) if one.waits_s is not None
        ),
    )


def read_nodes(
    listed: Sequence[Mapping[str, object]], draining: Mapping[str, int], now_ms: float
) -> tuple[Node, ...]:
    """Nodes that are alive, from what Ray says.

    Args:
        listed: what ``ray.nodes()`` returns.
        draining: ids of nodes that are drained, with the time of their end in ms; 0 if that is not known.
        now_ms: on the same clock.
    """
    nodes = []
    for row in listed:
        resources = row["Resources"]
        if not row["Alive"]:
            continue
        assert isinstance(resources, Mapping)
        node_id = str(row["NodeID"])
        end_ms = draining.get(node_id)
        is_named = row["NodeName"] not in ("", row["NodeManagerAddress"])
        nodes.append(
            Node(
                node_id=node_id,
                host=str(row["NodeName" if is_named else "NodeManagerHostname"]),
                resources={str(name): float(number) for name, number in resources.items()},
                is_draining=end_ms is not None,
                leave_s=max(_SHORTEST_S, (end_ms - now_ms) / 1e3) if end_ms else None,
            )
        )
    return tuple(nodes)


def name_of(node: Node, taken: Collection[str]) -> str:
    """What to call a machine: as its node, or with some of the node's id if another is called so."""
    return node.host if node.host not in taken else f"{node.host}-{node.node_id[:_NUM_ID_LETTERS]}"


def needs_of(
    reserved: Mapping[str, float] | None, num_workers: int | None, most: int | None, nodes: Sequence[Node]
) -> NodeNeeds:
    """What is needed where a user has not said: all GPUs of nodes that have some, else a CPU for each worker.

    Args:
        reserved: what the user has said of resources; None for nothing.
        num_workers: what the user has said of workers a node; None for nothing.
        most: see ``NodeNeeds``.
        nodes: those that are alive at first.
    """
    all_gpus = False
    if reserved is None:
        has_gpus = any(node.resources.get("GPU", 0.0) >= 1 for node in nodes)
        all_gpus = has_gpus and num_workers is None
        reserved = {"GPU" if has_gpus else "CPU": float(num_workers or 1)}
    return NodeNeeds(reserved=reserved, all_gpus=all_gpus, num_workers=num_workers, most=most)


def fewest_workers(needs: NodeNeeds, nodes: Sequence[Node], num_nodes: int) -> int:
    """How many workers so many nodes have at least, judged by those that fit."""
    there = [needs.workers(node) for node in nodes if needs.fits(node)]
    fallback = needs.num_workers or max(1, int(needs.reserved.get("GPU", 1)))
    return num_nodes * min(there, default=fallback)


def bundles(needs: NodeNeeds, nodes: Sequence[Node]) -> list[dict[str, float]]:
    """What to ask Ray's autoscaler for: as much as the job takes of ``most`` nodes."""
    taken = [needs.taken(node) for node in nodes if needs.fits(node)]
    one = max(taken, key=lambda resources: resources.get("GPU", 0.0), default=dict(needs.reserved))
    return [dict(one) for _ in range(needs.most or 0)]


def read_resources(text: str) -> dict[str, float]:
    """``GPU=4,CPU=8,accelerator_type:A100=0.001``: what to reserve on each node, by Ray's names.

    Raises:
        ConfigError: it cannot be read, or is nothing that Ray reserves.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.rpartition("="))
        number = _number(value)
        if not equals or not name or name in found or number is None:
            raise ConfigError(
                f"--ray-resources {text!r}: {part.strip()!r} is no NAME=NUMBER that is there once. Write, for "
                f"example, GPU=4,CPU=8."
            )
        if number > 1 and number != int(number):
            raise ConfigError(f"--ray-resources {text!r}: Ray reserves whole numbers above 1, not {number:g}.")
        found[name] = number
    return found


def _number(text: str) -> float | None:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and number > 0 else None
