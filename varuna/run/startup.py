"""What happens once, before the first generation: joining the world, agreeing on shapes and weights.

Workers meet in the store. Whoever waits there also watches for a failure that another worker has told, so that
nobody waits for one that has given up.
"""

from __future__ import annotations

import functools
import itertools
import json
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from typing import TypeVar

import torch
from torch import nn
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from varuna.config import WorldConfig
from varuna.errors import ConfigError, PeerLost, WeightsDiffer
from varuna.partition import InputSignature, Partition
from varuna.partition.materialise import digest_of
from varuna.plan import PlanChoice, decode_choice, encode_choice
from varuna.run.address import choose_address
from varuna.run.failure import published_failure
from varuna.run.groups import World, connect
from varuna.run.memory import available_bytes
from varuna.versions import Versions, installed_versions, refusal_of_versions

START_TIMEOUT_S = 600.0
"""How long a worker waits for another one's part of the start (a capture, say) before it gives up."""

_POLL_S = 0.01
_T = TypeVar("_T")


def pick_device(config: WorldConfig, device: torch.device | str | None) -> torch.device:
    """The device asked for; else the GPU of this local rank; else the CPU.

    Raises:
        ConfigError: more workers than GPUs on this machine and no device named.
    """
    if device is not None:
        return _named_device(device)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if config.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"Local rank {config.local_rank} has no GPU: this machine has {torch.cuda.device_count()}. Start "
            f"at most {torch.cuda.device_count()} workers here, or give Varuna(..., device=...)."
        )
    return torch.device("cuda", config.local_rank)


def _named_device(device: torch.device | str) -> torch.device:
    try:
        named = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device={device!r} is no device. Give 'cpu', 'cuda' or 'cuda:1', or None.") from None
    if named.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r}; workers compute on 'cpu' or 'cuda' devices.")
    if named.type == "cuda" and (named.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device={device!r}, but this process sees {torch.cuda.device_count()} CUDA devices "
            f"(CUDA_VISIBLE_DEVICES, the driver and the torch build decide that)."
        )
    return named


def worker_memory_bytes(config: WorldConfig, device: torch.device) -> int:
    """Memory that one worker may use: its GPU's, or its share of what this machine has left."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return available_bytes(device, num_sharing=config.local_world_size)


_JOB_NUMBERS = itertools.count()
"""Jobs of this process, in the order in which they start: the same order on every worker."""


@functools.lru_cache(maxsize=1)
def _run_store(config: WorldConfig) -> Store:
    """The run's store; one connection for all jobs of this process, and one server where worker 0 serves it."""
    return connect(
        config.rank,
        config.world_size,
        config.master_addr,
        config.master_port,
        prefix=f"varuna/{config.run_id}/{config.restart_count}",
        timeout_s=60.0,
        is_served=config.store_is_hosted,
    )


def join_world(config: WorldConfig, device: torch.device) -> World:
    """Meet the other workers of the run, for the next job of this process.

    A worker that joins meets nobody yet: the others are at work. Its store comes with its place.

    Raises:
        PeerLost: the store or a worker was not reached in time.
    """
    number = next(_JOB_NUMBERS)
    store = HashStore() if config.joins else PrefixStore(f"job-{number}", _run_store(config))
    num_asked = 1 if config.joins else config.world_size
    address = choose_address(store, config.rank, num_asked, config.master_addr, config.master_port)
    return World(
        rank=config.rank,
        size=config.world_size,
        local_rank=config.local_rank,
        store=store,
        device=device,
        address=address,
    )


def wait_for(store: Store, key: str, what: str) -> bytes:
    """The value of a key that another worker will set; gives up as soon as any worker has told a failure.

    Raises:
        PeerLost: a worker failed, or the key did not come in ``START_TIMEOUT_S``.
    """
    give_up_at_s = time.monotonic() + START_TIMEOUT_S
    while not store.check([key]):
        failure = published_failure(store, 0, timeout_s=0.0)
        if failure is not None:
            raise PeerLost(f"Gave up waiting for {what}.")
        if time.monotonic() > give_up_at_s:
            raise PeerLost(f"Waited {START_TIMEOUT_S:.0f} s for {what}. Look at the other workers' logs.")
        time.sleep(_POLL_S)  # store.wait would log every time-out as a warning
    return bytes(store.get(key))


def agree_on_signature(world: World, read: Callable[[], InputSignature]) -> InputSignature:
    """Worker 0 reads the first samples; all others take the shapes from it and read nothing."""
    if world.size == 1:
        return read()
    if world.rank == 0:
        signature = read()
        world.store.set("signature", signature.to_json())
        return signature
    return InputSignature.from_json(wait_for(world.store, "signature", "worker 0 to read the dataset").decode())


def agree_on_plan(world: World, choose: Callable[[], PlanChoice]) -> PlanChoice:
    """Worker 0 decides (memory, say, may differ between machines); all others take its plan."""
    if world.size == 1:
        return choose()
    if world.rank == 0:
        choice = choose()
        world.store.set("plan", encode_choice(choice).decode())
        return choice
    return decode_choice(wait_for(world.store, "plan", "worker 0 to choose a plan"))


def leader_first(world: World, name: str, work: Callable[[], _T]) -> _T:
    """Do ``work`` on the first worker of each machine, then on its others, which find it in the cache."""
    if world.size == 1:
        return work()
    key = f"leader/{name}/{world.rank - world.local_rank}"
    if world.local_rank == 0:
        result = work()
        world.store.set(key, "done")
        return result
    wait_for(world.store, key, f"worker {world.rank - world.local_rank} to capture the model")
    return work()


def compare_settings(world: World, settings: Mapping[str, object]) -> None:
    """Raise ConfigError, naming both values, if a setting here is not worker 0's. Values are JSON's."""
    if world.size == 1:
        return
    if world.rank == 0:
        world.store.set("settings", json.dumps(settings))
        return
    for name, value in json.loads(wait_for(world.store, "settings", "worker 0 to start")).items():
        if settings[name] != value:
            raise ConfigError(
                f"Workers were given different settings: {name} is {settings[name]!r} on worker {world.rank} "
                f"and {value!r} on worker 0. Every worker must run the same script on the same data."
            )


def compare_versions(world: World) -> None:
    """Raise ConfigError, naming both, if torch or varuna here is not worker 0's."""
    if world.size == 1:
        return
    mine = replace(installed_versions(), torch=str(torch.__version__))
    if world.rank == 0:
        world.store.set("versions", json.dumps(asdict(mine)))
        return
    job = Versions(**json.loads(wait_for(world.store, "versions", "worker 0 to start")))
    if refusal := refusal_of_versions(mine, job):
        raise ConfigError(f"Worker {world.rank} on {socket.gethostname()} cannot take part: {refusal}")


def compare_partitions(world: World, partition: Partition) -> None:
    """Raise WeightsDiffer if this worker's model is cut unlike worker 0's (it was built differently)."""
    _compare(
        world, "partition", {"model": partition.digest}, "The models that workers built have different graphs"
    )


def compare_weights(world: World, partition: Partition, *, given: Collection[str] = ()) -> None:
    """Raise WeightsDiffer, naming sections, if this worker's initial weights are not worker 0's.

    Args:
        world: this worker.
        partition: the model.
        given: parameters whose values come from elsewhere, whatever they were built with.
    """
    if world.size == 1:
        return
    digests = {
        f"section {section.spec.index} ({section.spec.name})": digest_of(
            value for name, value in section.parameters.items() if name not in given
        )
        for section in partition.sections
    }
    _compare(world, "weights", digests, "Workers built different initial weights")


def _compare(world: World, key: str, mine: Mapping[str, str], what: str) -> None:
    if world.size == 1:
        return
    if world.rank == 0:
        world.store.set(key, json.dumps(mine))
        return
    theirs = json.loads(wait_for(world.store, key, "worker 0"))
    if theirs == mine:
        return
    names = [name for name in mine if mine[name] != theirs.get(name)]
    raise WeightsDiffer(
        f"{what}: worker {world.rank} differs from worker 0 in {', '.join(names[:4])}"
        f"{f' and {len(names) - 4} more' if len(names) > 4 else ''}. Seed the generators before you build the "
        f'model (torch.manual_seed(...)), or build it under torch.device("meta") and let Varuna initialise it.'
    )


def is_on_meta(model: nn.Module) -> bool:
    """Whether any parameter has no storage yet."""
    return any(parameter.device.type == "meta" for parameter in model.parameters())


def tokens_per_sample(signature: InputSignature) -> int | None:
    """Elements of the largest integer input of one sample that is a sequence, None if there is none."""
    counts = [
        int(torch.Size(spec.shape).numel())
        for spec in signature.tensors
        if spec.has_batch_dim and spec.shape and not spec.torch_dtype.is_floating_point
    ]
    return max(counts, default=None)
