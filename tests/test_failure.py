"""Failure records: what is kept of an exception, and which of several caused the others."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from varuna.errors import PeerLost, ProtocolError, WorkerFailed
from varuna.failure import (
    FailurePlace,
    decode_record,
    encode_record,
    first_cause,
    is_root_cause,
    mark_place,
    place_of,
    read_record,
    record_of,
    shortened,
    write_record,
)

PLACE = FailurePlace(step_index=7, pipeline_index=0, stage_index=1, micro_batch_index=3, operation="backward")


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        return raised


def test_a_record_says_who_where_and_what_and_survives_the_disk(tmp_path: Path) -> None:
    error = caught(ValueError("bad token\nsecond line"))
    mark_place(error, PLACE)
    record = record_of(error, 2)
    assert record.place == PLACE
    assert "ValueError: bad token" in record.traceback_text
    assert "this happened in step 7, pipeline 0, stage 1, micro-batch 3, backward" in record.traceback_text
    where = "step 7, pipeline 0, stage 1, micro-batch 3, backward"
    assert record.summary() == f"worker 2 failed ({record.host}, {where}): ValueError: bad token"
    assert decode_record(encode_record(record)) == record
    assert read_record(tmp_path, 2) is None
    write_record(record, tmp_path)
    assert read_record(tmp_path, 2) == record
    assert [path.name for path in tmp_path.iterdir()] == ["worker-2.failure.json"]


@pytest.mark.parametrize("text", ["x" * 9000, "\u2713\n" * 4000, "short"])
def test_a_shortened_record_fits_and_keeps_what_says_most(text: str) -> None:
    def deep(depth: int) -> None:
        if depth:
            deep(depth - 1)
        else:
            raise ValueError(text)

    with pytest.raises(ValueError) as raised:
        deep(60)
    whole = record_of(raised.value, 2)
    short = shortened(whole, 3000)
    assert len(encode_record(short)) <= 3000
    assert short.error_text
    assert whole.error_text.startswith(short.error_text)
    assert whole.traceback_text.endswith(short.traceback_text)
    assert short.summary().startswith(f"worker 2 failed ({whole.host}): ValueError: ")
    assert shortened(short, 3000) == short


def test_the_innermost_mark_stays_and_is_found_behind_causes() -> None:
    inner = caught(KeyError("x"))
    mark_place(inner, PLACE)
    mark_place(inner, FailurePlace(stage_index=9))
    outer = WorkerFailed("worker 2 failed")
    outer.__cause__ = inner
    assert place_of(outer) == PLACE
    assert place_of(RuntimeError()) == FailurePlace()
    looped = RuntimeError()
    looped.__context__ = looped.__cause__ = looped
    assert place_of(looped) == FailurePlace()


@pytest.mark.parametrize(
    ("error", "is_root"),
    [
        (ValueError("connection reset by peer"), True),  # the user's own words
        (ProtocolError("a message of step 3 in step 4"), True),
        (pickle.PicklingError("x"), True),
        (OSError("No space left on device"), True),
        (PeerLost("worker 1 is gone"), False),
        (ConnectionResetError("peer"), False),
        (BrokenPipeError(), False),
        (RuntimeError("[/pytorch/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:2"), False),
        (RuntimeError("Socket closed"), False),
        (RuntimeError("shapes do not match"), True),
    ],
)
def test_broken_connections_are_consequences(error: BaseException, is_root: bool) -> None:
    assert is_root_cause(error) is is_root


@pytest.mark.parametrize(
    ("modules", "is_root"),
    [
        (["__main__"], True),  # a logging service that hung up, a closed standard output
        (["__main__", "varuna.session", "users_model", "urllib3.connection", "socket"], True),
        (["__main__", "varuna.session", "varuna.run.channel", "socket"], False),
        (["__main__", "torch.distributed.distributed_c10d"], False),
    ],
)
@pytest.mark.parametrize("raised", ["ConnectionResetError('peer')", "RuntimeError('Broken pipe')"])
def test_whose_connection_it_was_is_told_by_the_code_that_used_it(
    modules: list[str], is_root: bool, raised: str
) -> None:
    function = None
    for name in reversed(modules):
        scope: dict[str, Any] = {"__name__": name, "inner": function}
        exec(f"def outer():\n    {'inner()' if function else f'raise {raised}'}", scope)
        function = scope["outer"]
    assert function is not None
    with pytest.raises((ConnectionResetError, RuntimeError)) as caught:
        function()
    assert is_root_cause(caught.value) is is_root
    failed = WorkerFailed(f"in forward of micro-batch 3: {caught.value}: connection reset by peer")
    failed.__cause__ = caught.value
    assert is_root_cause(failed) is is_root


def test_the_earliest_real_cause_is_first() -> None:
    lost = record_of(PeerLost("gone"), 0)
    cause = record_of(ValueError("a"), 1)
    later = record_of(ValueError("b"), 2)
    assert first_cause([lost, later, cause]) == cause
    assert first_cause([lost]) == lost
    assert first_cause([]) is None
