"""What the C library does with memory that was freed: keep it for the next step, or give it back.

glibc gives the free end of its heap back to the system as soon as it is a few megabytes long. A training step
frees its activations and needs as many again in the next one, so that all their pages are taken and cleared by
the system anew: 2 to 7 % of a step on a CPU (LOG.md).
"""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
_KEPT_BYTES = 2**31 - 1
_MAPPED_BYTES = 32 << 20
"""Larger pieces are mapped one by one and go back when freed; glibc's own threshold grows up to this."""

_OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Have this process keep up to 2 GiB that it frees, until ``return_memory``.

    Returns:
        Whether it does: not where the user has set malloc's own variables, or the C library is not glibc.
    """
    setting = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if setting is None or any(os.environ.get(name) for name in _OWN_SETTINGS):
        return False
    # Setting one of the two ends the growth of both.
    return bool(setting(_MMAP_THRESHOLD, _MAPPED_BYTES)) and bool(setting(_TRIM_THRESHOLD, _KEPT_BYTES))


def return_memory() -> None:
    """Give freed memory back to the operating system, where the C library keeps it otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
