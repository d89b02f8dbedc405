"""Scripts of faults: what they refuse, when they happen, and that each happens once."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from varuna.errors import ConfigError
from varuna.run.job import POINTS
from varuna.testing.faults import VARIABLE, Fault, FaultScript, Injector, Point, faults_from_env, worker_number
from varuna.testing.silence import silence_connections


def forked(work: Callable[[], None]) -> int:
    """A child that does this; its id."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(7)
    return pid


def raising(point: Point, **changes: object) -> Fault:
    return Fault(what="raise", point=point, **changes)  # type: ignore[arg-type]


def test_the_points_are_those_of_a_job() -> None:
    assert set(Point.__args__) == set(POINTS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"count": 0}, "count is from 1 on"),
        ({"worker": -1}, "worker and step are from 0 on"),
        ({"step": -1}, "worker and step are from 0 on"),
        ({"seconds": 1.0}, "give seconds for a delay"),
        ({"what": "delay"}, "give seconds for a delay"),
        ({"what": "delay", "seconds": float("nan")}, "seconds is a number"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Fault(**{"what": "kill", "point": "step", **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        '[{"what":"kill"}]',
        '[{"what":"kill","point":"there"}]',
        '[{"what":"x","point":"step"}]',
        '[{"what":"kill","point":"step","count":0}]',
    ],
)
def test_a_script_that_cannot_be_read_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "faults.json").write_text(content)
    with pytest.raises(ConfigError, match=f"{VARIABLE}=.* names no script of faults"):
        faults_from_env({VARIABLE: str(tmp_path)}, lambda: 0)


def test_a_script_that_is_not_there_is_refused_and_none_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Make one with "):
        faults_from_env({VARIABLE: str(tmp_path / "nowhere")}, lambda: 0)
    faults_from_env({}, lambda: 0)("step")


def test_a_worker_is_known_by_the_number_in_its_logs_name() -> None:
    assert worker_number({"VARUNA_INCARNATION": "some.host.12.ab1f", "RANK": "3"}) == 12
    assert worker_number({"RANK": "3"}) == 3
    assert worker_number({}) == 0


def test_a_fault_happens_at_its_step_worker_point_and_count(tmp_path: Path) -> None:
    script = FaultScript(tmp_path, [raising("forward", worker=1, step=4, count=2)])
    step = 3
    other, mine = (Injector(tmp_path, worker, lambda: step) for worker in (0, 1))
    for step in (3, 4):
        for point in ("step", "forward", "forward", "forward") if step == 3 else ("step", "forward"):
            mine.at(point)
            other.at(point)
    other.at("forward")
    assert script.fired() == ()
    with pytest.raises(RuntimeError, match="scripted on worker 1"):
        mine.at("forward")
    (fired,) = script.fired()
    assert (fired.index, fired.worker, fired.step, fired.pid) == (0, 1, 4, os.getpid())
    assert script.wait_for(0) == fired
    mine.at("step")
    mine.at("forward")
    mine.at("forward")  # the step runs again, and nothing goes wrong this time


def test_whoever_comes_first_has_it_and_nobody_else(tmp_path: Path) -> None:
    script = FaultScript(tmp_path, [raising("reduce")])
    workers = [Injector(tmp_path, worker, lambda: 0) for worker in range(3)]
    with pytest.raises(RuntimeError, match="scripted on worker 2"):
        workers[2].at("reduce")
    workers[0].at("reduce")
    Injector(tmp_path, 1, lambda: 0).at("reduce")  # one that starts later
    assert [fired.worker for fired in script.fired()] == [2]


def test_faults_may_be_added_while_the_job_runs(tmp_path: Path) -> None:
    script = FaultScript(tmp_path)
    worker = faults_from_env(script.environ(), lambda: 9)
    worker("commit")
    assert script.add(raising("commit"), raising("form")) == 0
    assert script.add(raising("save")) == 2
    with pytest.raises(RuntimeError):
        worker("save")
    with pytest.raises(TimeoutError, match="has not happened within "):
        script.wait_for(0, timeout_s=0.05)


def test_a_held_worker_waits_to_be_released(tmp_path: Path) -> None:
    script = FaultScript(tmp_path, [Fault(what="hold", point="step")])
    worker = Injector(tmp_path, 0, lambda: 0)
    pid = forked(lambda: worker.at("step"))
    script.wait_for(0)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    script.release()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


@pytest.mark.parametrize(("what", "seconds"), [("kill", 0.0), ("freeze", 0.2), ("delay", 0.2)])
def test_what_happens_happens_to_the_process(tmp_path: Path, what: str, seconds: float) -> None:
    script = FaultScript(tmp_path, [Fault(what=what, point="step", seconds=seconds)])  # type: ignore[arg-type]
    worker = Injector(tmp_path, 0, lambda: 0)
    started_s = time.monotonic()
    pid = forked(lambda: worker.at("step"))
    if what == "freeze":
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == (-signal.SIGKILL if what == "kill" else 7)
    assert time.monotonic() - started_s >= seconds
    assert script.fired()[0].pid == pid


def test_a_silenced_connection_hears_nothing_and_does_not_end() -> None:
    heard, told = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pid = forked(lambda: _fall_silent(listener, told))
        far, _ = listener.accept()
    with far:
        assert os.read(heard, 1) == b"1"
        far.sendall(b"anybody there?")
        assert os.read(heard, 20) == b"nothing came"
        far.settimeout(0.1)
        with pytest.raises(TimeoutError):  # and no end of the stream
            far.recv(100)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(heard)
    os.close(told)


def _fall_silent(listener: socket.socket, told: int) -> None:
    stream = socket.create_connection(listener.getsockname())
    listener.close()  # the parent's stays as it is
    os.write(told, str(silence_connections()).encode())
    stream.settimeout(0.3)
    try:
        stream.recv(100)
    except TimeoutError:
        os.write(told, b"nothing came")
        signal.pause()
