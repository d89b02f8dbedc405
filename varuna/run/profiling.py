"""The profile of a job: from the cache of an earlier start, or measured now by all workers together.

Worker 0 reads the cache, says what is to be done, joins what the workers measured, and hands the same profile
to all. Everything travels through the store, where nobody waits for a worker that has failed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from varuna.config import WorldConfig
from varuna.errors import ConfigError
from varuna.partition import example_batch, flatten_batch
from varuna.partition.key import capture_key
from varuna.partition.materialise import InitWeights, return_memory
from varuna.partition.program import GraphProgram
from varuna.plan.cluster import Cluster, Machine
from varuna.plan.profile import PROFILE_VERSION, Profile, SectionProfile
from varuna.plan.profile_file import decode_profile, encode_profile, read_profile, write_profile
from varuna.run.fingerprint import kinds_of, shapes_digest
from varuna.run.job import JobSpec
from varuna.run.join_profile import JoinedLinks, join_costs, ties_of
from varuna.run.links import LinkMeasures, measure_links
from varuna.run.measure import AGAIN, MEASURED_AS, KindCosts, MeasureRequest, measure_sections
from varuna.run.measure_jitter import joined
from varuna.run.measure_update import UpdateMeasure, gradient_bytes, options_text
from varuna.run.memory import resident_bytes
from varuna.run.overhead import task_overhead_s
from varuna.run.partitions import Partitions
from varuna.run.precision import Precision
from varuna.run.startup import wait_for, worker_memory_bytes
from varuna.run.world import World

_MOST_EXAMPLE_BYTES = 8 << 20
"""A larger example batch stays on worker 0; the others measure with zeros."""


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """What is profiled, and how.

    Attributes:
        model, optimizer, precision, job, init_weights: the user's.
        config, world: this worker.
        partitions: the model's sections.
        example: tensors of a few samples by key; None but on worker 0.
        directory: where profiles are kept; None keeps none.
        micro_batch_sizes: those to measure; empty: chosen.
        is_fresh: measure even if there is one in the cache.
    """

    model: nn.Module
    optimizer: Optimizer
    precision: Precision
    job: JobSpec
    init_weights: InitWeights | None
    config: WorldConfig
    world: World
    partitions: Partitions
    example: Mapping[str, Tensor] | None
    directory: Path | None
    micro_batch_sizes: tuple[int, ...] = ()
    is_fresh: bool = False


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """What planning is given.

    Attributes:
        profile: equal on all workers.
        cluster: the machines of this job, with the memory they have now.
        from_cache: nothing was measured in this start.
        duration_s: of measuring.
        path: on worker 0, where it is kept; None if it cannot be.
    """

    profile: Profile
    cluster: Cluster
    from_cache: bool
    duration_s: float
    path: Path | None


@dataclass(frozen=True, kw_only=True)
class _Place:
    """One worker: number of its machine; memory it may use in all, and uses besides weights now."""

    machine: int
    memory_bytes: int
    runtime_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Order:
    """What worker 0 tells the others to do."""

    places: tuple[_Place, ...]
    is_cached: bool
    has_example: bool


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What one worker measured; ``runtime_bytes`` as in ``Profile``, all libraries loaded."""

    kinds: list[KindCosts]
    links: LinkMeasures
    runtime_bytes: int


def obtain_profile(request: ProfileRequest) -> Profiled:
    """The job's profile. Every worker calls it, after capture and before parameters are given up.

    Raises:
        WorkerFailed: the model raised while it was measured.
        PeerLost: another worker gave up.
    """
    started_s = time.monotonic()
    profile: Profile | None = None
    path: Path | None = None
    place = _place(request)
    if request.world.rank == 0:
        places = (place, *_places_of_others(request.world))
        path = _path(request, places)
        profile = None if request.is_fresh or path is None else _cached(path, request)
        order = _give_order(request, places, profile)
    else:
        order = _take_order(request.world, place)
    if not order.is_cached:
        part = _measure(request, order)
        if request.world.rank == 0:
            profile = _join(request, order, [part, *_parts_of_others(request.world)], path)
            if path is not None:
                with contextlib.suppress(ConfigError):  # nowhere to keep it: measured again next time
                    write_profile(profile, path)
        else:
            _set(request.world, f"part/{request.world.rank}", msgspec.json.encode(part))
    shared = _share(request.world, profile)
    runtime_bytes = max(shared.runtime_bytes, *(found.runtime_bytes for found in order.places))
    return Profiled(
        profile=replace(shared, device_memory_bytes=order.places[0].memory_bytes, runtime_bytes=runtime_bytes),
        cluster=_cluster(order.places),
        from_cache=order.is_cached,
        duration_s=time.monotonic() - started_s,
        path=path,
    )


# --- between workers ------------------------------------------------------------------------


def _places_of_others(world: World) -> list[_Place]:
    waits = [
        wait_for(world.store, f"profile/place/{rank}", f"worker {rank} to capture the model")
        for rank in range(1, world.size)
    ]
    return [msgspec.json.decode(data, type=_Place) for data in waits]


def _parts_of_others(world: World) -> list[_Part]:
    waits = [
        wait_for(world.store, f"profile/part/{rank}", f"worker {rank} to measure the model")
        for rank in range(1, world.size)
    ]
    return [msgspec.json.decode(data, type=_Part) for data in waits]


def _give_order(request: ProfileRequest, places: tuple[_Place, ...], cached: Profile | None) -> _Order:
    has_example = cached is None and _publish_example(request)
    order = _Order(places=places, is_cached=cached is not None, has_example=has_example)
    if request.world.size > 1:
        _set(request.world, "order", msgspec.json.encode(order))
    return order


def _take_order(world: World, place: _Place) -> _Order:
    _set(world, f"place/{world.rank}", msgspec.json.encode(place))
    data = wait_for(world.store, "profile/order", "worker 0 to look for a profile")
    return msgspec.json.decode(data, type=_Order)


def _publish_example(request: ProfileRequest) -> bool:
    example = request.example
    if request.world.size == 1 or example is None:
        return False
    if sum(tensor.nbytes for tensor in example.values()) > _MOST_EXAMPLE_BYTES:
        return False
    dense = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in example.items()}
    _set(request.world, "example", safetensors.torch.save(dense).hex().encode())
    return True


def _example(request: ProfileRequest, order: _Order) -> Mapping[str, Tensor]:
    """Worker 0's, or zeros where it did not send it."""
    if request.example is not None:
        return request.example
    if order.has_example:
        data = wait_for(request.world.store, "profile/example", "worker 0 to read the dataset")
        return safetensors.torch.load(bytes.fromhex(data.decode()))
    return flatten_batch(example_batch(request.partitions.signature, 1, "cpu")).tensors


def _share(world: World, profile: Profile | None) -> Profile:
    """Worker 0's profile, on every worker."""
    if world.rank != 0:
        return decode_profile(wait_for(world.store, "profile/result", "worker 0 to join the measurements"))
    assert profile is not None
    if world.size > 1:
        _set(world, "result", encode_profile(profile))
    return profile


def _set(world: World, name: str, data: bytes) -> None:
    world.store.set(f"profile/{name}", data.decode())


# --- the cache ------------------------------------------------------------------------------


def _path(request: ProfileRequest, places: Sequence[_Place]) -> Path | None:
    key = None if request.directory is None else _key(request, places)
    return None if request.directory is None or key is None else request.directory / f"{key}.json"


def _key(request: ProfileRequest, places: Sequence[_Place]) -> str | None:
    """Hash of everything that the numbers depend on; None if the model's code cannot be described.

    A graph says all about its code. Modules that run as they are do not: for them it is the capture's own key.
    """
    reference, device = request.partitions.reference, request.world.device
    code: str | None = ""
    if not all(_is_plain_graph(section.program) for section in reference.sections):
        code = capture_key(request.model, reference.signature, True, request.job.autocast)
    if code is None:
        return None
    described = [
        PROFILE_VERSION,
        MEASURED_AS,
        shapes_digest(reference),
        code,
        request.precision.value,
        device_name(device),
        str(torch.__version__),
        torch.get_num_threads() if device.type == "cpu" else 0,
        options_text(request.optimizer),
        min(len({place.machine for place in places}), 2),  # which links there are
        min(request.world.size, 2),
        request.micro_batch_sizes,
    ]
    return hashlib.sha256(repr(described).encode()).hexdigest()


def _is_plain_graph(program: object) -> bool:
    return isinstance(program, GraphProgram) and not program.leaves


def _cached(path: Path, request: ProfileRequest) -> Profile | None:
    """An earlier profile; one that cannot be read is measured again."""
    if not path.exists():
        return None
    try:
        profile = read_profile(path)
    except ConfigError:
        return None
    return profile if len(profile.sections) == len(request.partitions.reference.sections) else None


def device_name(device: torch.device) -> str:
    """``cpu``, or what the GPU is called."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


# --- measuring ------------------------------------------------------------------------------


def _place(request: ProfileRequest) -> _Place:
    """Memory: what is free, and what this process holds already and would use for the same things."""
    world = request.world
    runtime_bytes = _runtime_bytes(request)
    free = worker_memory_bytes(request.config, world.device)
    resident = 0 if world.device.type == "cuda" else resident_bytes()
    return _Place(
        machine=world.rank - world.local_rank, memory_bytes=free + resident, runtime_bytes=runtime_bytes
    )


def _runtime_bytes(request: ProfileRequest) -> int:
    """What this process takes besides parameters; of a GPU nothing that PyTorch would count."""
    if request.world.device.type == "cuda":
        return 0
    return_memory()
    held = sum(parameter.nbytes for parameter in request.model.parameters() if not parameter.is_meta)
    return max(0, resident_bytes() - held)


def _measure(request: ProfileRequest, order: _Order) -> _Part:
    world = request.world
    place = order.places[world.rank]
    kinds = measure_sections(
        MeasureRequest(
            model=request.model,
            partitions=request.partitions,
            autocast=request.job.autocast,
            seed=request.job.seed,
            device=world.device,
            init_weights=request.init_weights,
            example=_example(request, order),
            batch_size=request.job.batch_size,
            micro_batch_sizes=request.micro_batch_sizes,
            memory_bytes=place.memory_bytes - place.runtime_bytes,
            share_index=world.rank,
            num_shares=world.size,
            again=AGAIN if request.is_fresh else 0.0,
        )
    )
    machines = [found.machine for found in order.places]
    most_bytes = sum(gradient_bytes(section) for section in request.partitions.reference.sections)
    links = measure_links(world, machines, request.job.token, most_bytes)
    return _Part(kinds=kinds, links=links, runtime_bytes=_runtime_bytes(request))


def _join(request: ProfileRequest, order: _Order, parts: Sequence[_Part], path: Path | None) -> Profile:
    """The profile from all workers' parts, on worker 0."""
    reference, world = request.partitions.reference, request.world
    update = UpdateMeasure(request.optimizer, world.device)
    found = [kind for part in parts for kind in part.kinds]
    costs, jitter = join_costs(found), joined([kind.jitter for kind in found])
    sections = []
    for section, kind in zip(reference.sections, kinds_of(reference), strict=True):
        update_s, optimizer_bytes = update.section(section)
        sections.append(
            SectionProfile(
                index=section.spec.index,
                name=section.spec.name,
                parameter_bytes=section.spec.parameter_bytes,
                gradient_bytes=gradient_bytes(section),
                optimizer_bytes=optimizer_bytes,
                update_s=update_s,
                costs=costs[kind],
            )
        )
    links = JoinedLinks.of([part.links for part in parts], world.size)
    commits = [point.seconds for point in links.all_reduce if point.num_workers == world.size]
    return Profile(
        model=type(request.model).__name__,
        key="" if path is None else path.stem,
        device=device_name(world.device),
        precision=request.precision.value,
        torch_version=str(torch.__version__),
        notes=(*links.notes, *update.notes),
        device_memory_bytes=order.places[0].memory_bytes,
        runtime_bytes=max(part.runtime_bytes for part in parts),
        sections=tuple(sections),
        ties=ties_of(reference),
        within_machine=links.within,
        across_machines=links.across,
        all_reduce=links.all_reduce,
        reduces_beside=world.device.type != "cpu" or _has_spare_cores(order.places),
        compute_jitter=jitter.quantiles,
        compute_jitter_s=jitter.lasts_s,
        task_overhead_s=task_overhead_s(),
        step_overhead_s=min(commits, default=0.0),
    )


def _has_spare_cores(places: Sequence[_Place]) -> bool:
    """Whether this machine has, for each of its workers, a core besides those that compute."""
    num_here = max(Counter(place.machine for place in places).values())
    return len(os.sched_getaffinity(0)) >= num_here * (torch.get_num_threads() + 1)


def _cluster(places: Sequence[_Place]) -> Cluster:
    """Machines in the order of their workers' ranks."""
    machines: dict[int, list[_Place]] = {}
    for place in places:
        machines.setdefault(place.machine, []).append(place)
    return Cluster(
        machines=tuple(
            Machine(
                name=f"machine-{index}",
                num_workers=len(members),
                memory_bytes=min(member.memory_bytes for member in members),
            )
            for index, members in enumerate(machines.values())
        )
    )
