"""Which cloud is here; off the cloud nothing happens; what leads elsewhere is not followed."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading

import pytest

from tests.morph.cloud_support import START
from varuna.errors import ConfigError
from varuna.morph.notices_aws import AwsNotices
from varuna.morph.notices_azure import AzureNotices
from varuna.morph.notices_detect import DETECT_S, detect_clouds, sources_from_env
from varuna.morph.notices_gcp import GcpNotices
from varuna.morph.notices_http import MOST_BYTES, Answer, MetadataHttp, Silence
from varuna.morph.waiting import RealWaiting
from varuna.testing.clouds import (
    AwsScene,
    AzureScene,
    EmulatedAws,
    EmulatedAzure,
    EmulatedGcp,
    GcpScene,
)
from varuna.testing.virtual_time import VirtualTime

CLOUDS = {
    "aws": (EmulatedAws, AwsScene, AwsNotices),
    "gcp": (EmulatedGcp, GcpScene, GcpNotices),
    "azure": (EmulatedAzure, AzureScene, AzureNotices),
}


def all_at(url: str) -> dict[str, str]:
    """Every provider's service is looked for at one place, as on a real machine."""
    return {
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": url,
        "GCE_METADATA_HOST": url.removeprefix("http://"),
        "VARUNA_AZURE_METADATA_URL": url,
    }


@pytest.fixture
def refusing_url():
    """A port that nobody listens on, and nobody else can take meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.parametrize("name", sorted(CLOUDS))
def test_each_cloud_is_told_from_the_others_at_the_same_address(name):
    emulated, _, source = CLOUDS[name]

    async def run():
        async with emulated() as cloud:
            return await detect_clouds(
                "m0", reports.append, environ=all_at(cloud.url), limit_s=60
            ), cloud.requests

    reports = []
    found, requests = asyncio.run(run())
    assert [type(one) for one in found] == [source]
    assert len(requests) == 3
    assert reports == []


@pytest.mark.parametrize("name", sorted(CLOUDS))
def test_environ_of_an_emulated_cloud_leads_to_it_and_nowhere_else(name):
    emulated, _, source = CLOUDS[name]

    async def run():
        async with emulated() as cloud:
            return await detect_clouds("m0", lambda _: None, environ=cloud.environ, limit_s=60), cloud.requests

    found, requests = asyncio.run(run())
    assert [type(one) for one in found] == [source]
    assert len(requests) == 1


def test_refused_is_silent_and_cheap(refusing_url):
    num_threads = threading.active_count()
    reports = []
    time = VirtualTime()

    async def run():
        return await detect_clouds("m0", reports.append, environ=all_at(refusing_url), waiting=time)

    assert asyncio.run(run()) == ()
    assert reports == []
    assert time.now_s() == 0
    assert threading.active_count() == num_threads


@pytest.mark.parametrize("limit_s", [2.0, DETECT_S])
def test_no_answer_is_silent_and_takes_the_stated_time(limit_s):
    """A listener that accepts and never speaks looks like a route that swallows everything."""
    reports = []

    async def run():
        time = VirtualTime()
        async with EmulatedAws([AwsScene(hold_s=math.inf)], waiting=time, server_time=START) as cloud:
            task = asyncio.create_task(
                detect_clouds("m0", reports.append, environ=all_at(cloud.url), waiting=time, limit_s=limit_s)
            )
            found = await time.run_until_done(task, num_pausing=3)
            return found, time.now_s()

    assert asyncio.run(run()) == ((), limit_s)
    assert reports == []


@pytest.mark.parametrize("status", [200, 204, 301, 400, 401, 403, 404, 405, 500, 503])
def test_a_service_of_another_kind_is_no_cloud(status):
    async def run():
        async with EmulatedAws([AwsScene(status=status)]) as cloud:
            return await detect_clouds("m0", lambda _: None, environ=all_at(cloud.url))

    assert asyncio.run(run()) == ()


def test_named_but_absent_is_said(refusing_url):
    reports = []
    environ = {"VARUNA_CLOUD": "aws,azure", **all_at(refusing_url)}
    assert asyncio.run(detect_clouds("m0", reports.append, environ=environ)) == ()
    assert len(reports) == 2
    assert "aws" in reports[0].text


def test_none_asks_nobody():
    assert sources_from_env("m0", print, environ={"VARUNA_CLOUD": "none"}, waiting=RealWaiting()) == []


def test_aws_own_switch_is_honoured():
    environ = {"AWS_EC2_METADATA_DISABLED": "true"}
    sources = sources_from_env("m0", print, environ=environ, waiting=RealWaiting())
    assert [source.source for source in sources] == ["gcp", "azure"]


@pytest.mark.parametrize(
    "environ",
    [
        {"VARUNA_CLOUD": "ibm"},
        {"VARUNA_CLOUD": "aws,none"},
        {"VARUNA_GCP_NOTICE_S": "soon"},
        {"VARUNA_GCP_NOTICE_S": "-1"},
        {"VARUNA_AZURE_METADATA_URL": "169.254.169.254"},
        {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "file:///etc/passwd"},
    ],
)
def test_what_cannot_be_is_refused(environ):
    [(name, value)] = environ.items()
    with pytest.raises(ConfigError) as caught:
        sources_from_env("m0", print, environ=environ, waiting=RealWaiting())
    assert name in str(caught.value)
    assert value in str(caught.value)


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    async def run():
        async with EmulatedAws() as proxy, EmulatedGcp() as cloud:
            for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
                monkeypatch.setenv(name, proxy.url)
            monkeypatch.setenv("no_proxy", "")
            found = await detect_clouds("m0", lambda _: None, environ=cloud.environ, limit_s=60)
            return len(found), proxy.requests

    assert asyncio.run(run()) == (1, [])


# --- the questions themselves ---------------------------------------------------------------


async def served(raw: bytes, *, for_ever: bytes = b"") -> Answer | Silence:
    """What comes back from a server that answers every request with these bytes, and others without end."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(raw)
            await writer.drain()
            while for_ever:
                writer.write(for_ever)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, MetadataHttp(f"http://127.0.0.1:{port}", RealWaiting()) as http:
        return await http.ask("GET", "/x", timeout_s=10)


def test_redirects_are_not_followed():
    async def run():
        async with EmulatedAws() as elsewhere:
            head = f"HTTP/1.1 302 Found\r\nLocation: {elsewhere.url}/\r\nContent-Length: 0\r\n\r\n"
            return await served(head.encode()), elsewhere.requests

    answer, requests = asyncio.run(run())
    assert answer.status == 302
    assert requests == []


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\xff" * 100_000,
    ],
)
def test_nonsense_is_silence(raw):
    answer = asyncio.run(served(raw))
    assert isinstance(answer, Silence)
    assert answer.reason


def test_a_long_answer_is_cut():
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n"
    answer = asyncio.run(served(head, for_ever=b"x" * 65536))
    assert len(answer.body) == MOST_BYTES


def test_bytes_that_are_no_text_are_replaced():
    answer = asyncio.run(served(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A: \xff\r\n\r\n\xff\xfe"))
    assert answer.body == "\ufffd\ufffd"
