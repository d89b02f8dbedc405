"""``varuna profiles`` and ``varuna simulate --trace``: flags, numbers, errors; all without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import varuna
from tests.plan.test_fleet_trace import TRACES
from varuna.cli import main
from varuna.plan.estimate import load_profile
from varuna.plan.estimate_devices import DEVICES, NETWORKS
from varuna.plan.estimate_models import MODELS

TRACE = "0,add,a\n0,add,b\n600000,add,c\n3000000,remove,b\n3600000,remove,a\n"
ASK = ("simulate", "gpt2-355m@v100", "--batch-size", "64")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), prog_name="varuna")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "fleet.csv"
    path.write_text(TRACE, encoding="utf-8")
    return str(path)


def test_profiles_lists_all_there_are() -> None:
    text = invoke("profiles").output
    for name in (*MODELS, *DEVICES, *NETWORKS):
        assert name in text
    named = next(word for word in text.split() if word.count("@") == 2 and word.islower()).rstrip(",")
    assert load_profile(named).estimated


def test_a_trace_as_text(trace: str) -> None:
    result = invoke(*ASK, "--trace", trace, "--price-spot", "0.9", "--price-on-demand", "3.06")
    assert result.exit_code == 0, result.output
    for words in ("gpt2-355m on NVIDIA V100", "goodput", "2 to 3 machines", "per million samples", "estimate"):
        assert words in result.output


def test_a_trace_as_json_with_other_assumptions(trace: str) -> None:
    options = ("--morph-seconds", "5", "--notice-seconds", "0", "--sudden-share", "1", "--seed", "3")
    options += ("--start-seconds", "7")
    result = invoke(*ASK, "--trace", trace, *options, "--devices-per-machine", "2", "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.output)
    assert values["options"] == {
        "morph_s": 5.0,
        "start_s": 7.0,
        "notice_s": 0.0,
        "sudden_share": 1.0,
        "checkpoint_interval_s": 600.0,
        "restore_s": 60.0,
        "seed": 3,
    }
    assert values["devices_per_machine"] == 2
    assert values["duration_s"] == 3600
    assert sum(values["wall"].values()) == pytest.approx(3600)
    assert values["samples"] == 64 * values["num_steps"] > 0
    assert values["spot"] is None


def test_a_picture(trace: str, tmp_path: Path) -> None:
    picture = tmp_path / "fleet.svg"
    assert invoke(*ASK, "--trace", trace, "--picture", str(picture)).exit_code == 0
    assert picture.read_text(encoding="utf-8").startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate", "gpt2-355m@v100", "--trace", "{trace}"), "--trace needs --batch-size"),
        ((*ASK, "--trace", "missing.csv"), "missing.csv: No such file"),
        ((*ASK, "--trace", "{trace}", "--machines", "3"), "chooses its own plans"),
        ((*ASK, "--price-spot", "1"), "--batch-size, --price-spot belong to --trace"),
        ((*ASK, "--trace", "{trace}", "--price-spot", "-1"), "--price-spot"),
        ((*ASK, "--trace", "{trace}", "--sudden-share", "2"), "--sudden-share"),
        (("simulate", "gpt9@v100", "--trace", "{trace}", "--batch-size", "8"), "no ready model 'gpt9'"),
        (
            ("simulate", "gpt2-20b@v100", "--trace", "{trace}", "--batch-size", "8"),
            "never has enough machines for this model: at most 3",
        ),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], message: str, trace: str) -> None:
    result = invoke(*(argument.format(trace=trace) for argument in arguments))
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_malformed_trace_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("0,add,a\n\n60000,remove,b\n", encoding="utf-8")
    result = invoke(*ASK, "--trace", str(path))
    assert result.exit_code == 2
    assert f"{path}, line 3: 'b' is removed, but it is not there" in result.output


@pytest.mark.parametrize("arguments", [["profiles"], [*ASK, "--trace", "fleet.csv", "--json"]])
def test_without_torch(arguments: list[str], trace: str) -> None:
    code = (
        "import sys\nfrom varuna.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as error:\n    assert not error.code, error.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    environ = {"PYTHONPATH": str(Path(varuna.__file__).parent.parent), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", code], cwd=Path(trace).parent, env=environ, check=True)


@pytest.mark.skipif(not TRACES.is_dir(), reason="real traces are not part of the source tree")
@pytest.mark.parametrize("name", ["bamboo-p3-48nodes.csv", "bamboo-g4dn.csv"])
def test_real_traces(name: str) -> None:
    ask = ("simulate", "gpt2-2.5b@v100@10gbit", "--batch-size", "8192", "--trace", str(TRACES / name))
    result = invoke(*ask, "--price-spot", "0.9", "--price-on-demand", "3.06", "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.output)
    assert 0.5 < values["goodput"] < 1
    assert values["spot"]["cost_per_million"] < values["on_demand"]["cost_per_million"]
