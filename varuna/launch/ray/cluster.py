"""The Ray cluster that this process is a driver of: every call of Ray is here. Needs ``varuna[ray]``."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from varuna.errors import ConfigError
from varuna.launch.ray.actor import NodeAgent
from varuna.launch.ray.nodes import Node, read_nodes

_CLIENT = "ray://"
_AUTO = "auto"
_CONNECT_S = 10.0


class RayTrouble(Exception):
    """Ray could not do something; its words in one line."""


class NotNow(Exception):
    """An actor could not be reached, and perhaps can be again."""


class RayCluster:
    """A cluster, for as long as this process takes part.

    Args:
        address: ``auto``, or ``HOST:PORT`` of the head node.

    Raises:
        ConfigError: Ray is not installed, or there is no such cluster.
    """

    def __init__(self, address: str) -> None:
        self._ray = _import_ray()
        _check(address)
        try:
            self._ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError, self._ray.exceptions.RayError) as error:
            raise ConfigError(
                f"--ray {address}: no Ray cluster was reached: {_first_line(error)}. Run the command on one of "
                f"its nodes, and give auto, or HOST:PORT of the head node."
            ) from error

    @property
    def here(self) -> str:
        """This node's address, as the other nodes reach it."""
        return str(self._ray.util.get_node_ip_address())

    @property
    def directory(self) -> str:
        """Where agents run: this process's folder; empty if Ray brings the job's folder to each node."""
        brings = self._ray.get_runtime_context().runtime_env.get("working_dir")
        return "" if brings else os.getcwd()

    def nodes(self) -> tuple[Node, ...]:
        """Those that are alive.

        Raises:
            RayTrouble: Ray does not say.
        """
        try:
            listed = self._ray.nodes()
            # drain notices are told in no other way; Ray's own libraries ask so, too
            draining = self._ray._private.state.state.get_draining_nodes()
        except (ConnectionError, RuntimeError, self._ray.exceptions.RayError) as error:
            raise RayTrouble(_first_line(error)) from error
        return read_nodes(listed, draining, time.time() * 1e3)

    def request(self, bundles: Sequence[Mapping[str, float]]) -> None:
        """Ask the autoscaler, if there is one, for nodes for all of these, instead of what was asked before.

        Raises:
            RayTrouble: Ray does not take it.
        """
        from ray.autoscaler.sdk import request_resources

        try:
            request_resources(bundles=[dict(bundle) for bundle in bundles])
        except (ConnectionError, RuntimeError, self._ray.exceptions.RayError) as error:
            raise RayTrouble(_first_line(error)) from error

    def place(self, node: Node, taken: Mapping[str, float], arguments: Sequence[str], directory: str) -> Any:
        """Have a ``NodeAgent`` made on a node, once what is to be taken is free; returns its handle."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        others = {name: number for name, number in taken.items() if name not in ("CPU", "GPU", "memory")}
        memory = {"memory": int(taken["memory"])} if "memory" in taken else {}
        actor = self._ray.remote(NodeAgent).options(
            num_cpus=taken.get("CPU", 0),
            num_gpus=taken.get("GPU", 0),
            resources=others,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
            max_concurrency=2,  # it is told things while it reads
            **memory,
        )
        return actor.remote(list(arguments), directory)

    def is_ready(self, reference: Any) -> bool:
        """Whether a call has been answered, well or not."""
        return self.wait([reference], 0.0)

    def wait(self, references: Sequence[Any], timeout_s: float) -> bool:
        """Wait for an answer to one of these calls."""
        return bool(self._ray.wait(list(references), timeout=timeout_s)[0])

    def answer(self, reference: Any) -> Any:
        """The answer to a call that is ready.

        Raises:
            NotNow: whether the call was made is not known.
            RayTrouble: the actor was lost, or could not be made.
        """
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.ActorUnavailableError as error:
            raise NotNow from error
        except self._ray.exceptions.RayError as error:
            raise RayTrouble(_first_line(error)) from error

    def kill(self, actor: Any) -> None:
        """End an actor, and what it has taken of its node."""
        self._ray.kill(actor)

    def close(self) -> None:
        """Take part no more; actors that are left end. Idempotent."""
        self._ray.shutdown()


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"--ray needs Ray ({error}). Do: pip install 'varuna[ray]'") from error
    return ray


def _check(address: str) -> None:
    """Raise ``ConfigError`` for an address at which there is no cluster; Ray itself tries that for minutes."""
    if address.startswith(_CLIENT):
        raise ConfigError(
            f"--ray {address}: the command has to run on a node of the cluster, without Ray's client: "
            f"`ray job submit --address http://HEAD:8265 -- varuna run --ray auto ...`."
        )
    host, _, port = address.rpartition(":")
    if address == _AUTO:
        return
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"--ray {address!r} is no address. Give auto, or HOST:PORT of the cluster's head.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise ConfigError(
            f"--ray {address}: nothing answers at {host}:{port} ({error}). Run the command on a node of the "
            f"cluster, and give auto, or HOST:PORT of its head (6379 where it was not chosen)."
        ) from error


def _first_line(error: Exception) -> str:
    """What an error says, without the pages that Ray adds."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".:") if lines else type(error).__name__
