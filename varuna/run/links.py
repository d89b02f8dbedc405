"""Measures the network between workers at the start of a job: messages, and sums over several workers.

One pair of workers on one machine and one pair on two are measured, each with the channels that stages use
(``channel.py``). Clocks of two machines differ; what is assumed is that the quickest message took as long in
one direction as in the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from varuna.errors import PeerLost
from varuna.plan.profile import AllReducePoint, LinkProfile
from varuna.run.channel import StageChannels, open_channels
from varuna.run.connect import ConnectOptions, StageAddress
from varuna.run.groups import Group, Groups, World
from varuna.run.wire import Direction, Message, MessageHeader

GENERATION = -1
"""Measuring comes before the first generation; its keys and connections are its own."""

ASSUMED_LINK = LinkProfile(latency_s=2e-4, bytes_per_s=1e9)
"""A link nobody could measure, since one worker was alone: two processes of one machine, roughly."""

_WARM_UP = 3
_NUM_PINGS = 40
_PINGS_S = 0.4
_PAUSE_S = 0.002  # between messages, as in a run: after a wait everything is slower than in a loop
_NUM_QUANTILES = 11
_FIRST_BYTES, _LAST_BYTES = 1 << 18, 1 << 24
_LONG_S = 0.03  # a transfer that takes so long tells the bandwidth well enough
_NUM_REPEATS = 3
_REDUCED_BYTES = (4 << 10, 256 << 10, 4 << 20)
_LONG_REDUCE_S = 0.1


@dataclass(frozen=True, kw_only=True)
class LinkMeasures:
    """What this worker measured of the network; None and empty where it took no part or another tells.

    Attributes:
        within_machine, across_machines: of the pair that this worker leads.
        all_reduce: of groups that this worker leads.
    """

    within_machine: LinkProfile | None = None
    across_machines: LinkProfile | None = None
    all_reduce: tuple[AllReducePoint, ...] = ()


def measure_links(world: World, machines: Sequence[int], token: bytes, most_bytes: int) -> LinkMeasures:
    """Measure with the other workers; all of them call it.

    Args:
        world: this worker.
        machines: per rank, a number of its machine.
        token: the job's, for connections.
        most_bytes: larger all-reduces than this do not happen in the job.

    Raises:
        PeerLost: a worker is gone.
    """
    if world.size == 1:
        return LinkMeasures()
    within, across = _pair(machines, same=True), _pair(machines, same=False)
    links: dict[str, LinkProfile | None] = {}
    for index, (name, pair) in enumerate((("within_machine", within), ("across_machines", across))):
        if pair is not None and world.rank in pair:
            links[name] = _measure_pair(world, pair, token, GENERATION - index)
    groups = Groups(world, GENERATION)
    try:
        members = [pair for pair in (within, across, tuple(range(world.size))) if pair is not None]
        groups.prepare(members)
        points = [
            point
            for ranks in dict.fromkeys(members)
            if world.rank in ranks
            for point in _all_reduces(groups.of(ranks), world.rank, machines, most_bytes)
        ]
        groups.all.barrier()  # nobody closes while another is still at work
    finally:
        groups.close()
    return LinkMeasures(
        within_machine=links.get("within_machine"),
        across_machines=links.get("across_machines"),
        all_reduce=tuple(points),
    )


def _pair(machines: Sequence[int], *, same: bool) -> tuple[int, int] | None:
    """The first two workers that are on one machine, or on two."""
    for first, machine in enumerate(machines):
        for second in range(first + 1, len(machines)):
            if (machines[second] == machine) == same:
                return first, second
    return None


# --- messages -------------------------------------------------------------------------------


def _measure_pair(world: World, pair: tuple[int, int], token: bytes, generation: int) -> LinkProfile | None:
    """The first of the pair asks and gets the answer; the second replies."""
    leads = world.rank == pair[0]
    place = StageAddress(
        rank=world.rank,
        stage_index=0 if leads else 1,
        previous_rank=None if leads else pair[0],
        next_rank=pair[1] if leads else None,
    )
    options = ConnectOptions(generation=generation, token=token, host=world.address)
    channels = open_channels(world.store, place, options, pin_memory=world.device.type == "cuda")
    try:
        line = _Line(channels, generation, leads)
        if leads:
            return _lead(line)
        _reply(line)
    finally:
        channels.close()
    return None


class _Line:
    """One end of the pair's channels: numbered messages out and in."""

    def __init__(self, channels: StageChannels, generation: int, leads: bool) -> None:
        self._channels = channels
        self._generation = generation
        self._sends = Direction.ACTIVATION if leads else Direction.GRADIENT
        self._receives = Direction.GRADIENT if leads else Direction.ACTIVATION
        self._count = 0

    def send(self, numbers: Sequence[float], load: torch.Tensor | None = None) -> float:
        """Send numbers, with the time of sending before them, and a load; how long that kept the caller."""
        self._count += 1
        header = MessageHeader(
            generation=self._generation,
            step_index=0,
            micro_batch_index=self._count,
            operation="measure",
            direction=self._sends,
        )
        now_s = time.monotonic()
        values = torch.tensor([now_s, *numbers], dtype=torch.float64)
        self._channels.send(header, Message(values=(values, load)))
        return time.monotonic() - now_s

    def receive(self) -> tuple[list[float], float]:
        """The numbers of the next message, and the time of its arrival here."""
        mailbox = self._channels.mailbox
        while True:
            version = mailbox.version
            if mailbox.failure is not None:
                raise PeerLost(f"While links were measured: {mailbox.failure}") from mailbox.failure
            if mailbox.num_unread(self._receives):
                values = mailbox.take(self._receives).message.values[0]
                assert values is not None
                return values.tolist(), time.monotonic()
            if mailbox.has_ended(self._receives):
                raise PeerLost(f"{self._channels.peer_of(self._receives)} left while links were measured.")
            mailbox.wait_past(version)


def _reply(line: _Line) -> None:
    """Answer every message with how late it came, until one says that it is the last."""
    while True:
        (sent_s, is_last), arrived_s = line.receive()
        if is_last:
            return
        line.send([arrived_s - sent_s])


def _lead(line: _Line) -> LinkProfile:
    there: list[float] = []
    back: list[float] = []
    keeping: list[float] = []
    give_up_at_s = time.monotonic() + _PINGS_S
    while len(there) < _NUM_PINGS and (len(there) <= _WARM_UP or time.monotonic() < give_up_at_s):
        time.sleep(_PAUSE_S)
        keeping.append(line.send([0.0]))
        (sent_s, late_s), arrived_s = line.receive()
        there.append(late_s)
        back.append(arrived_s - sent_s)
    there, back, keeping = there[_WARM_UP:], back[_WARM_UP:], keeping[_WARM_UP:]
    ahead_s = (min(there) - min(back)) / 2  # of the other clock
    latency_s = max((min(there) + min(back)) / 2, 1e-6)
    late = [late_s - min(there) for late_s in there] + [late_s - min(back) for late_s in back]
    bytes_per_s = _bandwidth(line, ahead_s, latency_s)
    line.send([1.0])
    return LinkProfile(
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        jitter_s=_quantiles(late),
        send_s=statistics.median(keeping),
    )


def _bandwidth(line: _Line, ahead_s: float, latency_s: float) -> float:
    """Of loads that grow until one takes long."""
    num_bytes, taken_s = _FIRST_BYTES, 0.0
    while True:
        load = torch.zeros(num_bytes, dtype=torch.uint8)
        seconds = []
        for _ in range(_NUM_REPEATS):
            line.send([0.0], load)
            (_, late_s), _ = line.receive()
            seconds.append(late_s - ahead_s - latency_s)
        taken_s = max(statistics.median(seconds), 1e-6)
        if taken_s >= _LONG_S or num_bytes >= _LAST_BYTES:
            return num_bytes / taken_s
        num_bytes *= 4


def _quantiles(late_s: Sequence[float]) -> tuple[float, ...]:
    """Evenly spaced ones from the least to the most."""
    ordered = sorted(late_s)
    last = len(ordered) - 1
    return tuple(ordered[round(last * index / (_NUM_QUANTILES - 1))] for index in range(_NUM_QUANTILES))


# --- all-reduce -----------------------------------------------------------------------------


def _all_reduces(group: Group, rank: int, machines: Sequence[int], most_bytes: int) -> list[AllReducePoint]:
    """Points of one group, on its first member; the others get nothing."""
    points = []
    for num_bytes in _REDUCED_BYTES:
        seconds = _all_reduce_s(group, group.place(torch.zeros(num_bytes // 4)))
        shared = group.place(torch.tensor([seconds], dtype=torch.float64))
        group.all_reduce_sum(shared)  # so that all stop at the same size
        seconds = float(shared.item()) / group.size
        points.append(
            AllReducePoint(
                num_workers=group.size,
                num_bytes=num_bytes,
                across_machines=len({machines[member] for member in group.ranks}) > 1,
                seconds=seconds,
            )
        )
        if num_bytes >= most_bytes or seconds > _LONG_REDUCE_S:
            break
    return points if rank == group.ranks[0] else []


def _all_reduce_s(group: Group, tensor: torch.Tensor) -> float:
    """As a bucket of gradients is reduced (``reduce.py``): in fresh memory, filled before."""
    seconds = []
    for _ in range(1 + _NUM_REPEATS):
        started_s = time.monotonic()
        group.all_reduce_sum(tensor.clone())
        if tensor.device.type == "cuda":
            torch.cuda.synchronize(tensor.device)
        seconds.append(time.monotonic() - started_s)
    return statistics.median(seconds[1:])
