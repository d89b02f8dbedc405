"""The task files for SkyPilot: what their shell does. Its own parser: ``tests/services/test_sky.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from varuna.cli.machines import agent, manager

EXAMPLES = Path(__file__).parents[2] / "examples"
TELL = """#!{python}
import json, os, sys
with open("told", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
sys.exit(int(os.environ.get("EXIT", "0")) if sys.argv[1] == "agent" else 0)
"""
TASK = "sky-managed-2026-11-30-00-19-55-123456_varuna_1-0"
TOKEN = "t" * 20


def shell(directory: Path, name: str, **given: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run a task's commands with a `varuna` that only tells what it was given; exit code, and that."""
    task = yaml.safe_load((EXAMPLES / name).read_text())
    tell = directory / "varuna"
    tell.write_text(TELL.format(python=sys.executable))
    tell.chmod(0o755)
    environ = {name: str(value) for name, value in task["envs"].items()}
    result = subprocess.run(
        ["bash", "-u", "-c", task["run"]],
        cwd=directory,
        env={"PATH": f"{directory}:/usr/bin:/bin", "HOME": str(directory), "VARUNA_TOKEN": TOKEN}
        | environ
        | {"SKYPILOT_TASK_ID": TASK, **given},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not result.stderr
    lines = [json.loads(line) for line in (directory / "told").read_text().splitlines()]
    commands = {"manager": manager, "agent": agent}
    return result.returncode, {
        words[0]: commands[words[0]].make_context("", words[1:]).params for words in lines
    }


def node(directory: Path, rank: int, **given: str) -> tuple[int, dict[str, dict[str, Any]]]:
    ips = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3", "SKYPILOT_NUM_NODES": "3"}
    return shell(directory, "sky.yaml", **ips, SKYPILOT_NODE_RANK=str(rank), **given)


def test_the_first_node_has_the_manager_and_an_agent(tmp_path: Path) -> None:
    code, told = node(tmp_path, 0, SKYPILOT_NUM_GPUS_PER_NODE="8")
    assert code == 0
    assert told["manager"]["listen"] == "10.0.0.1:7000"
    assert told["manager"]["min_workers"] == 24
    assert told["manager"]["state"] == tmp_path / f"varuna-{TASK}"
    assert told["agent"]["url"] == "http://10.0.0.1:7000"
    assert (told["agent"]["name"], told["agent"]["workers"]) == ("machine-0", 8)
    assert told["agent"]["checkpoint_url"] == f"s3://my-bucket/varuna/{TASK}"
    assert (told["agent"]["script"], told["agent"]["arguments"][:1]) == ("examples/gpt.py", ("--size",))


def test_other_nodes_have_an_agent(tmp_path: Path) -> None:
    code, told = node(tmp_path, 2)
    assert code == 0
    assert list(told) == ["agent"]
    assert told["agent"]["url"] == "http://10.0.0.1:7000"
    assert (told["agent"]["name"], told["agent"]["workers"]) == ("machine-2", 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_agents_exit_code_is_the_nodes(tmp_path: Path, rank: int) -> None:
    assert node(tmp_path, rank, EXIT="3")[0] == 3


def test_a_machine_of_its_own(tmp_path: Path) -> None:
    code, told = shell(tmp_path, "sky-machine.yaml")
    assert code == 0
    assert list(told) == ["agent"]
    assert told["agent"]["name"] == TASK
    assert told["agent"]["url"] == "http://10.0.0.1:7000"
    assert told["agent"]["script"] == "examples/gpt.py"


def test_no_secret_is_in_the_files() -> None:
    for path in EXAMPLES.glob("sky*.yaml"):
        task = yaml.safe_load(path.read_text())
        assert task["secrets"] == {"VARUNA_TOKEN": None}
