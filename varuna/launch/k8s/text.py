"""Manifests as YAML that people can read and edit: mappings, lists, text, numbers, yes and no. Pure.

Only what every YAML parser reads alike is written: block style, and text in double quotes wherever another
reader could take it for something else (``1.0``, ``no``, ``a: b``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeGuard

Value: TypeAlias = "str | int | bool | Mapping[str, Value] | Sequence[Value]"
"""What a manifest is made of."""

_PLAIN = re.compile(r"-{0,2}[A-Za-z_/][A-Za-z0-9_./-]*(:[A-Za-z0-9_./-]+)*")
_NOT_PLAIN = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))
_NUMBER = re.compile(r"[-+]?[0-9.].*|[-+]?\.(inf|nan)", re.IGNORECASE)
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def to_yaml(documents: Sequence[Mapping[str, Value]]) -> str:
    """Documents, one after another."""
    return "---\n".join("\n".join(_lines(document)) + "\n" for document in documents)


def _lines(value: Mapping[str, Value] | Sequence[Value]) -> list[str]:
    lines: list[str] = []
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if _is_block(inner):
                indent = "  " if isinstance(inner, Mapping) else ""
                lines += [f"{_text(key)}:", *(indent + line for line in _lines(inner))]
            else:
                lines.append(f"{_text(key)}: {_scalar(inner)}")
        return lines
    for inner in value:
        if _is_block(inner):
            first, *others = _lines(inner)
            lines += [f"- {first}", *(f"  {line}" for line in others)]
        else:
            lines.append(f"- {_scalar(inner)}")
    return lines


def _is_block(value: Value) -> TypeGuard[Mapping[str, Value] | Sequence[Value]]:
    return not isinstance(value, str | int) and len(value) > 0


def _scalar(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return _text(value)
    return "{}" if isinstance(value, Mapping) else "[]"


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_PLAIN and not _NUMBER.fullmatch(text):
        return text
    return '"' + "".join(_escaped(letter) for letter in text) + '"'


def _escaped(letter: str) -> str:
    if letter in _ESCAPES:
        return _ESCAPES[letter]
    if letter.isprintable():
        return letter
    return f"\\u{ord(letter):04x}" if ord(letter) < 0x10000 else f"\\U{ord(letter):08x}"
