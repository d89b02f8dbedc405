"""Telling peers why a connection broke: a failing worker leaves its reason in the store before it closes.

    try: ...                                      # the step
    except PeerLost as error:
        raise explain_peer_loss(store, generation, error) from error
    except BaseException as error:
        publish_failure(store, generation, rank, error)
        raise

Both take a ``torch.distributed.Store`` that lives outside the workers. The first real cause of a generation
stays; later ones are dropped.
"""

from __future__ import annotations

import time
from dataclasses import replace

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from varuna.errors import PeerLost
from varuna.failure import FailurePlace, FailureRecord, decode_record, encode_record, is_root_cause, record_of

_EXPLAIN_TIMEOUT_S = 0.5
_POLL_S = 0.02


def failure_key(generation: int) -> str:
    """Where in the store the first failure of a generation is told."""
    return f"failure/{generation}"


def describe_failure(error: BaseException, place: FailurePlace, worker_index: int) -> str:
    """One line for people: worker, host, place, exception."""
    return replace(record_of(error, worker_index), place=place).summary()


def publish_failure(store: Store, generation: int, worker_index: int, error: BaseException) -> bool:
    """Tell the other workers of this generation why this one fails. Never raises for a store that is gone too.

    Returns whether it was told: False if the error only says that another worker went away, if another's
    failure was told first, or if the store cannot be reached.
    """
    if not is_root_cause(error):
        return False
    mine = encode_record(record_of(error, worker_index))
    try:
        return bool(store.compare_set(failure_key(generation), "", mine.decode()) == mine)
    except DistError:  # the store died as well: the launcher's own record has to do
        return False


def published_failure(
    store: Store, generation: int, *, timeout_s: float = _EXPLAIN_TIMEOUT_S
) -> FailureRecord | None:
    """The first failure told in this generation; waits at most ``timeout_s`` seconds for one."""
    key = failure_key(generation)
    give_up_at_s = time.monotonic() + timeout_s
    try:
        while not store.check([key]):  # store.wait would log its time-out as a warning
            if time.monotonic() >= give_up_at_s:
                return None
            time.sleep(_POLL_S)
        return decode_record(bytes(store.get(key)))
    except DistError:  # the store is gone as well
        return None


def explain_peer_loss(
    store: Store, generation: int, error: BaseException, *, timeout_s: float = _EXPLAIN_TIMEOUT_S
) -> PeerLost:
    """A ``PeerLost`` that says why the connection broke, if its cause was told within ``timeout_s`` seconds."""
    record = published_failure(store, generation, timeout_s=timeout_s)
    if record is None:
        return PeerLost(
            f"{error} No worker said why before its connection broke: one was killed, or its script "
            f"ended before the others'."
        )
    return PeerLost(f"{error} Because {record.summary()}")
