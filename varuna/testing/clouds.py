"""Emulated metadata services of AWS, GCP and Azure on loopback: they play a script of preemptions and faults.

    with EmulatedAws([AwsScene(at_s=60, action="terminate", ends_s=180)]).serving() as cloud:
        subprocess.run(["varuna", "run", "train.py"], env={**os.environ, **cloud.environ})

A script is a list of scenes; each holds from its ``at_s`` (seconds after the start) until the next. ``show``
changes the scene by hand, at any moment and from any thread. What a service refuses without its header or token
is refused here. In asyncio code use ``async with cloud:`` instead. ``waiting`` makes the script run faster, or
in a test's own time. Source: the providers' documentation; see docs/concepts/notices.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

from aiohttp import web

from varuna.morph.waiting import Waiting
from varuna.testing.cloud_server import EmulatedCloud, Scene, http_date

__all__ = ["AwsScene", "AzureEvent", "AzureScene", "EmulatedAws", "EmulatedAzure", "EmulatedGcp", "GcpScene"]

# --- AWS ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AwsScene(Scene):
    """An EC2 spot instance.

    Attributes:
        action: ``terminate``, ``stop`` or ``hibernate``; None: nothing is planned.
        ends_s: second of the script at which that happens; None: two minutes after the scene's start.
        rebalance: a rebalance recommendation is out.
        tokens_are_void: every token given so far is refused with 401.
    """

    action: str | None = None
    ends_s: float | None = None
    rebalance: bool = False
    tokens_are_void: bool = False


class EmulatedAws(EmulatedCloud[AwsScene]):
    """IMDSv2: nothing without a token, which lives as long as was asked for."""

    source = "aws"

    def __init__(
        self,
        scenes: Sequence[AwsScene] = (),
        *,
        waiting: Waiting | None = None,
        server_time: datetime | None = None,
        sends_date: bool = True,
    ) -> None:
        super().__init__(scenes, waiting=waiting, server_time=server_time, sends_date=sends_date)
        self._tokens: dict[str, tuple[float, float]] = {}

    @property
    def environ(self) -> dict[str, str]:
        """Variables for Varuna and AWS's own clients."""
        return {"VARUNA_CLOUD": "aws", "AWS_EC2_METADATA_SERVICE_ENDPOINT": self.url}

    def no_scene(self) -> AwsScene:
        """Nothing is planned."""
        return AwsScene()

    async def answer(self, request: web.Request, scene: AwsScene) -> web.Response:
        """Tokens, ``instance-action`` and ``rebalance``."""
        if request.path == "/latest/api/token":
            return self._token(request)
        if not self._is_valid(request.headers.get("X-aws-ec2-metadata-token", ""), scene):
            return web.Response(status=401)
        if request.path == "/latest/meta-data/spot/instance-action":
            if scene.body is not None:
                return web.Response(text=scene.body)
            if scene.action is not None:
                ends_s = scene.at_s + 120.0 if scene.ends_s is None else scene.ends_s
                return web.json_response({"action": scene.action, "time": self._iso(ends_s)})
        if request.path == "/latest/meta-data/events/recommendations/rebalance" and scene.rebalance:
            return web.json_response({"noticeTime": self._iso(self._rebalance_s())})
        return web.Response(status=404)

    def _rebalance_s(self) -> float:
        """When the recommendation that is out was made: in the first of the scenes in a row that have it."""
        since_s = 0.0
        for before, after in pairwise([self.no_scene(), *self._scenes]):
            if after.at_s <= self.elapsed_s and after.rebalance and not before.rebalance:
                since_s = after.at_s
        return since_s

    def _token(self, request: web.Request) -> web.Response:
        ttl = request.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if request.method != "PUT" or not ttl.isdigit() or not 1 <= int(ttl) <= 21600:
            return web.Response(status=400)
        if "X-Forwarded-For" in request.headers:
            return web.Response(status=403)
        token = f"token-{len(self._tokens)}=="
        self._tokens[token] = (self.elapsed_s, self.elapsed_s + int(ttl))
        return web.Response(text=token)

    def _is_valid(self, token: str, scene: AwsScene) -> bool:
        given_s, ends_s = self._tokens.get(token, (0.0, 0.0))
        is_void = scene.tokens_are_void and given_s < scene.at_s
        return self.elapsed_s < ends_s and not is_void

    def _iso(self, script_s: float) -> str:
        return self.moment(script_s).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# --- GCP ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GcpScene(Scene):
    """A Compute Engine spot instance.

    Attributes:
        preempted: what its metadata says.
        waits: a long poll waits for a change; False: it is answered at once, as by some stand-ins.
    """

    preempted: bool = False
    waits: bool = True


class EmulatedGcp(EmulatedCloud[GcpScene]):
    """``instance/preempted`` with its long poll."""

    source = "gcp"

    @property
    def environ(self) -> dict[str, str]:
        """Variables for Varuna and Google's own clients."""
        return {"VARUNA_CLOUD": "gcp", "GCE_METADATA_HOST": self.url.removeprefix("http://")}

    def no_scene(self) -> GcpScene:
        """Nothing is planned."""
        return GcpScene()

    async def answer(self, request: web.Request, scene: GcpScene) -> web.Response:
        """The value at once, or when it changes, or after ``timeout_sec``."""
        if request.headers.get("Metadata-Flavor") != "Google" or "X-Forwarded-For" in request.headers:
            return web.Response(status=403)
        if request.path != "/computeMetadata/v1/instance/preempted":
            return web.Response(status=404)
        if request.query.get("wait_for_change") == "true":
            ends_s = self.elapsed_s + float(request.query.get("timeout_sec", "inf"))
            known = request.query.get("last_etag", self._etag())
            while self._etag() == known and self.elapsed_s < ends_s and self._waits():
                await self.until_next_scene(ends_s - self.elapsed_s)
        scene = self.scene_now()
        if scene.status is not None:
            return web.Response(status=scene.status)
        headers = {"ETag": self._etag(), "Metadata-Flavor": "Google"}
        return web.Response(text=self._value(scene), headers=headers)

    def _waits(self) -> bool:
        scene = self.scene_now()
        return scene.waits and not scene.drop and scene.status is None

    @staticmethod
    def _value(scene: GcpScene) -> str:
        return scene.body if scene.body is not None else str(scene.preempted).upper()

    def _etag(self) -> str:
        """A name of the value: changes when the value does."""
        begun = [scene for scene in self._scenes if scene.at_s <= self.elapsed_s]
        values = [self._value(scene) for scene in (self.no_scene(), *begun)]
        changes = sum(before != after for before, after in pairwise(values))
        return f"{changes:016x}"


# --- Azure ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AzureEvent:
    """One scheduled event.

    Attributes:
        event_id: its name.
        event_type: ``Preempt``, ``Terminate``, ``Reboot``, ``Redeploy`` or ``Freeze``.
        resources: names of the VMs that it strikes.
        ends_s: second of the script at which it strikes; None: 30 s after the scene's start.
        started: it is under way, and has no ``NotBefore`` any more.
    """

    event_id: str = "602d9444-d2cd-49c7-8624-8643e7171297"
    event_type: str = "Preempt"
    resources: tuple[str, ...] = ("vm_0",)
    ends_s: float | None = None
    started: bool = False


@dataclass(frozen=True, kw_only=True)
class AzureScene(Scene):
    """A VM, and all events of the set that it belongs to."""

    events: tuple[AzureEvent, ...] = ()


class EmulatedAzure(EmulatedCloud[AzureScene]):
    """Scheduled events and the VM's name.

    Args:
        scenes: the script.
        vm_name: of the VM that asks.
        first_call_s: how long the first question for events takes to be answered.
        waiting, server_time, sends_date: as for every emulated cloud.
    """

    source = "azure"

    def __init__(
        self,
        scenes: Sequence[AzureScene] = (),
        *,
        vm_name: str = "vm_0",
        first_call_s: float = 0.0,
        waiting: Waiting | None = None,
        server_time: datetime | None = None,
        sends_date: bool = True,
    ) -> None:
        super().__init__(scenes, waiting=waiting, server_time=server_time, sends_date=sends_date)
        self.acknowledged: list[str] = []
        self._vm_name = vm_name
        self._first_call_s = first_call_s

    @property
    def environ(self) -> dict[str, str]:
        """Variables for Varuna."""
        return {"VARUNA_CLOUD": "azure", "VARUNA_AZURE_METADATA_URL": self.url}

    def no_scene(self) -> AzureScene:
        """Nothing is planned."""
        return AzureScene()

    async def answer(self, request: web.Request, scene: AzureScene) -> web.Response:
        """The VM's name, the events, acknowledgements."""
        if request.headers.get("Metadata", "").lower() != "true" or "api-version" not in request.query:
            return web.Response(status=400)
        if request.path == "/metadata/instance/compute/name":
            return web.Response(text=self._vm_name)
        if request.path != "/metadata/scheduledevents":
            return web.Response(status=404)
        if request.method == "POST":
            starts = await request.json()
            self.acknowledged += [start["EventId"] for start in starts["StartRequests"]]
            return web.Response(status=200)
        if self._first_call_s:
            first_call_s, self._first_call_s = self._first_call_s, 0.0
            await self._waiting.pause(first_call_s)
        scene = self.scene_now()
        text = scene.body if scene.body is not None else json.dumps(self._document(scene))
        return web.Response(text=text, content_type="application/json")

    def _document(self, scene: AzureScene) -> dict[str, object]:
        begun = sum(other.at_s <= self.elapsed_s for other in self._scenes)
        events = [self._event(event, scene) for event in scene.events]
        return {"DocumentIncarnation": begun + len(self.acknowledged), "Events": events}

    def _event(self, event: AzureEvent, scene: AzureScene) -> dict[str, object]:
        is_started = event.started or event.event_id in self.acknowledged
        ends_s = scene.at_s + 30.0 if event.ends_s is None else event.ends_s
        return {
            "EventId": event.event_id,
            "EventType": event.event_type,
            "ResourceType": "VirtualMachine",
            "Resources": list(event.resources),
            "EventStatus": "Started" if is_started else "Scheduled",
            "NotBefore": "" if is_started else http_date(self.moment(ends_s)),
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }
