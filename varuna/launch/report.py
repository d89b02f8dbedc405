"""What a person reads when a job ends early: the first failure's traceback, then one line per other worker."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from varuna.launch.supervise import Outcome, WorkerEnd

TAIL_LINES = 30

_SIGNAL_HINTS = {
    signal.SIGKILL: " (out of memory?)",
    signal.SIGSEGV: " (a crash in native code)",
    signal.SIGABRT: " (native code gave up)",
    signal.SIGBUS: " (a crash in native code, or shared memory is full)",
}


def failure_report(outcome: Outcome, tail: Callable[[int, int], str], log_dir: Path) -> str:
    """Text for standard error; empty for a job that ended well.

    Args:
        outcome: how the job ended.
        tail: last lines of a worker's log, by worker and number of lines.
        log_dir: where logs and failure records are.
    """
    if outcome.stopped_by is not None:
        return f"varuna: stopped by {outcome.stopped_by.name}.\n"
    lines: list[str] = []
    if outcome.lost:
        lines.append(f"varuna: {outcome.lost}")
    if outcome.root is not None:
        lines = [*_root_lines(outcome.root, tail), *lines]
        alike = [end for end in outcome.others if _same_error(end, outcome.root)]
        affected = [end for end in outcome.others if (end.is_failure or end.stopped_by) and end not in alike]
        if alike:
            names = ", ".join(str(end.worker_index) for end in alike)
            lines.append(f"varuna: worker{'s' if len(alike) > 1 else ''} {names} failed with the same error")
        lines += [f"varuna: {describe_end(end)}" for end in affected]
    if not lines:
        return ""
    return "\n".join([*lines, f"varuna: logs and failure records: {log_dir}", ""])


def describe_end(end: WorkerEnd) -> str:
    """One line: how a worker ended."""
    name = f"worker {end.worker_index}"
    if end.record is not None and not end.record.is_root_cause:
        text = end.record.error_text.strip().splitlines()
        return (
            f"{name} lost its connection to another worker ({end.record.error_type}: {text[0] if text else ''})"
        )
    if end.record is not None:
        return end.record.summary()
    if end.stopped_by is not None:
        return f"{name} was stopped ({end.stopped_by.name})"
    if end.code is None:
        return f"{name} was lost"
    if end.code < 0:
        return f"{name} was killed by {_signal_name(-end.code)}"
    return f"{name} exited with code {end.code} and without a Python exception"


def _same_error(end: WorkerEnd, root: WorkerEnd) -> bool:
    """Whether both failed alike, as all workers do when the script itself is wrong."""
    if end.record is None or root.record is None:
        return False
    mine, its = end.record, root.record
    return (mine.error_type, mine.error_text) == (its.error_type, its.error_text)


def _root_lines(root: WorkerEnd, tail: Callable[[int, int], str]) -> list[str]:
    if root.record is not None and root.record.traceback_text:
        return [root.record.traceback_text, f"varuna: {describe_end(root)}"]
    last_words = tail(root.worker_index, TAIL_LINES)
    shown = [f"--- last output of worker {root.worker_index} ---", last_words, "---"] if last_words else []
    return [*shown, f"varuna: {describe_end(root)}"]


def _signal_name(signum: int) -> str:
    try:
        known = signal.Signals(signum)
    except ValueError:  # a real-time signal
        return f"signal {signum}"
    return known.name + _SIGNAL_HINTS.get(known, "")
