"""What emulated metadata services share: a server on loopback, a script of scenes, faults, a log."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Generic, Self, TypeVar

from aiohttp import web

from varuna.morph.waiting import RealWaiting, Waiting

_SHUTDOWN_S = 0.01  # to aiohttp, 0 is no limit


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What a service does from ``at_s`` on.

    Attributes:
        at_s: seconds after the start of the script.
        status: answer everything with this status; None: as the service would.
        body: answer with this text where the notice would be, e.g. malformed JSON; None: as the service would.
        hold_s: wait so long before every answer; ``math.inf`` never answers.
        drop: cut every connection without an answer, those that wait for a change too.
    """

    at_s: float = 0.0
    status: int | None = None
    body: str | None = None
    hold_s: float = 0.0
    drop: bool = False


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request that came, and the status that it got (0: cut off)."""

    at_s: float
    method: str
    path: str
    status: int


SceneT = TypeVar("SceneT", bound=Scene)


class EmulatedCloud(ABC, Generic[SceneT]):
    """A metadata service on a port of its own.

    Args:
        scenes: the script, in order of time; before the first scene nothing is planned.
        waiting: time of the script.
        server_time: the service's own clock at the start; by default the real time.
        sends_date: answers have a ``Date`` header, as the real services' have.
    """

    source: str

    def __init__(
        self,
        scenes: Sequence[SceneT] = (),
        *,
        waiting: Waiting | None = None,
        server_time: datetime | None = None,
        sends_date: bool = True,
    ) -> None:
        self.requests: list[Request] = []
        self._scenes: tuple[SceneT, ...] = tuple(scenes)
        self._waiting = waiting or RealWaiting()
        self._server_time = server_time
        self._sends_date = sends_date
        self._runner: web.AppRunner | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._start_s = 0.0
        self._port = 0

    # --- what a test does -------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where the service is; known once it serves."""
        return f"http://127.0.0.1:{self._port}"

    @property
    @abstractmethod
    def environ(self) -> dict[str, str]:
        """Variables that make Varuna take this service for the machine's own, and look for no other."""

    @abstractmethod
    def no_scene(self) -> SceneT:
        """Nothing is planned."""

    @property
    def elapsed_s(self) -> float:
        """Seconds of the script so far."""
        return self._waiting.now_s() - self._start_s

    def show(self, scene: SceneT) -> None:
        """Play ``scene`` from now on, whatever its ``at_s``, in place of the rest of the script."""
        now_s = self.elapsed_s
        self._scenes = (*(old for old in self._scenes if old.at_s <= now_s), replace(scene, at_s=now_s))
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._changed.set)

    @contextlib.contextmanager
    def serving(self) -> Iterator[Self]:
        """Serve from a thread of its own, for code without asyncio."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name=f"emulated-{self.source}", daemon=True)
        thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self.__aenter__(), loop).result()
            try:
                yield self
            finally:
                asyncio.run_coroutine_threadsafe(self.__aexit__(None, None, None), loop).result()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._start_s = self._waiting.now_s()
        self._server_time = self._server_time or datetime.now(UTC)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        app.on_response_prepare.append(self._set_date)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S, access_log=None
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()
        self._loop = None

    # --- what a service does ----------------------------------------------------------------

    @abstractmethod
    async def answer(self, request: web.Request, scene: SceneT) -> web.Response:
        """The service's own answer."""

    def scene_now(self) -> SceneT:
        """The scene that is on."""
        begun = [scene for scene in self._scenes if scene.at_s <= self.elapsed_s]
        return begun[-1] if begun else self.no_scene()

    def moment(self, script_s: float) -> datetime:
        """The service's own clock at a moment of the script."""
        assert self._server_time is not None
        return self._server_time + timedelta(seconds=script_s)

    async def until_next_scene(self, limit_s: float) -> None:
        """Wait for the next scene of the script, one shown by hand, or ``limit_s``, whichever comes first."""
        coming = [scene.at_s for scene in self._scenes if scene.at_s > self.elapsed_s]
        pause_s = max(0.0, min([limit_s, *(at_s - self.elapsed_s for at_s in coming)]))
        self._changed.clear()
        pausing = asyncio.ensure_future(self._waiting.pause(pause_s))
        changing = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({pausing, changing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in (pausing, changing):
                one.cancel()
            await asyncio.wait({pausing, changing})

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        scene = self.scene_now()
        if scene.hold_s:
            await self._waiting.pause(scene.hold_s)
        if scene.drop:
            return self._cut(request)
        if scene.status is not None:
            response = web.Response(status=scene.status)
        else:
            response = await self.answer(request, scene)
            if self.scene_now().drop:
                return self._cut(request)
        self._record(request, response.status)
        return response

    def _cut(self, request: web.Request) -> web.Response:
        self._record(request, 0)
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=500)

    def _record(self, request: web.Request, status: int) -> None:
        self.requests.append(
            Request(at_s=self.elapsed_s, method=request.method, path=request.path_qs, status=status)
        )

    async def _set_date(self, _: web.Request, response: web.StreamResponse) -> None:
        response.headers.popall("Date", None)
        if self._sends_date:
            response.headers["Date"] = http_date(self.moment(self.elapsed_s))


def http_date(moment: datetime) -> str:
    """As in HTTP headers and Azure's events."""
    return format_datetime(moment.astimezone(UTC), usegmt=True)
