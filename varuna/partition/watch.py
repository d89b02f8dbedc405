"""What forward does that a graph cannot show, noticed during capture: the user is told instead of misled."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
from torch import nn

from varuna.errors import CaptureError


@contextlib.contextmanager
def watched(model: nn.Module) -> Iterator[None]:
    """Around one run of forward under capture.

    Raises:
        CaptureError: it put another tensor in a buffer's place, or drew from Python's or NumPy's generator.
    """
    buffers = {name: id(buffer) for name, buffer in model.named_buffers()}
    of_random, of_numpy = random.getstate(), np.random.get_state(legacy=False)
    yield
    assigned = [name for name, buffer in model.named_buffers() if buffers.get(name) != id(buffer)]
    if assigned:
        last = assigned[0].rpartition(".")[2]
        raise CaptureError(
            f"Forward assigns a new tensor to the buffer {assigned[0]!r} (self.{last} = ...), which a captured "
            f"graph loses. Change it in place: self.{last}.copy_(...), .add_(...) or .mul_(...)."
        )
    if of_random != random.getstate() or not _equal(of_numpy, np.random.get_state(legacy=False)):
        raise CaptureError(
            "Forward draws random numbers from Python's random or numpy.random. A captured graph would keep "
            "the first draw for ever. Draw with torch (torch.rand(...), torch.where), or set options that skip "
            "layers at random to 0."
        )


def _equal(first: object, second: object) -> bool:
    return repr(first) == repr(second) and _keys(first) == _keys(second)


def _keys(state: object) -> bytes:
    assert isinstance(state, dict)
    inner = state["state"]
    return bytes(inner["key"].tobytes()) + str(inner["pos"]).encode()
