"""A Ray cluster on this machine, whose nodes come and go: ``python -m tests.services.ray_nodes``.

It answers requests, one JSON object a line, and is a process of its own, so that Ray is in no other. A head
without CPUs is there at first. ``{"add": NAME}`` adds a node of 2 CPUs; ``{"kill": NAME}`` takes one away as a
power cut does, with all that runs there; ``{"drain": NAME, "seconds": S}`` announces its end; ``{"alive":
NAME}`` tells whether Ray knows it; ``{"nodes": true}`` how many it knows; ``{"end": true}`` ends all and names
the processes that are left. What Ray prints goes to the file that the variable ERRORS names.

With ``--scales`` Ray's autoscaler adds nodes of 1 CPU when they are asked for, 3 at most, and takes them away
when they are idle for some seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._raylet import GcsClient
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from varuna.launch.processes import adopt_orphans

_ENDING_S = 15
_LISTS = (
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "initialization_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
    "cluster_synced_files",
    "rsync_exclude",
    "rsync_filter",
)
_TABLES = ("file_mounts", "auth", "docker", "head_node", "worker_nodes")
_QUIET = {"include_dashboard": False, "object_store_memory": 80 << 20}


class Nodes:
    """The cluster's."""

    def __init__(self, **head: Any) -> None:
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **_QUIET, **head})
        self.by_name: dict[str, Any] = {}

    def add(self, name: str) -> None:
        """One more, with a resource of its own, too."""
        self.by_name[name] = self.cluster.add_node(
            num_cpus=2, node_name=name, resources={name: 1}, object_store_memory=80 << 20
        )

    def kill(self, name: str) -> None:
        """Everything on it at once."""
        node = self.by_name.pop(name)
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        for process in [raylet, *raylet.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.cluster.remove_node(node, allow_graceful=False)

    def drain(self, name: str, seconds: float) -> None:
        """Its provider takes it away in so many seconds."""
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline_ms = int((time.time() + seconds) * 1000)
        client = GcsClient(address=self.cluster.address)
        accepted, why = client.drain_node(self.by_name[name].node_id, reason, "preempted", deadline_ms)
        assert accepted, why

    def is_alive(self, name: str) -> bool:
        """Whether Ray knows it."""
        table = self.cluster.global_state.node_table()
        return any(row["NodeID"] == self.by_name[name].node_id and row["Alive"] for row in table)

    def count(self) -> int:
        """Nodes that Ray knows, besides the head."""
        return sum(row["Alive"] for row in self.cluster.global_state.node_table()) - 1

    def end(self) -> list[str]:
        """All of it; what is left a while later, and killed then."""
        self.cluster.shutdown()
        _, left = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=_ENDING_S)
        for process in left:
            process.kill()
        return [f"{process.name()} ({process.pid})" for process in left]

    def answer(self, request: dict[str, Any]) -> Any:
        """To a request."""
        match request:
            case {"add": str(name)}:
                return self.add(name)
            case {"kill": str(name)}:
                return self.kill(name)
            case {"drain": str(name), "seconds": seconds}:
                return self.drain(name, seconds)
            case {"alive": str(name)}:
                return self.is_alive(name)
            case {"nodes": True}:
                return self.count()
            case {"end": True}:
                return self.end()
        raise AssertionError(request)


def scaling() -> dict[str, Any]:
    """What makes a head scale: nodes of the autoscaler are processes here."""
    os.environ |= {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    os.environ["RAY_OVERRIDE_NODE_ID_FOR_TESTING"] = os.environ["RAY_CLOUD_INSTANCE_ID"] = FAKE_HEAD_NODE_ID
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    provider = {
        "type": "fake_multinode",
        "gcs_address": f"{ray.util.get_node_ip_address()}:{port}",
        "head_node_id": FAKE_HEAD_NODE_ID,
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    types = {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "worker": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 3},
    }
    config = {
        "cluster_name": "test",
        "max_workers": 3,
        "idle_timeout_minutes": 0.05,
        "upscaling_speed": 100,
        "provider": provider,
        "available_node_types": types,
        "head_node_type": "ray.head.default",
        "file_mounts_sync_continuously": False,
        **{name: [] for name in _LISTS},
        **{name: {} for name in _TABLES},
    }
    path = Path(os.environ["RAY_TMPDIR"], "scaling.yaml")
    path.write_text(json.dumps(config))
    return {"autoscaling_config": str(path), "gcs_server_port": port}


def main() -> None:
    """Serve requests until standard input ends."""
    answers = os.dup(1)
    errors = os.open(os.environ["ERRORS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):  # what Ray prints is no answer
        os.dup2(errors, stream)
    adopt_orphans()
    nodes = Nodes(**scaling()) if "--scales" in sys.argv else Nodes()
    os.write(
        answers, json.dumps({"address": nodes.cluster.address, "version": ray.__version__}).encode() + b"\n"
    )
    for line in sys.stdin:
        os.write(answers, json.dumps(nodes.answer(json.loads(line))).encode() + b"\n")


if __name__ == "__main__":
    main()
