from __future__ import annotations

import pytest

from tests.plan.support import make_sections
from varuna.plan import SCHEDULES, render_plan, render_schedule, simple_plan


@pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(1, 3), (2, 4), (4, 8), (4, 12)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_text(name, num_stages, num_micro_batches, recompute, check_golden):
    text = render_schedule(name, num_stages, num_micro_batches, recompute)
    kind = "recompute" if recompute else "keep"
    check_golden(f"{name}-P{num_stages}-N{num_micro_batches}-{kind}.txt", text)


def test_schedule_text_of_a_mask_and_a_limit(check_golden):
    text = render_schedule("varuna", 3, 6, [True, False, True], max_in_flight=3)
    check_golden("varuna-P3-N6-mask-limit3.txt", text)


def test_plan_text(check_golden):
    sections = make_sections([1.0, 2.0, 2.0, 1.0, 3.0], parameter_bytes=1_500_000)
    choice = simple_plan(
        sections=sections,
        num_workers=7,
        batch_size=50,
        num_stages=2,
        micro_batch_size=4,
        recompute=[True, False],
    )
    check_golden("plan-3x2-spare.txt", f"{choice.reason}\n{render_plan(choice.plan, sections)}")


def test_plan_text_of_one_worker(check_golden):
    sections = make_sections([0.0, 0.0], parameter_bytes=10)
    choice = simple_plan(sections=sections, num_workers=1, batch_size=1, memory_bytes=10**9)
    check_golden("plan-1x1.txt", f"{choice.reason}\n{render_plan(choice.plan, sections)}")
