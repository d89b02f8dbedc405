"""Workers whose torch or varuna is another release do not work together, whoever has started them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from varuna.errors import ConfigError
from varuna.run.groups import World
from varuna.run.startup import compare_versions
from varuna.versions import Versions, installed_versions


def world(store: Store, rank: int) -> World:
    return World(
        rank=rank, size=2, local_rank=rank, store=store, device=torch.device("cpu"), address="127.0.0.1"
    )


def test_equal_versions() -> None:
    store = HashStore()
    compare_versions(world(store, 0))
    compare_versions(world(store, 1))
    told = Versions(**json.loads(store.get("versions")))
    assert told == replace(installed_versions(), torch=str(torch.__version__))


@pytest.mark.parametrize(
    ("unlike", "words"),
    [
        (
            {"torch": "1.0.0"},
            r"Worker 1 on \S+ cannot take part: it has torch \d\S+, the job has torch 1\.0\.0\. ",
        ),
        ({"varuna": "9.9.9"}, "the job has varuna 9.9.9"),
    ],
)
def test_another_release(unlike: dict[str, str], words: str) -> None:
    store = HashStore()
    store.set("versions", json.dumps(asdict(replace(installed_versions(), **unlike))))
    with pytest.raises(ConfigError, match=words):
        compare_versions(world(store, 1))


def test_another_build_is_no_other_release() -> None:
    store = HashStore()
    other = replace(installed_versions(), torch=f"{torch.__version__.partition('+')[0]}+cu999", python="3.99.0")
    store.set("versions", json.dumps(asdict(other)))
    compare_versions(world(store, 1))
