"""A plan as JSON and back: what the one who decides sends to the workers."""

from __future__ import annotations

import msgspec

from varuna.errors import PlanError
from varuna.plan.layout import PlanChoice


def encode_choice(choice: PlanChoice) -> bytes:
    """JSON of a plan and its reason."""
    return msgspec.json.encode(choice)


def decode_choice(data: bytes) -> PlanChoice:
    """What ``encode_choice`` wrote, checked again.

    Raises:
        PlanError: it is not a plan.
    """
    try:
        return msgspec.json.decode(data, type=PlanChoice)
    except msgspec.ValidationError as error:
        raise PlanError(f"Not a plan: {error}.") from error
