"""Three ways to have micro-batches ready in order: in the calling thread, in a thread, in worker processes.

Each ``Source`` hands out the answers to a row of requests, in the row's order, and works a bounded number
ahead.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from varuna.errors import DataError, PeerLost
from varuna.partition.signature import FlatBatch
from varuna.run.fetch import Fetcher, FetchRequest, preserved_globals

_NUM_AHEAD = 4  # micro-batches loaded before they are asked for, at least (per process, with worker processes)
_NUM_AT_ONCE = 4  # that a thread loads more than that: each time it wakes, the training thread stumbles
_CLOSE_WAIT_S = 5.0
_EXIT_WAIT_S = 30.0
_ENDED = "The generation was ended here while it waited for a sample."


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A request and its micro-batch, by key."""

    request: FetchRequest
    flat: FlatBatch

    def pin_memory(self) -> Fetched:
        """The same in page-locked memory; torch's ``DataLoader`` calls this too."""
        pinned = {key: tensor.pin_memory() for key, tensor in self.flat.tensors.items()}
        return replace(self, flat=replace(self.flat, tensors=pinned))


class Source(Protocol):
    """Micro-batches in the order of their requests."""

    def take(self) -> Fetched:
        """The next one; waits for it. Raises DataError if the user's code did, and then always."""
        ...

    def close(self) -> None:
        """Stop; no thread or process is left."""
        ...


def open_source(
    fetcher: Fetcher,
    requests: Iterator[FetchRequest],
    *,
    num_processes: int | None,
    uses_random: bool,
    pin: bool,
) -> Source:
    """The source for a dataset.

    Args:
        fetcher: the user's dataset and collate function.
        requests: what to load; may be endless.
        num_processes: worker processes, 0 to load in the calling thread, None to choose: a thread, or one
            process if the dataset draws random numbers.
        uses_random: whether the dataset draws from the global generators.
        pin: copy batches to page-locked memory.
    """
    if num_processes == 0:
        return InlineSource(fetcher, requests, pin=pin)
    if num_processes is None and not uses_random:
        return ThreadSource(fetcher, requests, pin=pin)
    return ProcessSource(fetcher, requests, num_processes=num_processes or 1, pin=pin)


class InlineSource:
    """Loads in the calling thread, when asked; the caller's global generators are left as they were."""

    def __init__(self, fetcher: Fetcher, requests: Iterator[FetchRequest], *, pin: bool) -> None:
        self._fetcher = fetcher
        self._requests = requests
        self._pin = pin

    def take(self) -> Fetched:
        """See ``Source``."""
        request = next(self._requests)
        with preserved_globals():
            fetched = Fetched(request=request, flat=self._fetcher.fetch(request, seeded=True))
        return fetched.pin_memory() if self._pin else fetched

    def close(self) -> None:
        """See ``Source``."""


class ThreadSource:
    """Loads ahead in one thread, for dataset code that draws no random numbers.

    The thread ends before the interpreter does: one that is inside torch when Python's last steps are taken
    would abort the process.
    """

    def __init__(self, fetcher: Fetcher, requests: Iterator[FetchRequest], *, pin: bool) -> None:
        self._fetcher = fetcher
        self._requests = requests
        self._pin = pin
        self._changed = threading.Condition()
        self._ready: deque[Fetched] = deque()
        self._error: BaseException | None = None
        self._finished = False
        self._closed = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._work, name="varuna-data", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def take(self) -> Fetched:
        """See ``Source``."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._finished or self._closed)
            if self._ready:
                fetched = self._ready.popleft()
                if len(self._ready) <= _NUM_AHEAD:
                    self._changed.notify_all()
                return fetched
        if self._error is not None:
            raise self._error
        if self._closed:
            raise PeerLost(_ENDED)
        raise AssertionError("more micro-batches were taken than there are")

    def close(self) -> None:
        """See ``Source``; a sample being loaded is finished first, but not waited for longer than 5 s."""
        self._stop()
        self._thread.join(_CLOSE_WAIT_S)
        if not self._thread.is_alive():
            atexit.unregister(self._end)

    def _end(self) -> None:
        """At exit: what ``close`` does, with more patience for a slow sample. Not in a forked copy."""
        if os.getpid() == self._process:
            self._stop()
            self._thread.join(_EXIT_WAIT_S)

    def _stop(self) -> None:
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        try:
            for request in self._requests:
                fetched = Fetched(request=request, flat=self._fetcher.fetch(request, seeded=False))
                if not self._put(fetched.pin_memory() if self._pin else fetched):
                    return
        except BaseException as error:  # handed to the thread that asks next
            self._error = error
        finally:
            with self._changed:
                self._finished = True
                self._changed.notify_all()

    def _put(self, fetched: Fetched) -> bool:
        with self._changed:
            if len(self._ready) == _NUM_AHEAD + _NUM_AT_ONCE:
                self._changed.wait_for(lambda: self._closed or len(self._ready) <= _NUM_AHEAD)
            if not self._closed:
                self._ready.append(fetched)
                self._changed.notify_all()
            return not self._closed


class ProcessSource:
    """Loads ahead in worker processes (forked; torch's ``DataLoader``), the global generators seeded."""

    def __init__(
        self, fetcher: Fetcher, requests: Iterator[FetchRequest], *, num_processes: int, pin: bool
    ) -> None:
        loader = DataLoader(
            _Answers(fetcher),
            batch_size=None,
            sampler=requests,
            num_workers=num_processes,
            collate_fn=_same,
            prefetch_factor=max(2, -(-_NUM_AHEAD // num_processes)),
            pin_memory=pin,
            worker_init_fn=_end_with(os.getpid()),
            multiprocessing_context="fork",
            generator=torch.Generator(),  # or it would draw from the user's
        )
        self._answers: Iterator[Fetched | _Failed] | None = iter(loader)
        self._failed: DataError | None = None

    def take(self) -> Fetched:
        """See ``Source``."""
        if self._answers is None:
            raise PeerLost(_ENDED)
        if self._failed is not None:
            raise self._failed
        try:
            answer = next(self._answers)  # nobody else may refer to it, a traceback neither: see close
        except RuntimeError as error:  # what DataLoader raises if a process of its own is gone
            raise DataError(
                f"A data worker process died: {error}. If it was killed for memory, use fewer data workers or "
                "a smaller micro-batch; num_data_workers=0 loads without processes."
            ) from error.with_traceback(None)
        if isinstance(answer, Fetched):
            return answer
        self._failed = answer.to_error()
        raise self._failed

    def close(self) -> None:
        """See ``Source``."""
        self._answers = None  # the last reference: DataLoader ends and joins its processes


@dataclass(frozen=True, kw_only=True)
class _Failed:
    """A DataError on its way from a worker process; ``cause`` is None if it cannot be sent."""

    message: str
    cause: BaseException | None
    traceback_text: str

    def to_error(self) -> DataError:
        error = DataError(self.message)
        error.__cause__ = self.cause
        noted = error if self.cause is None else self.cause
        noted.add_note(f"In the data worker process:\n{self.traceback_text}")
        return error


class _Answers(Dataset[Fetched | _Failed]):
    """Requests to micro-batches, for DataLoader; failures are answers, so that nothing of them is lost."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def __getitem__(self, request: FetchRequest) -> Fetched | _Failed:
        try:
            return Fetched(request=request, flat=self._fetcher.fetch(request, seeded=True))
        except DataError as error:
            return _Failed(
                message=str(error), cause=_sendable(error.__cause__), traceback_text=traceback.format_exc()
            )


def _sendable(error: BaseException | None) -> BaseException | None:
    """The exception if it survives the way to another process, else None."""
    try:
        copy = ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:  # whatever the user's exception class does when it is copied
        return None
    return error if type(copy) is type(error) else None


def _same(answer: Any) -> Any:
    return answer


class _end_with:  # noqa: N801  # used as a function
    """In a worker process: end at once when the parent does, so that its sockets do not outlive it."""

    def __init__(self, parent_pid: int) -> None:
        self._parent_pid = parent_pid

    def __call__(self, worker_index: int) -> None:
        set_parent_death_signal = 1  # prctl(2): PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != self._parent_pid:
            os._exit(1)
