"""What the environment says: who this worker is, which layout the user asked for, where caches go.

Pure functions of an environment mapping. Three ways to start are understood: ``python train.py`` (one worker),
``varuna run`` and ``torchrun``, both of which describe the world in the same variables (``RANK`` and so on).
Errors are ``ConfigError`` and name the variable, its value and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from varuna.errors import ConfigError

SCHEDULE_NAMES = ("varuna", "1f1b", "gpipe", "zero-bubble")
"""Schedules that a user can name; ``varuna.plan`` implements each."""

_WORLD_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_START_HINT = (
    "Start with `varuna run --workers N train.py`, `torchrun --nproc-per-node N train.py` or `python train.py`."
)
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True, kw_only=True)
class WorldConfig:
    """Who this worker is among how many, and where they meet.

    Attributes:
        rank, world_size: index of this worker and number of workers in the job.
        local_rank, local_world_size: the same on this machine; ``local_rank`` picks the device.
        master_addr, master_port: where the rendezvous store listens; port 0 when there is one worker alone.
        store_is_hosted: True if the launcher hosts the store, so that every worker connects as a client;
            False if worker 0 must host it.
        run_id: name of the run, the same on every worker.
        restart_count: how often the launcher has restarted these workers; part of every store key.
        launched_by: who set the variables.
        token: secret of the job, the same on every worker; empty under other launchers.
        failure_dir: where a failing worker leaves its failure record; None if nobody reads one.
        joins: this worker comes to a job that is at work already; its rank is given to it later.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    store_is_hosted: bool = False
    run_id: str = "local"
    restart_count: int = 0
    launched_by: Literal["varuna", "torchrun", "none"] = "none"
    token: str = field(default="", repr=False)
    failure_dir: str | None = None
    joins: bool = False

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> WorldConfig:
        """Read the world from the variables of `varuna run` or torchrun; without any, one worker alone.

        Raises:
            ConfigError: a variable is missing, is not a number, or contradicts another.
        """
        present = [name for name in _WORLD_VARIABLES if environ.get(name)]
        if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(present):
            return WorldConfig()
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in present]
        if missing:
            given = ", ".join(f"{name}={environ[name]}" for name in present)
            raise ConfigError(
                f"{given} in the environment, but not {', '.join(missing)}: half a description of the workers. "
                f"Unset {', '.join(present)} to run one worker alone, or set them all. {_START_HINT}"
            )
        rank = _integer(environ, "RANK", minimum=0)
        world_size = _integer(environ, "WORLD_SIZE", minimum=1)
        local_rank = _integer(environ, "LOCAL_RANK", minimum=0, default=rank)
        local_world_size = _integer(environ, "LOCAL_WORLD_SIZE", minimum=1, default=world_size)
        _check_below("RANK", rank, "WORLD_SIZE", world_size)
        _check_below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size)
        is_varuna = bool(environ.get("VARUNA_RUN_ID"))
        return WorldConfig(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            master_addr=environ["MASTER_ADDR"],
            master_port=_port(environ),
            store_is_hosted=is_varuna or environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            run_id=environ.get("VARUNA_RUN_ID") or environ.get("TORCHELASTIC_RUN_ID") or "local",
            restart_count=_integer(environ, "TORCHELASTIC_RESTART_COUNT", minimum=0, default=0),
            launched_by="varuna" if is_varuna else "torchrun",
            token=environ.get("VARUNA_TOKEN", ""),
            failure_dir=environ.get("VARUNA_FAILURE_DIR") or None,
            joins=_flag("VARUNA_JOINS", environ.get("VARUNA_JOINS") or "0"),
        )


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """What the user fixed of the layout; None leaves the choice to the planner.

    Attributes:
        num_stages: P, stages per pipeline.
        micro_batch_size: m, samples per micro-batch.
        schedule: one of ``SCHEDULE_NAMES``.
        recompute: for all stages, or one flag per stage.
        check: compare one split step with one unsplit step at start.
    """

    num_stages: int | None = None
    micro_batch_size: int | None = None
    schedule: str | None = None
    recompute: bool | tuple[bool, ...] | None = None
    check: bool = True

    def __post_init__(self) -> None:
        for what, value in (("number of stages", self.num_stages), ("micro-batch size", self.micro_batch_size)):
            if value is not None and value < 1:
                raise ConfigError(f"The {what} is {value}; it must be at least 1.")
        if self.schedule is not None and self.schedule not in SCHEDULE_NAMES:
            raise ConfigError(
                f"Unknown schedule {self.schedule!r}. Known schedules: {', '.join(SCHEDULE_NAMES)}."
            )
        if isinstance(self.recompute, tuple) and self.num_stages not in (None, len(self.recompute)):
            raise ConfigError(
                f"{len(self.recompute)} recompute flags for {self.num_stages} stages. Give one flag for all "
                f"stages or one per stage."
            )

    def over(self, other: LayoutConfig | None) -> LayoutConfig:
        """What is fixed here, and where nothing is, what ``other`` fixes: flags over the script's own layout.

        Raises:
            ConfigError: the two do not go together.
        """
        if other is None:
            return self
        fixed = {
            one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) is not None
        }
        return replace(other, **{**fixed, "check": self.check and other.check})

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> LayoutConfig:
        """Read what ``to_env`` writes, or a user of torchrun sets by hand.

        ``VARUNA_STAGES``, ``VARUNA_MICRO_BATCH_SIZE``, ``VARUNA_SCHEDULE``, ``VARUNA_CHECK`` (0 or 1) and
        ``VARUNA_RECOMPUTE``: 0 or 1, or one of them per stage with commas between: ``1,1,1,0``.

        Raises:
            ConfigError: a value that cannot be.
        """
        return LayoutConfig(
            num_stages=_optional_integer(environ, "VARUNA_STAGES"),
            micro_batch_size=_optional_integer(environ, "VARUNA_MICRO_BATCH_SIZE"),
            schedule=environ.get("VARUNA_SCHEDULE") or None,
            recompute=_recompute(environ),
            check=_flag("VARUNA_CHECK", environ.get("VARUNA_CHECK") or "1"),
        )

    def to_env(self) -> dict[str, str]:
        """The variables from which ``from_env`` reads this value back."""
        environ: dict[str, str] = {}
        if self.num_stages is not None:
            environ["VARUNA_STAGES"] = str(self.num_stages)
        if self.micro_batch_size is not None:
            environ["VARUNA_MICRO_BATCH_SIZE"] = str(self.micro_batch_size)
        if self.schedule is not None:
            environ["VARUNA_SCHEDULE"] = self.schedule
        if self.recompute is not None:
            flags = self.recompute if isinstance(self.recompute, tuple) else (self.recompute,)
            environ["VARUNA_RECOMPUTE"] = ",".join(str(int(flag)) for flag in flags)
        if not self.check:
            environ["VARUNA_CHECK"] = "0"
        return environ


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """Which steps to record, and where to write them.

    Attributes:
        path: the file, written by worker 0.
        first_step, end_step: steps ``first_step <= t < end_step``, counted as ``Step.index``. The first two are
            left out by default: they warm up.
    """

    path: str
    first_step: int = 2
    end_step: int = 5

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> TraceConfig | None:
        """``VARUNA_TRACE`` (a file) and ``VARUNA_TRACE_STEPS`` (such as 5:8); None: record nothing.

        Raises:
            ConfigError: the steps cannot be read.
        """
        path = environ.get("VARUNA_TRACE")
        if not path:
            return None
        return TraceConfig.parse(path, environ.get("VARUNA_TRACE_STEPS") or "")

    @staticmethod
    def parse(path: str, steps: str) -> TraceConfig:
        """``steps`` is such as 5:8 (steps 5, 6 and 7, counted from 0), or empty for the default.

        Raises:
            ConfigError: the steps cannot be read.
        """
        if not steps:
            return TraceConfig(path=path)
        first, colon, end = steps.partition(":")
        if not colon or not first.isdecimal() or not end.isdecimal() or int(first) >= int(end):
            raise ConfigError(
                f"Steps to trace {steps!r} cannot be read. Write 5:8 for steps 5, 6 and 7, counted from 0."
            )
        return TraceConfig(path=path, first_step=int(first), end_step=int(end))

    def to_env(self) -> dict[str, str]:
        """The variables from which ``from_env`` reads this value back."""
        return {"VARUNA_TRACE": self.path, "VARUNA_TRACE_STEPS": f"{self.first_step}:{self.end_step}"}

    @property
    def steps(self) -> range:
        """The steps."""
        return range(self.first_step, self.end_step)


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """When a job measures its model before it plans.

    Attributes:
        wanted: True: at every start that has no profile yet; False: never; None: where the number of stages
            or the micro-batch size is left to choose.
        output: write the profile to this file and end before the first step; None trains.
        micro_batch_sizes: those to measure; empty leaves the choice to Varuna.
    """

    wanted: bool | None = None
    output: Path | None = None
    micro_batch_sizes: tuple[int, ...] = ()

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> ProfileConfig:
        """Read ``VARUNA_PROFILE`` (0 or 1), ``VARUNA_PROFILE_ONLY`` (a file) and ``VARUNA_PROFILE_SIZES``
        (``1,2,4``).

        Raises:
            ConfigError: a value that cannot be.
        """
        wanted = environ.get("VARUNA_PROFILE", "")
        output = environ.get("VARUNA_PROFILE_ONLY", "")
        return ProfileConfig(
            wanted=_flag("VARUNA_PROFILE", wanted) if wanted else None,
            output=Path(output) if output else None,
            micro_batch_sizes=read_sizes("VARUNA_PROFILE_SIZES", environ.get("VARUNA_PROFILE_SIZES", "")),
        )

    def to_env(self) -> dict[str, str]:
        """The variables from which ``from_env`` reads this value back."""
        environ: dict[str, str] = {}
        if self.wanted is not None:
            environ["VARUNA_PROFILE"] = str(int(self.wanted))
        if self.output is not None:
            environ["VARUNA_PROFILE_ONLY"] = str(self.output)
        if self.micro_batch_sizes:
            environ["VARUNA_PROFILE_SIZES"] = ",".join(map(str, self.micro_batch_sizes))
        return environ


def read_sizes(name: str, text: str) -> tuple[int, ...]:
    """``1,2,4`` as ascending numbers without repetition; none for an empty text.

    Raises:
        ConfigError: it cannot be read; the message calls it ``name``.
    """
    try:
        sizes = {int(part) for part in text.split(",")} if text else set()
    except ValueError:
        sizes = {0}
    if any(size < 1 for size in sizes):
        raise ConfigError(f"{name}={text!r} is no list of micro-batch sizes. Write numbers from 1 on: 1,2,4,8.")
    return tuple(sorted(sizes))


@dataclass(frozen=True, kw_only=True)
class MorphConfig:
    """How a job goes on when workers come and go.

    Attributes:
        heartbeat_limit_s: a worker that is silent for so long is taken for dead.
        manager_limit_s: so is the manager, and another is started in its place. It thinks about plans
            meanwhile, so this is longer.
        replace_lost: start a new worker for each one that is lost.
        finds_slow: give less work to workers that are slower than their peers.
        rest_s: how long one that is much slower gets no work; twice as long each time.
    """

    heartbeat_limit_s: float = 10.0
    manager_limit_s: float = 60.0
    replace_lost: bool = False
    finds_slow: bool = True
    rest_s: float = 300.0

    @staticmethod
    def from_env(
        environ: Mapping[str, str], wanted: bool | None = None, replace_lost: bool | None = None
    ) -> MorphConfig | None:
        """Read ``VARUNA_MORPH`` (0 or 1, by default 1), ``VARUNA_HEARTBEAT_S``, ``VARUNA_MANAGER_S``,
        ``VARUNA_REPLACE_LOST`` (0 or 1, by default 0), ``VARUNA_FIND_SLOW`` (0 or 1, by default 1) and
        ``VARUNA_REST_S``.

        Args:
            environ: the variables.
            wanted: what a flag says instead of ``VARUNA_MORPH``.
            replace_lost: what a flag says instead of ``VARUNA_REPLACE_LOST``.

        Returns:
            None if the job is to end with the first worker that is lost.

        Raises:
            ConfigError: a value that cannot be.
        """
        if not (_flag("VARUNA_MORPH", environ.get("VARUNA_MORPH") or "1") if wanted is None else wanted):
            if replace_lost:
                raise ConfigError(
                    "--replace-lost is for a job that goes on when a worker is lost, and this one is to end "
                    "then (--no-morph, or VARUNA_MORPH=0). Leave one of them out."
                )
            return None
        if replace_lost is None:
            replace_lost = _flag("VARUNA_REPLACE_LOST", environ.get("VARUNA_REPLACE_LOST") or "0")
        usual = MorphConfig()
        return MorphConfig(
            heartbeat_limit_s=_seconds(environ, "VARUNA_HEARTBEAT_S", usual.heartbeat_limit_s),
            manager_limit_s=_seconds(environ, "VARUNA_MANAGER_S", usual.manager_limit_s),
            replace_lost=replace_lost,
            finds_slow=_flag("VARUNA_FIND_SLOW", environ.get("VARUNA_FIND_SLOW") or "1"),
            rest_s=_seconds(environ, "VARUNA_REST_S", usual.rest_s),
        )


def cache_dir(environ: Mapping[str, str]) -> Path:
    """Where captures and profiles are kept between runs: ``VARUNA_CACHE_DIR``, else varuna/ in the XDG cache.

    Raises:
        ConfigError: neither that nor a home directory is known.
    """
    if environ.get("VARUNA_CACHE_DIR"):
        return Path(environ["VARUNA_CACHE_DIR"]).absolute()
    xdg = environ.get("XDG_CACHE_HOME", "")
    if xdg and Path(xdg).is_absolute():  # the XDG specification: relative paths are to be ignored
        return Path(xdg) / "varuna"
    if environ.get("HOME"):
        return Path(environ["HOME"]) / ".cache" / "varuna"
    raise ConfigError(
        "No cache directory: neither VARUNA_CACHE_DIR, XDG_CACHE_HOME nor HOME is set. Set one of them."
    )


# --- reading one variable -------------------------------------------------------------------


def _integer(environ: Mapping[str, str], name: str, *, minimum: int, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a whole number. Set {name} to {minimum} or more.") from None
    if value < minimum:
        raise ConfigError(f"{name}={value} must be at least {minimum}.")
    return value


def _seconds(environ: Mapping[str, str], name: str, default_s: float) -> float:
    """A number of seconds from 1 on."""
    text = environ.get(name) or str(default_s)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds < float("inf"):
        raise ConfigError(f"{name}={text!r} is no number of seconds. Set it to 1 or more.")
    return seconds


def _optional_integer(environ: Mapping[str, str], name: str) -> int | None:
    return _integer(environ, name, minimum=1) if environ.get(name) else None


def _port(environ: Mapping[str, str]) -> int:
    port = _integer(environ, "MASTER_PORT", minimum=1)
    if port > 65535:
        raise ConfigError(f"MASTER_PORT={port} is not a port. Set it to a number from 1 to 65535.")
    return port


def _check_below(name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        raise ConfigError(
            f"{name}={value} is out of range for {limit_name}={limit}: workers count from 0 to {limit - 1}. "
            f"{_START_HINT}"
        )


def _flag(name: str, text: str) -> bool:
    if text.strip().lower() in _TRUE:
        return True
    if text.strip().lower() in _FALSE:
        return False
    raise ConfigError(f"{name}={text!r} is neither on nor off. Set it to 1 or 0.")


def _recompute(environ: Mapping[str, str]) -> bool | tuple[bool, ...] | None:
    text = environ.get("VARUNA_RECOMPUTE", "")
    if not text:
        return None
    flags = tuple(_flag("VARUNA_RECOMPUTE", part) for part in text.split(","))
    return flags if "," in text else flags[0]
