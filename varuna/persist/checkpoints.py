"""A job's checkpoints, as its session sees them: begin from one, save while it trains, go back to one.

What a member carries from one generation to the next besides sections goes this way too
(``run.reform.Carried``), with checkpoints or without.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from varuna.checkpoint.commit import Committer
from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.find import Checkpoint, find_checkpoint, saves_in
from varuna.checkpoint.load import read_tensors
from varuna.checkpoint.retention import Retention, parse_directory
from varuna.checkpoint.save import Saver
from varuna.checkpoint.store import Store, open_store
from varuna.checkpoint.tree import tensor_names
from varuna.checkpoint.values import SaveOrder
from varuna.config_checkpoint import CheckpointConfig
from varuna.events import Event, Notice, Resumed
from varuna.persist.contents import SectionStore
from varuna.persist.resume import begin_from, check_settings, open_directory
from varuna.persist.saves import Saves
from varuna.persist.schedule import SaveSchedule
from varuna.persist.standing import Standing
from varuna.run.commit import SaveMark
from varuna.run.generation import Generation
from varuna.run.reform import Worker

_NO_STORE = (
    "the store in which workers meet was lost, and there is no manager to give them another; when there is, "
    "later ones are written"
)

Complete = Callable[[SaveOrder, str, bool], None]
"""Told of a checkpoint, where it is, and whether it was found there and nobody here has heard of it."""


class Checkpoints:
    """The checkpoints of one worker's job.

    Args:
        config: what the user asked for; None: no checkpoints, but newcomers still get the standing.
        standing: of the job.
        optimizer: the user's.
        publish: hears what people should know; in the training thread.
        complete: told of every checkpoint; in a thread.
        name: of this worker, in files; unique among all that ever were in the job.
    """

    def __init__(
        self,
        config: CheckpointConfig | None,
        standing: Standing,
        optimizer: Optimizer,
        *,
        publish: Callable[[Event], None],
        complete: Complete,
        name: str,
    ) -> None:
        self._config = config
        self._store: Store | None = None if config is None else open_store(config.url)
        self._standing = standing
        self._optimizer = optimizer
        self._publish = publish
        self._complete = complete
        self._name = name
        self._generation: Callable[[], Generation | None] = lambda: None
        self._sections: SectionStore | None = None
        self._saves: Saves | None = None
        self._back_to: Checkpoint | None = None
        self._begun: Checkpoint | None = None
        self._found: set[str] = set()
        self._news: list[Event] = []

    # --- the start --------------------------------------------------------------------------

    def begin(self, worker: Worker) -> int:
        """The first generation is about to open: take what it begins from; the first step.

        Raises:
            CheckpointError: there is no such checkpoint, or it cannot be read.
            UserError: it is of another job.
        """
        config, store = self._config, self._store
        if config is None or store is None:
            return 0
        sections = self._sections_of(worker)
        held = sorted(worker.held_sections)

        def use(checkpoint: Checkpoint) -> None:
            check_settings(checkpoint, worker.job, has_scheduler=self._standing.has_scheduler)
            sections.check(checkpoint)
            sections.take(checkpoint, held)
            self._load_standing(checkpoint)

        beginning = begin_from(store, config, worker.world, use=use, publish=self._publish)
        self._standing.last_sequence = beginning.last_sequence
        checkpoint = beginning.checkpoint
        if checkpoint is None:
            return 0
        self._standing.start_over(checkpoint.manifest.job)
        self._publish(Resumed(step=checkpoint.step, url=checkpoint.url))
        if told := self._standing.registry.compare(checkpoint.manifest.job.registered):
            self._publish(Notice(text=f"About the checkpoint of step {checkpoint.step}: {told}."))
        self._begun = checkpoint
        return checkpoint.step

    def started(self, worker: Worker, generation: Callable[[], Generation | None]) -> None:
        """A generation is at work here; ``generation`` is the one at work from now on."""
        self._generation = generation
        if self._begun is not None and worker.world.rank == 0:
            self._complete(self._begun.manifest.order, self._begun.url, False)
        if self._config is not None and self._saves is None:
            self._saves = self._new_saves(worker)

    def look(self, newer_than: int = 0) -> bool:
        """Tell of the newest checkpoint in the place: whoever saved it while the manager was away may be lost.

        Args:
            newer_than: number of a save; older ones are not told.

        Returns:
            Whether there is one that was not told before.
        """
        found = None
        if self._store is not None:
            with contextlib.suppress(CheckpointError):  # whoever has to read one hears of that
                found = find_checkpoint(self._store, publish=self._publish)
        if found is None or found.manifest.order.sequence <= newer_than or found.directory in self._found:
            return False
        self._found.add(found.directory)
        self._complete(found.manifest.order, found.url, True)
        return True

    # --- saving -----------------------------------------------------------------------------

    def wish(self, step: int, *, is_last: bool) -> SaveMark | None:
        """Before a step, on worker 0: whether to save when ``step`` steps are done."""
        return None if self._saves is None else self._saves.wish(step, is_last=is_last)

    def save(self, mark: SaveMark, worker: Worker, generation: Generation) -> None:
        """After the update of a step whose commit carried this wish, on every member."""
        assert self._saves is not None, "a save was wished for in a job without checkpoints"
        size = generation.world.size
        contents = self._sections_of(worker).contents(generation.plan, size, self._standing.encode())
        self._saves.begin(mark, self._standing.step_index, generation.world.rank, contents)

    def tell_news(self) -> None:
        """Publish what has become of saves since the last call."""
        if self._saves is not None:
            self._news += self._saves.news()
        for event in self._news:
            self._publish(event)
        self._news.clear()

    def leave(self) -> None:
        """This worker goes, the others go on."""
        if self._saves is not None:
            self._saves.leave()

    def fail(self) -> None:
        """The job has failed."""
        if self._saves is not None:
            self._saves.fail()

    def settle(self) -> None:
        """Return when all that was begun is saved, or the generation has been given up."""
        if self._saves is not None:
            self._saves.settle()

    def close(self) -> None:
        """The job is over: return when all that was begun is saved."""
        if self._saves is not None:
            self._saves.close()
            self.tell_news()

    # --- from one generation to the next: ``varuna.run.reform.Carried`` ----------------------

    def tell(self) -> bytes:
        """The standing, for newcomers."""
        return self._standing.tell()

    def take(self, data: bytes) -> None:
        """The standing that a member told this newcomer."""
        self._standing.take(data)

    def greet(self) -> dict[str, Any]:
        """What this member says to the others when the next generation meets."""
        return {} if self._saves is None else self._saves.tell()

    def greeted(self, greetings: Sequence[Mapping[str, Any]], generation: Generation) -> None:
        """What all members said, in the order of their ranks."""
        if self._saves is not None:
            self._saves.hear(greetings, generation.index, generation.world.store)

    def go_back(self, address: str, worker: Worker) -> bool:
        """Nobody has the newest state any more: stand where the checkpoint at ``address`` was written.

        Returns:
            False if a newer one has turned up, of which the manager has been told: it decides anew.

        Raises:
            CheckpointError: it cannot be read.
        """
        if self._store is None:
            raise CheckpointError(
                f"The job is to go back to the checkpoint {address}, but this worker was started without one. "
                f"Start every worker with the same --checkpoint."
            )
        if self._saves is not None:
            self._saves.go_back()
        directory = address.rstrip("/").rpartition("/")[2]
        order = parse_directory(directory)
        if order is not None and self.look(newer_than=order.sequence):
            return False
        checkpoint = self._back_to = open_directory(self._store, directory)
        self._sections_of(worker).check(checkpoint)
        self._load_standing(checkpoint)
        self._news.append(Resumed(step=checkpoint.step, url=checkpoint.url))
        return True

    def restore(self, worker: Worker, section_indices: Iterable[int]) -> None:
        """Hold these sections as that checkpoint has them. ``CheckpointError`` if they cannot be read."""
        assert self._back_to is not None, "before go_back"
        self._sections_of(worker).take(self._back_to, section_indices)

    def start_over(self) -> None:
        """All members are newcomers: the script runs from its beginning, from that checkpoint on.

        Nobody tells them the number of the newest save, so they look.

        Raises:
            CheckpointError: the place cannot be listed.
        """
        assert self._back_to is not None, "before go_back"
        assert self._store is not None
        self._standing.start_over(self._back_to.manifest.job)
        orders = (self._back_to.manifest.order, *saves_in(self._store))
        self._standing.last_sequence = max(order.sequence for order in orders)

    # --- inside -----------------------------------------------------------------------------

    def _sections_of(self, worker: Worker) -> SectionStore:
        if self._sections is None:
            self._sections = SectionStore(worker, self._optimizer)
        return self._sections

    def _load_standing(self, checkpoint: Checkpoint) -> None:
        job = checkpoint.manifest.job
        stored = [job.param_groups, job.lr_scheduler, *job.registered.values()]
        names = [name for one in stored for name in tensor_names(one)]
        self._standing.load(job, read_tensors(checkpoint, names))

    def _new_saves(self, worker: Worker) -> Saves:
        config, store = self._config, self._store
        assert config is not None
        assert store is not None
        at = worker.job.at

        def make_committer(publish: Callable[[Event], None]) -> Committer:
            return Committer(store, retention=Retention(newest=config.keep), publish=publish)

        def is_aborted() -> bool:
            generation = self._generation()
            # without a store members do not hear of each other's parts: in the next generation they do
            return generation is not None and (generation.is_aborted or generation.calls.store_is_lost)

        def obstacle() -> str:
            generation = self._generation()
            is_cut_off = generation is not None and not generation.is_aborted and generation.calls.store_is_lost
            return _NO_STORE if is_cut_off else ""

        return Saves(
            store,
            Saver(
                store,
                self._name,
                pin_memory=worker.world.device.type == "cuda",
                before_write=lambda: at("save"),
            ),
            SaveSchedule(config, time.monotonic(), self._standing.step_index),
            worker.world.store,
            make_committer=make_committer,
            standing=self._standing,
            at=at,
            complete=lambda order: self._complete(order, f"{store.url}/{order.directory}", False),
            is_aborted=is_aborted,
            obstacle=obstacle,
        )


def worker_name(rank: int, *, joins: bool) -> str:
    """A worker's name in the files of a checkpoint: founders by number, newcomers by chance."""
    return f"n{secrets.token_hex(4)}" if joins else f"w{rank}"
