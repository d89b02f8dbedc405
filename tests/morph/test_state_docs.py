"""The page about the states says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from varuna.morph import decision, slowness, wishes
from varuna.morph.phases import ENDED, TRANSITIONS, Phase
from varuna.morph.policy import Policy

PAGE = (Path(__file__).parents[2] / "docs" / "concepts" / "morph-states.md").read_text(encoding="utf-8")


def test_the_diagram_has_exactly_the_transitions() -> None:
    drawn = re.findall(r"^    (\w+) --> (\w+): .+$", PAGE, re.MULTILINE)
    assert len(drawn) == len(set(drawn))
    assert set(drawn) == {
        (phase.value, following.value) for phase, after in TRANSITIONS.items() for following in after
    }
    assert set(re.findall(r"^    (\w+) --> \[\*\]$", PAGE, re.MULTILINE)) == {phase.value for phase in ENDED}


def test_the_table_explains_every_state() -> None:
    rows = dict(re.findall(r"^\| (\w+) \| (.+) \|$", PAGE, re.MULTILINE))
    rows.pop("state")
    assert set(rows) == {phase.value for phase in Phase}
    source = Path(str(__import__("varuna.morph.phases", fromlist=["x"]).__file__)).read_text(encoding="utf-8")
    for text in rows.values():
        assert f'"""{text}"""' in source


def test_numbers_on_the_page_are_those_of_the_code() -> None:
    policy = Policy()
    assert f"not report within {policy.halt_limit_s:g} s" in PAGE
    assert policy.leave_margin_s == 1.0
    assert policy.max_same_failures == 3
    assert (decision.MIN_GAIN, decision.HORIZON_S, decision.DEFAULT_MORPH_S) == (0.01, 600.0, 0.5)
    assert (slowness.WINDOW, slowness.SLOW_BELOW, slowness.REST_BELOW, slowness.REST_S) == (8, 0.8, 0.5, 300.0)
    assert wishes.MIN_SHARE_GAIN == 0.05
