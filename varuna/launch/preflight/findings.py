"""What facts of machines mean for a job: findings, each with what to do about it. Pure; ``gather.py`` looks.

Three levels. ``ok`` is for people who want to see what was looked at. A ``warning`` costs time or comfort, or
matters to some jobs only. What ``stops`` would end a job, or would keep a machine out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from varuna.launch.preflight.facts import MachineFacts, Place
from varuna.launch.preflight.network import Level, Said, network
from varuna.versions import UNKNOWN, Versions, must_be_equal, refusal_of_versions

_GIB = 1 << 30
_MIB = 1 << 20
FREE_BYTES = {"cache": 1 * _GIB, "logs": 1 * _GIB, "checkpoints": 20 * _GIB}
"""Less than this on a disk is worth a warning."""

_NO_SPACE_BYTES = 16 * _MIB
_SHARED_MEMORY_BYTES = 256 * _MIB
"""Containers have 64 MiB unless told otherwise: too little for data loaders with processes, and for NCCL."""

_CLOCK_WARNING_S = 30.0
BUCKET_CLOCK_S = 900.0
"""S3 refuses requests of a clock that is off by more (RequestTimeTooSkewed)."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at on one machine.

    Attributes:
        machine: its name.
        check: what was looked at.
        level: see the module.
        found: what it is.
        mend: what to do; empty where nothing has to be done.
    """

    machine: str
    check: str
    level: Level
    found: str
    mend: str = ""


def findings_of(facts: MachineFacts, *, has_others: bool, uses_bucket: bool = False) -> tuple[Finding, ...]:
    """What one machine's facts mean.

    Args:
        facts: its.
        has_others: the job has other machines.
        uses_bucket: its checkpoints go to a bucket.
    """
    said = {
        "versions": versions(facts),
        **network(facts, has_others=has_others),
        **{place.what: place_for(place) for place in facts.places},
        "shared memory": _shared_memory(facts.shared_memory_bytes),
        "GPUs": _gpus(facts),
        **_manager(facts, uses_bucket=uses_bucket),
    }
    return tuple(
        Finding(machine=facts.name, check=check, level=level, found=found, mend=mend)
        for check, (level, found, mend) in said.items()
    )


def findings_between(
    here: MachineFacts, others: Sequence[MachineFacts], *, uses_bucket: bool = False
) -> tuple[Finding, ...]:
    """Where machines do not fit together: what of each differs from ``here``, the manager's."""
    found = []
    for facts in others:
        if refusal := refusal_of_versions(facts.versions, here.versions):
            found.append(Finding(machine=facts.name, check="versions", level="stops", found=refusal))
        elif unlike := _unlike(facts.versions, here.versions):
            found.append(Finding(machine=facts.name, check="versions", level="warning", found=unlike))
        level, text, mend = clock(facts.unix_s - here.unix_s, here.name, uses_bucket=uses_bucket)
        found.append(Finding(machine=facts.name, check="clock", level=level, found=text, mend=mend))
    with_gpus = [facts.name for facts in others if facts.num_visible_gpus]
    for facts in others:
        if with_gpus and not facts.num_visible_gpus:
            text = f"no GPU, while {with_gpus[0]} has some: its workers would be far slower than others"
            found.append(Finding(machine=facts.name, check="GPUs", level="warning", found=text))
    return tuple(found)


def stops(findings: Sequence[Finding]) -> bool:
    """Whether any of them would stop a job."""
    return any(finding.level == "stops" for finding in findings)


def versions(facts: MachineFacts) -> Said:
    """What is installed."""
    has = facts.versions
    text = f"varuna {has.varuna}, torch {has.torch}, Python {has.python}"
    if has.torch == UNKNOWN:
        return Said("stops", f"{text}: torch is not installed for this Python", "pip install torch")
    return Said("ok", text, "")


def place_for(place: Place) -> Said:
    """Where a job writes."""
    if place.what == "bucket":  # nothing is asked of it: that may cost money, and needs credentials
        return Said("stops" if place.problem else "ok", place.problem or f"{place.path} is known here", "")
    if place.problem:
        mends = {
            "cache": "Set VARUNA_CACHE_DIR to a directory on this machine that you may write to.",
            "logs": "Set TMPDIR to a directory on this machine that you may write to.",
            "checkpoints": "Training would go on without checkpoints. Give --checkpoint another place.",
        }
        level: Level = "warning" if place.what == "checkpoints" else "stops"
        return Said(
            level, f"{place.path or 'none'}: nothing can be written: {place.problem}", mends[place.what]
        )
    free = f"{place.path}: {place.free_bytes / _GIB:,.1f} GiB free"
    if place.free_bytes < _NO_SPACE_BYTES and place.what != "checkpoints":
        return Said("stops", free, "Make room there, or name another place.")
    wanted_bytes = FREE_BYTES[place.what]
    if place.free_bytes < wanted_bytes:
        return Said(
            "warning", free, f"{wanted_bytes // _GIB} GiB or more are better: make room, or another place."
        )
    return Said("ok", free, "")


def clock(ahead_s: float, than: str, *, uses_bucket: bool) -> Said:
    """How a clock stands: ``ahead_s`` seconds ahead of another one, negative if behind."""
    way = "ahead of" if ahead_s > 0 else "behind"
    off_s = abs(ahead_s)
    text = f"{off_s:.1f} s {way} {than}"
    mend = "Training does not mind; times in logs will not agree. Set it by NTP (chronyd, systemd-timesyncd)."
    if off_s >= BUCKET_CLOCK_S and uses_bucket:
        return Said("warning", text, "Buckets refuse requests of such a clock. Set it by NTP.")
    if off_s >= _CLOCK_WARNING_S:
        return Said("warning", text, mend)
    return Said("ok", text, "")


def _unlike(there: Versions, here: Versions) -> str:
    """Differences that are allowed, and worth knowing."""
    unlike = []
    if there.python.split(".")[:2] != here.python.split(".")[:2]:
        unlike.append(f"Python {there.python} here, {here.python} on the manager's machine")
    if there.torch != here.torch and must_be_equal(there) == must_be_equal(here):
        unlike.append(f"torch {there.torch} here, {here.torch} on the manager's machine")
    return "; ".join(unlike)


def _shared_memory(free_bytes: int | None) -> Said:
    mend = (
        "In a container: docker run --shm-size 8g; in Kubernetes an emptyDir with medium: Memory at /dev/shm."
    )
    if free_bytes is None:
        return Said("warning", "there is no /dev/shm", mend)
    text = f"{free_bytes / _MIB:,.0f} MiB free in /dev/shm"
    if free_bytes < _SHARED_MEMORY_BYTES:
        return Said("warning", f"{text}: little for data loaders with processes, and for NCCL", mend)
    return Said("ok", text, "")


def _gpus(facts: MachineFacts) -> Said:
    count, visible = facts.num_gpus, facts.num_visible_gpus
    if not count:
        return Said("ok", "none: workers compute on the CPU", "")
    text = f"{visible} of {count} visible"
    hides = facts.variables.get("CUDA_VISIBLE_DEVICES")
    if facts.versions.torch.endswith("+cpu"):
        mend = "Install a CUDA build: https://pytorch.org/get-started/locally"
        return Said("warning", f"{text}, but torch {facts.versions.torch} cannot use them", mend)
    if not visible:
        return Said("warning", f"{text}: CUDA_VISIBLE_DEVICES={hides!r}", "Unset it, or name devices: 0,1")
    return Said("ok", text, "")


def _manager(facts: MachineFacts, *, uses_bucket: bool) -> dict[str, Said]:
    manager = facts.manager
    if manager is None:
        return {}
    if manager.problem:
        mend = "Does it run, with --listen on an address that is reached from here? Is its port open?"
        if "token" in manager.problem:
            mend = "Give the manager's token: STATE/token on its machine."
        return {"manager": Said("stops", manager.problem, mend)}
    answers = f"{manager.url} answers within {manager.round_trip_s * 1e3:.0f} ms"
    said: dict[str, Said] = {"manager": Said("ok", answers, "")}
    said["clock"] = clock(-manager.ahead_s, "the manager's", uses_bucket=uses_bucket)
    if manager.versions is not None:
        if refusal := refusal_of_versions(facts.versions, manager.versions):
            said["versions"] = Said("stops", refusal, "")
        elif unlike := _unlike(facts.versions, manager.versions):
            said["versions"] = Said("warning", unlike, "")
    return said
