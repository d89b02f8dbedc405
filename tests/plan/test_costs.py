from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.profiles import make_costs, make_profile, make_section
from varuna.errors import PlanError
from varuna.plan.costs import all_reduce_s, message_s, section_costs, stage_costs
from varuna.plan.profile import AllReducePoint, LinkProfile


def test_a_stage_is_the_sum_of_its_sections_and_the_cuts_around_it():
    sections = tuple(
        make_section(
            index,
            [
                make_costs(
                    2, workspace_bytes=[5, 9, 7, 1][index], output_bytes=index + 1, gradient_bytes=index + 11
                )
            ],
        )
        for index in range(4)
    )
    costs = stage_costs(make_profile(sections=sections), 1, 3, 2)
    assert (costs.forward_s, costs.recompute_s, costs.backward_s, costs.weight_s) == (4.0, 4.0, 8.0, 4.0)
    assert (costs.activation_bytes, costs.weight_bytes, costs.workspace_bytes) == (400, 160, 9)
    assert (costs.received_bytes, costs.returned_bytes) == (1, 11)
    assert (costs.output_bytes, costs.gradient_bytes) == (3, 13)
    first = stage_costs(make_profile(sections=sections), 0, 1, 2)
    assert (first.received_bytes, first.returned_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("size", "seconds"),
    [
        (4, 1.0),  # measured
        (6, 1.5),  # between
        (16, 6.0),  # beyond, along the last two
        (2, 0.5),  # below: the line would give 0.5
        (1, 0.25),
    ],
)
def test_sizes_that_were_not_measured(size, seconds):
    section = make_section(
        0, [make_costs(4, forward_s=1.0), make_costs(8, forward_s=2.0), make_costs(12, forward_s=4.0)]
    )
    assert section_costs(section, size).forward_s == pytest.approx(seconds)


def test_below_the_smallest_size_a_fixed_part_stays():
    section = make_section(0, [make_costs(4, forward_s=1.0), make_costs(8, forward_s=1.4)])
    assert section_costs(section, 1).forward_s == pytest.approx(0.7)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_noise_gives_nothing_negative_or_zero(size):
    """A larger micro-batch that measured faster; growth that is steeper than in proportion."""
    falling = make_section(0, [make_costs(2, forward_s=1.0), make_costs(4, forward_s=0.5)])
    steep = make_section(0, [make_costs(2, forward_s=1.0), make_costs(4, forward_s=9.0)])
    assert section_costs(falling, size).forward_s > 0
    assert section_costs(steep, size).forward_s >= 0.5 * size


def test_one_measured_size_is_taken_in_proportion():
    section = make_section(0, [make_costs(4)])
    assert section_costs(section, 6).forward_s == pytest.approx(6.0)
    assert section_costs(section, 1).activation_bytes == 100
    assert section_costs(section, 1).micro_batch_size == 1


def test_no_samples_are_refused():
    with pytest.raises(PlanError, match="micro-batches of 0"):
        section_costs(make_section(0), 0)


def test_messages():
    assert message_s(LinkProfile(latency_s=0.5, bytes_per_s=10.0), 20) == pytest.approx(2.5)


def test_all_reduce_is_measured_where_it_was():
    points = tuple(
        AllReducePoint(num_workers=4, num_bytes=size, across_machines=False, seconds=seconds)
        for size, seconds in ((100, 1.0), (300, 2.0))
    )
    profile = make_profile(all_reduce=points, within_machine=LinkProfile(latency_s=0.0, bytes_per_s=100.0))
    assert all_reduce_s(profile, 4, 200, False) == pytest.approx(1.5)
    assert all_reduce_s(profile, 4, 500, False) == pytest.approx(3.0)
    assert all_reduce_s(profile, 4, 10, False) == pytest.approx(0.55)
    # a ring moves 2 (n - 1) / n of the bytes
    assert all_reduce_s(profile, 2, 200, False) == pytest.approx(1.5 * (1 / 2) / (3 / 4))
    assert all_reduce_s(profile, 1, 200, False) == 0.0


def test_all_reduce_from_the_links():
    link = LinkProfile(latency_s=1.0, bytes_per_s=10.0)
    cpu = make_profile(across_machines=link)
    assert all_reduce_s(cpu, 100, 50, True) == pytest.approx(2 * 99 * (1.0 + 0.5 / 10.0))
    gpu = replace(cpu, device="NVIDIA H200")
    assert all_reduce_s(gpu, 100, 50, True) == pytest.approx(2 * 7 * 1.0 + 2 * 5.0)
    assert all_reduce_s(gpu, 2, 50, True) == all_reduce_s(cpu, 2, 50, True)
