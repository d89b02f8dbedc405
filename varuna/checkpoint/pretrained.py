"""A Hugging Face directory of safetensors files: values for a model that each worker reads only in part.

Opening reads the headers of all files, compares names and shapes, and no values. Then every tensor is read by
itself, with ``pread`` into memory of its own, by the worker that holds it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor, nn

from varuna.checkpoint.errors import StateError
from varuna.checkpoint.layout import PlacedTensor, TensorForm, header_size, parse_header
from varuna.checkpoint.manifest import listed
from varuna.checkpoint.pretrained_names import describe, match_names
from varuna.checkpoint.store import Span
from varuna.checkpoint.store_file import FileStore
from varuna.partition.ties import canonical_names

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A tensor in a file: its bytes begin at ``begin``, counted from the file's first."""

    file: str
    form: TensorForm
    begin: int


class Pretrained:
    """A directory that fits a model.

    Args:
        directory: where the files are.
        sources: per name of the model, where its value is; more than one if it is there several times.
        missing, unexpected: names that have no partner.
    """

    def __init__(
        self,
        directory: Path,
        sources: Mapping[str, tuple[_Source, ...]],
        *,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
    ) -> None:
        self.missing = missing
        self.unexpected = unexpected
        self._store = FileStore(directory)
        self._sources = sources

    @property
    def names(self) -> frozenset[str]:
        """Tensors of the model that have a value here, by canonical name."""
        return frozenset(self._sources)

    @property
    def summary(self) -> str:
        """How many tensors it has for the model, and what has no partner."""
        told = describe(self.missing, self.unexpected)
        return "; ".join([f"{self._store.url} has {len(self._sources)} tensors of the model", *told]) + "."

    def read(self, wanted: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Values of some of ``names``, one after the other in the order of the files, on the CPU.

        Args:
            wanted: by the model's names; of each only the dtype counts, to which the value is converted.

        Raises:
            StateError: a file cannot be read, or a tied weight has two values.
        """
        ordered = sorted(wanted, key=lambda name: (self._sources[name][0].file, self._sources[name][0].begin))
        for name in ordered:
            first, *others = self._sources[name]
            value = self._read(first)
            for other in others:
                if not _same(self._read(other), value):
                    raise StateError(
                        f"{self._store.url}: {first.form.name} and {other.form.name} are one tensor in the "
                        f"model and two different ones in the directory. Build the model from the directory's "
                        f"own config.json."
                    )
            yield name, value.to(wanted[name].dtype)

    def _read(self, source: _Source) -> Tensor:
        value = torch.empty(source.form.shape, dtype=getattr(torch, source.form.dtype))
        memory = value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else memoryview(b"")
        try:
            self._store.read_into(source.file, [Span(begin=source.begin, into=memory)])
        except (OSError, EOFError) as error:
            raise _unreadable(self._store.path_of(source.file), repr(error)) from error
        return value


def open_pretrained(
    directory: Path | str, model: nn.Module, *, strict: bool = True, prefix: str = ""
) -> Pretrained:
    """Find every parameter and persistent buffer of a model in a directory.

    Names that transformers' models say may be missing or superfluous (``_keys_to_ignore_on_load_missing``,
    ``..._unexpected``) are not counted.

    Args:
        directory: with ``model.safetensors``, or several files and ``model.safetensors.index.json``.
        model: on the meta device or not; only names, shapes and dtypes are looked at.
        strict: whether names without a partner are an error; different shapes always are.
        prefix: what the user's own wrapper puts before every name, such as ``model.``.

    Raises:
        StateError: no such directory, no safetensors in it, or names and shapes that do not fit, each listed.
    """
    directory = Path(directory).absolute()
    tensors = _persistent(model)
    there = {source.form.name: source for source in _tensors_in(directory)}
    names = {name: [name] for name in tensors}
    for alias, canonical in canonical_names(model).items():
        if canonical in names and alias != canonical:
            names[canonical].append(alias)
    matching = match_names(
        names,
        there.keys(),
        prefix=prefix,
        may_miss=_patterns(model, "_keys_to_ignore_on_load_missing"),
        ignored=_patterns(model, "_keys_to_ignore_on_load_unexpected"),
    )
    sources = {name: tuple(there[item] for item in items) for name, items in matching.found.items()}
    complaints = [text for name, items in sources.items() for text in _unlike(name, tensors[name], items)]
    if strict or not sources:
        complaints = [*describe(matching.missing, matching.unexpected), *complaints]
    if complaints:
        more = f"; and {len(complaints) - 10} more" if len(complaints) > 10 else ""
        raise StateError(
            f"{directory} does not fit the model: {'; '.join(complaints[:10])}{more}. Build the model from the "
            f"directory's own config.json; if your model wraps it, say prefix='...'; with strict=False only "
            f"what fits is taken."
        )
    return Pretrained(directory, sources, missing=matching.missing, unexpected=matching.unexpected)


def _persistent(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by canonical name."""
    canonical = canonical_names(model)
    return {
        canonical[name]: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor) and name in canonical
    }


def _patterns(model: nn.Module, attribute: str) -> list[str]:
    return [pattern for module in model.modules() for pattern in getattr(module, attribute, None) or ()]


def _unlike(name: str, tensor: Tensor, sources: tuple[_Source, ...]) -> list[str]:
    """What forbids to take a value from these."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    unlike = []
    for form in (source.form for source in sources):
        stored: torch.dtype = getattr(torch, form.dtype)
        is_rounded = stored.is_floating_point == tensor.dtype.is_floating_point
        if form.shape != tuple(tensor.shape) or not (is_rounded or stored == tensor.dtype):
            here, found = f"{dtype}{list(tensor.shape)}", f"{form.dtype}{list(form.shape)}"
            unlike.append(f"{name} is {here} in the model and {found} there")
    return unlike


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


# --- files ----------------------------------------------------------------------------------


def _tensors_in(directory: Path) -> list[_Source]:
    """Every tensor in a directory's files."""
    found = []
    for path in _files_of(directory):
        try:
            with open(path, "rb") as file:
                start = file.read(8)
                header = start + file.read(header_size(start) - 8)
            placed = parse_header(header)
            _check_size(path, len(header), placed)
        except (OSError, ValueError) as error:
            raise _unreadable(path, str(error)) from error
        found += [_Source(file=path.name, form=item.form, begin=len(header) + item.begin) for item in placed]
    by_name = sorted(found, key=lambda source: source.form.name)
    for name, group in groupby(by_name, key=lambda source: source.form.name):
        if len(files := [source.file for source in group]) > 1:
            raise StateError(f"{directory} has {name} in {listed(files)}; it must be in one file only.")
    return found


def _check_size(path: Path, header_bytes: int, placed: tuple[PlacedTensor, ...]) -> None:
    expected = header_bytes + max((item.end for item in placed), default=0)
    if path.stat().st_size != expected:
        raise ValueError(f"expected {expected} bytes, found {path.stat().st_size}")


def _files_of(directory: Path) -> list[Path]:
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    index = directory / _INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unreadable(index, repr(error)) from error
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


def _unreadable(path: Path, why: str) -> StateError:
    return StateError(f"Cannot read {path}: {why}. Download it again.")
