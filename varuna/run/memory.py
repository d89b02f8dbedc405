"""How much memory this process has used at most, uses, and may still take.

What it may take is the least of: what the machine has left, what is left of every control group it is in (v1
and v2, limits of parents count too), and what is left of its limits on address space and data. A file cache
that the kernel would give up counts as free, as it does for the kernel.
"""

from __future__ import annotations

import resource
from pathlib import Path

import torch

_UNLIMITED_V1 = 2**60  # control groups v1 write a number near 2**63 for "no limit"


def peak_memory_bytes(device: torch.device | str = "cpu") -> int:
    """The most this process has held: resident memory for the CPU, allocated memory for a CUDA device."""
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    for line in (_read(Path("/proc/self/status")) or "").splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # counts what ran before an exec, too


def resident_bytes() -> int:
    """Resident memory of this process, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def reset_peak_memory(device: torch.device | str = "cpu") -> bool:
    """Let ``peak_memory_bytes`` count from now on; False where the system does not allow it.

    For the CPU it is Linux's ``/proc/self/clear_refs`` (man 5 proc: 5 resets the peak resident set size).
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # a kernel without it, or a sandbox: the peak stays that of the whole process
        return False
    return True


def available_bytes(device: torch.device | str = "cpu", *, num_sharing: int = 1) -> int:
    """How much more memory this process can take now; other processes may want some of it too.

    Args:
        device: where.
        num_sharing: processes among which the machine's and the control groups' memory is divided evenly;
            limits of this process are its own.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    proc = Path("/proc")
    shared = [machine_left(proc / "meminfo"), *group_left(proc / "self/cgroup", Path("/sys/fs/cgroup"))]
    left = [amount // num_sharing for amount in shared]
    for what, column in ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5)):
        soft_limit, _ = resource.getrlimit(what)
        if soft_limit != resource.RLIM_INFINITY:
            left.append(soft_limit - _mapped_bytes(proc / "self/statm", column))
    return max(0, min(left))


def machine_left(meminfo: Path) -> int:
    """Bytes that ``/proc/meminfo`` calls available."""
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError(f"{meminfo} has no MemAvailable; Linux 3.14 or newer is needed.")


def group_left(membership: Path, root: Path) -> list[int]:
    """Bytes left in each control group with a memory limit that this process is in, its parents' included.

    Args:
        membership: ``/proc/self/cgroup``: lines ``0::/path`` (v2) or ``4:memory:/path`` (v1).
        root: where control groups are mounted; v1 has its memory groups in ``root/memory``.
    """
    left: list[int] = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            left += _walk_up(root, path, limit="memory.max", usage="memory.current", cache="inactive_file")
        elif "memory" in controllers.split(","):
            left += _walk_up(
                root / "memory",
                path,
                limit="memory.limit_in_bytes",
                usage="memory.usage_in_bytes",
                cache="total_inactive_file",
            )
    return left


def _walk_up(top: Path, path: str, *, limit: str, usage: str, cache: str) -> list[int]:
    """Bytes left in a group and its parents.

    In a container the path may name a group of the host that cannot be seen; its own is then ``top``.
    """
    inside = top / path.lstrip("/")
    groups = [inside, *inside.parents]
    left = []
    for group in groups[: groups.index(top) + 1]:
        text = _read(group / limit)
        if text is None or text == "max" or int(text) >= _UNLIMITED_V1:
            continue
        used = int(_read(group / usage) or 0) - _cache_bytes(group / "memory.stat", cache)
        left.append(int(text) - used)
    return left


def _cache_bytes(stat: Path, name: str) -> int:
    for line in (_read(stat) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _read(path: Path) -> str | None:
    """A file's text, or None if there is no such file."""
    try:
        return path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None


def _mapped_bytes(statm: Path, column: int) -> int:
    """Column 0: the whole address space; 5: private memory that can be written."""
    return int(statm.read_text().split()[column]) * resource.getpagesize()
