"""What a replayed fleet costs, and what the same work costs on machines that nobody takes away."""

from __future__ import annotations

from dataclasses import dataclass

from varuna.errors import ConfigError
from varuna.plan.fleet_plans import Planner
from varuna.plan.fleet_result import FleetResult

_HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Bill:
    """Machines of one kind, in the currency of the price.

    Attributes:
        price: of one machine for one hour.
        num_machines: mean number of them.
        hours: how long they are rented.
        samples_per_s: average.
        cost: price, machines and hours multiplied.
        cost_per_million: samples; None if none was trained.
    """

    price: float
    num_machines: float
    hours: float
    samples_per_s: float
    cost: float
    cost_per_million: float | None


def spot_bill(result: FleetResult, price: float) -> Bill:
    """The fleet as it was: all its machines for as long as they were there, whatever they did."""
    return _bill(price, result.mean_machines, result.duration_s, result.samples)


def on_demand_bill(result: FleetResult, planner: Planner, price: float) -> Bill:
    """The same samples on a fixed number of machines: the fleet's mean, or more if the model needs them.

    Nothing is lost there: the plan for so many runs until the samples are trained.
    """
    most = max(count.num_machines for count in result.counts)
    first = max(1, round(result.mean_machines))
    for num_machines in range(first, max(first, most) + 1):
        plan = planner(num_machines)
        if plan is not None:
            return _bill(price, num_machines, result.samples / plan.samples_per_s, result.samples)
    raise AssertionError(f"no plan for up to {most} machines, and yet the fleet had one: {planner!r}")


def _bill(price: float, num_machines: float, seconds: float, samples: int) -> Bill:
    if not 0 <= price < float("inf"):
        raise ConfigError(f"A price of {price} per machine and hour must be at least 0 and finite.")
    cost = price * num_machines * seconds / _HOUR_S
    return Bill(
        price=price,
        num_machines=num_machines,
        hours=seconds / _HOUR_S,
        samples_per_s=samples / seconds if seconds else 0.0,
        cost=cost,
        cost_per_million=cost / samples * 1e6 if samples else None,
    )
