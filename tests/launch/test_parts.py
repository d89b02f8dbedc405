"""The small parts of the launcher by themselves."""

from __future__ import annotations

import io
import os
import signal
import socket
from pathlib import Path

import pytest

from varuna.launch.devices import count_visible, visible_gpus
from varuna.launch.naming import new_run_id
from varuna.launch.output import Output, PrefixedStream
from varuna.launch.protocol import (
    Channel,
    Exited,
    Ready,
    SendSignal,
    Started,
    StartProcess,
    StartStore,
    StoreReady,
    decode_report,
    decode_request,
)
from varuna.launch.signals import SignalInbox

LISTING = """\
GPU 0: NVIDIA H100 (UUID: GPU-aa)
  MIG 1g.10gb Device 0: (UUID: MIG-cc)
GPU 1: NVIDIA H100 (UUID: GPU-bb)
"""


@pytest.mark.parametrize(
    ("listing", "visible", "count"),
    [
        (LISTING, None, 2),
        (LISTING, "", 0),
        (LISTING, "-1", 0),
        (LISTING, "1", 1),
        (LISTING, " 1 , 0 ", 2),
        (LISTING, "0,7,1", 1),  # an unknown entry ends the list
        (LISTING, "GPU-bb,MIG-cc", 2),
        (LISTING, "GPU-zz", 0),
        ("", "0,1", 0),  # a variable left over on a machine without GPUs
        ("No devices were found\n", None, 0),
    ],
)
def test_gpus_are_counted_as_cuda_shows_them(listing: str, visible: str | None, count: int) -> None:
    assert count_visible(listing, visible) == count


def test_gpus_are_asked_of_nvidia_smi(tmp_path: Path) -> None:
    assert visible_gpus({"PATH": str(tmp_path)}) == 0
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\nprintf '%s' '{LISTING}'\n")
    command.chmod(0o755)
    assert visible_gpus({"PATH": str(tmp_path)}) == 2
    assert visible_gpus({"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0"}) == 1
    command.write_text("#!/bin/sh\necho 'GPU 0: stale'\nexit 9\n")
    assert visible_gpus({"PATH": str(tmp_path)}) == 0


def test_messages_keep_their_descriptors_and_order() -> None:
    ours, its = (Channel(end) for end in socket.socketpair())
    readers = []
    for index in range(20):
        reader, writer = os.pipe()
        readers.append(reader)
        request = StartProcess(
            name=f"worker-{index}",
            worker_index=index,
            target="train.py",
            is_module=False,
            arguments=["two words", 'quote " and\nline'],
            environ={"BIG": "x" * 5000},
            failure_dir="",
            num_fds=1,
        )
        ours.send(request, [writer])
        ours.send(SendSignal(name="x", signum=15))
        os.close(writer)
    lines: list[bytes] = []
    while len(lines) < 40:
        lines += its.receive_lines()
    for index, line in enumerate(lines[::2]):
        request = decode_request(line)
        assert isinstance(request, StartProcess)
        assert (request.worker_index, request.arguments[1]) == (index, 'quote " and\nline')
        [fd] = its.take_fds(request.num_fds)
        os.write(fd, str(index).encode())
        os.close(fd)
    assert [os.read(reader, 99) for reader in readers] == [str(index).encode() for index in range(20)]
    for reader in readers:
        os.close(reader)
    ours.close()
    assert its.receive_lines() == []
    assert not its.is_open
    its.close()


def test_a_closed_channel_refuses_nothing_and_says_so() -> None:
    ours, its = (Channel(end) for end in socket.socketpair())
    its.close()
    ours.send(Ready(import_s=1.0))
    assert not ours.is_open
    ours.close()


def test_messages_come_back_from_json() -> None:
    import msgspec

    for report in (
        Ready(import_s=1.5),
        StoreReady(host="h", port=1),
        Started(name="store", pid=5),
        Exited(name="worker-1", code=-9, at_s=2.0),
    ):
        assert decode_report(msgspec.json.encode(report)) == report
    assert decode_request(msgspec.json.encode(StartStore(host="h"))) == StartStore(host="h")


def test_lines_get_a_prefix_however_they_arrive(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    log, shown = (tmp_path / "log").open("wb"), io.BytesIO()
    stream = PrefixedStream(reader, "[worker 2] ", log, shown.write)
    for data in (b"a", b"b\ncd\n", "é".encode()[:1], "é".encode()[1:] + b"\n", b"last"):
        os.write(writer, data)
        assert stream.pump()
    os.close(writer)
    assert not stream.pump()
    assert not stream.is_open
    assert (tmp_path / "log").read_text() == "ab\ncd\né\nlast\n"
    assert shown.getvalue().decode() == "[worker 2] ab\n[worker 2] cd\n[worker 2] é\n[worker 2] last\n"


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    (tmp_path / "worker-1.log").write_text("of an earlier run")
    output = Output(tmp_path, "first")
    streams = output.streams_for(1, False)
    os.write(streams.stdout, b"".join(b"line %d\n" % index for index in range(5000)))
    os.write(streams.stderr, b"the end\n")
    output.append(1, "Traceback\n")
    streams.close()
    assert output.tail(1, 3) == "line 4999\nthe end\nTraceback"
    assert output.tail(0, 3) == ""
    output.close()
    assert (tmp_path / "worker-1.log").read_text().startswith("line 0\n")


def test_signals_can_be_waited_for_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with SignalInbox((signal.SIGTERM, signal.SIGHUP)) as inbox:
        assert inbox.read() == []
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        assert set(inbox.read()) == {signal.SIGTERM, signal.SIGHUP}
    assert signal.getsignal(signal.SIGTERM) is before


def test_run_names_are_safe_in_paths_and_differ() -> None:
    first, second = new_run_id("dir/my script (2).py"), new_run_id("dir/my script (2).py")
    assert first.startswith("my_script_2_-")
    assert first != second


def test_a_task_of_skypilot_names_the_run() -> None:
    """The same when it is recovered on another machine; safe in a path, whatever it is called."""
    task = "sky-managed-2026-11-30-00-19-55-123456_my-gpt_12-0"
    assert new_run_id("train.py", {"SKYPILOT_TASK_ID": task}) == task
    assert new_run_id("train.py", {"SKYPILOT_TASK_ID": "../../a b/é"}) == "_.._a_b_"
    assert len(new_run_id("train.py", {"SKYPILOT_TASK_ID": "a" * 300})) == 150
    for nothing in ("", "..", "--"):
        assert new_run_id("train.py", {"SKYPILOT_TASK_ID": nothing}).startswith("train-")
