"""The emulated services from a user's side: threads, environment, scenes by hand, and refusals."""

from __future__ import annotations

import asyncio
import threading
import urllib.error
import urllib.request
from dataclasses import replace

import pytest

from varuna.morph.notices_detect import detect_clouds
from varuna.morph.waiting import RealWaiting
from varuna.testing.clouds import (
    AwsScene,
    AzureEvent,
    AzureScene,
    EmulatedAws,
    EmulatedAzure,
    EmulatedGcp,
    GcpScene,
)
from varuna.testing.virtual_time import ScaledTime

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Impatient(RealWaiting):
    """Real limits, pauses of almost nothing."""

    async def pause(self, seconds):
        await asyncio.sleep(min(seconds, 0.005))


def status_of(url: str, method: str = "GET", **headers: str) -> int:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, method=method, headers=names)
    try:
        with OPENER.open(request, timeout=10) as response:
            return response.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.parametrize(
    ("emulated", "scene"),
    [
        (EmulatedAws, AwsScene(action="terminate")),
        (EmulatedGcp, GcpScene(preempted=True)),
        (EmulatedAzure, AzureScene(events=(AzureEvent(),))),
    ],
)
def test_a_scene_reaches_a_source_by_hand_and_by_a_script_that_runs_fast(emulated, scene):
    """The service runs in a thread of its own."""
    num_threads = threading.active_count()
    told = []

    async def watch(cloud, *, show):
        [source] = await detect_clouds("m0", lambda _: None, environ=cloud.environ, waiting=Impatient())
        heard = asyncio.Event()
        loop = asyncio.get_running_loop()

        def tell(one):
            told.append(one)
            heard.set()

        task = asyncio.create_task(source.run(tell))
        if show:
            loop.call_later(0, cloud.show, scene)
        async with asyncio.timeout(30):
            await heard.wait()
        task.cancel()
        await asyncio.wait({task})

    with emulated().serving() as cloud:
        asyncio.run(watch(cloud, show=True))
    script = [replace(scene, at_s=3.0)]
    with emulated(script, waiting=ScaledTime(100)).serving() as cloud:
        asyncio.run(watch(cloud, show=False))
    assert len(told) == 2
    assert threading.active_count() == num_threads


def test_real_services_refuse_without_header_token_or_version_and_so_do_these():
    with EmulatedAws().serving() as cloud:
        action = f"{cloud.url}/latest/meta-data/spot/instance-action"
        assert status_of(action) == 401
        assert status_of(f"{cloud.url}/latest/api/token", "PUT") == 400
        ttl = {"X_aws_ec2_metadata_token_ttl_seconds": "60"}
        assert status_of(f"{cloud.url}/latest/api/token", "PUT", X_Forwarded_For="1.2.3.4", **ttl) == 403
        assert status_of(f"{cloud.url}/latest/api/token", "PUT", **ttl) == 200
        assert status_of(action, X_aws_ec2_metadata_token="token-0==") == 404
    with EmulatedGcp().serving() as cloud:
        assert status_of(f"{cloud.url}/computeMetadata/v1/instance/preempted") == 403
        assert status_of(f"{cloud.url}/computeMetadata/v1/instance/preempted", Metadata_Flavor="Google") == 200
    with EmulatedAzure().serving() as cloud:
        events = f"{cloud.url}/metadata/scheduledevents"
        assert status_of(f"{events}?api-version=2020-07-01") == 400
        assert status_of(events, Metadata="true") == 400
        assert status_of(f"{events}?api-version=2020-07-01", Metadata="true") == 200
    assert [request.status for request in cloud.requests] == [400, 400, 200]


def test_real_time_limits():
    async def run():
        waiting = RealWaiting()
        with pytest.raises(TimeoutError):
            await waiting.within(0.001, asyncio.Event().wait())
        assert await waiting.within(10, asyncio.sleep(0, "done")) == "done"
        before_s = waiting.now_s()
        await waiting.pause(0.001)
        assert waiting.now_s() > before_s

    asyncio.run(run())
