"""What a launcher on one machine is to run, and what its workers find in their environment."""

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


def worker_environ(
    job: LocalJob, worker_index: int, local_rank: int, store: StoreReady, token: str
) -> dict[str, str]:
    """What a worker finds in its environment: torchrun's names, and Varuna's own.

    A newcomer's numbers only have to be consistent: it gets its rank with its place.
    """
    return {
        "RANK": str(worker_index),
        "WORLD_SIZE": str(max(job.num_workers, worker_index + 1)),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(max(job.num_workers, local_rank + 1)),
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        # so that torch.distributed.init_process_group() in a user's script joins this store as a client
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "VARUNA_RUN_ID": job.run_id,
        "VARUNA_TOKEN": token,
        "VARUNA_FAILURE_DIR": str(job.log_dir),
        "VARUNA_MANAGER": "",  # not that of a job in which this one may have been started
        "VARUNA_JOINS": "0",
        **job.layout.to_env(),
    }
