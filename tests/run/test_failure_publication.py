"""A failing worker's reason reaches its peers through the store."""

from __future__ import annotations

import socket
import time

import pytest
from torch.distributed import HashStore, TCPStore

from varuna.errors import PeerLost
from varuna.failure import FailurePlace, mark_place
from varuna.run.failure import describe_failure, explain_peer_loss, publish_failure, published_failure


@pytest.fixture
def stores() -> tuple[TCPStore, TCPStore]:
    """A hosted store and a client of it."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return server, TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def failure(text: str) -> ValueError:
    error = ValueError(text)
    mark_place(error, FailurePlace(stage_index=1, micro_batch_index=3, operation="forward"))
    return error


def test_peers_say_whose_failure_broke_the_connection(stores: tuple[TCPStore, TCPStore]) -> None:
    failing, peer = stores
    assert publish_failure(failing, 4, 2, failure("bad token"))
    error = explain_peer_loss(peer, 4, PeerLost("The connection to worker 2 broke."))
    assert isinstance(error, PeerLost)
    assert str(error).startswith("The connection to worker 2 broke. Because worker 2 failed (")
    assert str(error).endswith("stage 1, micro-batch 3, forward): ValueError: bad token")


def test_only_the_first_real_cause_of_a_generation_is_told(stores: tuple[TCPStore, TCPStore]) -> None:
    first, second = stores
    assert not publish_failure(first, 0, 1, PeerLost("a consequence"))
    assert publish_failure(first, 0, 2, failure("first"))
    assert not publish_failure(second, 0, 3, failure("second"))
    assert publish_failure(second, 1, 3, failure("next generation"))
    record = published_failure(first, 0)
    assert record is not None
    assert (record.worker_index, record.error_text) == (2, "first")


def test_without_last_words_the_wait_is_bounded(stores: tuple[TCPStore, TCPStore]) -> None:
    started_s = time.monotonic()
    error = explain_peer_loss(stores[1], 0, PeerLost("The connection broke."), timeout_s=0.2)
    assert 0.2 <= time.monotonic() - started_s < 5
    assert "No worker said why" in str(error)


def test_a_description_in_one_line() -> None:
    text = describe_failure(ValueError("bad\nmore"), FailurePlace(stage_index=2, operation="loading data"), 5)
    assert text.startswith("worker 5 failed (")
    assert text.endswith("stage 2, loading data): ValueError: bad")


def test_any_store_will_do() -> None:
    store = HashStore()
    assert publish_failure(store, 0, 0, failure("x"))
    assert published_failure(store, 0) is not None
