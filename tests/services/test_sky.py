"""The task files for SkyPilot: read by its own parser, and run as it runs them, each node a shell.

What the shell makes of their commands, ``tests/examples/test_sky_files.py`` looks at in no time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.services, pytest.mark.timeout(900)]

LONGEST_S = 400  # three processes import torch, on as few cores as there are
EXAMPLES = Path(__file__).parents[2] / "examples"
TASK = "sky-managed-2026-11-30-00-19-55-123456_varuna_1-0"
TRAIN = """
import sys, torch, varuna
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(2, (32,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = varuna.Varuna(model, optimizer, data, batch_size=8, loss_fn=torch.nn.functional.cross_entropy)
steps = [step.index for step in job.train(num_steps=int(sys.argv[1]))]
open(f"steps-{job.rank}", "w").write(f"{steps}")
"""


READ = """
import json, sys
import sky, yaml
task = sky.Task.from_yaml(sys.argv[1])
with open(sys.argv[1]) as file:  # as `sky jobs launch --secret VARUNA_TOKEN` does it
    given = sky.Task.from_yaml_config(yaml.safe_load(file), secrets_overrides=[("VARUNA_TOKEN", "t" * 20)])
[resources] = task.resources
print(json.dumps({
    "name": task.name, "num_nodes": task.num_nodes, "use_spot": resources.use_spot,
    "accelerators": resources.accelerators, "run": task.run, "envs": sorted(task.envs), "workdir": task.workdir,
    "secrets": sorted(given.secrets),
}))
"""


@pytest.fixture(scope="module")
def skypilot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has it, in an environment of its own."""
    directory = tmp_path_factory.mktemp("skypilot")
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    python = directory / "bin" / "python"
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "skypilot>=0.10"]
    subprocess.run(command, check=True)
    return python


def read(python: Path, path: Path, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-c", READ, path],
        cwd=EXAMPLES.parent,
        env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", ["sky.yaml", "sky-machine.yaml"])
def test_skypilot_takes_the_task(skypilot: Path, tmp_path: Path, name: str) -> None:
    result = read(skypilot, EXAMPLES / name, tmp_path)
    assert result.returncode == 0, result.stderr
    taken, loaded = json.loads(result.stdout.splitlines()[-1]), task(name)
    assert (taken["name"], taken["run"], taken["workdir"]) == (loaded["name"], loaded["run"], ".")
    assert (taken["num_nodes"], taken["use_spot"]) == (loaded.get("num_nodes", 1), True)
    assert taken["accelerators"] == {"A100": 8}
    assert taken["envs"] == sorted(loaded["envs"])
    assert taken["secrets"] == ["VARUNA_TOKEN"]


def test_skypilot_would_tell_a_wrong_field(skypilot: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((EXAMPLES / "sky.yaml").read_text().replace("num_nodes", "nodes"))
    result = read(skypilot, wrong, tmp_path)
    assert result.returncode != 0
    assert "nodes" in result.stderr


def task(name: str) -> dict[str, Any]:
    loaded = yaml.safe_load((EXAMPLES / name).read_text())
    assert isinstance(loaded, dict)
    return loaded


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def environ(directory: Path, loaded: dict[str, Any], **given: str) -> dict[str, str]:
    """As SkyPilot makes it: the task's variables, what the user gave, its own."""
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": str(directory),
        "TMPDIR": str(directory),
        "OMP_NUM_THREADS": "1",
        "VARUNA_CLOUD": "none",
        **{name: str(value) for name, value in loaded["envs"].items()},
        "VARUNA_TOKEN": "t" * 20,
        "SKYPILOT_TASK_ID": TASK,
        **given,
    }


def end(processes: list[subprocess.Popen[str]]) -> None:
    """Whatever a test that fails has left."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def steps_of_workers(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.glob("steps-*")}


def nodes(directory: Path, loaded: dict[str, Any], count: int, num_steps: int, port: int) -> list[str]:
    """Run the task on so many nodes to its end; what each has printed."""
    processes = [
        subprocess.Popen(
            ["bash", "-c", loaded["run"]],
            cwd=directory,
            env=environ(
                directory,
                loaded,
                CHECKPOINTS=str(directory / "checkpoints"),
                TRAIN=f"train.py {num_steps}",
                PORT=str(port),
                SKYPILOT_NODE_IPS="\n".join(["127.0.0.1"] * count),
                SKYPILOT_NUM_NODES=str(count),
                SKYPILOT_NODE_RANK=str(rank),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(count)
    ]
    try:
        printed = [process.communicate(timeout=LONGEST_S)[0] for process in processes]
    finally:
        end(processes)
    assert [process.returncode for process in processes] == [0] * count, printed
    return printed


def test_a_task_of_two_nodes_is_recovered_elsewhere_under_the_same_name(tmp_path: Path) -> None:
    loaded = task("sky.yaml")
    (tmp_path / "train.py").write_text(TRAIN)
    first = "".join(nodes(tmp_path, loaded, 2, 3, free_port()))
    assert f"run {TASK} is managed at http://127.0.0.1:" in first
    assert steps_of_workers(tmp_path) == {"steps-0": "[0, 1, 2]", "steps-1": "[0, 1, 2]"}
    (tmp_path / f"varuna-{TASK}").rename(tmp_path / "lost")  # with its machine
    again = "".join(nodes(tmp_path, loaded, 2, 5, free_port()))
    assert f"run {TASK} is managed at" in again
    assert steps_of_workers(tmp_path) == {"steps-0": "[3, 4]", "steps-1": "[3, 4]"}
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [TASK]


def test_a_machine_of_its_own(tmp_path: Path) -> None:
    """It takes part in a job whose manager is there already, named after its task."""
    (tmp_path / "train.py").write_text(TRAIN)
    loaded = task("sky-machine.yaml")
    port = free_port()
    variables = environ(
        tmp_path,
        loaded,
        MANAGER=f"http://127.0.0.1:{port}",
        CHECKPOINTS=str(tmp_path / "checkpoints"),
        TRAIN="train.py 2",
    )
    command = ["varuna", "manager", "--listen", f"127.0.0.1:{port}", "--state", "state", "--settle", "0.2"]
    manager = subprocess.Popen(
        command, cwd=tmp_path, env=variables, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        machine = subprocess.run(
            ["bash", "-c", loaded["run"]],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
        assert machine.returncode == 0, machine.stderr
        assert manager.wait(LONGEST_S) == 0
    finally:
        end([manager])
    assert f"{TASK} is in run " in machine.stderr
    assert steps_of_workers(tmp_path) == {"steps-0": "[0, 1]"}
