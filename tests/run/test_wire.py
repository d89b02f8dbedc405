"""Messages as bytes, over real sockets: every type and shape arrives bit by bit, damage is found."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator, Sequence

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.run.pipes import header, nothing_leaks  # noqa: F401
from varuna.errors import ProtocolError
from varuna.run.receive_memory import RECYCLED_BYTES, ReceiveMemory
from varuna.run.stream import FrameReader, Goodbye, goodbye_frame, message_frame, send_frame
from varuna.run.tensor_bytes import DTYPES, TensorInfo
from varuna.run.wire import (
    MAX_LAYOUT_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_REMEMBERED,
    PREFIX_BYTES,
    Decoder,
    Direction,
    Encoder,
    Layout,
    Message,
    MessageHeader,
    decode_prefix,
)

Values = Sequence[torch.Tensor | None]


@pytest.fixture
def streams() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    with left, right:
        yield left, right


def exchange(streams: tuple[socket.socket, socket.socket], messages: Sequence[Message]) -> list[Message]:
    """Send messages from a thread, read them here."""
    left, right = streams

    def send_all() -> None:
        encoder = Encoder()
        for k, message in enumerate(messages):
            send_frame(left, message_frame(encoder, header(k), message))
        send_frame(left, goodbye_frame("that was all"))

    sender = threading.Thread(target=send_all)
    sender.start()
    reader = FrameReader(right)
    received = []
    while not isinstance(frame := reader.read(), Goodbye):
        assert frame.header == header(len(received))
        received.append(frame.message)
    sender.join()
    assert frame.reason == "that was all"
    return received


def assert_same_bits(received: Values, sent: Values) -> None:
    assert len(received) == len(sent)
    for got, expected in zip(received, sent, strict=True):
        if expected is None or got is None:
            assert got is None
            assert expected is None
            continue
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        dense = expected.detach().resolve_conj().resolve_neg().contiguous()
        assert torch.equal(got.reshape(-1).view(torch.uint8), dense.reshape(-1).view(torch.uint8))


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    num_bytes = math.prod(shape) * dtype.itemsize
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (num_bytes,), dtype=torch.uint8)
    return bits.view(dtype).view(shape)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_arrives_bit_by_bit(streams: tuple[socket.socket, socket.socket], name: str) -> None:
    dtype = DTYPES[name]
    values = [random_bits(shape, dtype) for shape in ((), (0,), (3, 0, 2), (1,), (5, 7), (70_001,))]
    (received,) = exchange(streams, [Message(values=tuple(values))])
    assert_same_bits(received.values, values)


def test_the_types_of_torch_that_models_use_are_all_known() -> None:
    fp8 = {
        name
        for name in dir(torch)
        if name.startswith("float8_") and isinstance(getattr(torch, name), torch.dtype)
    }
    assert fp8 <= set(DTYPES)
    assert {"bool", "int64", "bfloat16", "float16", "float32", "float64", "complex64"} <= set(DTYPES)


def test_strided_values_arrive_dense(streams: tuple[socket.socket, socket.socket]) -> None:
    base = torch.randn(6, 8)
    values = (
        base.t(),
        base[::2, 1:5],
        torch.ones(()).expand(4, 3),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        base.requires_grad_().sum(),
    )
    (received,) = exchange(streams, [Message(values=values)])
    assert_same_bits(received.values, values)
    assert all(
        value is not None and value.is_contiguous() and not value.requires_grad for value in received.values
    )


def test_missing_tensors_and_signature_travel(streams: tuple[socket.socket, socket.socket]) -> None:
    messages = [
        Message(values=()),
        Message(values=(None, None)),
        Message(values=(None, torch.arange(5), None), signature="x" * 300_000),
        Message(values=(torch.arange(5),), signature='{"batch": "é"}'),
    ]
    received = exchange(streams, messages)
    assert [message.signature for message in received] == [message.signature for message in messages]
    for got, sent in zip(received, messages, strict=True):
        assert_same_bits(got.values, sent.values)


def test_more_tensors_than_one_system_call_takes(streams: tuple[socket.socket, socket.socket]) -> None:
    values = tuple(torch.full((3,), index) for index in range(2500))
    (received,) = exchange(streams, [Message(values=values)])
    assert_same_bits(received.values, values)


def test_frames_of_all_sizes_follow_each_other(streams: tuple[socket.socket, socket.socket]) -> None:
    streams[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)  # reads end in the middle of things
    sizes = [1, 0, 4095, 16_384, 3, 16_383, 100_001, 7, 7, 7, 250_000, 12_345] * 2
    messages = [
        Message(values=(torch.randint(0, 256, (size,), dtype=torch.uint8), torch.tensor(size)))
        for size in sizes
    ]
    received = exchange(streams, messages)
    for got, sent in zip(received, messages, strict=True):
        assert_same_bits(got.values, sent.values)


def test_tensor_memory_is_sent_without_a_copy() -> None:
    tensor = torch.zeros(10, dtype=torch.uint8)
    message = Message(values=(tensor,))
    frame = message_frame(Encoder(), header(0), message)
    tensor.fill_(9)
    assert bytes(frame.buffers[1]) == bytes([9] * 10)


def test_received_tensors_do_not_share_memory(streams: tuple[socket.socket, socket.socket]) -> None:
    (received,) = exchange(streams, [Message(values=(torch.ones(4), torch.ones(4)))])
    first, second = received.values
    assert first is not None
    assert second is not None
    first.zero_()
    assert second.sum() == 4


def test_large_messages_reuse_memory_that_nobody_uses_any_more(
    streams: tuple[socket.socket, socket.socket],
) -> None:
    """A region is given again only when the last view of it is gone, and only for the same size."""
    info = TensorInfo("float32", (RECYCLED_BYTES // 4 + 1,))
    memory = ReceiveMemory()

    def allocate(info: TensorInfo) -> torch.Tensor:
        (tensor,) = memory.allocate((info,))
        assert tensor is not None
        return tensor

    first = allocate(info)
    address, kept = first.data_ptr(), first[10:20]
    assert first.shape == info.shape
    del first
    second = allocate(info)
    assert second.data_ptr() != address
    second.fill_(1)
    kept.fill_(2)
    assert bool((second == 1).all())
    del kept
    third = allocate(info)
    assert third.data_ptr() == address
    del second, third
    assert allocate(TensorInfo("float32", (RECYCLED_BYTES,))).nbytes == 4 * RECYCLED_BYTES

    messages = [Message(values=(torch.full(info.shape, float(k)), None, torch.tensor(k))) for k in range(6)]
    received = exchange(streams, messages)
    for got, sent in zip(received, messages, strict=True):
        assert_same_bits(got.values, sent.values)


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.empty(3, device="meta"), torch.empty(2, dtype=torch.bits8)],
    ids=["sparse", "meta", "bits"],
)
def test_tensors_that_cannot_travel_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ProtocolError, match="cannot be sent to the next stage"):
        message_frame(Encoder(), header(0), Message(values=(tensor,)))


def test_stream_that_ends_inside_a_frame(streams: tuple[socket.socket, socket.socket]) -> None:
    left, right = streams
    message = Message(values=(torch.zeros(100_000),))
    frame = message_frame(Encoder(), header(0), message)
    left.sendall(bytes(frame.buffers[0]) + bytes(1000))
    left.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        FrameReader(right).read()


def good_prefix() -> bytearray:
    return bytearray(Encoder().encode(header(0), Message(values=()))[0][:PREFIX_BYTES])


@pytest.mark.parametrize(
    ("offset", "value", "text"),
    [
        (0, b"GET ", "magic b'GET '"),
        (4, b"\x63", "version 99"),
        (5, b"\x09", "kind of message 9"),
        (32, (MAX_LAYOUT_BYTES + 1).to_bytes(4, "big"), "damaged"),
        (36, (MAX_PAYLOAD_BYTES + 1).to_bytes(8, "big"), "damaged"),
    ],
)
def test_a_damaged_prefix_is_found(offset: int, value: bytes, text: str) -> None:
    prefix = good_prefix()
    prefix[offset : offset + len(value)] = value
    with pytest.raises(ProtocolError, match=text):
        decode_prefix(prefix)


def encoded(**changes: object) -> bytes:
    fields: dict[str, object] = {
        "operation": "train",
        "direction": "gradient",
        "signature": "",
        "tensors": [["float32", [2, 3]]],
    }
    return msgspec.msgpack.encode(list((fields | changes).values()))


def test_a_good_layout_is_read() -> None:
    expected = Layout("train", Direction.GRADIENT, "", (TensorInfo("float32", (2, 3)),))
    assert Decoder().decode(encoded(), 24) == expected


@pytest.mark.parametrize(
    ("changes", "payload_bytes", "text"),
    [
        ({}, 23, "24 bytes, but 23"),
        ({"tensors": []}, 24, "0 bytes, but 24"),
        ({"tensors": [["float31", [2, 3]]]}, 24, "float31"),
        ({"tensors": [["float32", [-2, -3]]]}, 24, "impossible shape"),
        ({"tensors": [["float32", [1] * 65]]}, 4, "impossible shape"),
        ({"tensors": [None] * 5000}, 0, "5000 tensors"),
        ({"direction": "sideways"}, 24, "cannot be read"),
        ({"operation": 1}, 24, "cannot be read"),
        ({"tensors": [["float32", [1 << 40, 1 << 40]]]}, 24, "but 24"),
    ],
)
def test_a_wrong_layout_is_found(changes: dict[str, object], payload_bytes: int, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        Decoder().decode(encoded(**changes), payload_bytes)


def test_a_remembered_layout_is_still_checked_against_the_payload() -> None:
    decoder = Decoder()
    decoder.decode(encoded(), 24)
    with pytest.raises(ProtocolError, match="24 bytes, but 28"):
        decoder.decode(encoded(), 28)


def test_layouts_without_end_are_forgotten(streams: tuple[socket.socket, socket.socket]) -> None:
    messages = [Message(values=(torch.arange(size),)) for size in [*range(3 * MAX_REMEMBERED), *range(10)]]
    received = exchange(streams, messages)
    for got, sent in zip(received, messages, strict=True):
        assert_same_bits(got.values, sent.values)


def test_a_sparse_tensor_is_not_taken_for_a_remembered_dense_one() -> None:
    encoder = Encoder()
    dense = torch.eye(3)
    message_frame(encoder, header(0), Message(values=(dense,)))
    with pytest.raises(ProtocolError, match="cannot be sent"):
        message_frame(encoder, header(1), Message(values=(dense.to_sparse(),)))


@given(st.binary(max_size=200), st.integers(0, 1 << 40))
def test_random_bytes_are_a_protocol_error_or_a_layout(data: bytes, payload_bytes: int) -> None:
    try:
        Decoder().decode(data, payload_bytes)
    except ProtocolError:
        return


@given(st.binary(min_size=PREFIX_BYTES, max_size=PREFIX_BYTES))
def test_random_prefixes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_prefix(data)


@given(
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 30),
    st.text(max_size=50),
    st.lists(st.none() | st.lists(st.integers(0, 9), max_size=4), max_size=6),
)
def test_headers_and_layouts_round_trip(
    generation: int, step_index: int, k: int, signature: str, shapes: list[list[int] | None]
) -> None:
    message = Message(
        values=tuple(None if shape is None else torch.zeros(shape, dtype=torch.int16) for shape in shapes),
        signature=signature,
    )
    sent = MessageHeader(
        generation=generation,
        step_index=step_index,
        micro_batch_index=k,
        operation="evaluate",
        direction=Direction.ACTIVATION,
    )
    data, payload_bytes = Encoder().encode(sent, message)
    assert payload_bytes == sum(value.nbytes for value in message.values if value is not None)
    prefix = decode_prefix(data[:PREFIX_BYTES])
    layout = Decoder().decode(data[PREFIX_BYTES:], prefix.payload_bytes)
    assert prefix.header(layout) == sent
    assert layout.signature == signature
    assert [None if info is None else list(info.shape) for info in layout.tensors] == shapes
