"""One worker's part of a save: a copy in line, then writing in a thread while training goes on.

What goes wrong while writing comes back as a value, ``PartFailed``, since the others must hear of it; the files
of that save are removed. Snapshot memory is used again, so a save that is asked for while the one before is
still being written waits for it: ask only after that was committed or given up.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from varuna.checkpoint.collect import SectionState
from varuna.checkpoint.shares import Share
from varuna.checkpoint.snapshot import Snapshot, SnapshotFile
from varuna.checkpoint.store import Store
from varuna.checkpoint.values import (
    JOB_SECTION,
    PartFailed,
    PartRecord,
    SaveOrder,
    StoredTensor,
    Written,
)

Answer = Written | PartFailed


class Saver:
    """Copies and writes what one worker owes to each save.

    Args:
        store: where.
        worker: unique among the workers of a save; part of file names.
        pin_memory: for state on a GPU.
        before_write: called before each file, in the thread that writes it.
    """

    def __init__(
        self,
        store: Store,
        worker: str,
        *,
        pin_memory: bool = False,
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._before_write = before_write
        self._worker = worker
        self._mine = Snapshot(pin_memory=pin_memory)
        self._kept = Snapshot(pin_memory=pin_memory)
        self._kept_files: tuple[SnapshotFile, ...] = ()
        self._kept_save_id = ""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="varuna-checkpoint")
        self._last: Future[Answer] | None = None

    def save(self, order: SaveOrder, sections: Sequence[SectionState], share: Share) -> Future[Answer]:
        """Copy this worker's share now and write it behind; the future never raises.

        Args:
            order: the save.
            sections: everything this worker holds.
            share: what of it to write, and what to keep for a writer that may die.
        """
        self._wait_for_last()
        started_s = time.monotonic()
        self._kept_save_id = ""
        try:
            files = self._mine.copy(_chosen(sections, share.write))
            self._kept_files = self._kept.copy(_chosen(sections, share.keep))
        except (RuntimeError, MemoryError) as error:  # no memory for the copy
            done: Future[Answer] = Future()
            done.set_result(self._failed(order, error))
            return done
        self._kept_save_id = order.save_id
        pause_s = time.monotonic() - started_s
        self._last = self._thread.submit(self._write, order, self._mine, files, pause_s, "")
        return self._last

    def write_kept(self, order: SaveOrder, names: Collection[str], *, suffix: str = "-kept") -> Future[Answer]:
        """Write what a worker that died owed to this save, from what was kept; the future never raises.

        Args:
            order: the save under way.
            names: of ``Share.keep``.
            suffix: of the files' names; one that was not used before in this save.
        """
        self._last = self._thread.submit(self._write_kept, order, frozenset(names), suffix)
        return self._last

    def close(self) -> None:
        """Finish what is being written and end the thread."""
        self._thread.shutdown(wait=True)

    # --- in the thread ----------------------------------------------------------------------

    def _write(
        self,
        order: SaveOrder,
        snapshot: Snapshot,
        files: Sequence[SnapshotFile],
        pause_s: float,
        suffix: str,
    ) -> Answer:
        started_s = time.monotonic()
        paths: list[str] = []
        try:
            snapshot.wait()
            if files:
                self._store.make_directory(order.directory)
            parts = []
            for file in files:
                name = _file_name(file.section_index, self._worker, suffix)
                paths.append(f"{order.directory}/{name}")
                self._before_write()
                parts.append(self._write_file(paths[-1], name, file))
        except Exception as error:  # of whatever kind: the committer must hear of it
            self._remove(paths)
            return self._failed(order, error)
        return Written(
            save_id=order.save_id,
            worker=self._worker,
            parts=tuple(parts),
            pause_s=pause_s,
            write_s=time.monotonic() - started_s,
        )

    def _write_kept(self, order: SaveOrder, names: frozenset[str], suffix: str) -> Answer:
        if self._kept_save_id != order.save_id:
            reason = f"what was kept for {order.directory} is no longer in memory"
            return PartFailed(save_id=order.save_id, worker=self._worker, reason=reason)
        chosen = [file.only(names) for file in self._kept_files]
        return self._write(order, self._kept, [file for file in chosen if not file.is_empty], 0.0, suffix)

    def _write_file(self, path: str, name: str, file: SnapshotFile) -> PartRecord:
        header = file.layout.header
        tensors = tuple(
            StoredTensor(
                name=item.form.name,
                dtype=item.form.dtype,
                shape=item.form.shape,
                begin=len(header) + item.begin,
                end=len(header) + item.end,
                crc32=zlib.crc32(file.bytes_of(item.form.name)),
            )
            for item in file.layout.tensors
        )
        self._store.write(path, [header, *file.payload()])
        return PartRecord(
            file=name,
            section_index=file.section_index,
            size_bytes=len(header) + file.layout.payload_bytes,
            header_bytes=len(header),
            header_crc32=zlib.crc32(header),
            tensors=tensors,
            values=file.values,
        )

    def _failed(self, order: SaveOrder, error: Exception) -> PartFailed:
        reason = f"{type(error).__name__}: {error}"
        return PartFailed(save_id=order.save_id, worker=self._worker, reason=reason)

    def _remove(self, paths: Sequence[str]) -> None:
        for path in paths:
            with contextlib.suppress(OSError):  # the committer removes the whole directory
                self._store.remove_file(path)

    def _wait_for_last(self) -> None:
        if self._last is not None:
            self._last.result()


def _chosen(sections: Sequence[SectionState], names: Collection[str]) -> list[SectionState]:
    """What a share has of each section, without sections it has nothing of."""
    wanted = frozenset(names)
    chosen = []
    for section in sections:
        tensors = {name: tensor for name, tensor in section.tensors.items() if name in wanted}
        values = {name: value for name, value in section.values.items() if name in wanted}
        if tensors or values:
            chosen.append(SectionState(section_index=section.section_index, tensors=tensors, values=values))
    return chosen


def _file_name(section_index: int, worker: str, suffix: str) -> str:
    section = "job" if section_index == JOB_SECTION else f"section-{section_index:05d}"
    return f"{section}-{worker}{suffix}.safetensors"
