"""What a checkpoint is made of, as frozen values: they travel as JSON and import no torch.

A save goes: ``SaveOrder`` (committer to all) → ``Written`` or ``PartFailed`` (each worker back) → ``Manifest``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Json = Any
"""What JSON can hold: None, bool, int, float, str, lists, and objects with text keys."""

FORMAT = 1
"""Version of the manifest; another one is refused."""

JOB_SECTION = -1
"""Index under which tensors are stored that belong to no section."""


@dataclass(frozen=True, kw_only=True)
class SaveOrder:
    """One attempt to save one step.

    Attributes:
        save_id: unique; two attempts at the same step never share files.
        sequence: grows with every save in a store, whatever the step; the highest complete one is the newest.
        step: index of the next step to run, which is the number of steps done.
    """

    save_id: str
    sequence: int
    step: int

    @property
    def directory(self) -> str:
        """Where its files go, below the store's root."""
        return f"step-{self.step:09d}-save-{self.sequence:05d}-{self.save_id}"


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies in its part file.

    Attributes:
        name: see ``names``.
        dtype: as in ``torch.<dtype>``.
        shape: of the tensor.
        begin, end: bytes of the file, ``begin <= i < end``; row-major, little-endian.
        crc32: of those bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    crc32: int


@dataclass(frozen=True, kw_only=True)
class PartRecord:
    """One file that is durable.

    Attributes:
        file: its name in the checkpoint's directory.
        section_index: the section its tensors belong to, or ``JOB_SECTION``.
        size_bytes: of the whole file.
        header_bytes, header_crc32: what stands before the first tensor, and its checksum.
        tensors: where each one lies; together they cover the rest of the file.
        values: optimizer state that is not a tensor, by name, as ``tree`` encodes it.
    """

    file: str
    section_index: int
    size_bytes: int
    header_bytes: int
    header_crc32: int
    tensors: tuple[StoredTensor, ...]
    values: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Written:
    """What one worker made durable.

    Attributes:
        save_id: of the order.
        worker: who.
        parts: its files.
        pause_s: how long training stood still for the copy.
        write_s: how long writing took behind it.
    """

    save_id: str
    worker: str
    parts: tuple[PartRecord, ...]
    pause_s: float
    write_s: float

    @property
    def size_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(part.size_bytes for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class PartFailed:
    """A worker could not write; none of its files of this save is left.

    Attributes:
        save_id: of the order.
        worker: who.
        reason: one line for people, with the file.
    """

    save_id: str
    worker: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class JobState:
    """What is the same on every worker: position, schedules and what the user registered.

    Attributes:
        step: index of the next step.
        num_samples: samples consumed so far over the life of the job.
        seed, batch_size, dataset_length: what makes the order of samples, with ``step``.
        lr_scheduler: its ``state_dict``, encoded by ``tree``; None without one.
        loss_scale: state of the fp16 loss scale; None without one.
        param_groups: options of the optimizer's param groups by parameter name, see ``options``.
        registered: state of each registered object by name, encoded by ``tree``.
        model_names: every name of ``model.state_dict()`` to the stored tensor; tied names share one.
        train_calls: the script's calls of ``train`` so far, as JSON objects; the last may be under way.
    """

    step: int
    num_samples: int
    seed: int
    batch_size: int
    dataset_length: int
    lr_scheduler: Json = None
    loss_scale: Json = None
    param_groups: Json = None
    registered: Mapping[str, Json] = field(default_factory=dict)
    model_names: Mapping[str, str] = field(default_factory=dict)
    train_calls: tuple[Json, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A complete checkpoint: what is in it and where. Exists only when every part is durable.

    Attributes:
        order: which save it is.
        job: what is the same on every worker.
        parts: all files.
        num_sections: of the model when it was saved; informative, tensors are found by name.
        saved_at: UTC, for people; nothing is decided by it.
        version: of Varuna that wrote it.
    """

    order: SaveOrder
    job: JobState
    parts: tuple[PartRecord, ...]
    num_sections: int
    saved_at: str
    version: str

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.size_bytes for part in self.parts)
