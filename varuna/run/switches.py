"""What users may switch between steps: parameters frozen or not, modules in train or eval mode.

Both decide what a stage computes and what it sends, its own and those of stages before it, so they must be
switched on every worker before the same step. Newcomers get them from a member.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from torch import nn

from varuna.errors import ProtocolError


class Flags(NamedTuple):
    """Switches without names, quick to read: whether a parameter is trained, whether a module is in train mode.

    A model that is in eval mode as a whole is trained in train mode, so all its modules count as in train mode.
    """

    trainable: tuple[bool, ...]
    modes: tuple[bool, ...]


class Switches(msgspec.Struct, frozen=True, kw_only=True):
    """Names, in the model's order; the root module's is empty."""

    frozen: tuple[str, ...] = ()
    evaluating: tuple[str, ...] = ()


def switches_of(model: nn.Module) -> Switches:
    """As they are now."""
    return Switches(
        frozen=tuple(name for name, one in model.named_parameters() if not one.requires_grad),
        evaluating=tuple(name for name, module in model.named_modules() if not module.training),
    )


def switch(model: nn.Module, switches: Switches) -> None:
    """Set all of them as they are there."""
    frozen, evaluating = set(switches.frozen), set(switches.evaluating)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad is (name in frozen):
            parameter.requires_grad_(name not in frozen)
    for name, module in model.named_modules():
        module.training = name not in evaluating


class SwitchAgreement:
    """Whether all workers of a generation have switched the same.

    Args:
        model: the user's.
        read: its flags as they are now.
        rank, size: this worker among all.
    """

    def __init__(self, model: nn.Module, read: Callable[[], Flags], rank: int, size: int) -> None:
        self._model = model
        self._read = read
        self._rank = rank
        self._size = size
        self._flags: Flags | None = None
        self._agreed: Flags | None = None
        self._before = Switches()
        self._note = ""

    def note(self) -> str:
        """What others are to be told before a step."""
        flags = self._read()
        if flags != self._flags:
            self._flags = flags
            self._note = hashlib.blake2b(repr(flags).encode(), digest_size=16).hexdigest()
        return self._note

    def check(self, note_of: Callable[[int], str]) -> None:
        """Compare with all others, if something has changed here since the last step. Call ``note`` first.

        Args:
            note_of: what another worker's note is for this step, by its rank; waits until it has told.

        Raises:
            ProtocolError: another worker has not switched the same.
        """
        if self._flags == self._agreed:
            return
        is_first, self._agreed = self._agreed is None, self._flags
        before, self._before = self._before, switches_of(self._model)
        odd = [rank for rank in range(self._size) if rank != self._rank and note_of(rank) != self._note]
        if odd:
            news = "" if is_first else f" Changed here since the last step: {_changes(before, self._before)}."
            raise ProtocolError(
                f"On worker {self._rank} other parameters are frozen, or other modules in eval mode, than on "
                f"workers {odd}.{news} requires_grad and modes must be the same on all of them: change them "
                f"everywhere before the same step, never under `if job.rank == 0`."
            )


def _changes(before: Switches, now: Switches) -> str:
    names = sorted({*before.frozen} ^ {*now.frozen}) + sorted({*before.evaluating} ^ {*now.evaluating})
    shown = ", ".join(repr(name) for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
