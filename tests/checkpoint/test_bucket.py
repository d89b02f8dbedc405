"""C49: on a bucket the close of a file is not its durability, listings are late and a rename is not atomic."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import s3fs
import torch
from moto.server import ThreadedMotoServer

from tests.checkpoint.state import (
    NUM_SECTIONS,
    begin_save,
    layout,
    required_names,
    save,
    train,
    trained,
)
from tests.checkpoint.stores import LateFileSystem
from varuna.checkpoint.commit import Committer
from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.find import find_checkpoint, open_save, saves_in, with_newest
from varuna.checkpoint.load import read_tensors
from varuna.checkpoint.retention import Retention
from varuna.checkpoint.save import Saver
from varuna.checkpoint.store import Patience, Span, open_store, shown_url
from varuna.checkpoint.store_fsspec import FsspecStore
from varuna.checkpoint.values import PartFailed
from varuna.checkpoint.verify import problems_of
from varuna.errors import ConfigError
from varuna.events import Notice


def never(event: object) -> None:
    pytest.fail(str(event))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """An S3 server on loopback."""
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def bucket(server, monkeypatch, request) -> str:
    """URL of an empty prefix in a bucket; endpoint and keys come from the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    fs = s3fs.S3FileSystem(skip_instance_cache=True)
    if not fs.exists("checkpoints"):
        fs.mkdir("checkpoints")
    return f"s3://checkpoints/{request.node.name}"


@pytest.fixture
def late(bucket) -> tuple[LateFileSystem, FsspecStore]:
    """The bucket, but what is written appears only 5 seconds later; waiting is what makes time go on."""
    fs = LateFileSystem(s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False), delay_s=5.0)
    patience = Patience(limit_s=20.0, sleep=fs.sleep)
    return fs, FsspecStore(fs, bucket.removeprefix("s3://"), bucket, patience)


def test_c49_a_bucket_holds_checkpoints_like_a_directory(bucket):
    store = open_store(bucket)
    committer = Committer(store, retention=Retention(newest=2), publish=never)
    state = trained(1)
    for _ in range(3):
        manifest = save(store, state, 2, 2, committer=committer)
        train(state, 1)
    assert [order.step for order in saves_in(store)] == [3, 2]
    assert not [entry for entry in store.files(manifest.order.directory) if entry.name == ".writing"]
    found = find_checkpoint(store, publish=never)
    assert found is not None
    assert list(problems_of(found)) == []
    read = read_tensors(found, found.places)
    other = trained(3)
    assert torch.equal(read["parameters/second.weight"], other.parameters["second.weight"])


def test_c49_a_save_waits_until_what_it_wrote_is_visible_and_readers_wait_for_late_parts(late):
    fs, store = late
    committer = Committer(store, publish=never)
    state = trained(1)
    manifest = save(store, state, 2, 1, committer=committer)
    assert fs.now_s >= 5.0 * 2, "it must have had to wait, for parts and for the manifest"
    for part in manifest.parts:
        fs.hide(f"{store.url.removeprefix('s3://')}/{manifest.order.directory}/{part.file}")
    assert fs.num_hidden == len(manifest.parts)
    before_s = fs.now_s
    found = find_checkpoint(store, publish=never)
    assert found is not None
    assert fs.now_s - before_s >= 5.0
    assert list(problems_of(found)) == []


def test_c49_parts_that_stay_invisible_make_the_reader_take_the_older_one(late):
    fs, store = late
    committer = Committer(store, publish=never)
    state = trained(1)
    save(store, state, committer=committer)
    train(state, 1)
    manifest = save(store, state, committer=committer)
    fs.delay_s = 1000.0
    part = manifest.parts[0].file
    fs.hide(f"{store.url.removeprefix('s3://')}/{manifest.order.directory}/{part}")
    events: list[Notice] = []
    found = with_newest(store, lambda checkpoint: checkpoint.step, publish=events.append)
    assert found == 1
    assert f"{part}: expected {manifest.parts[0].size_bytes} bytes, found no such file" in events[0].text


def test_c49_a_manifest_that_stays_invisible_is_no_checkpoint_and_nothing_older_goes(late):
    fs, store = late
    committer = Committer(store, retention=Retention(newest=1), publish=never)
    state = trained(1)
    save(store, state, committer=committer)
    train(state, 1)
    savers = {0: Saver(store, "w0")}
    order, job, futures = begin_save(committer, savers, state, layout(1, 1))
    answers = [future.result(timeout=30) for future in futures.values()]
    savers[0].close()
    fs.delay_s = 1000.0
    with pytest.raises(CheckpointError, match=r"manifest\.json: wrote \d+ bytes and found no file for 20.0 s"):
        committer.commit(order, job, answers, required=required_names(state), num_sections=NUM_SECTIONS)
    fs.sleep(2000.0)
    assert [o.step for o in saves_in(store) if open_save(store, o) is not None] == [1]


def test_an_upload_that_breaks_leaves_no_half_object(bucket):
    fs = s3fs.S3FileSystem(skip_instance_cache=True, default_block_size=5 << 20)
    store = FsspecStore(fs, bucket.removeprefix("s3://"), bucket, Patience())

    def chunks():
        yield b"x" * (11 << 20)
        uploads = fs.call_s3("list_multipart_uploads", Bucket="checkpoints").get("Uploads")
        assert len(uploads) == 1, "some of it must be there"
        raise OSError("the network is gone")

    with pytest.raises(OSError, match="the network is gone"):
        store.write("d/part", chunks())
    assert store.files("d") == ()
    assert not fs.call_s3("list_multipart_uploads", Bucket="checkpoints").get("Uploads")


def test_a_bucket_that_does_not_exist_is_an_answer_and_not_an_exception(bucket):
    store = open_store("s3://no-such-bucket/x")
    saver = Saver(store, "w0")
    committer = Committer(open_store(bucket), publish=never)
    _, _, futures = begin_save(committer, {0: saver}, trained(1), layout(1, 1))
    answer = futures[0].result(timeout=60)
    saver.close()
    assert isinstance(answer, PartFailed)
    assert "s3://no-such-bucket/x" in answer.reason
    with pytest.raises(CheckpointError, match="A save cannot begin in s3://no-such-bucket/x"):
        Committer(store, publish=never).begin(3)


def test_large_files_are_read_in_pieces_and_small_neighbours_together(bucket, monkeypatch):
    monkeypatch.setattr("varuna.checkpoint.store_fsspec._PIECE_BYTES", 1 << 20)
    store = open_store(bucket)
    data = bytes(range(251)) * 15_000  # 3.7 MB
    store.write("d/part", [data])
    spans = [Span(begin=at, into=memoryview(bytearray(size))) for at, size in SPANS]
    store.read_into("d/part", spans)
    for span, (at, size) in zip(spans, SPANS, strict=True):
        assert bytes(span.into) == data[at : at + size], (at, size)
    with pytest.raises(EOFError):
        store.read_into("d/part", [Span(begin=len(data) - 3, into=memoryview(bytearray(4)))])
    assert store.read("d/part", 5, 9) == data[5:9]


SPANS = [(100, 4), (0, 3), (4, 4), (3_600_000, 7), (200, 2_500_000), (2_000_000, 600_000)]


def test_leftovers_in_a_bucket_go_by_the_buckets_own_clock(bucket):
    store = open_store(bucket)
    store.write("step-000000001-save-00001-deadbeef/section-00000-w0.safetensors", [b"half"])
    patient, impatient = (Committer(store, publish=never, grace_s=grace_s) for grace_s in (3600.0, 0.0))
    begun = patient.begin(2)
    assert len(saves_in(store)) == 2, "another job may be writing it"
    patient.abandon(begun)
    impatient.begin(3)
    assert [order.step for order in saves_in(store)] == [3]


def test_other_file_systems_of_fsspec_work_too(request):
    store = open_store(f"memory://{request.node.name}")
    committer = Committer(store, retention=Retention(newest=1), publish=never)
    state = trained(1)
    for _ in range(2):
        save(store, state, 2, 1, committer=committer)
        train(state, 1)
    found = find_checkpoint(store, publish=never)
    assert found is not None
    assert found.step == 2
    assert list(problems_of(found)) == []
    assert len(saves_in(store)) == 1


def test_urls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_store("runs/a").url == str(tmp_path / "runs/a")
    assert open_store(f"file://{tmp_path}/with%20space").url == f"{tmp_path}/with space"
    assert shown_url("ftp://user:secret@host/x") == "ftp://host/x"
    for url, text in [
        ("", "is no place for checkpoints"),
        ("s3://", "is no place for checkpoints"),
        ("file://host/x", "names the host 'host'"),
        ("nonsense://x", "is no place for checkpoints"),
        ("gs://bucket/x", "pip install gcsfs"),
    ]:
        with pytest.raises(ConfigError, match=text):
            open_store(url)
