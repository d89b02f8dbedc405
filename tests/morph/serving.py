"""A real server on loopback, in a thread of its own, that can be ended and started again at the same place."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from aiohttp import web

from tests.launch.jobs import wait_until
from varuna.clock import MonotonicClock
from varuna.morph.hub import Hub
from varuna.morph.planning import plan_for
from varuna.morph.server import Server, request_log
from varuna.morph.state import Manager
from varuna.versions import Versions

T = TypeVar("T")
TOKEN = "a-token-of-a-job"


class Loop:
    """An asyncio loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-server")
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        async def work() -> T:
            return function(*arguments)

        return self.run(work())

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Place:
    """A listening socket, and what serves on it."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._runner: web.AppRunner | None = None

    def serve(self, app: web.Application) -> None:
        """Serve it; whoever tried to connect before has waited in the socket's queue."""

        async def start() -> None:
            self._runner = web.AppRunner(app, access_log=None, logger=request_log(), shutdown_timeout=0.5)
            await self._runner.setup()
            await web.SockSite(self._runner, self._listener.dup()).start()

        self.loop.run(start())

    def end(self) -> None:
        """Cut all connections and serve no more; the place stays."""
        if self._runner is not None:
            self.loop.run(self._runner.cleanup())
            self._runner = None

    def close(self) -> None:
        self.end()
        self._listener.close()


@contextlib.contextmanager
def place() -> Iterator[Place]:
    """Where something can be served."""
    threads = set(threading.enumerate())
    loop = Loop()
    found = Place(loop)
    try:
        yield found
    finally:
        found.close()
        loop.close()
        wait_until(lambda: _num_links(threads) == 0, 120, "links end")


def _num_links(before: set[threading.Thread]) -> int:
    return sum(thread.name == "varuna-link" for thread in set(threading.enumerate()) - before)


class ServedManager:
    """A manager with its hub and server."""

    def __init__(self, at: Place, *, heartbeat_limit_s: float = 10.0, versions: Versions | None = None) -> None:
        self.at = at
        self.manager = Manager(plan_for)
        self.hub = at.loop.call(self._make_hub, heartbeat_limit_s)
        self._num_asked = 0
        app = Server(self.hub, TOKEN, run_id="a-run", versions=versions).application()
        app.on_response_prepare.append(self._count)
        at.serve(app)

    async def _count(self, _: web.Request, __: web.StreamResponse) -> None:
        self._num_asked += 1

    def num_asked(self) -> int:
        """Requests that were answered."""
        return self._num_asked

    def _make_hub(self, heartbeat_limit_s: float) -> Hub:
        return Hub(self.manager, MonotonicClock(), heartbeat_limit_s=heartbeat_limit_s)
