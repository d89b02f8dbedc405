"""A fleet's trace made small and quick enough for one machine. Pure: traces in, traces out."""

from __future__ import annotations

from varuna.errors import ConfigError
from varuna.plan.fleet_trace import FleetTrace, counted_trace


def scaled(
    trace: FleetTrace,
    *,
    max_workers: int,
    min_workers: int = 1,
    from_s: float = 0.0,
    until_s: float | None = None,
    speed: float = 1.0,
) -> FleetTrace:
    """A part of a trace, for a few workers, in less time.

    The number of workers is that of machines, times ``max_workers`` over the most machines of that part,
    rounded; traces with no more machines than that are taken as they are. Counts do not say which worker goes:
    the one that has been there longest does.

    Args:
        trace: who was there when.
        max_workers: never more.
        min_workers: never fewer.
        from_s: where the part begins, in seconds of the trace.
        until_s: where it ends; None is the trace's end.
        speed: seconds of the trace in a second of the result.

    Raises:
        ConfigError: the part is empty, or the numbers cannot be.
    """
    end_s = trace.end_s if until_s is None else until_s
    if not 0 <= from_s < end_s <= trace.end_s:
        raise ConfigError(
            f"{trace.name} has no part from {from_s:g} to {end_s:g} s: it begins at 0 and ends at "
            f"{trace.end_s:g} s."
        )
    if not 1 <= min_workers <= max_workers:
        raise ConfigError(
            f"{min_workers} to {max_workers} workers cannot be: at least 1, and no fewer at most than at least."
        )
    if not 0 < speed < float("inf"):
        raise ConfigError(f"speed={speed:g} must be above 0 and finite.")
    counts = {0.0: 0}
    num_machines = 0
    for change in trace.changes:
        if change.time_s >= end_s:
            break
        num_machines += len(change.added) - len(change.removed)
        counts[max(0.0, change.time_s - from_s)] = num_machines
    most = max(counts.values())
    share = min(1.0, max_workers / max(1, most))
    moments = {time_s / speed: max(min_workers, int(count * share + 0.5)) for time_s, count in counts.items()}
    return counted_trace(trace.name, moments, end_s=(end_s - from_s) / speed)


def num_at_start(trace: FleetTrace) -> int:
    """Machines that are there when the trace begins."""
    return sum(len(change.added) for change in trace.changes if change.time_s == 0)


def counts_of(trace: FleetTrace) -> tuple[tuple[float, int], ...]:
    """Seconds, ascending, and how many machines there are from then on."""
    counts = []
    count = 0
    for change in trace.changes:
        count += len(change.added) - len(change.removed)
        counts.append((change.time_s, count))
    return tuple(counts)
