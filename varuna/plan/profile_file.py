"""Profiles and plans as files: JSON, written whole or not at all, checked when they are read."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from varuna.errors import ConfigError
from varuna.plan.broken_json import explain_broken_json
from varuna.plan.profile import PROFILE_VERSION, Profile
from varuna.spec import Plan

PLAN_VERSION = 1
"""Version of the format of plan files; a file of another version is refused."""

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class _Version:
    """The part of a file that is read first."""

    version: int


@dataclass(frozen=True, kw_only=True)
class _PlanFile:
    """What a plan file holds."""

    plan: Plan
    reason: str = ""
    version: int = PLAN_VERSION


def encode_profile(profile: Profile) -> bytes:
    """A profile as JSON: the same bytes for the same numbers."""
    return msgspec.json.encode(profile)


def decode_profile(data: bytes) -> Profile:
    """What ``encode_profile`` wrote.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: it is something else.
    """
    return msgspec.json.decode(data, type=Profile)


def write_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile, replacing what was there; nobody ever sees half of it. Its folder is made.

    Raises:
        ConfigError: it cannot be written there.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error.strerror}.") from error
    _write(Path(path), encode_profile(profile))


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile.

    Raises:
        ConfigError: there is no such file, or it is not a profile of this version; the message has its name.
    """
    profile = _read(Path(path), Profile, PROFILE_VERSION, "profile", "`varuna profile train.py -o FILE`")
    _check(profile, Path(path))
    return profile


def write_plan(plan: Plan, path: str | os.PathLike[str], reason: str = "") -> None:
    """Write a plan and, for people, why it looks so. Its folder must exist.

    Raises:
        ConfigError: it cannot be written there.
    """
    _write(Path(path), msgspec.json.encode(_PlanFile(plan=plan, reason=reason)))


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan.

    Raises:
        ConfigError: there is no such file, or it is not a plan of this version; the message has its name.
    """
    return _read(Path(path), _PlanFile, PLAN_VERSION, "plan", "`varuna plan PROFILE -o FILE`").plan


def _check(profile: Profile, path: Path) -> None:
    """What types cannot say: a profile has sections in order, each with costs for ascending sizes."""
    if not profile.sections:
        raise ConfigError(f"Profile {path} has no sections.")
    for position, section in enumerate(profile.sections):
        sizes = [costs.micro_batch_size for costs in section.costs]
        if section.index != position:
            raise ConfigError(
                f"Profile {path}: section {section.index} stands where {position} belongs. Sections are "
                f"listed in order, from 0."
            )
        if not sizes or sizes[0] < 1 or any(a >= b for a, b in itertools.pairwise(sizes)):
            raise ConfigError(
                f"Profile {path}: section {section.index} ({section.name}) has costs for micro-batches of "
                f"{sizes}. It needs at least one, in ascending order, from 1 on."
            )
    _check_numbers(profile, f"Profile {path}")


def _check_numbers(value: object, where: str) -> None:
    """Times and sizes are finite and not negative, rates are more than nothing."""
    if isinstance(value, tuple):
        for index, item in enumerate(value):
            _check_numbers(item, f"{where}[{index}]")
    elif is_dataclass(value):
        for field in fields(value):
            _check_numbers(getattr(value, field.name), f"{where}, {field.name}")
    elif isinstance(value, (int, float)):
        is_rate = where.endswith(", bytes_per_s")
        if not math.isfinite(value) or value < 0 or (is_rate and value == 0):
            raise ConfigError(f"{where} is {value}; it must be {'more than 0' if is_rate else '0 or more'}.")


def _read(path: Path, kind: type[_T], version: int, what: str, made_by: str) -> _T:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"Cannot read {what} {path}: {error.strerror}. Make one with {made_by}.") from error
    if not data.strip():
        raise ConfigError(f"{path} is empty, not a {what}. Make one with {made_by}.")
    try:
        found = msgspec.json.decode(data, type=_Version).version
        if found != version:
            raise ConfigError(
                f"{path} is a {what} of version {found}; this Varuna reads version {version}. Make it again "
                f"with {made_by}."
            )
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # ValidationError is a DecodeError
        why = explain_broken_json(data) or str(error)
        raise ConfigError(f"{path} is not a {what}: {why}. Make one with {made_by}.") from error


def _write(path: Path, data: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            unfinished.write_bytes(msgspec.json.format(data, indent=1) + b"\n")
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error.strerror}.") from error
