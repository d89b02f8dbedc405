"""What was measured (or estimated) about a model and its machines: all that planning needs to know.

Values only. ``varuna.run.measure`` makes them by measuring, ``varuna.plan.estimate`` from architecture and
data sheets; ``varuna.plan.costs`` reads numbers out of them, interpolating between what was measured;
``profile_file`` writes and reads them. Seconds are those of one device at work on one micro-batch; bytes are of
one device.
"""

from __future__ import annotations

from dataclasses import dataclass

PROFILE_VERSION = 1
"""Version of the file format; a file of another version is refused."""


@dataclass(frozen=True, kw_only=True)
class TaskCosts:
    """What one section costs at one micro-batch size.

    Attributes:
        micro_batch_size: m, in samples.
        forward_s: forward that keeps what backward needs.
        recompute_s: forward done again before backward, random numbers set up anew.
        backward_s: the whole backward: input gradients and weight gradients.
        weight_s: the part of ``backward_s`` that a split backward can put off; 0 if it cannot be split.
        split_s: by how much longer a split backward takes in all; spent in its first part.
        activation_bytes: kept from forward (or recompute) to the end of backward, without the section's input.
        weight_bytes: kept from the input-gradient part to the weight-gradient part of a split backward.
        workspace_bytes: needed during a task on top of all that is kept.
        output_bytes: what crosses the cut after it, forward; 0 after the last section.
        gradient_bytes: what crosses the same cut backward.
    """

    micro_batch_size: int
    forward_s: float
    recompute_s: float
    backward_s: float
    weight_s: float = 0.0
    split_s: float = 0.0
    activation_bytes: int = 0
    weight_bytes: int = 0
    workspace_bytes: int = 0
    output_bytes: int = 0
    gradient_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class SectionProfile:
    """One section.

    Attributes:
        index, name: as in ``SectionSpec``.
        parameter_bytes: of all it uses, tied ones included (see ``Profile.ties``).
        gradient_bytes: of the gradients of those that require one.
        optimizer_bytes: of the optimizer's state for them.
        update_s: seconds that the optimizer needs for them.
        costs: per measured micro-batch size, ascending, at least one.
    """

    index: int
    name: str
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    update_s: float
    costs: tuple[TaskCosts, ...]


@dataclass(frozen=True, kw_only=True)
class Tie:
    """A parameter that several sections use: held once per worker, summed over all workers that hold it."""

    name: str
    num_bytes: int
    section_indices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LinkProfile:
    """A message between two workers takes ``latency_s + bytes / bytes_per_s + jitter``.

    Attributes:
        latency_s: of an empty message, one way: the least that was seen.
        bytes_per_s: of one stream alone.
        jitter_s: extra delay of a message: its quantiles, evenly spaced from least to most; empty means none.
        shared_bytes_per_s: what all streams of one machine have together; 0 means they do not share.
        send_s: for how long sending keeps the sender from computing, per message.
    """

    latency_s: float
    bytes_per_s: float
    jitter_s: tuple[float, ...] = ()
    shared_bytes_per_s: float = 0.0
    send_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class AllReducePoint:
    """Seconds of one measured all-reduce.

    Attributes:
        num_workers: taking part.
        num_bytes: reduced.
        across_machines: whether they were on more than one machine.
        seconds: median.
    """

    num_workers: int
    num_bytes: int
    across_machines: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model on one kind of device.

    Attributes:
        version: ``PROFILE_VERSION``.
        model: name for people.
        key: hash of what the numbers depend on: model code, shapes, precision, device type, torch version.
        device: e.g. ``cpu`` or ``NVIDIA H200``.
        precision: ``fp32``, ``bf16``, ``fp16``, ``fp64``.
        torch_version: empty if estimated.
        estimated: computed from architecture and data sheets, nothing was measured.
        notes: for people: sources, formulas, conditions.
        device_memory_bytes: of one device, as a plan may use it.
        runtime_bytes: taken on a device before any parameter: process, libraries, communication buffers.
        sections: in order.
        ties: parameters shared between sections.
        within_machine, across_machines: links between two workers on one machine, on two.
        all_reduce: measured points; where none fits, the links' numbers are used.
        reduces_beside: whether gradients are summed while tasks run, at no cost to them; processors without a
            core to spare do one after the other.
        compute_jitter: how long the same computing takes at one time and at another, as multiples of its mean:
            quantiles, evenly spaced; empty: always as long. Each device has its own times.
        compute_jitter_s: for how long it stays as it is: after so many seconds its correlation is 1/e.
        task_overhead_s: seconds that the engine adds to each task.
        step_overhead_s: seconds per step besides tasks, reduction and update: commit, report.
        num_refinements: steps whose measurements went into these numbers after the first profile.
    """

    version: int = PROFILE_VERSION
    model: str
    key: str
    device: str
    precision: str
    torch_version: str = ""
    estimated: bool = False
    notes: tuple[str, ...] = ()
    device_memory_bytes: int
    runtime_bytes: int = 0
    sections: tuple[SectionProfile, ...]
    ties: tuple[Tie, ...] = ()
    within_machine: LinkProfile
    across_machines: LinkProfile
    all_reduce: tuple[AllReducePoint, ...] = ()
    reduces_beside: bool = True
    compute_jitter: tuple[float, ...] = ()
    compute_jitter_s: float = 0.0
    task_overhead_s: float = 0.0
    step_overhead_s: float = 0.0
    num_refinements: int = 0

    @property
    def has_jitter(self) -> bool:
        """Whether steps differ, so that a prediction is a mean over several."""
        links = (self.within_machine, self.across_machines)
        return bool(self.compute_jitter) or any(link.jitter_s for link in links)
