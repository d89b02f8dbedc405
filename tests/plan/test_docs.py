from __future__ import annotations

import re
from pathlib import Path

from varuna.plan import SCHEDULES, render_schedule

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "plan.md"
EXAMPLE = re.compile(r"```\n\$ varuna schedule ([\w-]+) -p (\d+) -n (\d+)( --recompute)?\n(.*?)```", re.DOTALL)


def test_schedules_on_the_page_are_what_is_printed():
    examples = EXAMPLE.findall(PAGE.read_text(encoding="utf-8"))
    assert {name for name, *_ in examples} == set(SCHEDULES)
    for name, num_stages, num_micro_batches, recompute, text in examples:
        assert text == render_schedule(name, int(num_stages), int(num_micro_batches), bool(recompute))
