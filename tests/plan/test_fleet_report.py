"""A replayed fleet for people and for programs: golden text, JSON, pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.plan.fleets import TablePlanner
from varuna.errors import ConfigError
from varuna.observe.fleet_picture import write_fleet_picture
from varuna.observe.fleet_report import FleetReport, fleet_values, render_fleet
from varuna.plan.estimate import estimated_profile
from varuna.plan.fleet import FleetOptions, replay_fleet
from varuna.plan.fleet_cost import on_demand_bill, spot_bill
from varuna.plan.fleet_trace import parse_trace

PLANNER = TablePlanner({2: 10.0, 3: 10.0, 4: 5.0}, num_stages=2)
TRACE = """\
0,add,a
600000,add,b
1200000,add,c
1800000,add,d
3000000,remove,c
3000000,remove,d
4200000,remove,b
4800000,add,e
7200000,remove,a
"""


def report(*, prices: bool = True) -> FleetReport:
    options = FleetOptions(sudden_share=1)
    result = replay_fleet(parse_trace(TRACE, "fleet.csv"), PLANNER, options)
    return FleetReport(
        profile=estimated_profile("gpt2-355m", "v100"),
        batch_size=100,
        devices_per_machine=1,
        options=options,
        result=result,
        spot=spot_bill(result, 0.9) if prices else None,
        on_demand=on_demand_bill(result, PLANNER, 3.06) if prices else None,
    )


def test_text(check_golden: Callable[[str, str], None]) -> None:
    check_golden("fleet.txt", render_fleet(report()))


def test_text_without_prices_has_no_bill() -> None:
    text = render_fleet(report(prices=False))
    assert "per million" not in text
    assert render_fleet(report()).startswith(text[: text.index("Assumed")])


def test_json_has_the_same_numbers() -> None:
    values = json.loads(msgspec.json.encode(fleet_values(report())))
    result = report().result
    assert values["samples"] == result.samples
    assert values["goodput"] == result.goodput
    assert values["wall"]["training_s"] == result.wall.training_s
    assert sum(values["machines"].values()) == pytest.approx(result.machines.total_s)
    assert values["counts"][1] == {"time_s": 600.0, "num_machines": 2}
    assert values["intervals"][0]["activity"] == "waiting"
    assert values["spot"]["cost"] == pytest.approx(0.9 * result.machines.total_s / 3600)
    assert values["estimated"] is True


@pytest.mark.parametrize(("name", "begins"), [("f.svg", b"<?xml"), ("f.png", b"\x89PNG")])
def test_picture(name: str, begins: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    write_fleet_picture(path, report().result, title="A fleet")
    assert path.read_bytes().startswith(begins)


def test_the_picture_names_what_happened(tmp_path: Path) -> None:
    import matplotlib as mpl

    path = tmp_path / "fleet.svg"
    with mpl.rc_context({"svg.fonttype": "none"}):  # text as text
        write_fleet_picture(path, report().result, title="A fleet")
    text = path.read_text(encoding="utf-8")
    for words in ("A fleet", "machines", "samples/s", "waiting", "redone", "restore", "2x2", "hours"):
        assert words in text, words


def test_a_picture_of_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.png"):
        write_fleet_picture(tmp_path / "fleet.txt", report().result)
