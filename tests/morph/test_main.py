"""The manager as a process of its own, that is killed and started again on the same socket and journal."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.jobs import wait_until
from tests.morph.serving import TOKEN
from varuna.launch.agent import Agent
from varuna.morph.client import RunClient
from varuna.morph.runs import RunInfo


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def start(listener: socket.socket, journal: Path, token: str = TOKEN, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "varuna.morph",
            "--listen-fd",
            str(listener.fileno()),
            "--journal",
            str(journal),
            *flags,
        ],
        env={**os.environ, "VARUNA_TOKEN": token},
        pass_fds=(listener.fileno(),),
        stderr=subprocess.PIPE,
        text=True,
    )


def test_killed_and_started_again_it_knows_what_it_knew(listener: socket.socket, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    client = RunClient(RunInfo(run_id="x", url=url, token=TOKEN, pid=os.getpid(), started_s=0.0), tmp_path)
    manager = start(listener, tmp_path / "journal")
    agent = Agent(url, TOKEN, "vm")
    agent.worker_started(0, 0)
    wait_until(lambda: client.status().workers, 120, "it knows the worker")
    client.preempt("0", 500.0)
    agent.close()
    manager.kill()
    manager.communicate()
    manager = start(listener, tmp_path / "journal")
    (worker,) = client.status().workers
    assert (worker.status, worker.leaving, worker.is_connected) == ("started", "user", False)
    manager.send_signal(signal.SIGTERM)
    assert manager.communicate(timeout=20) == (None, "")
    assert manager.returncode == 0
    assert TOKEN.encode() not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


def test_without_a_token_it_does_not_start(listener: socket.socket, tmp_path: Path) -> None:
    manager = start(listener, tmp_path / "journal", "")
    _, told = manager.communicate(timeout=30)
    assert manager.returncode == 2
    assert told == "varuna manager: VARUNA_TOKEN is not set. `varuna run` sets it.\n"
    assert not (tmp_path / "journal").exists()
