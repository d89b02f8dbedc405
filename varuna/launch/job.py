"""What a launcher is to run on its machine, and what workers find in their environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from varuna.config import LayoutConfig, MorphConfig
from varuna.launch.protocol import StoreReady


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """What to run on this machine.

    Attributes:
        target: path of a script, or with ``is_module`` the name of a module.
        arguments: what it finds in ``sys.argv[1:]``.
        num_workers: processes to start.
        layout: what the user fixed of the layout, handed to workers in their environment.
        run_id: name of the run.
        log_dir: an existing directory for logs and failure records.
        show_all: repeat every worker's output on the terminal, not only worker 0's.
        morph: how the job goes on when workers come and go; None ends it with the first that is lost.
    """

    target: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    num_workers: int = 1
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    run_id: str = "local"
    log_dir: Path
    show_all: bool = False
    morph: MorphConfig | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerPlace:
    """Where a worker begins.

    Attributes:
        worker_index: its number on this machine, for names of processes, logs and records.
        rank, size: its rank among the founders of the job; a newcomer's only have to be consistent, for it gets
            its rank with its place.
        local_rank, local_size: the same on this machine; decides which GPU it takes.
        attempt: of founding the job.
        joins: it comes to a job that is at work.
    """

    worker_index: int
    rank: int
    size: int
    local_rank: int
    local_size: int
    attempt: int = 0
    joins: bool = False

    @staticmethod
    def newcomer(worker_index: int, local_rank: int, num_workers: int) -> WorkerPlace:
        """Of a worker that comes later; ``num_workers`` were started here at first."""
        return WorkerPlace(
            worker_index=worker_index,
            rank=worker_index,
            size=max(num_workers, worker_index + 1),
            local_rank=local_rank,
            local_size=max(num_workers, local_rank + 1),
            joins=True,
        )


def worker_environ(job: LocalJob, place: WorkerPlace, store: StoreReady, token: str) -> dict[str, str]:
    """What a worker finds in its environment: torchrun's names, and Varuna's own."""
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        # so that torch.distributed.init_process_group() in a user's script joins this store as a client
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(place.attempt),
        "VARUNA_RUN_ID": job.run_id,
        "VARUNA_TOKEN": token,
        "VARUNA_FAILURE_DIR": str(job.log_dir),
        "VARUNA_MANAGER": "",  # not that of a job in which this one may have been started
        "VARUNA_JOINS": str(int(place.joins)),
        **job.layout.to_env(),
    }
