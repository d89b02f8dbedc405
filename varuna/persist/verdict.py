"""Whether a save is complete, still under way, or lost: from the answers that are in. Pure."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from varuna.checkpoint.values import PartFailed, Written


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a member tells of its part in a save.

    Attributes:
        written: the files that it has made durable.
        failed: why it could not.
        lost: names that a dead member owed, and that nobody has kept as far as this member knows.
    """

    written: Written | None = None
    failed: PartFailed | None = None
    lost: tuple[str, ...] = ()


class Action(enum.Enum):
    """What follows for a save."""

    WAIT = "wait"
    COMMIT = "commit"
    GIVE_UP = "give up"


@dataclass(frozen=True, kw_only=True)
class SaveVerdict:
    """What follows, and why if it is given up."""

    action: Action
    reason: str = ""


def judge(answers: Mapping[str, Answer], expected: Collection[str], required: Collection[str]) -> SaveVerdict:
    """What follows from the answers so far.

    Args:
        answers: by key; those of members that are gone since count too.
        expected: keys that must be there.
        required: names of tensors that must be in some file.
    """
    for answer in answers.values():
        if answer.failed is not None:
            return SaveVerdict(action=Action.GIVE_UP, reason=f"{answer.failed.worker}: {answer.failed.reason}")
    if not set(expected) <= answers.keys():
        return SaveVerdict(action=Action.WAIT)
    there = {
        tensor.name
        for answer in answers.values()
        if answer.written is not None
        for part in answer.written.parts
        for tensor in part.tensors
    }
    there |= {
        name
        for answer in answers.values()
        if answer.written is not None
        for part in answer.written.parts
        for name in part.values
    }
    lost = {name for answer in answers.values() for name in answer.lost} | set(required)
    missing = sorted(lost - there)
    if missing:
        reason = f"a worker was lost before it had written {missing[0]}, which no other had"
        return SaveVerdict(action=Action.GIVE_UP, reason=reason)
    return SaveVerdict(action=Action.COMMIT)
