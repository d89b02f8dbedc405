"""Numbers as people read them: 12.3k, 1.24 GiB, 1:02:03; and a row of numbers as a small curve."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"
_SECONDS_PER_DAY = 86400


def human_count(value: float) -> str:
    """Three digits and a letter: 7.12, 950, 12.3k, 1.50M; at most five characters up to 999T."""
    return _scaled(value, 1000, ("", "k", "M", "G", "T"))


def human_bytes(num_bytes: float) -> str:
    """Three digits and a binary unit: 312 MiB, 1.24 GiB."""
    return _scaled(num_bytes, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def human_duration(seconds: float) -> str:
    """0.52 s, 12.3 s, 4:05 (minutes), 1:02:03 (hours), 2 d 1:02:03."""
    if seconds < 60:
        return f"{_three_digits(seconds)} s"
    whole = round(seconds)
    days, rest = divmod(whole, _SECONDS_PER_DAY)
    minutes, second = divmod(rest, 60)
    hours, minute = divmod(minutes, 60)
    if days:
        return f"{days} d {hours}:{minute:02}:{second:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def human_seconds(seconds: float) -> str:
    """Three digits, however short: 12.3 s, 873 ms, 40 µs; from a minute on as ``human_duration``."""
    if seconds >= 59.95:
        return human_duration(seconds)
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds == 0 or seconds * factor >= 0.9995:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def sparkline(values: Sequence[float]) -> str:
    """One block a value, the least lowest and the greatest highest; what is not finite is a space."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return " " * len(values)
    low, high = min(finite), max(finite)
    step = (high - low) / (len(_BLOCKS) - 1) or 1.0
    return "".join(_BLOCKS[round((value - low) / step)] if math.isfinite(value) else " " for value in values)


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    if not math.isfinite(value):
        return str(value)
    unit_index = 0
    while abs(value) >= 999.5 and unit_index < len(units) - 1:
        value /= base
        unit_index += 1
    digits = f"{value:.0f}" if unit_index == 0 and value == round(value) else _three_digits(value)
    return digits + units[unit_index]


def _three_digits(value: float) -> str:
    size = abs(value)
    if size >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
