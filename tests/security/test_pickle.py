"""A pickle at every door: nobody loads it, from the wire or from disk."""

from __future__ import annotations

import asyncio
import pickle
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import msgspec
import pytest
from torch.distributed import HashStore

from tests.checkpoint.state import save, trained
from tests.morph.serving import TOKEN, ServedManager, place
from tests.run.pipes import address_of, options, receive
from tests.security.pickles import Canary
from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.find import find_checkpoint
from varuna.checkpoint.load import read_tensors
from varuna.checkpoint.store import open_store
from varuna.errors import ConfigError, PeerLost, ProtocolError
from varuna.launch.token import read_token
from varuna.morph.journal import Journal
from varuna.morph.runs import living_runs
from varuna.run.channel import open_channels
from varuna.run.wire import Direction

GOOD = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def canary(tmp_path: Path) -> Canary:
    """Each test ends with a look whether it sang."""
    return Canary(tmp_path / "sang")


def test_the_canary_sings(canary: Canary) -> None:
    pickle.loads(canary.data).close()
    assert not canary.is_silent


def test_the_managers_door(canary: Canary) -> None:
    async def knock(url: str) -> None:
        async with aiohttp.ClientSession(headers=GOOD) as session:
            for path in ("/worker?incarnation=vm.0.a", "/agent?machine=vm"):
                async with session.ws_connect(url + path) as door:
                    await door.send_bytes(canary.data)
                    async for message in door:
                        raise AssertionError(message)
                    assert door.close_code == 1008
            for path in ("/preempt", "/workers"):
                async with session.post(url + path, data=canary.data) as answer:
                    assert answer.status == 400

    with place() as at:
        served = ServedManager(at)
        before = at.loop.call(lambda: msgspec.json.encode(served.manager.job))
        asyncio.run(knock(at.url))
        assert at.loop.call(lambda: msgspec.json.encode(served.manager.job)) == before
    assert canary.is_silent


def test_the_channel_between_workers(canary: Canary) -> None:
    """Before the hello of a stranger, and after one that was accepted."""
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        right = pool.submit(open_channels, store, address_of(1, 2), options())
        store.wait(["channels/7/1"])
        host, _, port = store.get("channels/7/1").decode().rpartition("|")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(canary.data)
            left = open_channels(store, address_of(0, 2), options())
            channels = right.result()
            left._send[Direction.ACTIVATION]._stream.sendall(canary.data + bytes(100))
            with pytest.raises((ProtocolError, PeerLost)):
                receive(channels)
        left.abort()
        channels.abort()
    assert canary.is_silent


@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_a_checkpoint(canary: Canary, tmp_path: Path, suffix: str) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    store = open_store(str(root))
    save(store, trained(1), 2, 1)
    files = [path for path in root.rglob(f"*{suffix}") if path.is_file()]
    assert files
    for path in files:
        path.write_bytes(canary.data)
    try:
        found = find_checkpoint(store, publish=lambda _: None)
    except CheckpointError:
        found = None
    if suffix == ".json":
        assert found is None
    if found is not None:
        with pytest.raises(CheckpointError):
            read_tensors(found, found.places)
    assert canary.is_silent


def test_files_that_commands_and_managers_read(canary: Canary, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "x.json").write_bytes(canary.data)
    with pytest.raises(ConfigError, match="cannot be read"):
        living_runs(tmp_path)
    journal = tmp_path / "journal.sqlite"
    journal.write_bytes(canary.data * 100)
    with pytest.raises(ConfigError, match="no journal"):
        Journal(journal)
    token = tmp_path / "token"
    token.write_bytes(canary.data)
    token.chmod(0o600)
    with pytest.raises(ConfigError, match="token"):
        read_token({}, token)
    assert canary.is_silent


def test_nothing_in_the_package_can_unpickle() -> None:
    """No module of ours imports pickle, or calls what loads one."""
    package = Path(__file__).parents[2] / "varuna"
    forbidden = re.compile(
        r"(import|from) (pickle|marshal|shelve|dill|joblib)\b|(?<!safetensors\.)\btorch\.(load|save)\("
        r"|all_gather_object|broadcast_object|scatter_object|\bgather_object\("
    )
    found = {
        str(path.relative_to(package)): match[0]
        for path in package.rglob("*.py")
        if (match := forbidden.search(path.read_text(encoding="utf-8")))
    }
    assert found == {}
