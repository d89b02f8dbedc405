"""What people read when a job fails, as golden text."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

from tests.launch.test_supervise import record
from varuna.launch.report import failure_report
from varuna.launch.supervise import Outcome, WorkerEnd


def report(outcome: Outcome, tail: str = "") -> str:
    return failure_report(outcome, lambda worker_index, num_lines: tail, Path("/logs"))


def test_cause_then_one_line_for_each_affected() -> None:
    others = (
        WorkerEnd(worker_index=0, code=1, record=record(0, 2.0, is_root_cause=False)),
        WorkerEnd(worker_index=1, code=-15, stopped_by=signal.SIGTERM),
        WorkerEnd(worker_index=3, code=0),
        WorkerEnd(worker_index=4, code=-11),
        WorkerEnd(worker_index=5, code=9),
        WorkerEnd(worker_index=6, code=-40),
        WorkerEnd(worker_index=7, code=1, record=replace(record(7, 3.0), error_text="worse")),
    )
    root = WorkerEnd(worker_index=2, code=1, record=record(2, 1.0))
    assert report(Outcome(exit_code=1, root=root, others=others)) == (
        "Traceback ...\n"
        "varuna: worker 2 failed (here): ValueError: bad\n"
        "varuna: worker 0 lost its connection to another worker (PeerLost: bad)\n"
        "varuna: worker 1 was stopped (SIGTERM)\n"
        "varuna: worker 4 was killed by SIGSEGV (a crash in native code)\n"
        "varuna: worker 5 exited with code 9 and without a Python exception\n"
        "varuna: worker 6 was killed by signal 40\n"
        "varuna: worker 7 failed (here): ValueError: worse\n"
        "varuna: logs and failure records: /logs\n"
    )


def test_what_all_workers_met_is_told_once() -> None:
    others = tuple(WorkerEnd(worker_index=index, code=1, record=record(index, 2.0)) for index in (0, 2, 3))
    root = WorkerEnd(worker_index=1, code=1, record=record(1, 1.0))
    text = report(Outcome(exit_code=1, root=root, others=others))
    assert text.splitlines()[1:3] == [
        "varuna: worker 1 failed (here): ValueError: bad",
        "varuna: workers 0, 2, 3 failed with the same error",
    ]


def test_last_output_stands_in_for_a_traceback() -> None:
    root = WorkerEnd(worker_index=1, code=-9)
    assert report(Outcome(exit_code=137, root=root), "step 4\nstep 5") == (
        "--- last output of worker 1 ---\n"
        "step 4\n"
        "step 5\n"
        "---\n"
        "varuna: worker 1 was killed by SIGKILL (out of memory?)\n"
        "varuna: logs and failure records: /logs\n"
    )


def test_quiet_endings() -> None:
    assert report(Outcome(exit_code=0, others=(WorkerEnd(worker_index=0, code=0),))) == ""
    assert report(Outcome(exit_code=130, stopped_by=signal.SIGINT)) == "varuna: stopped by SIGINT.\n"


def test_what_was_lost_is_told() -> None:
    text = report(Outcome(exit_code=1, others=(WorkerEnd(worker_index=0),), lost="the store died."))
    assert text == "varuna: the store died.\nvaruna: logs and failure records: /logs\n"
