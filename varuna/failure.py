"""Failure records: what a failing worker leaves behind, and which failure caused the others.

``mark_place`` is called where an exception passes through the run and says at which step, stage and micro-batch
that was. ``record_of`` turns the exception into a ``FailureRecord``, a value that crosses process borders as
JSON. No torch here: the launcher reads records too.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from varuna.errors import PeerLost, WorkerFailed

_PLACE_ATTRIBUTE = "__varuna_place__"
_LOST_CONNECTION_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")
_WHO_CONNECTS_WORKERS = ("varuna.", "torch.distributed")
_LOST_CONNECTION_TEXTS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket closed",
)


@dataclass(frozen=True, kw_only=True)
class FailurePlace:
    """Where in the run an exception happened; None where it does not apply.

    ``operation`` is a word for people: "forward", "backward", "loading data", "optimizer step".
    """

    step_index: int | None = None
    pipeline_index: int | None = None
    stage_index: int | None = None
    micro_batch_index: int | None = None
    operation: str = ""

    def __str__(self) -> str:
        parts = (
            ("step", self.step_index),
            ("pipeline", self.pipeline_index),
            ("stage", self.stage_index),
            ("micro-batch", self.micro_batch_index),
        )
        words = [f"{name} {value}" for name, value in parts if value is not None]
        return ", ".join([*words, self.operation] if self.operation else words)


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """One worker's failure.

    Attributes:
        worker_index: the worker that failed.
        host: name of its machine.
        at_s: when, on the machine's monotonic clock (comparable between processes of one machine).
        error_type, error_text: class name and message of the exception.
        traceback_text: formatted traceback, the user's lines included.
        place: where in the run.
        is_root_cause: False if the exception only says that another worker went away.
        exit_code: what this worker's process exits with.
    """

    worker_index: int
    host: str
    at_s: float
    error_type: str
    error_text: str
    traceback_text: str
    place: FailurePlace
    is_root_cause: bool
    exit_code: int = 1

    def summary(self) -> str:
        """One line: worker, host, place, exception."""
        place = str(self.place)
        where = f"{self.host}, {place}" if place else self.host
        text = self.error_text.strip().splitlines()
        return (
            f"worker {self.worker_index} failed ({where}): {self.error_type}: {text[0] if text else ''}".rstrip(
                ": "
            )
        )


def mark_place(error: BaseException, place: FailurePlace) -> None:
    """Remember on the exception where in the run it happened, as a note too; the innermost mark stays."""
    if getattr(error, _PLACE_ATTRIBUTE, None) is None:
        setattr(error, _PLACE_ATTRIBUTE, place)
        error.add_note(f"Varuna: this happened in {place}.")


@contextlib.contextmanager
def marked(place: FailurePlace) -> Iterator[None]:
    """Mark what is raised inside with this place."""
    try:
        yield
    except Exception as error:
        mark_place(error, place)
        raise


def place_of(error: BaseException) -> FailurePlace:
    """The place marked on the exception or on one of its causes; an empty one if none was marked."""
    for link in _chain(error):
        place = getattr(link, _PLACE_ATTRIBUTE, None)
        if isinstance(place, FailurePlace):
            return place
    return FailurePlace()


def is_root_cause(error: BaseException) -> bool:
    """Whether the exception is its own worker's fault, not a connection that another's death broke."""
    if isinstance(error, WorkerFailed) and error.__cause__ is not None:  # what the user's code raised
        return is_root_cause(error.__cause__)
    if isinstance(error, PeerLost) or type(error).__name__ in _LOST_CONNECTION_TYPES:
        return False
    text = str(error).lower()
    tells_of_one = isinstance(error, ConnectionError) or (
        isinstance(error, (RuntimeError, OSError)) and any(part in text for part in _LOST_CONNECTION_TEXTS)
    )
    return not tells_of_one or _is_of_others(error)


def _is_of_others(error: BaseException) -> bool:
    """Whether it comes from the user's code, or a library's: nothing of that connects workers."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(_WHO_CONNECTS_WORKERS):
            return False
        if module.partition(".")[0] not in (*sys.stdlib_module_names, "torch"):
            return True
    return False


def record_of(error: BaseException, worker_index: int, *, exit_code: int = 1) -> FailureRecord:
    """Describe an exception that worker ``worker_index`` met, as of now."""
    lines = traceback.format_exception(error)
    return FailureRecord(
        worker_index=worker_index,
        host=socket.gethostname(),
        at_s=time.monotonic(),
        error_type=type(error).__name__,
        error_text=str(error),
        traceback_text="".join(lines),
        place=place_of(error),
        is_root_cause=is_root_cause(error),
        exit_code=exit_code,
    )


def first_cause(records: Iterable[FailureRecord]) -> FailureRecord | None:
    """The record to show first: the earliest root cause, else the earliest of all."""
    return min(records, key=lambda record: (not record.is_root_cause, record.at_s), default=None)


def encode_record(record: FailureRecord) -> bytes:
    """JSON of a record."""
    return msgspec.json.encode(record)


def decode_record(data: bytes) -> FailureRecord:
    """A record from its JSON.

    Raises:
        msgspec.DecodeError: not the JSON of a record.
    """
    return msgspec.json.decode(data, type=FailureRecord)


def shortened(record: FailureRecord, most_bytes: int) -> FailureRecord:
    """The record with the beginning of its text and the end of its traceback, so that its JSON fits."""
    num_kept = most_bytes
    while len(encode_record(record)) > most_bytes and num_kept:
        num_kept //= 2
        text, lines = record.error_text[:num_kept], record.traceback_text[-num_kept:]
        record = replace(record, error_text=text, traceback_text=lines if num_kept else "")
    return record


def record_path(directory: Path, worker_index: int) -> Path:
    """Where a worker leaves its record."""
    return directory / f"worker-{worker_index}.failure.json"


def write_record(record: FailureRecord, directory: Path) -> None:
    """Leave a record for the launcher; whole or not at all."""
    path = record_path(directory, record.worker_index)
    temporary = path.with_suffix(".part")
    temporary.write_bytes(encode_record(record))
    temporary.replace(path)


def read_record(directory: Path, worker_index: int) -> FailureRecord | None:
    """The record a worker left, or None."""
    try:
        return decode_record(record_path(directory, worker_index).read_bytes())
    except OSError:
        return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
