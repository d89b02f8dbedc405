"""Which checkpoint to read: the newest complete one, or that of an explicit step. Without torch.

A save without manifest does not exist. One with a manifest is complete when every part it names is there with
its size; on a bucket a part may become visible late, so it is waited for, up to the store's limit. Damage makes
who asked for the newest go back to an older one; a store that cannot be reached does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import TypeVar

from varuna.checkpoint.errors import CheckpointError, DamagedCheckpoint
from varuna.checkpoint.manifest import (
    MANIFEST_FILE,
    Place,
    decode_manifest,
    listed,
    places_of,
    values_of,
)
from varuna.checkpoint.retention import newest_first, parse_directory
from varuna.checkpoint.store import Store
from varuna.checkpoint.values import Json, Manifest, SaveOrder
from varuna.events import Event, Notice

_T = TypeVar("_T")
Publish = Callable[[Event], None]


class Checkpoint:
    """A complete checkpoint in a store.

    Args:
        store: where.
        manifest: what is in it.
    """

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store = store
        self.manifest = manifest

    @property
    def step(self) -> int:
        """Index of the step that comes next."""
        return self.manifest.order.step

    @property
    def directory(self) -> str:
        """Its directory below the store's root."""
        return self.manifest.order.directory

    @property
    def url(self) -> str:
        """Its place, for people."""
        return f"{self.store.url}/{self.directory}"

    @functools.cached_property
    def places(self) -> dict[str, Place]:
        """Every tensor by name."""
        return places_of(self.manifest)

    @functools.cached_property
    def values(self) -> dict[str, Json]:
        """Optimizer state that is not a tensor, by name, as ``tree`` encodes it."""
        return values_of(self.manifest)

    def path_of(self, file: str) -> str:
        """A part's path below the store's root."""
        return f"{self.directory}/{file}"

    def url_of(self, file: str) -> str:
        """A part's place, for messages."""
        return f"{self.store.url}/{self.path_of(file)}"


def saves_in(store: Store) -> tuple[SaveOrder, ...]:
    """Every save that left a directory, complete or not; newest first.

    Raises:
        CheckpointError: the store cannot be read.
    """
    try:
        parsed = [parse_directory(name) for name in store.directories()]
    except OSError as error:
        raise CheckpointError(f"Cannot list the checkpoints in {store.url}: {error}.") from error
    return newest_first(order for order in parsed if order is not None)


def open_save(store: Store, order: SaveOrder, *, check_parts: bool = True) -> Checkpoint | None:
    """The checkpoint a save became; None if it has no manifest.

    Raises:
        DamagedCheckpoint: the manifest is damaged, or a part is missing or of another size.
        CheckpointError: the store fails, or another version of Varuna wrote it.
    """
    path = f"{order.directory}/{MANIFEST_FILE}"
    try:
        data = store.read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"Cannot read {store.url}/{path}: {error}.") from error
    manifest = decode_manifest(data, f"{store.url}/{path}")
    if manifest.order != order:
        raise DamagedCheckpoint(
            f"{store.url}/{path}: expected the manifest of {order.directory}, found that of "
            f"{manifest.order.directory}. The directory was renamed or copied; give it its name back."
        )
    checkpoint = Checkpoint(store, manifest)
    if check_parts:
        _check_parts(checkpoint)
    return checkpoint


def find_checkpoint(
    store: Store,
    step: int | None = None,
    *,
    publish: Publish,
    rejected: Collection[str] = (),
) -> Checkpoint | None:
    """The newest complete checkpoint, or that of an explicit step.

    Args:
        store: where to look.
        step: index of the next step; None for the newest.
        publish: is told of each newer one that was passed over because it is damaged.
        rejected: directories not to take: some worker could not read them.

    Returns:
        None if the newest is asked for and no save was ever completed.

    Raises:
        CheckpointError: that step has none, or is damaged; or every complete one is damaged.
    """
    saves = saves_in(store)
    if step is not None:
        return _explicit(store, saves, step, rejected)
    broken: list[str] = []
    for order in saves:
        if order.directory in rejected:
            broken.append(f"{order.directory} could not be read")
            continue
        try:
            checkpoint = open_save(store, order)
        except DamagedCheckpoint as error:
            broken.append(str(error))
            publish(Notice(text=f"Checkpoint of step {order.step} is passed over: {error}"))
            continue
        if checkpoint is not None:
            return checkpoint
    if broken:
        raise CheckpointError(
            f"None of the {len(broken)} checkpoints in {store.url} can be used: {' '.join(broken)} Restore one "
            f"of them, or start anew with another place for checkpoints."
        )
    return None


def with_newest(
    store: Store, use: Callable[[Checkpoint], _T], step: int | None = None, *, publish: Publish
) -> _T | None:
    """``use`` the newest checkpoint; if it raises ``DamagedCheckpoint``, the next older one, and so on.

    An explicit step is used or fails: nothing else is tried. None if no save was ever completed.

    Raises:
        CheckpointError: that step has none or is damaged; or every complete one is damaged.
    """
    rejected: list[str] = []
    while True:
        checkpoint = find_checkpoint(store, step, publish=publish, rejected=rejected)
        if checkpoint is None:
            return None
        try:
            return use(checkpoint)
        except DamagedCheckpoint as error:
            if step is not None:
                raise
            rejected.append(checkpoint.directory)
            publish(Notice(text=f"Checkpoint of step {checkpoint.step} is passed over: {error}"))


def _explicit(store: Store, saves: tuple[SaveOrder, ...], step: int, rejected: Collection[str]) -> Checkpoint:
    for order in saves:
        if order.step == step and order.directory not in rejected:
            checkpoint = open_save(store, order)
            if checkpoint is not None:
                return checkpoint
    there = sorted({order.step for order in saves if _has_manifest(store, order)})
    steps = listed(map(str, there)) if there else "none"
    raise CheckpointError(
        f"There is no complete checkpoint of step {step} in {store.url}; of these steps: {steps}."
    )


def _has_manifest(store: Store, order: SaveOrder) -> bool:
    return any(entry.name == MANIFEST_FILE for entry in store.files(order.directory))


def _check_parts(checkpoint: Checkpoint) -> None:
    """Every part is there with its size; late ones are waited for."""
    store = checkpoint.store
    wanted = {part.file: part.size_bytes for part in checkpoint.manifest.parts}
    found: dict[str, int] = {}

    def all_there() -> bool:
        found.clear()
        found.update({entry.name: entry.size_bytes for entry in store.files(checkpoint.directory)})
        return all(found.get(name) == size for name, size in wanted.items())

    try:
        if store.patience.until(all_there):
            return
    except OSError as error:
        raise CheckpointError(f"Cannot list {store.url}/{checkpoint.directory}: {error}.") from error
    name = next(name for name, size in wanted.items() if found.get(name) != size)
    what = f"{found[name]} bytes" if name in found else "no such file"
    raise DamagedCheckpoint(
        f"{checkpoint.url_of(name)}: expected {wanted[name]} bytes, found {what}. Restore the file, or use "
        f"another checkpoint."
    )
