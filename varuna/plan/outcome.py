"""The simulated step of a layout, fast: one pipeline of each kind, and long steps from their steady state.

The same numbers go into the same event loop as in ``predict``, which takes whole plans, and every stage's
memory is counted the same way. What is left out here: that pipelines of one kind may cross machines at
different boundaries, that the last micro-batch of several pipelines may be short, and the order of reductions
among several groups.
The step is that of the slowest kind.

A long step is not simulated to its end: once every stage has been busy for a while, each further micro-batch
takes as long as the ones before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from varuna.plan.decide import BACKWARD, FORWARD, RECOMPUTE, WEIGHT
from varuna.plan.kernel import NUM_KINDS
from varuna.plan.lay import KindPlan, Laid
from varuna.plan.pipeline import NO_DELAYS, PipelineArrays, PipelineRun, draw_delays, rules_of, run_pipeline
from varuna.plan.schedule import stage_schedule
from varuna.plan.setting import Setting
from varuna.plan.sharing import slowdowns
from varuna.plan.tables import Floats, RunTable

STEADY_AFTER, STEADY_BESIDES = 2, 12
"""Micro-batches per stage, and some more, after which a pipeline is in its steady state."""

NUM_SEEDS = 2
"""Steps with drawn delays that are simulated where links have jitter."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Outcome:
    """What a simulated step came to.

    Attributes:
        laid: what was simulated.
        step_s: of the whole step.
        bubble: share of the used workers' step in which no task runs.
        memory_bytes: of the fullest device.
        spill_bytes: how far the fullest device is over its memory; not above 0 if all fit.
        num_tasks: simulated, as a measure of effort.
    """

    laid: Laid
    step_s: float
    bubble: float
    memory_bytes: int
    spill_bytes: float
    num_tasks: int


@dataclass(frozen=True, eq=False, kw_only=True)
class _Step:
    """Of one kind: when each stage ends ``[P]``, its busy seconds ``[P]``, bytes ``[P]``, tasks simulated."""

    end_s: Floats
    busy_s: Floats
    memory_bytes: Floats
    num_tasks: int


def simulate(setting: Setting, laid: Laid, *, whole: bool = False, free_communication: bool = False) -> Outcome:
    """Run the step of every kind.

    Args:
        setting: what it is for.
        laid: what to run.
        whole: simulate long steps to their end.
        free_communication: as if messages and reductions took no time.
    """
    step_s, busy_s, used, memory, spill, tasks = 0.0, 0.0, 0, 0.0, -np.inf, 0
    for plan in laid.kinds:
        step = _step(setting, laid, plan, whole=whole, free_communication=free_communication)
        done_s = step.end_s
        if not free_communication:
            edges = np.array(plan.borders.borders)
            point = laid.point
            late_s = setting.late_s(laid.placement, plan.kind, point.micro_batch_size, split=point.split)
            late_s = (late_s - setting.residents.update_s)[
                edges[:-1], edges[1:]
            ]  # updates come first, next step
            done_s = done_s + late_s
        step_s = max(step_s, float(done_s.max()) + setting.profile.step_overhead_s)
        busy_s += plan.kind.count * float(step.busy_s.sum())
        used += plan.kind.count * plan.kind.num_stages
        memory = max(memory, float(step.memory_bytes.max()))
        spill = max(spill, float((step.memory_bytes - plan.kind.memory_bytes).max()))
        tasks += step.num_tasks
    return Outcome(
        laid=laid,
        step_s=step_s,
        bubble=max(0.0, 1 - busy_s / used / step_s) if step_s > 0 else 0.0,
        memory_bytes=int(memory),
        spill_bytes=spill,
        num_tasks=tasks,
    )


def _step(setting: Setting, laid: Laid, plan: KindPlan, *, whole: bool, free_communication: bool) -> _Step:
    num_stages, num = plan.kind.num_stages, plan.num_micro_batches
    first = STEADY_AFTER * num_stages + STEADY_BESIDES
    second = first + num_stages + STEADY_BESIDES
    arrays = arrays_of(setting, laid, plan)
    if free_communication:
        free = {name: 0 * getattr(arrays, name) for name in ("transmit_s", "latency_s", "send_s")}
        arrays = replace(arrays, **free)
    quantiles = () if free_communication else setting.ways(plan.kind).quantiles
    if (
        whole or num <= 2 * second or laid.schedule == "gpipe"
    ):  # which has all N in flight: every N is another matter
        return _run(setting, laid, plan, arrays, quantiles)
    low, high = (
        _run(setting, laid, plan, replace(arrays, num_micro_batches=count), quantiles)
        for count in (first, second)
    )
    more = (num - second) / (second - first)
    return _Step(
        end_s=high.end_s + more * float((high.end_s - low.end_s).max()),
        busy_s=high.busy_s + more * (high.busy_s - low.busy_s),
        memory_bytes=np.maximum(low.memory_bytes, high.memory_bytes),
        num_tasks=low.num_tasks + high.num_tasks,
    )


def _run(
    setting: Setting,
    laid: Laid,
    plan: KindPlan,
    arrays: PipelineArrays,
    quantiles: Sequence[Sequence[float]],
) -> _Step:
    """One step, or with jitter the mean of several."""
    num, drawn = arrays.num_micro_batches, [arrays]
    if any(quantiles):
        drawn = [replace(arrays, delays_s=draw_delays(quantiles, num, seed)) for seed in range(NUM_SEEDS)]
    runs = [run_pipeline(each) for each in drawn]
    return _Step(
        end_s=np.mean([run.end_s for run in runs], axis=0) if len(runs) > 1 else runs[0].end_s,
        busy_s=runs[0].busy_s,
        memory_bytes=np.max([_memory_bytes(setting, laid, plan, run) for run in runs], axis=0),
        num_tasks=len(runs) * num * int((2 + arrays.rules[:, 4] + arrays.rules[:, 5]).sum()),
    )


def arrays_of(setting: Setting, laid: Laid, plan: KindPlan) -> PipelineArrays:
    """A pipeline of one kind as the event loop takes it."""
    size = laid.point.micro_batch_size
    runs = setting.sections.runs(size, split=laid.point.split)
    edges = np.array(plan.borders.borders)
    first, end = edges[:-1], edges[1:]
    num_stages = plan.kind.num_stages
    schedules = [
        stage_schedule(
            laid.schedule,
            num_stages=num_stages,
            stage_index=stage,
            num_micro_batches=plan.num_micro_batches,
            recompute=plan.borders.recompute,
            max_in_flight=plan.borders.max_in_flight[stage],
        )
        for stage in range(num_stages)
    ]

    last_runs = runs
    if laid.point.num_pipelines == 1:  # the only pipeline has the short micro-batch
        last_runs = setting.sections.runs(
            setting.wish.batch_size - (setting.num_micro_batches(size) - 1) * size, split=laid.point.split
        )
    durations_s = np.stack([_durations_s(setting, laid, plan, each) for each in (runs, last_runs)], axis=1)
    ways = setting.ways(plan.kind)
    alone_s, last_s = (
        np.stack([each.forward_bytes[end], each.backward_bytes[first]], axis=1) / ways.bytes_per_s
        for each in (runs, last_runs)
    )
    drops = np.array([schedule.recompute for schedule in schedules])
    kinds_s = durations_s[:, 0, :]
    cycle_s = float((kinds_s.sum(axis=1) - np.where(drops, 0.0, kinds_s[:, RECOMPUTE])).max())
    transmit_s = np.stack([alone_s, last_s], axis=2)
    transmit_s *= _slowdowns(setting, laid, plan, alone_s / max(cycle_s, 1e-12))[:, :, None]
    activations = runs.activation_bytes[end] - runs.activation_bytes[first]
    weights = runs.weight_bytes[end] - runs.weight_bytes[first]
    kept = [runs.forward_bytes[first] + np.where(drops, 0.0, activations), np.where(drops, activations, 0.0)]
    return PipelineArrays(
        num_micro_batches=plan.num_micro_batches,
        rules=rules_of(schedules),
        durations_s=durations_s,
        transmit_s=transmit_s,
        latency_s=ways.latency_s,
        send_s=ways.send_s,
        delays_s=NO_DELAYS,
        start_s=setting.residents.update_s[first, end] / plan.kind.speed,
        kept_bytes=np.stack([*kept, weights], axis=1),
    )


def _durations_s(setting: Setting, laid: Laid, plan: KindPlan, runs: RunTable) -> Floats:
    """``[P, kinds]``: seconds of the tasks of every stage."""
    edges = np.array(plan.borders.borders)
    forward_s, recompute_s, backward_s, weight_s = runs.sums[:4, edges[1:]] - runs.sums[:4, edges[:-1]]
    seconds = np.zeros((plan.kind.num_stages, NUM_KINDS))
    seconds[:, FORWARD], seconds[:, RECOMPUTE] = forward_s, recompute_s
    seconds[:, BACKWARD] = backward_s - (weight_s if laid.point.split else 0.0)
    seconds[:, WEIGHT] = weight_s
    seconds /= plan.kind.speed[:, None]
    seconds[:, FORWARD:] += setting.profile.task_overhead_s
    return seconds


def _slowdowns(setting: Setting, laid: Laid, plan: KindPlan, busy: Floats) -> Floats:
    """``[P, 2]``: how much longer messages take because others leave the same machine (see ``arrays``).

    ``busy`` is the share of a micro-batch's time, without messages, in which each link sends if it is alone.
    """
    if not setting.link_share or not plan.kind.crosses.any():
        return np.ones_like(busy)
    share = np.minimum(1.0, busy)
    kinds = [kind for kind in laid.placement.kinds if kind.num_stages == len(share)]  # others are few: left out
    sends = [np.stack([kind.crossing, np.roll(kind.crossing, 1, axis=1)], axis=2) for kind in kinds]
    leaves = [setting.devices.machine[kind.workers] for kind in kinds]
    machine = np.concatenate(
        [np.repeat(row[:, :, None], 2, axis=2)[sent] for row, sent in zip(leaves, sends, strict=True)]
    )
    used = np.concatenate([np.broadcast_to(share, sent.shape)[sent] for sent in sends])
    factors = slowdowns(machine, used, 1.0 / setting.link_share)
    index = next(index for index, kind in enumerate(kinds) if kind is plan.kind)
    first = sum(int(sent.sum()) for sent in sends[:index])
    own = np.ones(sends[index].shape)
    own[sends[index]] = factors[first : first + int(sends[index].sum())]
    return np.asarray(own[plan.kind.representative])


def _memory_bytes(setting: Setting, laid: Laid, plan: KindPlan, run: PipelineRun) -> Floats:
    """``[P]``, as ``memory.stage_bytes``."""
    runs = setting.sections.runs(laid.point.micro_batch_size)
    resident = setting.resident_bytes(laid.point.num_pipelines)
    edges = np.array(plan.borders.borders)
    first, end = edges[:-1], edges[1:]
    workspace = np.maximum.reduceat(runs.workspace_bytes, first)
    messages = (
        run.peak_waiting[:, 0] * runs.forward_bytes[first] + run.peak_waiting[:, 1] * runs.backward_bytes[end]
    )
    return np.asarray(resident[first, end] + run.peak_bytes + workspace + messages + runs.backward_bytes[first])
