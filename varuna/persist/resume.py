"""Which checkpoint a job begins from: all workers take the same one, or none of them begins.

Worker 0 looks; every worker checks that it fits and reads its sections. If one of them finds it damaged, all
take the next older one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from varuna.checkpoint.errors import CheckpointError, DamagedCheckpoint, StateError
from varuna.checkpoint.find import Checkpoint, find_checkpoint, open_save, saves_in
from varuna.checkpoint.retention import parse_directory
from varuna.checkpoint.store import Store
from varuna.checkpoint.values import JobState
from varuna.config_checkpoint import CheckpointConfig
from varuna.events import Event, Notice
from varuna.run.groups import World
from varuna.run.job import JobSpec
from varuna.run.startup import wait_for


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What a job begins from.

    Attributes:
        checkpoint: None: from the start.
        last_sequence: number of the newest save there is, complete or not.
    """

    checkpoint: Checkpoint | None
    last_sequence: int


def begin_from(
    store: Store,
    config: CheckpointConfig,
    world: World,
    *,
    use: Callable[[Checkpoint], None],
    publish: Callable[[Event], None],
) -> Beginning:
    """Find the checkpoint that is asked for and ``use`` it. Every worker of the first generation calls it.

    Args:
        store: where checkpoints are.
        config: which is asked for.
        world: this worker.
        use: checks and reads this worker's part.
        publish: hears of those that are passed over.

    Raises:
        CheckpointError, UserError: see ``find_checkpoint`` and ``use``.
    """
    rejected: list[str] = []
    while True:
        directory, last_sequence = _chosen(store, config, world, rejected, publish)
        if not directory:
            return Beginning(checkpoint=None, last_sequence=last_sequence)
        problem = ""
        try:
            checkpoint = open_directory(store, directory)
            use(checkpoint)
        except DamagedCheckpoint as error:
            if config.resume != "newest":
                raise
            problem = str(error)
        problem = _first_problem(world, len(rejected), problem)
        if not problem:
            return Beginning(checkpoint=checkpoint, last_sequence=last_sequence)
        rejected.append(directory)
        publish(Notice(text=f"The checkpoint {directory} is passed over: {problem}"))


def open_directory(store: Store, directory: str) -> Checkpoint:
    """The checkpoint in a directory that another worker has found.

    Raises:
        DamagedCheckpoint: it is not there, as far as can be seen from here, or not whole.
        CheckpointError: the store cannot be read.
    """
    order = parse_directory(directory)
    if order is None:
        raise CheckpointError(f"{directory!r} is no directory of a checkpoint.")
    found: list[Checkpoint] = []

    def is_there() -> bool:
        checkpoint = open_save(store, order)
        found.extend([] if checkpoint is None else [checkpoint])
        return checkpoint is not None

    if not store.patience.until(is_there):
        raise DamagedCheckpoint(
            f"There is no complete checkpoint {store.url}/{directory} as seen from here: it was removed, "
            f"or the others write elsewhere. All machines must share that place."
        )
    return found[0]


def check_settings(checkpoint: Checkpoint, job: JobSpec, *, has_scheduler: bool) -> None:
    """Raise ``StateError`` if the job is none that can go on from there: other data, another schedule."""
    state: JobState = checkpoint.manifest.job
    pairs = [
        ("seed", state.seed, job.seed),
        ("batch_size", state.batch_size, job.batch_size),
        ("the dataset's length", state.dataset_length, len(job.dataset)),
        ("lr_scheduler", _yes(state.lr_scheduler is not None), _yes(has_scheduler)),
    ]
    different = [f"{name} was {there} and is {here}" for name, there, here in pairs if there != here]
    if different:
        raise StateError(
            f"The checkpoint of step {state.step} in {checkpoint.store.url} is of another job: "
            f"{'; '.join(different)}. Give the job what it had, or begin anew with --resume never or another "
            f"place for checkpoints."
        )


def _yes(value: bool) -> str:
    return "there" if value else "not there"


def _chosen(
    store: Store, config: CheckpointConfig, world: World, rejected: list[str], publish: Callable[[Event], None]
) -> tuple[str, int]:
    """Directory of the checkpoint to try (empty: none), and the newest number; worker 0 looks."""
    key = f"resume/{len(rejected)}"
    if world.rank != 0:
        directory, last_sequence = json.loads(wait_for(world.store, key, "worker 0 to look for a checkpoint"))
        return str(directory), int(last_sequence)
    checkpoint = None
    if config.resume != "never":
        step = None if config.resume == "newest" else int(config.resume)
        checkpoint = find_checkpoint(store, step, publish=publish, rejected=rejected)
    chosen = "" if checkpoint is None else checkpoint.directory
    last_sequence = max((order.sequence for order in saves_in(store)), default=0)
    world.store.set(key, json.dumps([chosen, last_sequence]))
    return chosen, last_sequence


def _first_problem(world: World, attempt: int, mine: str) -> str:
    """What some worker could not read; empty if all could."""
    world.store.set(f"resume/{attempt}/{world.rank}", json.dumps(mine))
    problems = [
        json.loads(wait_for(world.store, f"resume/{attempt}/{rank}", f"worker {rank} to read its sections"))
        for rank in range(world.size)
    ]
    return next((problem for problem in problems if problem), "")
