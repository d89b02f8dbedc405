"""Has the loops of simulator and borders compiled ahead: their first use on a machine takes ten seconds or so.

Later uses load what numba has kept beside the source, or in ``NUMBA_CACHE_DIR``. A process that would only wait
for another's result waits for its lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOCK_FILE = "compiling.lock"
LOOPS = ("kernel.*.run", "border_kernel.fill", "border_kernel.walk")
"""Module and function of what is called from Python."""

_PATIENCE_S = 60.0
_POLL_S = 0.02


def compile_loops(cache_dir: Path) -> bool:
    """Compile what nobody has compiled on this machine yet; whether there was something.

    Args:
        cache_dir: for the lock, see ``config.cache_dir``; made if it is not there.

    Raises:
        OSError: the lock cannot be made.
    """
    if _are_kept():
        return False
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(cache_dir / LOCK_FILE):
        if not _are_kept():
            _use_all()
    return True


def wait_for_compiler(cache_dir: Path) -> None:
    """Return when no process of this machine compiles, or after a minute."""
    with contextlib.suppress(OSError), _locked(cache_dir / LOCK_FILE):
        return


def are_kept_beside_source() -> bool:
    """Whether nothing is to do, as far as can be told without the compiler."""
    beside = Path(__file__).parent / "__pycache__"
    return "NUMBA_CACHE_DIR" not in os.environ and all(_is_kept(loop, beside) for loop in LOOPS)


def _use_all() -> None:
    """Choose a plan for some model."""
    from varuna.plan.choose import choose_plan
    from varuna.plan.cluster import Cluster
    from varuna.plan.estimate import estimated_profile

    choose_plan(estimated_profile("gpt2-355m", "v100"), Cluster.parse("2x1"), batch_size=4)


def _are_kept() -> bool:
    """Whether numba has kept something of each loop; what is out of date counts, too."""
    from varuna.plan import border_kernel, kernel

    compiled: tuple[Any, ...] = (kernel.run_compiled, border_kernel.fill, border_kernel.walk)
    return all(_is_kept(name, Path(loop.stats.cache_path)) for name, loop in zip(LOOPS, compiled, strict=True))


def _is_kept(loop: str, directory: Path) -> bool:
    return any(directory.glob(f"{loop}-*.nbc"))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock of this machine's processes, or have waited long for whoever holds it."""
    give_up_s = time.monotonic() + _PATIENCE_S
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while time.monotonic() < give_up_s:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)
