"""Listens to what the cloud says about this machine, in a thread of its own for as long as there is a cloud."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping
from concurrent.futures import Future, wait

from varuna.morph.notices import NoticeSource, Report, Tell
from varuna.morph.notices_detect import detect_clouds, sources_from_env
from varuna.morph.waiting import RealWaiting

_LAST_WORDS_S = 1.0


def check_environ(environ: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` for a variable about clouds that cannot be."""
    sources_from_env("", lambda _: None, environ=environ, waiting=RealWaiting())


class NoticeWatch:
    """This machine's notices. Off the cloud the thread ends after ``DETECT_S`` seconds at most, without a word.

    Args:
        machine: the agent's name for it.
        environ: see ``notices_detect.sources_from_env``.
        tell: called in the thread, once per notice, withdrawal or hint.
        report: called in the thread with troubles, for people.

    Raises:
        ConfigError: a variable that cannot be.
    """

    def __init__(self, machine: str, environ: Mapping[str, str], *, tell: Tell, report: Report) -> None:
        self._machine = machine
        self._environ = environ
        self._tell = tell
        self._report = report
        self._sources: dict[str, NoticeSource] = {}
        self._acknowledging: list[Future[bool]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        if sources_from_env(machine, report, environ=environ, waiting=RealWaiting()):
            self._loop = asyncio.new_event_loop()
            self._task = self._loop.create_task(self._listen())
            self._thread = threading.Thread(target=self._run, name="varuna-notices", daemon=True)
            self._thread.start()

    @property
    def is_listening(self) -> bool:
        """A cloud was found, or is being looked for."""
        return self._thread is not None and self._thread.is_alive()

    def acknowledge(self, source: str, event_id: str) -> None:
        """All state is safe: the provider may go ahead. Does not wait."""
        known = self._sources.get(source)
        if known is not None and self._loop is not None and self.is_listening:
            work = known.acknowledge(event_id)
            self._acknowledging.append(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        """Listen no more; what was acknowledged is sent first, if that takes no time. Idempotent."""
        if self._thread is None or self._loop is None:
            return
        wait(self._acknowledging, _LAST_WORDS_S)
        with contextlib.suppress(RuntimeError):  # it has ended by itself, and closed its loop
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()
        self._thread = None

    # --- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._loop is not None
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._task)
            if left := asyncio.all_tasks(self._loop):
                for task in left:
                    task.cancel()
                self._loop.run_until_complete(asyncio.wait(left))
        finally:
            self._loop.close()

    async def _listen(self) -> None:
        found = await detect_clouds(self._machine, self._report, environ=self._environ)
        self._sources = {source.source: source for source in found}
        await asyncio.gather(*(source.run(self._tell) for source in found))
