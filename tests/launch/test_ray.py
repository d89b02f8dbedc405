"""Jobs over Ray, without Ray: what follows from two looks at a cluster, and the part that runs on a node."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from tests.launch.jobs import wait_until
from varuna.cli import main
from varuna.errors import ConfigError
from varuna.launch.orders import Header, Order, encode_header, encode_order
from varuna.launch.ray.actor import Heard, NodeAgent
from varuna.launch.ray.nodes import (
    PATIENCE_S,
    Follows,
    Node,
    NodeNeeds,
    Notice,
    Placed,
    bundles,
    fewest_workers,
    follow,
    name_of,
    needs_of,
    read_nodes,
    read_resources,
)


def node(name: str, *, drains: bool = False, leave_s: float | None = None, **resources: float) -> Node:
    return Node(
        node_id=f"id-{name}",
        host=name,
        resources=resources or {"CPU": 4},
        is_draining=drains or leave_s is not None,
        leave_s=leave_s,
    )


def placed(name: str, *, waits_s: float | None = None, was_told: bool = False) -> Placed:
    return Placed(node_id=f"id-{name}", name=name, waits_s=waits_s, was_told=was_told)


CPU = NodeNeeds(reserved={"CPU": 2})
A, B, C, D = (node(name) for name in "abcd")


def test_nodes_that_come_and_go() -> None:
    assert follow([], [B, A], CPU) == Follows(start=(A, B))
    assert follow([placed("a"), placed("b")], [A, B], CPU) == Follows()
    assert follow([placed("a"), placed("b")], [A, C], CPU) == Follows(start=(C,), gone=("b",))
    assert follow([placed("a", waits_s=1)], [B], CPU) == Follows(start=(B,), gone=("a",))


def test_a_node_that_is_drained_gets_a_notice_once_and_no_new_agent() -> None:
    drained = node("b", leave_s=12.5)
    told = Follows(notices=(Notice(name="b", within_s=12.5),))
    assert follow([placed("a"), placed("b")], [A, drained], CPU) == told
    assert follow([placed("a"), placed("b", was_told=True)], [A, drained], CPU) == Follows()
    assert follow([placed("a")], [A, drained], CPU) == Follows()
    assert follow([placed("b")], [node("b", drains=True)], CPU) == Follows(
        notices=(Notice(name="b", within_s=None),)
    )
    assert follow([placed("b", waits_s=3)], [drained], CPU) == Follows(given_up=("b",))


def test_only_nodes_that_fit() -> None:
    nodes = [node("head", CPU=0), node("small", CPU=1), node("big", CPU=8), node("gpu", CPU=2, GPU=4)]
    assert [one.host for one in follow([], nodes, CPU).start] == ["big", "gpu"]
    assert [one.host for one in follow([], nodes, NodeNeeds(reserved={"GPU": 1})).start] == ["gpu"]
    assert follow([], nodes, NodeNeeds(reserved={"TPU": 1})) == Follows()


def test_a_node_on_which_an_agent_failed_waits() -> None:
    assert follow([], [A, B], CPU, not_yet=["id-a"]) == Follows(start=(B,))


def test_no_more_nodes_than_wanted() -> None:
    two = NodeNeeds(reserved={"CPU": 2}, most=2)
    assert follow([], [A, B, C], two) == Follows(start=(A, B))
    assert follow([placed("c")], [A, B, C], two) == Follows(start=(A,))
    assert follow([placed("b"), placed("c")], [A, B, C], two) == Follows()
    leaves = follow([placed("b"), placed("c")], [A, B, node("c", leave_s=9)], two)
    assert leaves == Follows(start=(A,), notices=(Notice(name="c", within_s=9),))
    assert follow([placed("b"), placed("c", was_told=True)], [A, B, C], two) == Follows(start=(A,))


def test_a_busy_node_does_not_count_for_ever() -> None:
    two = NodeNeeds(reserved={"CPU": 2}, most=2)
    assert follow([placed("a"), placed("b", waits_s=1)], [A, B, C], two) == Follows()
    late = placed("b", waits_s=PATIENCE_S)
    assert follow([placed("a"), late], [A, B, C], two) == Follows(start=(C,))
    assert follow([placed("a"), placed("c"), late], [A, B, C], two) == Follows(given_up=("b",))
    assert follow([placed("a"), late], [A, B], CPU) == Follows()


def row(name: str, **values: Any) -> dict[str, Any]:
    known = {"Alive": True, "NodeName": "10.0.0.7", "NodeManagerAddress": "10.0.0.7", "Resources": {"CPU": 2.0}}
    return {"NodeID": f"id-{name}", "NodeManagerHostname": name, **known, **values}


def test_what_ray_says() -> None:
    rows = [row("a"), row("b", Alive=False), row("c", NodeName="mine"), row("d"), row("e", Resources={})]
    found = read_nodes(rows, {"id-a": 0, "id-c": 61_000, "id-d": 500}, now_ms=1_000)
    assert found == (
        node("a", drains=True, CPU=2),
        Node(node_id="id-c", host="mine", resources={"CPU": 2}, is_draining=True, leave_s=60),
        node("d", leave_s=0.1, CPU=2),
        Node(node_id="id-e", host="e", resources={}),
    )


def test_names_are_given_once() -> None:
    twin = Node(node_id="0123456789", host="a", resources={})
    assert name_of(twin, []) == "a"
    assert name_of(twin, ["a", "b"]) == "a-012345"


def test_what_is_needed_where_nobody_has_said() -> None:
    cpus, gpus = [node("a", CPU=8)], [node("a", CPU=8), node("b", CPU=8, GPU=4), node("c", CPU=8, GPU=8)]
    assert needs_of(None, None, None, cpus) == NodeNeeds(reserved={"CPU": 1})
    assert needs_of(None, 3, 2, cpus) == NodeNeeds(reserved={"CPU": 3}, num_workers=3, most=2)
    assert needs_of({"TPU": 4}, None, None, gpus) == NodeNeeds(reserved={"TPU": 4})
    assert needs_of(None, 2, None, gpus) == NodeNeeds(reserved={"GPU": 2}, num_workers=2)
    all_gpus = needs_of(None, None, 3, gpus)
    assert [one.host for one in follow([], gpus, all_gpus).start] == ["b", "c"]
    assert [(all_gpus.taken(one), all_gpus.workers(one)) for one in gpus[1:]] == [
        ({"GPU": 4}, 4),
        ({"GPU": 8}, 8),
    ]
    assert fewest_workers(all_gpus, gpus, 3) == 12
    assert bundles(all_gpus, gpus) == [{"GPU": 8}] * 3
    assert bundles(NodeNeeds(reserved={"GPU": 4, "CPU": 2}, most=2), []) == [{"GPU": 4, "CPU": 2}] * 2
    assert fewest_workers(NodeNeeds(reserved={"GPU": 4}), [], 2) == 8
    assert fewest_workers(NodeNeeds(reserved={"CPU": 4}, num_workers=3), [], 2) == 6
    assert NodeNeeds(reserved={"GPU": 0.5}).workers(A) == 1


def test_resources() -> None:
    assert read_resources("GPU=4, CPU=0.5,accelerator_type:A100=0.001") == {
        "GPU": 4,
        "CPU": 0.5,
        "accelerator_type:A100": 0.001,
    }
    for wrong in ("", "GPU", "GPU=", "=4", "GPU=x", "GPU=0", "GPU=-1", "GPU=inf", "GPU=nan", "GPU=1,GPU=2"):
        with pytest.raises(ConfigError, match="--ray-resources"):
            read_resources(wrong)
    with pytest.raises(ConfigError, match="whole numbers above 1"):
        read_resources("CPU=1.5")


# --- the command ----------------------------------------------------------------------------


def refused(directory: Path, *flags: str) -> str:
    (directory / "train.py").touch()
    ended = CliRunner().invoke(main, ["run", *flags, str(directory / "train.py")])
    assert ended.exit_code == 2, ended.output
    return ended.stderr


def test_flags_that_cannot_be(tmp_path: Path) -> None:
    assert "Add --slurm or --ray ADDRESS" in refused(tmp_path, "--nodes", "3")
    assert "Add --ray ADDRESS" in refused(tmp_path, "--ray-resources", "GPU=1")
    assert "Give one of them" in refused(tmp_path, "--ray", "auto", "--hosts", "hosts.txt")
    assert "--nodes 'x'" in refused(tmp_path, "--ray", "auto", "--nodes", "x")
    assert "--ray-resources 'x'" in refused(tmp_path, "--ray", "auto", "--ray-resources", "x")


def test_ray_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'varuna[ray]'" in refused(
        tmp_path, "--ray", "auto", "--log-dir", str(tmp_path / "logs")
    )
    assert not (tmp_path / "logs").exists()


def test_help_imports_no_ray() -> None:
    code = "import sys, varuna.cli, varuna.cli.ray; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- on a node ------------------------------------------------------------------------------

FAKE = """
import sys
header, *rest = sys.stdin
print("told", rest, flush=True)
print(header, end="", file=sys.stderr)
print("no end", end="")
sys.exit(7)
"""


Start = Callable[..., NodeAgent]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts an agent in whose place a script runs."""
    (tmp_path / "varuna.py").write_text(FAKE)
    made: list[NodeAgent] = []

    def start(*arguments: str) -> NodeAgent:
        agent = NodeAgent(arguments, str(tmp_path))
        made.append(agent)
        return agent

    yield start
    for agent in made:
        process = agent._process
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()


def test_a_nodes_agent_is_told_and_heard(start: Start) -> None:
    agent = start("--name", "a")
    header = encode_header(Header(token="secret-token-0123"))
    assert agent.start(header) == ""
    assert agent.start(header) == ""  # the same one
    assert msgspec.msgpack.decode(agent.read(0.0), type=Heard) == Heard()
    agent.tell(encode_order(Order(word="leave", within_s=3)))
    assert agent._process is not None
    assert agent._process.stdin is not None
    agent._process.stdin.close()
    heard: list[Heard] = []

    def has_ended() -> bool:
        heard.append(msgspec.msgpack.decode(agent.read(), type=Heard))
        return heard[-1].code is not None

    wait_until(has_ended, 120)
    assert b"".join(one.stdout for one in heard) == b"told ['leave 3.0\\n']\nno end"
    assert b"".join(one.stderr for one in heard) == header
    assert [one.code for one in heard] == [None] * (len(heard) - 1) + [7]
    assert "secret" not in str(agent._process.args)


def test_a_node_without_the_folder_says_so(tmp_path: Path) -> None:
    agent = NodeAgent([], str(tmp_path / "none"))
    assert "there is no folder" in agent.start(b"{}\n")
