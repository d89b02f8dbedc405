"""Versions that the machines of a job must have in common: what is installed, and how two machines differ."""

from __future__ import annotations

import platform
from dataclasses import dataclass

VARUNA_VERSION = "0.1.0"
"""Of this package; pyproject.toml has the same."""

UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Of one machine.

    Attributes:
        varuna, torch: of the packages; a build behind a plus sign (``2.13.0+cu130``) may differ.
        python: of the interpreter.
    """

    varuna: str = UNKNOWN
    torch: str = UNKNOWN
    python: str = UNKNOWN


def installed_versions() -> Versions:
    """What a script finds here. Does not import torch: what was noted when it was installed must do."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        torch = version("torch")
    except PackageNotFoundError:  # not installed, or by nothing that leaves a note
        torch = UNKNOWN
    return Versions(varuna=VARUNA_VERSION, torch=torch, python=platform.python_version())


def must_be_equal(versions: Versions) -> dict[str, str]:
    """What no two machines of a job may have unlike, by package: the release, whichever build of it."""
    return {name: getattr(versions, name).partition("+")[0] for name in ("varuna", "torch")}


def refusal_of_versions(there: Versions, here: Versions) -> str:
    """Why a machine may not take part in a job; empty if it may.

    Args:
        there: of the machine.
        here: of the job.
    """
    wanted = must_be_equal(here)
    unlike = {name: has for name, has in must_be_equal(there).items() if has != wanted[name]}
    if not unlike:
        return ""
    found = " and ".join(f"{name} {has}" for name, has in unlike.items())
    asked = " and ".join(f"{name} {wanted[name]}" for name in unlike)
    return f"it has {found}, the job has {asked}. All machines need the same: install {asked} on it."
