"""A Hugging Face directory of safetensors files, read tensor by tensor under the names of the user's model.

A worker reads only what it holds. Names may differ by the prefix that a head model puts before its base model
(``transformer.``, ``model.``), in either direction, and a tied weight may be there under any of its names.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from varuna.checkpoint.errors import StateError
from varuna.checkpoint.layout import PlacedTensor, header_size, parse_header
from varuna.checkpoint.manifest import listed

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Where the value of one of the model's tensors is."""

    path: Path
    name: str


class Pretrained:
    """A directory whose tensors fit a model.

    Args:
        sources: for each of the model's names, where its value is.
    """

    def __init__(self, sources: Mapping[str, _Source]) -> None:
        self._sources = sources

    def read(self, wanted: Mapping[str, Tensor], device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Values of some of the model's tensors.

        Args:
            wanted: by the model's names; of each only the dtype counts, to which the value is converted.
            device: where values shall live.

        Raises:
            StateError: a file cannot be read.
        """
        by_path: dict[Path, list[str]] = {}
        for name in wanted:
            by_path.setdefault(self._sources[name].path, []).append(name)
        read: dict[str, Tensor] = {}
        for path, names in by_path.items():
            try:
                with safe_open(path, framework="pt") as file:
                    for name in names:
                        value = file.get_tensor(self._sources[name].name)
                        read[name] = value.to(device=device, dtype=wanted[name].dtype)
            except (OSError, SafetensorError) as error:
                raise StateError(f"Cannot read {path}: {error}. Download it again.") from error
        return {name: read[name] for name in wanted}


def open_pretrained(
    directory: Path | str,
    model: Mapping[str, Tensor],
    *,
    aliases: Mapping[str, str] | None = None,
    optional: Iterable[str] = (),
    ignored: Sequence[str] = (),
) -> Pretrained:
    """Find every tensor of a model in a directory; only headers are read.

    Args:
        directory: with ``model.safetensors``, or several files and ``model.safetensors.index.json``.
        model: parameters and persistent buffers, on meta or not, by canonical name.
        aliases: every other name of a tied tensor to its canonical one (``partition.canonical_names``).
        optional: names that may be missing; they keep the value they have.
        ignored: regular expressions of names in the directory that are no part of the model, such as
            transformers' ``_keys_to_ignore_on_load_unexpected``.

    Raises:
        StateError: no such directory, no safetensors in it, or names and shapes that do not fit, each listed.
    """
    directory = Path(directory)
    there = _tensors_in(directory)
    names = {name: [name] for name in model}
    for alias, canonical in (aliases or {}).items():
        if canonical in names and alias != canonical:
            names[canonical].append(alias)
    prefix = _best_prefix(names, there)
    sources: dict[str, _Source] = {}
    used: set[str] = set()
    wrong: list[str] = []
    for name, all_names in names.items():
        found = [item for one in all_names for item in _spellings(one, prefix) if item in there]
        used.update(found)
        if not found:
            continue
        path, placed = there[found[0]]
        sources[name] = _Source(path=path, name=found[0])
        if placed.form.shape != tuple(model[name].shape):
            wrong.append(
                f"{name} is {list(model[name].shape)} in the model and {list(placed.form.shape)} in {path.name}"
            )
    missing = sorted(set(model) - set(sources) - set(optional))
    unexpected = sorted(name for name in set(there) - used if not _is_ignored(name, ignored))
    _complain(directory, missing, unexpected, wrong)
    return Pretrained(sources)


# --- files ----------------------------------------------------------------------------------


def _tensors_in(directory: Path) -> dict[str, tuple[Path, PlacedTensor]]:
    """Every tensor in a directory's files, by the name it has there."""
    there: dict[str, tuple[Path, PlacedTensor]] = {}
    for path in _files_of(directory):
        try:
            with open(path, "rb") as file:
                start = file.read(8)
                header = start + file.read(header_size(start) - 8)
            placed = parse_header(header)
            expected = len(header) + (placed[-1].end if placed else 0)
            if path.stat().st_size != expected:
                raise ValueError(f"expected {expected} bytes, found {path.stat().st_size}")
        except (OSError, ValueError) as error:
            raise StateError(f"Cannot read {path}: {error}. Download it again.") from error
        there.update({item.form.name: (path, item) for item in placed})
    return there


def _files_of(directory: Path) -> list[Path]:
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    index = directory / _INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(f"Cannot read {index}: {error!r}. Download it again.") from error
        if any(Path(str(name)).name != name for name in names):
            raise StateError(f"{index} names files outside its directory: {listed(map(str, names))}.")
        return [directory / name for name in names]
    if not directory.is_dir():
        raise StateError(f"No directory {str(directory)!r}. Give one that holds {_SINGLE} or {_INDEX}.")
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise StateError(
            f"{directory} has weights only as pickle ({listed(pickles)}), which is never loaded here: it can "
            f"run code. Convert them once, where you trust them, with model.save_pretrained(directory)."
        )
    raise StateError(f"{directory} holds neither {_SINGLE} nor {_INDEX}.")


# --- names ----------------------------------------------------------------------------------


def _best_prefix(names: Mapping[str, Sequence[str]], there: Iterable[str]) -> str:
    """The prefix with which most of the model's names are found; '' if none is better."""
    there = set(there)
    ours = {one for all_names in names.values() for one in all_names}
    candidates = Counter(
        start for name in (*ours, *there) for start in _starts(name) if not {name, ""} & {start}
    )
    best, best_count = "", len(ours & there)
    for prefix in sorted(candidates, key=lambda prefix: (len(prefix), prefix)):
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


def _is_ignored(name: str, patterns: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _complain(directory: Path, missing: list[str], unexpected: list[str], wrong: list[str]) -> None:
    complaints = []
    if missing:
        complaints.append(f"{len(missing)} tensors of the model are not in it: {listed(missing)}")
    if unexpected:
        complaints.append(f"{len(unexpected)} tensors in it are not of the model: {listed(unexpected)}")
    if wrong:
        complaints.append(f"{len(wrong)} shapes differ: {listed(wrong)}")
    if complaints:
        raise StateError(
            f"{directory} does not fit the model. {'. '.join(complaints)}. Build the model from the "
            f"directory's own config.json."
        )
