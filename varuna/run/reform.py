"""From one generation to the next in the same process: groups anew, sections handed over, the rest given up.

Called by every member of the new generation at the same time, survivors and newcomers alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]

from varuna.generations import Formation, FormingTimes
from varuna.run.generation import Generation
from varuna.run.groups import Group, World
from varuna.run.handover import hand_over
from varuna.run.holders import section_parameters
from varuna.run.job import JobSpec
from varuna.run.parameters import ParameterHolding
from varuna.run.partitions import Partitions
from varuna.run.section_state import SectionStates

FORMING_TIMEOUT_S = 10.0
"""How long members that have all been seen may take to connect to one another."""


@dataclass(kw_only=True)
class Worker:
    """What outlives a generation on this worker.

    Attributes:
        model: the user's.
        holding: which of its parameters are here.
        partitions: its sections.
        job: data and arithmetic.
        world: this worker; rank and size are those of the last generation it tried to form.
        held_sections: sections whose state is here and up to date.
    """

    model: nn.Module
    holding: ParameterHolding
    partitions: Partitions
    job: JobSpec
    world: World
    held_sections: set[int] = field(default_factory=set)


class Carried(Protocol):
    """What a member carries from generation to generation besides its sections."""

    def tell(self) -> bytes:
        """Where the job stands, for newcomers."""

    def take(self, data: bytes) -> None:
        """Stand there; this member is a newcomer."""

    def greet(self) -> dict[str, Any]:
        """What this member says to all others when they meet; JSON."""

    def greeted(self, greetings: Sequence[Mapping[str, Any]], generation: Generation) -> None:
        """What all members said, in the order of their ranks."""

    def go_back(self, address: str, worker: Worker) -> bool:
        """Stand where the checkpoint at this address was written; False if it is to be decided anew where."""

    def restore(self, worker: Worker, section_indices: Iterable[int]) -> None:
        """Hold these sections as that checkpoint has them."""

    def start_over(self) -> None:
        """All members are newcomers: the script begins anew, from that checkpoint on."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the members of a generation have told one another.

    Attributes:
        job_state: for a newcomer: as the member that others follow has it; empty if all are newcomers.
        least_calls, most_calls: how many of the calls that no step depends on are over on the members.
    """

    job_state: bytes
    least_calls: int
    most_calls: int


def next_generation(
    worker: Worker, formation: Formation, store: Store, hang_up: Callable[[], None]
) -> Generation:
    """The next generation as a value: nothing is connected yet, nothing moved.

    Args:
        worker: this worker.
        formation: what it is like.
        store: in which its members meet.
        hang_up: ends every wait for it.
    """
    worker.world = replace(worker.world, rank=formation.rank, size=formation.size, store=store)
    return Generation(
        index=formation.generation,
        world=worker.world,
        plan=formation.plan,
        job=worker.job,
        partitions=worker.partitions,
        parameters={},
        forming_timeout_s=FORMING_TIMEOUT_S,
        hang_up=hang_up,
    )


def form(
    worker: Worker,
    generation: Generation,
    formation: Formation,
    carried: Carried,
    num_calls: int | None,
) -> Told:
    """Open a generation: meet, connect, hand sections over.

    Args:
        worker: this worker; the generation before, if it had one, is closed and its step undone or kept.
        generation: from ``next_generation``; another thread may ``abort`` it meanwhile.
        formation: what it is like.
        carried: what goes along.
        num_calls: how many calls that no step depends on are over here; None for a newcomer.

    Raises:
        PeerLost: a member is gone: this generation is over before it began, and is closed.
    """
    times_s = [time.monotonic()]
    try:
        worker.job.at("form")
        generation.calls.meet("the start of its generation")
        everyone = generation.groups.all
        greetings = everyone.all_gather_json({"calls": num_calls, **carried.greet()})
        job_state = _hand_state(everyone, formation, greetings, carried)
        carried.greeted(greetings, generation)
        times_s.append(time.monotonic())
        _move(worker, formation, everyone, carried)
        times_s.append(time.monotonic())
        generation.parameters = worker.holding.held
        generation.open(formation.next_step)
        times_s.append(time.monotonic())
    except BaseException as error:
        generation.abort(str(error))
        raise
    meet_s, transfer_s, open_s = (later - earlier for earlier, later in pairwise(times_s))
    generation.forming_times = FormingTimes(meet_s=meet_s, transfer_s=transfer_s, open_s=open_s)
    counts = [one["calls"] for one in greetings if one["calls"] is not None]
    return Told(job_state=job_state, least_calls=min(counts, default=0), most_calls=max(counts, default=0))


def _hand_state(
    everyone: Group, formation: Formation, greetings: Sequence[Mapping[str, Any]], carried: Carried
) -> bytes:
    """The job's state, from the member that others follow to newcomers; nothing if that is one itself."""
    newcomers = [rank for rank, greeting in enumerate(greetings) if greeting["calls"] is None]
    if formation.state_rank in newcomers:
        return b""
    if formation.rank in newcomers:
        return everyone.receive_bytes(formation.state_rank)
    if formation.rank == formation.state_rank and newcomers:
        job_state = carried.tell()
        for rank in newcomers:
            everyone.send_bytes(job_state, rank)
    return b""


def _move(worker: Worker, formation: Formation, everyone: Group, carried: Carried) -> None:
    """Sections to their new holders; afterwards exactly those of the new stage are here.

    Nothing is given up before all members have what they need: if one is lost meanwhile, another's old copy may
    be the last.
    """
    stage = formation.plan.stage_of(formation.rank)
    wanted = set() if stage is None else set(range(stage.first_section, stage.end_section))
    if formation.checkpoint:
        carried.restore(worker, sorted(wanted))
    states = SectionStates(worker.model, worker.holding, worker.partitions, worker.world.device)
    hand_over(
        everyone,
        formation.transfers,
        states,
        rank=formation.rank,
        before=lambda: worker.job.at("transfer"),
        arrived=worker.held_sections.add,
    )
    everyone.barrier()
    _keep_only(worker, wanted)
    assert worker.held_sections == wanted, f"lacks sections {sorted(wanted - worker.held_sections)}"


def _keep_only(worker: Worker, section_indices: set[int]) -> None:
    """Give up what no section of these needs."""
    worker.held_sections &= section_indices
    names = {name for index in worker.held_sections for name in section_parameters(worker.partitions, index)}
    worker.holding.keep_only(names)
