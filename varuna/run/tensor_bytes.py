"""Tensors as bytes: their type and shape in words, their memory without a copy, memory to receive into."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterable, Sequence

import msgspec
import torch
from torch import Tensor

from varuna.errors import ProtocolError

_DTYPE_NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *(
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    ),
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)}
_NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPES.items()}

assert sys.byteorder == "little", "tensor bytes travel as they lie in memory"


class TensorInfo(msgspec.Struct, frozen=True, array_like=True):
    """Type and shape of one tensor of a message; ``dtype`` as in ``torch.<dtype>``."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of its dense payload."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def info_of(tensor: Tensor) -> TensorInfo:
    """Type and shape as they travel.

    Raises:
        ProtocolError: a tensor without dense storage, or of a type that no model computes with.
    """
    name = _NAME_OF_DTYPE.get(tensor.dtype)
    if name is None or tensor.layout is not torch.strided or tensor.is_meta:
        raise ProtocolError(
            f"A tensor of {tensor.dtype}, layout {tensor.layout}, device {tensor.device} cannot be sent to the "
            f"next stage. Move the cut point so that a dense tensor crosses it."
        )
    return TensorInfo(name, tuple(tensor.shape))


def payload_views(tensors: Iterable[Tensor | None]) -> list[memoryview]:
    """The memory of contiguous CPU tensors in order, not copied, without those that have none.

    The views do not keep the tensors alive: the caller must, as long as it uses them.
    """
    return [_memory_of(tensor) for tensor in tensors if tensor is not None and tensor.nbytes]


def _memory_of(tensor: Tensor) -> memoryview:
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def allocate(infos: Sequence[TensorInfo | None], *, pin_memory: bool = False) -> tuple[Tensor | None, ...]:
    """Uninitialised CPU tensors, each with its own storage; None where there is no tensor."""
    return tuple([None if info is None else _empty(info, pin_memory) for info in infos])


def _empty(info: TensorInfo, pin_memory: bool) -> Tensor:
    dtype = DTYPES[info.dtype]
    if dtype is torch.complex32:  # torch warns that it is experimental when it makes one, not when it views one
        flat = torch.empty(info.num_bytes, dtype=torch.uint8, pin_memory=pin_memory)
        return flat.view(dtype).view(info.shape)
    return torch.empty(info.shape, dtype=dtype, pin_memory=pin_memory)


def on_host(tensor: Tensor) -> Tensor:
    """The same values, dense, in CPU memory; the tensor itself if it is that already.

    A CUDA tensor starts a copy to pinned memory on the current stream: wait for ``copies_done`` before reading.
    """
    if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    info_of(tensor)  # a sparse tensor may have the type and shape of a dense one that was sent before
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_cuda:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
    return tensor.cpu().contiguous()


def copies_done(tensors: Sequence[Tensor | None]) -> torch.cuda.Event | None:
    """What to synchronize with before the host copies of ``tensors`` may be read; None if none is on a GPU."""
    device = next((tensor.device for tensor in tensors if tensor is not None and tensor.is_cuda), None)
    if device is None:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
