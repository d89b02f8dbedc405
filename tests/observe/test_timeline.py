"""One step as text and as a picture."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.observe.support import step, worker
from varuna.errors import ConfigError
from varuna.observe.picture import new_figure, write_picture
from varuna.observe.timeline import render_timeline

TWO = (
    worker(0, 0, step([("F0", 0.0, 0.1), ("F1", 0.1, 0.2), ("B0", 0.5, 0.7)], end_s=1.0)),
    worker(1, 1, step([("F0", 0.1, 0.2), ("B0", 0.2, 0.4), ("W0", 0.4, 0.41)], started_s=0.05, end_s=0.9)),
)


def rows(text: str) -> list[str]:
    return [line.split("| ")[1] for line in text.splitlines() if "| " in line]


def test_a_timeline_reads_as_it_should() -> None:
    assert render_timeline(TWO, width=40) == (
        "step 0: 1 s, one column is 25 ms\n"
        "worker 0  pipeline 0 stage 0  busy  40% | F0==F1==............B0======~~~~~~~~U===\n"
        "worker 1  pipeline 0 stage 1  busy  31% | ......F0==B0======~~~~~~~~~~~~~U======..\n"
        "                                          +-------+-------+-------+-------+-------\n"
        "                                          0 s     200 ms  400 ms  600 ms  800 ms\n"
        "                                          F forward, R recompute, B backward, W weight gradients, "
        "~ reduce or commit, U update, . idle\n"
    )


def test_columns_are_time_and_every_row_has_all_of_them() -> None:
    for width in (20, 57, 100, 333):
        text = render_timeline(TWO, width=width)
        first, second = rows(text)
        assert len(first) == len(second) == width
        assert abs(first.index("B0") / width - 0.5) <= 1 / width
        assert abs(second.index("F") / width - 0.15) <= 1 / width  # its step began 50 ms later
        assert abs(first.count(".") / width - 0.3) <= 2 / width


def test_many_short_tasks_in_a_column_are_not_idle() -> None:
    tasks = [(f"F{index}", index * 0.01, index * 0.01 + 0.008) for index in range(100)]
    (row,) = rows(render_timeline([worker(0, 0, step(tasks, end_s=1.0))], width=20))
    assert row == "F" * 20


def test_the_step_is_chosen_and_a_missing_one_is_named() -> None:
    steps = [step([("F0", 0, 0.1)], index=index, started_s=index, end_s=0.2 + index) for index in (5, 6)]
    both = [worker(0, 0, *steps), worker(1, None, *steps[1:])]
    assert render_timeline(both).startswith("step 6: 6.2 s")
    assert render_timeline(both[:1], step_index=5).startswith("step 5: 5.2 s")
    with pytest.raises(ConfigError, match=r"step 5 of every worker; it has \[6\]"):
        render_timeline(both, step_index=5)
    with pytest.raises(ConfigError, match="it has none"):
        render_timeline([])
    with pytest.raises(ConfigError, match="10 columns is too narrow"):
        render_timeline(both, width=10)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_is_written_in_the_format_of_its_ending(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"step.{ending}"
    write_picture(path, TWO, title="a step")
    if ending == "png":
        assert path.read_bytes().startswith(b"\x89PNG")
    else:
        comments = path.read_text()
        ElementTree.fromstring(comments)
        for shown in ("a step", "worker 1", "F0", "backward", "commit"):
            assert f"<!-- {shown}" in comments, shown


def test_a_picture_that_cannot_be_made_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"step\.gif: its name must end in \.png, \.svg"):
        write_picture(tmp_path / "step.gif", TWO)
    with pytest.raises(ConfigError, match="Cannot write the picture"):
        write_picture(tmp_path / "missing" / "step.svg", TWO)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'varuna\[plot\]'"):
        new_figure(tmp_path / "step.svg", width_inches=1, height_inches=1)
