"""Begin a save, make it a checkpoint, or give it up; let older ones go. One committer per job, without torch.

The manifest is written last: until then the save does not exist for any reader, and after it, it does. Older
checkpoints go only when it has been read back, and they lose their manifest first.
"""

from __future__ import annotations

import errno
import logging
import uuid
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.manifest import MANIFEST_FILE, assemble, encode_manifest, listed
from varuna.checkpoint.retention import (
    Evidence,
    Retention,
    is_leftover,
    newest_first,
    parse_directory,
    to_prune,
)
from varuna.checkpoint.store import HOLD_FILE, Hold, Store
from varuna.checkpoint.values import JobState, Manifest, SaveOrder, Written
from varuna.events import Event, Notice

_log = logging.getLogger(__name__)


class Committer:
    """Numbers the saves of one job and decides when each becomes a checkpoint.

    Args:
        store: where.
        retention: which older ones stay.
        publish: is told what a person should read.
        grace_s: on stores without locks, how long another process's unfinished save is left alone when nothing
            happens in it.
    """

    def __init__(
        self,
        store: Store,
        *,
        retention: Retention | None = None,
        publish: Callable[[Event], None],
        grace_s: float = 3600.0,
    ) -> None:
        self._store = store
        self._retention = retention or Retention()
        self._publish = publish
        self._grace_s = grace_s
        self._last_sequence = 0
        self._holds: dict[str, Hold] = {}
        self._ended: set[str] = set()

    def begin(self, step: int) -> SaveOrder:
        """A new save, with its directory; what crashed saves left behind is removed first.

        Raises:
            CheckpointError: the store cannot be written.
        """
        try:
            known = self._orders()
        except OSError as error:
            raise self._cannot_begin(error) from error
        sequence = max([self._last_sequence, *(order.sequence for order in known)]) + 1
        order = SaveOrder(save_id=uuid.uuid4().hex[:8], sequence=sequence, step=step)
        self.open(order)
        return order

    def open(self, order: SaveOrder) -> None:
        """The directory of a save that was numbered elsewhere; what crashed saves left is removed first.

        So a save goes on whose committer has died, too.

        Raises:
            CheckpointError: the store cannot be written, or another committer holds the save.
        """
        try:
            known = self._orders()
            self._store.make_directory(order.directory)
            self._holds[order.save_id] = self._store.hold(order.directory)
        except OSError as error:
            raise self._cannot_begin(error) from error
        self._last_sequence = max(self._last_sequence, order.sequence)
        self._tidy(lambda: self._sweep(order, [one for one in known if one != order]))

    def commit(
        self,
        order: SaveOrder,
        job: JobState,
        written: Iterable[Written],
        *,
        required: Collection[str],
        num_sections: int,
    ) -> Manifest:
        """Make a save a checkpoint, then let older ones go.

        Args:
            order: from ``begin``.
            job: what is the same on every worker.
            written: all answers.
            required: names of tensors that must be there: at least every parameter.
            num_sections: of the model.

        Raises:
            CheckpointError: something is missing or the store failed; the save is given up, older ones stay.
        """
        try:
            manifest = assemble(
                order,
                job,
                written,
                required=required,
                num_sections=num_sections,
                saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
                version=_version(),
            )
            self._check_parts(manifest)
            self._store.write_marker(f"{order.directory}/{MANIFEST_FILE}", encode_manifest(manifest))
        except (CheckpointError, OSError) as error:
            self.abandon(order)
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"The checkpoint of step {order.step} in {self._store.url} could not be completed: {error}."
            ) from error
        self._tidy(lambda: self._release(order))
        self._tidy(lambda: self._remove_strays(manifest))
        self._tidy(lambda: self._prune(order))
        return manifest

    def abandon(self, order: SaveOrder) -> None:
        """Give a save up and remove its files; older checkpoints stay.

        A member that has not heard of it may write one more meanwhile, which the next save removes.
        """
        self._tidy(lambda: self._remove(order), may_be_written=True)
        self._tidy(lambda: self._release(order))

    def let_go(self, order: SaveOrder) -> None:
        """Leave a save to another committer, who takes it over."""
        hold = self._holds.pop(order.save_id, None)
        if hold is not None:
            hold.release()

    def is_complete(self, order: SaveOrder) -> bool:
        """Whether a save became a checkpoint. Raises ``CheckpointError`` if the store cannot be read."""
        try:
            return self._is_complete(order)
        except OSError as error:
            raise CheckpointError(f"Cannot read {self._store.url}/{order.directory}: {error}.") from error

    # --- inside -----------------------------------------------------------------------------

    def _cannot_begin(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"A save cannot begin in {self._store.url}: {error}.")

    def _orders(self) -> tuple[SaveOrder, ...]:
        parsed = (parse_directory(name) for name in self._store.directories())
        return newest_first(order for order in parsed if order is not None)

    def _check_parts(self, manifest: Manifest) -> None:
        """All parts are visible from here with the sizes the workers saw."""
        directory = manifest.order.directory
        wanted = {part.file: part.size_bytes for part in manifest.parts}
        wrong: dict[str, int | None] = {}

        def all_there() -> bool:
            found = {entry.name: entry.size_bytes for entry in self._store.files(directory)}
            wrong.clear()
            wrong.update({name: found.get(name) for name, size in wanted.items() if found.get(name) != size})
            return not wrong

        if not self._store.patience.until(all_there):
            first = next(iter(wrong))
            raise CheckpointError(
                f"{len(wrong)} of {len(wanted)} parts of the checkpoint of step {manifest.order.step} "
                f"({listed(wrong)}) are not in {self._store.url}/{directory} as their writers left them: of "
                f"{first} expected {wanted[first]} bytes, found {wrong[first] or 'none'}. All machines must "
                f"share that place: use a shared file system or a bucket (s3://...)."
            )

    def _remove_strays(self, manifest: Manifest) -> None:
        """Half files of a worker that died, when another wrote what it owed."""
        named = {MANIFEST_FILE, *(part.file for part in manifest.parts)}
        for entry in self._store.files(manifest.order.directory):
            if entry.name not in named:
                self._store.remove_file(f"{manifest.order.directory}/{entry.name}")

    def _prune(self, committed: SaveOrder) -> None:
        complete = [order for order in self._orders() if self._is_complete(order)]
        for order in to_prune(complete, committed, self._retention):
            self._remove(order)

    def _sweep(self, begun: SaveOrder, known: Iterable[SaveOrder]) -> None:
        for order in known:
            if order.save_id in self._holds or self._is_complete(order):
                continue
            evidence = Evidence(
                is_held=self._store.is_held(order.directory),
                is_ours=order.save_id in self._ended,
                idle_s=self._idle_s(begun, order),
            )
            if is_leftover(evidence, self._grace_s):
                _log.info("removing %s: a save that ended before its manifest was written", order.directory)
                self._remove(order)

    def _idle_s(self, begun: SaveOrder, order: SaveOrder) -> float | None:
        now_s = [entry.modified_s for entry in self._store.files(begun.directory) if entry.name == HOLD_FILE]
        changed_s = [entry.modified_s for entry in self._store.files(order.directory)]
        times_s = [*now_s, *changed_s]
        if not now_s or not changed_s or None in times_s:
            return None
        return max(time_s for time_s in now_s if time_s is not None) - max(
            time_s for time_s in changed_s if time_s is not None
        )

    def _is_complete(self, order: SaveOrder) -> bool:
        return any(entry.name == MANIFEST_FILE for entry in self._store.files(order.directory))

    def _remove(self, order: SaveOrder) -> None:
        """The manifest first: what is half removed must not look complete."""
        self._ended.add(order.save_id)
        self._store.remove_file(f"{order.directory}/{MANIFEST_FILE}")
        self._store.remove_directory(order.directory)

    def _release(self, order: SaveOrder) -> None:
        self._ended.add(order.save_id)
        hold = self._holds.pop(order.save_id, None)
        if hold is not None:
            hold.release()

    def _tidy(self, work: Callable[[], None], *, may_be_written: bool = False) -> None:
        """What fails here costs space, not safety: people are told and the job goes on."""
        try:
            work()
        except OSError as error:
            if may_be_written and error.errno == errno.ENOTEMPTY:
                return
            self._publish(
                Notice(text=f"Old checkpoint files in {self._store.url} could not be removed: {error}")
            )


def _version() -> str:
    try:
        return version("varuna")
    except PackageNotFoundError:  # a source tree on the path, not installed
        return "unknown"
