"""Where a file stops being JSON, for the message: line and column, or that it ends too early."""

from __future__ import annotations

import json


def explain_broken_json(data: bytes) -> str:
    """Why ``data`` is no JSON, with the place; empty if it is JSON."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} is no UTF-8 text"
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno} (character {error.pos} of {len(text)})"
        if not text[error.pos :].strip() or error.msg.startswith("Unterminated string"):
            return f"it breaks off at its end, {place}: it was cut short"
        return f"{place}: {error.msg}"
    except RecursionError:
        return "it is nested too deeply"
    return ""
