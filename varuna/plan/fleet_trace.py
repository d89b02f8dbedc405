"""Which machines were there when: traces of fleets, read from files. Pure but for the reading.

Three formats, told apart by what the file begins with:

- ``milliseconds,add|remove,node name`` a line: machines by name;
- ``milliseconds,node count`` a line: how many there are from then on;
- ``{"metadata": {"gap_seconds": N}, "data": [node count, ...]}``: one count per tick, the last tick included.

Time begins at the first line. Blank lines are passed over; anything else that does not fit is an error with
file, line and reason. A count says how many machines, not which: newcomers get new names, and the one that has
been there longest leaves first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from varuna.errors import ConfigError

MOST_MACHINES = 100_000
"""A larger count is taken for a mistake in the file."""

_VERBS = ("add", "remove")
_COUNT = f"not a whole number from 0 to {MOST_MACHINES:,}"
_MOST_DIGITS = 18


@dataclass(frozen=True, kw_only=True)
class FleetChange:
    """Machines that come and go at one moment.

    Attributes:
        time_s: seconds since the trace began.
        added, removed: names; one that goes and comes back in the same moment is in both.
    """

    time_s: float
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FleetTrace:
    """A fleet's history.

    Attributes:
        name: for people.
        changes: ascending in time, one per moment.
        end_s: how long it is.
    """

    name: str
    changes: tuple[FleetChange, ...]
    end_s: float


@dataclass(frozen=True)
class _Line:
    """A line that is not blank: its number in the file, from 1, and its fields without white space."""

    number: int
    fields: tuple[str, ...]


def read_trace(path: Path) -> FleetTrace:
    """Read a trace in any of the three formats.

    Raises:
        ConfigError: it cannot be read; the message has file, line and reason.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"Cannot read the trace {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {line}: not text in UTF-8 ({error.reason}).") from error
    return replace(parse_trace(text, str(path)), name=path.name)


def parse_trace(text: str, name: str) -> FleetTrace:
    """Understand the text of a trace file called ``name``; errors as in ``read_trace``."""
    if text.lstrip().startswith(("{", "[")):
        return _from_json(text, name)
    lines = [
        _Line(number, tuple(field.strip() for field in line.split(",")))
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip()
    ]
    if not lines:
        raise ConfigError(f"{name}, line 1: the trace is empty. It needs at least one line.")
    width = len(lines[0].fields)
    if width not in (2, 3):
        raise _error(
            name,
            lines[0],
            f"{width} fields. Write `milliseconds,add|remove,node name` or `milliseconds,node count`",
        )
    for line in lines:
        if len(line.fields) != width:
            raise _error(name, line, f"{len(line.fields)} fields, where the first line has {width}")
    trace = _from_events(lines, name) if width == 3 else _from_counts(lines, name)
    if not trace.end_s:
        raise _error(name, lines[-1], "the trace ends where it begins. It needs a later line to cover any time")
    return trace


def _from_events(lines: list[_Line], name: str) -> FleetTrace:
    present: set[str] = set()
    moments: dict[float, list[tuple[str, bool]]] = {}
    for line, time_s in _timed(lines, name):
        verb, node = line.fields[1], line.fields[2]
        if verb not in _VERBS:
            raise _error(name, line, f"{verb!r} is neither add nor remove")
        if not node:
            raise _error(name, line, "the node has no name")
        if verb == "add" and node in present:
            raise _error(name, line, f"{node!r} is added, but it is already there")
        if verb == "remove" and node not in present:
            raise _error(name, line, f"{node!r} is removed, but it is not there")
        (present.add if verb == "add" else present.remove)(node)
        moments.setdefault(time_s, []).append((node, verb == "add"))
    changes = [_change(time_s, events) for time_s, events in moments.items()]
    return FleetTrace(name=name, changes=_without_empty(changes), end_s=max(moments))


def _change(time_s: float, events: list[tuple[str, bool]]) -> FleetChange:
    """What a moment's events come to: verbs alternate, so a node's first and last one say it all."""
    first, last = dict(reversed(events)), dict(events)
    return FleetChange(
        time_s=time_s,
        added=tuple(node for node, is_added in last.items() if is_added),
        removed=tuple(node for node in last if not first[node]),
    )


def _from_counts(lines: list[_Line], name: str) -> FleetTrace:
    moments: dict[float, int] = {}
    for line, time_s in _timed(lines, name):
        count = _integer(line.fields[1])
        if count is None or not 0 <= count <= MOST_MACHINES:
            raise _error(name, line, f"node count {line.fields[1]!r} is {_COUNT}")
        moments[time_s] = count
    return counted_trace(name, moments, end_s=max(moments))


def _from_json(text: str, name: str) -> FleetTrace:
    try:
        value: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}, line {error.lineno}: not JSON: {error.msg}.") from error
    shape = '{"metadata": {"gap_seconds": N}, "data": [node count, ...]}'
    gap_s = value.get("metadata") if isinstance(value, dict) else None
    gap_s = gap_s.get("gap_seconds") if isinstance(gap_s, dict) else None
    counts = value.get("data") if isinstance(value, dict) else None
    if gap_s is None or not isinstance(counts, list):
        raise ConfigError(f"{name}, line 1: JSON of another shape than {shape}.")
    if not _is_number(gap_s) or not 0 < gap_s < float("inf"):
        line = _line_of(text, '"gap_seconds"')
        raise ConfigError(f"{name}, line {line}: gap_seconds {gap_s!r} is not a positive number.")
    if not counts:
        line = _line_of(text, '"data"')
        raise ConfigError(f"{name}, line {line}: data is empty. It needs a count or more.")
    for index, count in enumerate(counts):
        if type(count) is not int or not 0 <= count <= MOST_MACHINES:  # a bool is an int too
            line = _line_of(text, '"data"', index)
            raise ConfigError(f"{name}, line {line}: data[{index}] is {json.dumps(count)}, {_COUNT}.")
    moments = {index * float(gap_s): count for index, count in enumerate(counts)}
    return counted_trace(name, moments, end_s=len(counts) * float(gap_s))


def counted_trace(name: str, moments: Mapping[float, int], *, end_s: float) -> FleetTrace:
    """A trace from counts: ``moments`` maps seconds, ascending, to how many machines there are from then on."""
    return FleetTrace(name=name, changes=_changes_of(moments), end_s=end_s)


def _timed(lines: list[_Line], name: str) -> Iterator[tuple[_Line, float]]:
    """Each line with its seconds since the first one; they never go back."""
    first_ms = last_ms = None
    for line in lines:
        text = line.fields[0]
        time_ms = _integer(text)
        if time_ms is None:
            raise _error(name, line, f"time {text!r} is not a whole number of milliseconds")
        if last_ms is not None and time_ms < last_ms:
            raise _error(name, line, f"time goes back, from {last_ms} to {time_ms} ms")
        first_ms = time_ms if first_ms is None else first_ms
        last_ms = time_ms
        yield line, (time_ms - first_ms) / 1000


def _changes_of(moments: Mapping[float, int]) -> tuple[FleetChange, ...]:
    """Counts as comings and goings: new names, first in, first out."""
    changes: list[FleetChange] = []
    first = end = 0  # machines first <= i < end are there
    for time_s, count in moments.items():
        missing = count - (end - first)
        added = tuple(f"machine-{index}" for index in range(end, end + max(0, missing)))
        removed = tuple(f"machine-{index}" for index in range(first, first + max(0, -missing)))
        first, end = first + len(removed), end + len(added)
        changes.append(FleetChange(time_s=time_s, added=added, removed=removed))
    return _without_empty(changes)


def _without_empty(changes: Iterable[FleetChange]) -> tuple[FleetChange, ...]:
    return tuple(change for change in changes if change.added or change.removed)


def _integer(text: str) -> int | None:
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _line_of(text: str, key: str, entry: int = 0) -> int:
    """Line of a key in JSON text, or of an entry of the flat list after it."""
    position = text.find(key)
    if entry:
        position = text.find("[", position)
        for _ in range(entry):
            position = text.find(",", position + 1)
        rest = text[position + 1 :]
        position += 1 + len(rest) - len(rest.lstrip())
    return text.count("\n", 0, max(0, position)) + 1


def _error(name: str, line: _Line, reason: str) -> ConfigError:
    return ConfigError(f"{name}, line {line.number}: {reason}.")
