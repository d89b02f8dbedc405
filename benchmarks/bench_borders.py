"""Borders by time against equal counts of sections, in steps that really run: the gain, and what theory says.

Models with unlike sections (heavy ends, a pyramid), all section times scaled alike so that an even stage would
take 20 ms forward and 40 ms backward; stages sleep, everything else is real. ``1f1b``, m = 1, N = 4 P, 4 KB
messages, loopback. Gain is the measured step with equal counts over the measured step with the chooser's
borders; theory is the same of ``(n - 1) max + sum`` over the stages. Target: at least theory less 5 %.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial

from benchmarks import report
from benchmarks.bench_choose import plan_with, theory_s
from benchmarks.emulated_plans import measure_step_s
from benchmarks.models import heavy_ends, pyramid
from benchmarks.sleeping import Network
from varuna.plan.choose import choose_plan
from varuna.plan.cluster import Cluster
from varuna.plan.profile import LinkProfile, Profile, TaskCosts

STAGE_S = 0.06
MESSAGE_BYTES = 4096
TARGET = 0.95


def scaled(profile: Profile, num_stages: int) -> Profile:
    """The same model with other times, small messages and no bytes to speak of."""
    whole_s = sum(section.costs[0].forward_s + section.costs[0].backward_s for section in profile.sections)
    factor = num_stages * STAGE_S / whole_s
    last = len(profile.sections) - 1
    sections = tuple(
        replace(
            section, parameter_bytes=0, gradient_bytes=0, optimizer_bytes=0, update_s=0.0,
            costs=(_scaled_costs(section.costs[0], factor, 0 if section.index == last else MESSAGE_BYTES),),
        )
        for section in profile.sections
    )  # fmt: skip
    link = LinkProfile(latency_s=1e-4, bytes_per_s=1e9)
    return replace(
        profile, sections=sections, ties=(), within_machine=link, across_machines=link, all_reduce=(),
        device_memory_bytes=1 << 40, step_overhead_s=0.0, task_overhead_s=0.0,
    )  # fmt: skip


def _scaled_costs(costs: TaskCosts, factor: float, message_bytes: int) -> TaskCosts:
    return TaskCosts(
        micro_batch_size=1, forward_s=factor * costs.forward_s, recompute_s=factor * costs.recompute_s,
        backward_s=factor * costs.backward_s, output_bytes=message_bytes, gradient_bytes=message_bytes,
    )  # fmt: skip


def main() -> None:
    options = report.arguments(__doc__ or "", repeats=3)
    rows = [
        _row(scaled(profile, num_stages), num_stages, options.repeats)
        for profile in (heavy_ends(), pyramid())
        for num_stages in (2, 4, 8)
    ]
    header = ["model", "P", "N", "equal counts s", "by time s", "gain", "theory", "gain / theory", "target"]
    report.report("Borders by time against equal counts, measured", report.table(header, rows), options.log)


def _row(profile: Profile, num_stages: int, repeats: int) -> list[object]:
    count, num_micro_batches = len(profile.sections), 4 * num_stages
    equal = tuple(count * stage // num_stages for stage in range(num_stages + 1))
    choice = choose_plan(
        profile, Cluster.parse(f"1x{num_stages}"), batch_size=num_micro_batches, num_stages=num_stages,
        micro_batch_size=1, schedule="1f1b", recompute=False,
    )  # fmt: skip
    borders = (0, *(stage.end_section for stage in choice.plan.pipelines[0].stages))
    runs = {
        name: partial(
            measure_step_s, plan_with(profile, found, num_micro_batches), profile, Network(), rounds=2
        )
        for name, found in (("equal", equal), ("time", borders))
    }
    seconds = {name: statistics.median(found) for name, found in report.interleaved(repeats, runs).items()}
    gain = seconds["equal"] / seconds["time"]
    theory = theory_s(profile, equal, num_micro_batches) / theory_s(profile, borders, num_micro_batches)
    return [
        profile.model, num_stages, num_micro_batches, seconds["equal"], seconds["time"], gain, theory,
        gain / theory, f">= {TARGET}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
