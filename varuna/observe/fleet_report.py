"""A replayed fleet as text for people and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from varuna.observe.text import human_count, human_duration
from varuna.plan.fleet import FleetOptions
from varuna.plan.fleet_cost import Bill
from varuna.plan.fleet_result import FleetResult, TimeSpent
from varuna.plan.profile import Profile

_CAUSES = {
    "training": "training that counts",
    "morph": "re-planning",
    "redone": "steps lost and done again",
    "restore": "reading checkpoints",
    "waiting": "waiting for enough machines",
    "unfinished": "the step under way at the end",
    "spare": "machines without work",
}


@dataclass(frozen=True, kw_only=True)
class FleetReport:
    """A result with what it was asked for.

    Attributes:
        profile: of the model.
        batch_size: global batch.
        devices_per_machine: workers of each machine.
        options: assumptions.
        result: what came out.
        spot, on_demand: bills, where there was a price.
    """

    profile: Profile
    batch_size: int
    devices_per_machine: int
    options: FleetOptions
    result: FleetResult
    spot: Bill | None = None
    on_demand: Bill | None = None


def render_fleet(report: FleetReport) -> str:
    """What was trained, where the time went, what it costs, and what was assumed."""
    lines = [*_head(report), "", *_times(report.result)]
    if report.spot or report.on_demand:
        lines += ["", *_costs(report)]
    return "\n".join([*lines, "", *_assumptions(report)]) + "\n"


def fleet_values(report: FleetReport) -> dict[str, Any]:
    """Everything, without the profile's sections."""
    result = report.result
    derived = {
        "samples_per_s": result.samples_per_s,
        "goodput": result.goodput,
        "mean_machines": result.mean_machines,
    }
    values: dict[str, Any] = msgspec.to_builtins(result)
    return {
        "model": report.profile.model,
        "device": report.profile.device,
        "estimated": report.profile.estimated,
        "batch_size": report.batch_size,
        "devices_per_machine": report.devices_per_machine,
        "options": msgspec.to_builtins(report.options),
        **derived,
        **values,
        "spot": msgspec.to_builtins(report.spot),
        "on_demand": msgspec.to_builtins(report.on_demand),
    }


def _head(report: FleetReport) -> list[str]:
    result, profile = report.result, report.profile
    counts = [count.num_machines for count in result.counts]
    devices = "1 device" if report.devices_per_machine == 1 else f"{report.devices_per_machine} devices"
    ideal = result.ideal_samples / result.duration_s
    return [
        f"{profile.model} on {profile.device}, global batch {report.batch_size}, {result.trace}",
        f"{human_duration(result.duration_s)} with {min(counts)} to {max(counts)} machines of {devices}, "
        f"{result.mean_machines:.1f} on average",
        f"{human_count(result.samples)} samples in {result.num_steps} steps: "
        f"{human_count(result.samples_per_s)} samples/s",
        f"goodput {result.goodput:.1%} of the {human_count(ideal)} samples/s that the same plans give when "
        f"changes cost nothing",
        f"{result.num_morphs} generations, {result.num_restores} of them from a checkpoint",
    ]


def _times(result: FleetResult) -> list[str]:
    rows = [("", "job", "", "machine-hours", "")]
    for name, title in _CAUSES.items():
        job_s, machine_s = _of(result.wall, name), _of(result.machines, name)
        if job_s > 0 or machine_s > 0:
            rows.append(
                (
                    title,
                    human_duration(job_s) if name != "spare" else "",
                    f"{job_s / result.duration_s:.1%}" if name != "spare" else "",
                    f"{machine_s / 3600:.1f}",
                    f"{machine_s / result.machines.total_s:.1%}",
                )
            )
    total_hours = f"{result.machines.total_s / 3600:.1f}"
    return _table([*rows, ("all", human_duration(result.duration_s), "", total_hours, "")])


def _costs(report: FleetReport) -> list[str]:
    rows = [("", "price", "machines", "hours", "cost", "per million samples")]
    for title, bill in (("spot, as replayed", report.spot), ("on demand, undisturbed", report.on_demand)):
        if bill is not None:
            million = "-" if bill.cost_per_million is None else f"{bill.cost_per_million:,.2f}"
            machines = f"{bill.num_machines:.1f}".removesuffix(".0")
            rows.append((title, f"{bill.price:g}", machines, f"{bill.hours:.2f}", f"{bill.cost:,.2f}", million))
    lines = _table(rows)
    if report.spot and report.on_demand and report.spot.cost_per_million and report.on_demand.cost_per_million:
        ratio = report.on_demand.cost_per_million / report.spot.cost_per_million
        lines.append(f"The same samples on demand cost {ratio:.2f} times as much.")
    return lines


def _assumptions(report: FleetReport) -> list[str]:
    options = report.options
    start = f"{options.start_s:g} s until a newcomer is ready; " if options.start_s else ""
    lines = [
        f"Assumed: {options.morph_s:g} s per re-plan; {start}preemptions come with {options.notice_s:g} s of "
        f"notice, {options.sudden_share:.0%} of them without;",
        f"a checkpoint every {options.checkpoint_interval_s:g} s, {options.restore_s:g} s to read one "
        f"(only where all holders of a section are lost).",
    ]
    if report.profile.estimated:
        lines.append("The profile is an estimate from data sheets: nothing was measured.")
    return lines


def _of(spent: TimeSpent, cause: str) -> float:
    return float(getattr(spent, f"{cause}_s"))


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """First column to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
