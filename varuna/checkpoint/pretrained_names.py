"""Which tensor of a Hugging Face directory is which of the model. Pure: names only, no torch.

Names may differ by the prefix that a head model puts before its base model (``transformer.``, ``model.``), in
either direction; it is found. A wrapper's prefix is taken off first. A tied weight may be there under any of
its names.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

_MAX_LISTED = 8
_MOST_COMPARED = 2000
"""Unexpected names among which a close one is looked for."""


@dataclass(frozen=True, kw_only=True)
class Matching:
    """How names of a model and of a directory fit.

    Attributes:
        found: per name of the model, its names in the directory; the values of all are to be equal.
        missing: names of the model that are not there.
        unexpected: names there that are not of the model.
    """

    found: Mapping[str, tuple[str, ...]]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def match_names(
    names: Mapping[str, Sequence[str]],
    there: Collection[str],
    *,
    prefix: str = "",
    may_miss: Sequence[str] = (),
    ignored: Sequence[str] = (),
) -> Matching:
    """Find every tensor of a model in a directory.

    Args:
        names: per tensor of the model, under its canonical name, all names it has, that one first.
        there: names in the directory.
        prefix: what a wrapper puts before every name; tensors without it are not in the directory.
        may_miss: regular expressions of names that are not counted as missing.
        ignored: the same for unexpected ones.
    """
    stripped = {
        name: [one.removeprefix(prefix) for one in all_names if one.startswith(prefix)]
        for name, all_names in names.items()
    }
    base = _base_prefix(stripped.values(), there)
    found = {
        name: tuple(dict.fromkeys(item for one in all_names for item in _spellings(one, base) if item in there))
        for name, all_names in stripped.items()
    }
    used = {item for items in found.values() for item in items}
    return Matching(
        found={name: items for name, items in found.items() if items},
        missing=tuple(name for name in names if not found[name] and not _fits(name, may_miss)),
        unexpected=tuple(sorted(name for name in there if name not in used and not _fits(name, ignored))),
    )


def describe(missing: Sequence[str], unexpected: Sequence[str]) -> list[str]:
    """What is missing and what is too much, in words; with close names, since most are spelled otherwise."""
    told = []
    if missing:
        shown = [_with_close(name, unexpected) for name in missing[:_MAX_LISTED]]
        told.append(f"{len(missing)} of the model are not there: {_more(shown, len(missing))}")
    if unexpected:
        told.append(
            f"{len(unexpected)} there are not of the model: {_more(unexpected[:_MAX_LISTED], len(unexpected))}"
        )
    return told


def _with_close(name: str, unexpected: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, unexpected[:_MOST_COMPARED], n=1, cutoff=0.75)
    return f"{name} (there is {close[0]})" if close else name


def _more(shown: Sequence[str], count: int) -> str:
    return ", ".join(shown) + (f" and {count - len(shown)} more" if count > len(shown) else "")


def _base_prefix(names: Iterable[Sequence[str]], there: Collection[str]) -> str:
    """The prefix with which most of the model's names are found; '' if none is better."""
    ours = {one for all_names in names for one in all_names}
    num_equal = sum(name in there for name in ours)
    best, best_count = "", num_equal
    num_with = Counter(start for name in (*ours, *there) for start in _starts(name))
    for prefix in sorted(num_with, key=lambda prefix: (-num_with[prefix], len(prefix), prefix)):
        if num_equal + num_with[prefix] <= best_count:
            break
        count = sum(any(item in there for item in _spellings(name, prefix)) for name in ours)
        if count > best_count:
            best, best_count = prefix, count
    return best


def _starts(name: str) -> list[str]:
    """``a.``, ``a.b.`` of ``a.b.c``."""
    return [name[: match.end()] for match in re.finditer(r"\.", name)]


def _spellings(name: str, prefix: str) -> list[str]:
    """How a name of the model may be written in a directory."""
    spellings = [name]
    if prefix:
        spellings.append(prefix + name)
        if name.startswith(prefix):
            spellings.append(name.removeprefix(prefix))
    return spellings


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
