"""One compute thread, and no thread of a saver may outlive its test."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("varuna-checkpoint")]
    assert not left
