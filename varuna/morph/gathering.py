"""Which agent starts which workers of those that found the job, and when that is decided. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from varuna.morph.messages import StartFounders
from varuna.morph.policy import Policy
from varuna.morph.record import JobRecord, OfferRecord


def is_gathering(job: JobRecord) -> bool:
    """Founders have still to be started; whether agents or the launcher will do that, the policy says."""
    return all(offer.order is None for offer in job.offers.values())


def may_found(job: JobRecord, policy: Policy, now_s: float) -> bool:
    """Enough workers are offered, and those who are about to come have come."""
    num_offered = sum(offer.num_workers for offer in job.offers.values())
    return num_offered >= policy.min_workers and now_s >= job.offered_s + policy.settle_s


def founders(offers: Mapping[str, OfferRecord], attempt: int) -> dict[str, StartFounders]:
    """What each agent is to start: ranks in the order in which agents came, those of one agent in a row."""
    size = sum(offer.num_workers for offer in offers.values())
    orders: dict[str, StartFounders] = {}
    first_rank = 0
    for agent, offer in offers.items():
        if offer.num_workers:
            orders[agent] = StartFounders(
                count=offer.num_workers, first_rank=first_rank, size=size, attempt=attempt
            )
            first_rank += offer.num_workers
    return orders
