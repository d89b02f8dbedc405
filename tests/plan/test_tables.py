"""Arrays for the search say what ``costs`` and ``memory`` say one stage at a time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.plan.random_profiles import random_profile
from varuna.plan.costs import stage_costs
from varuna.plan.memory import resident_bytes
from varuna.plan.profile import Profile
from varuna.plan.tables import Residents, SectionTable


def every_run(profile: Profile) -> list[tuple[int, int]]:
    count = len(profile.sections)
    return [(a, b) for a in range(count) for b in range(a + 1, count + 1)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_sums_over_runs_are_the_costs_of_stages(seed, size):
    profile = random_profile(random.Random(seed), 5)
    if seed == 4:  # measured from 2 on: 1 is extrapolated
        sections = tuple(replace(section, costs=section.costs[1:]) for section in profile.sections)
        profile = replace(profile, sections=sections)
    runs = SectionTable(profile).runs(size)
    for a, b in every_run(profile):
        costs = stage_costs(profile, a, b, size)
        for name in ("forward_s", "recompute_s", "backward_s", "weight_s"):
            sums = getattr(runs, name)
            assert sums[b] - sums[a] == pytest.approx(getattr(costs, name))
        assert runs.activation_bytes[b] - runs.activation_bytes[a] == pytest.approx(
            costs.activation_bytes, abs=b
        )
        assert runs.weight_bytes[b] - runs.weight_bytes[a] == pytest.approx(costs.weight_bytes, abs=b)
        assert max(runs.workspace_bytes[a:b]) == pytest.approx(costs.workspace_bytes, abs=1)
        assert runs.forward_bytes[a] == pytest.approx(costs.received_bytes, abs=1)
        assert runs.backward_bytes[a] == pytest.approx(costs.returned_bytes, abs=1)
        assert runs.forward_bytes[b] == pytest.approx(costs.output_bytes, abs=1)
        assert runs.backward_bytes[b] == pytest.approx(costs.gradient_bytes, abs=1)


@pytest.mark.parametrize("seed", range(8))
def test_what_stages_keep_counts_tied_parameters_once(seed):
    profile = random_profile(random.Random(seed), 4)
    residents = Residents(profile)
    for a, b in every_run(profile):
        assert residents.alone_bytes[a, b] == pytest.approx(resident_bytes(profile, a, b), abs=2)
        shared = resident_bytes(profile, a, b, num_holders=2)
        assert residents.shared_bytes[a, b] == pytest.approx(shared, abs=2)
