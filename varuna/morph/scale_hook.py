"""Asks for machines: runs the user's command, or posts to the user's URL, in a thread of its own.

What goes wrong there is an event, and the job goes on.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from typing import IO, Any

import msgspec

from varuna.clock import Clock
from varuna.config_scale import ScaleConfig, host_of
from varuna.morph.hub import Hub
from varuna.morph.scaling import Call, Scaling

KIND = "scaling"
"""Of its events."""

_COMMAND_S = 60.0
_URL_S = 20.0
_LAST_S = 1.0
_SHOWN_BYTES = 400


class ScaleHook:
    """Between the decision and whoever can start machines; ``tick`` belongs to the manager's loop.

    Args:
        config: whom to ask.
        scaling: who decides.
        hub: whose job it is; gets events.
        clock: the manager's.
        command_limit_s: a command that takes longer is ended.
    """

    def __init__(
        self,
        config: ScaleConfig,
        scaling: Scaling,
        hub: Hub,
        clock: Clock,
        *,
        command_limit_s: float = _COMMAND_S,
    ) -> None:
        self._ask: _Command | _Webhook = _Webhook(config.url)
        if config.command:
            self._ask = _Command(config.command, command_limit_s)
        self._scaling = scaling
        self._hub = hub
        self._clock = clock
        self._under_way: Future[str] | None = None
        self._thread: threading.Thread | None = None

    def tick(self) -> None:
        """Look at the job, and at what has become of the last call. Does not wait."""
        now_s = self._clock.now_s()
        if self._under_way is not None:
            if not self._under_way.done():
                return
            problem, self._under_way = self._under_way.result(), None
            self._scaling.answered(well=not problem, now_s=now_s)
            if problem:
                self._tell(f"asking for machines has failed: {self._ask.name} {problem}")
        call = self._scaling.look(self._hub.manager.job, now_s)
        if call is not None:
            self._tell(f"asking {self._ask.name} for machines: {call.why}", call)
            self._under_way = Future()
            self._thread = threading.Thread(
                target=_answer, args=(self._under_way, self._ask, call), name="varuna-scaling", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Ask no more; a command under way is ended, a request is not waited for."""
        self._ask.close()
        if self._thread is not None:
            self._thread.join(_LAST_S)

    def _tell(self, text: str, call: Call | None = None) -> None:
        figures = {}
        if call is not None:
            figures = {"present": float(call.workers_present), "wanted": float(call.workers_wanted)}
        self._hub.events.add(KIND, text, self._hub.manager.job.generation.number, figures=figures)


def _answer(answer: Future[str], ask: Callable[[Call], str], call: Call) -> None:
    """The job does not end by whatever goes wrong in asking."""
    try:
        problem = ask(call)
    except Exception as error:
        problem = f"has failed: {error!r}"
    answer.set_result(problem)


class _Command:
    """Runs a command; it is called in a thread, and returns what went wrong, or nothing."""

    def __init__(self, command: str, limit_s: float) -> None:
        self.name = "the command"
        self._command = command
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def __call__(self, call: Call) -> str:
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:
            given.write(msgspec.json.encode(call) + b"\n")
            given.seek(0)
            try:
                process = self._start(given, printed)
            except OSError as error:
                return f"cannot be run: {error}"
            if process is None:
                return ""
            try:
                code = process.wait(self._limit_s)
            except subprocess.TimeoutExpired:
                self._kill(process)
                return f"was ended after {self._limit_s:g} s"
            return "" if code == 0 else f"exited with code {code}{_last_words(printed)}"

    def close(self) -> None:
        """End what is under way, and start nothing any more."""
        with self._lock:
            self._is_closed = True
        if self._process is not None:
            self._kill(self._process)

    def _start(self, given: IO[bytes], printed: IO[bytes]) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._is_closed:
                return None
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", self._command],
                stdin=given,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            return self._process

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class _Webhook:
    """Posts to a URL; as ``_Command``."""

    def __init__(self, url: str) -> None:
        self.name = host_of(url)
        self._url = url
        self._opener = urllib.request.build_opener(_StaysThere)

    def __call__(self, call: Call) -> str:
        request = urllib.request.Request(
            self._url,
            data=msgspec.json.encode(call),
            headers={"Content-Type": "application/json", "User-Agent": "varuna"},
            method="POST",
        )
        try:
            with self._opener.open(request, timeout=_URL_S):
                return ""
        except urllib.error.HTTPError as error:
            with error:
                return f"answered {error.code} {error.reason}"
        except (OSError, http.client.HTTPException, ValueError) as error:
            return f"cannot be reached: {error}"

    def close(self) -> None:
        """A request under way is left to its own time limit."""


class _StaysThere(urllib.request.HTTPRedirectHandler):
    """A redirect would be followed with another method, and without what was posted."""

    def redirect_request(self, *_: Any) -> None:
        """Not followed."""


def _last_words(printed: IO[bytes]) -> str:
    size = printed.seek(0, os.SEEK_END)
    printed.seek(max(0, size - _SHOWN_BYTES))
    lines = printed.read().decode("utf-8", "replace").split("\n")
    words = [" ".join(line.split()) for line in lines if line.strip()]
    return f": {words[-1]}" if words else ""
