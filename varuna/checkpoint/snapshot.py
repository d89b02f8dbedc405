"""A copy of tensors in host memory, laid out as the files they become: the part of a save that training feels.

One flat buffer holds everything a worker saves, file after file in the order of its payload, so that writing is
one pass over it. The buffer and the views into it are kept for the next save: copying into memory that was
touched before takes half the time of copying into fresh memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from varuna.checkpoint.collect import SectionState, form_of
from varuna.checkpoint.layout import FileLayout, PlacedTensor, TensorForm, lay_out
from varuna.checkpoint.values import Json

_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class SnapshotFile:
    """One file's worth of copied state.

    Attributes:
        section_index: the section it is of.
        layout: header, and where each tensor lies in the file's payload.
        memory: the copied bytes; the next copy overwrites them.
        places: where each tensor lies in ``memory``.
        values: state that is not a tensor, by name.
    """

    section_index: int
    layout: FileLayout
    memory: memoryview
    places: Mapping[str, PlacedTensor]
    values: Mapping[str, Json]

    def bytes_of(self, name: str) -> memoryview:
        """The copied bytes of a tensor."""
        place = self.places[name]
        return self.memory[place.begin : place.end]

    def payload(self) -> list[memoryview]:
        """What comes after the header, in order."""
        if self.layout.payload_bytes == len(self.memory):
            return [self.memory]
        return [self.bytes_of(item.form.name) for item in self.layout.tensors]

    def only(self, names: Collection[str]) -> SnapshotFile:
        """The same with some of the names: another file."""
        return replace(
            self,
            layout=lay_out(item.form for item in self.layout.tensors if item.form.name in names),
            values={name: value for name, value in self.values.items() if name in names},
        )

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to write."""
        return not self.layout.tensors and not self.values


@dataclass(frozen=True, kw_only=True)
class _PlannedFile:
    section_index: int
    layout: FileLayout
    start: int
    places: Mapping[str, PlacedTensor]


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Where everything goes, for one set of names, types and shapes."""

    key: Any
    files: tuple[_PlannedFile, ...]
    views: tuple[Tensor, ...]


class Snapshot:
    """Host memory that is used again by every save.

    Args:
        pin_memory: page-locked, so that a GPU copies into it without waiting.
    """

    def __init__(self, *, pin_memory: bool = False) -> None:
        self._pin_memory = pin_memory
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._plan: _Plan | None = None
        self._copied: torch.cuda.Event | None = None

    def copy(self, sections: Sequence[SectionState]) -> tuple[SnapshotFile, ...]:
        """Copy every tensor; what was there before is gone.

        Copies from a GPU are started on its current stream and may still be under way: ``wait`` before reading.
        """
        plan = self._plan_for(sections)
        sources = [
            section.tensors[item.form.name]
            for section, file in zip(sections, plan.files, strict=True)
            for item in file.layout.tensors
        ]
        with torch.no_grad():
            for view, tensor in zip(plan.views, sources, strict=True):
                view.copy_(tensor, non_blocking=True)
        self._copied = _record_event(sources)
        memory = self._buffer.numpy().data  # keeps the buffer alive
        return tuple(
            SnapshotFile(
                section_index=file.section_index,
                layout=file.layout,
                memory=memory[file.start : file.start + file.layout.payload_bytes],
                places=file.places,
                values=section.values,
            )
            for section, file in zip(sections, plan.files, strict=True)
        )

    def wait(self) -> None:
        """Return when the copies are done; from any thread."""
        if self._copied is not None:
            self._copied.synchronize()

    def _plan_for(self, sections: Sequence[SectionState]) -> _Plan:
        key = [
            (section.section_index, [(name, t.dtype, t.shape) for name, t in section.tensors.items()])
            for section in sections
        ]
        if self._plan is None or self._plan.key != key:
            self._plan = None  # its views keep the buffer alive, which may have to go
            self._plan = self._new_plan(key, sections)
        return self._plan

    def _new_plan(self, key: Any, sections: Sequence[SectionState]) -> _Plan:
        files = []
        start = 0
        for section in sections:
            layout = lay_out(form_of(name, tensor) for name, tensor in section.tensors.items())
            files.append(
                _PlannedFile(
                    section_index=section.section_index,
                    layout=layout,
                    start=start,
                    places={item.form.name: item for item in layout.tensors},
                )
            )
            start += -(-layout.payload_bytes // _ALIGNMENT) * _ALIGNMENT
        if self._buffer.nbytes < start:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # frees the old one first
            self._buffer = torch.empty(start, dtype=torch.uint8, pin_memory=self._pin_memory)
        views = tuple(
            _view(self._buffer[file.start + item.begin : file.start + item.end], item.form)
            for file in files
            for item in file.layout.tensors
        )
        return _Plan(key=key, files=tuple(files), views=views)


def _view(memory: Tensor, form: TensorForm) -> Tensor:
    return memory.view(getattr(torch, form.dtype)).view(form.shape)


def _record_event(tensors: Sequence[Tensor]) -> torch.cuda.Event | None:
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
