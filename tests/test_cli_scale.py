"""Flags and variables about asking for machines, good and bad."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from varuna.cli import main
from varuna.cli.hosts import environ_for
from varuna.cli.scale import scale_environ
from varuna.config_scale import SCALE_VARIABLES, ScaleConfig
from varuna.errors import ConfigError

NOTHING = {"scale_command": None, "scale_url": None, "scale_workers": None, "scale_every": None}


def test_flags_win_over_variables() -> None:
    environ = {"VARUNA_SCALE_COMMAND": "ask", "VARUNA_SCALE_WORKERS": "8", "VARUNA_SCALE_S": "30"}
    found = scale_environ(environ, **{**NOTHING, "scale_command": "ask more", "scale_every": 2.5})
    assert ScaleConfig.from_env({**environ, **found}) == ScaleConfig(command="ask more", workers=8, every_s=2.5)
    assert scale_environ(environ, **NOTHING) == {}
    assert ScaleConfig.from_env({}) is None
    assert ScaleConfig.from_env({"VARUNA_SCALE_URL": "https://h/x?k=v"}) == ScaleConfig(url="https://h/x?k=v")


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            {"VARUNA_SCALE_COMMAND": "a", "VARUNA_SCALE_URL": "http://h/?key=secret"},
            "Give one of --scale-command",
        ),
        ({"VARUNA_SCALE_COMMAND": "  "}, "is no command"),
        ({"VARUNA_SCALE_URL": "ftp://h/"}, "is no URL to post to"),
        ({"VARUNA_SCALE_URL": "h"}, "is no URL to post to"),
        ({"VARUNA_SCALE_URL": "http://"}, "is no URL to post to"),
        ({"VARUNA_SCALE_URL": "http://h:99999/"}, "is no URL to post to"),
        ({"VARUNA_SCALE_URL": "http://h/a b"}, "is no URL to post to"),
        ({"VARUNA_SCALE_URL": "http://h/\n"}, "is no URL to post to"),
        ({"VARUNA_SCALE_WORKERS": "8"}, "VARUNA_SCALE_WORKERS=8 says when to ask for machines"),
        ({"VARUNA_SCALE_S": "8"}, "nothing says whom"),
        ({"VARUNA_SCALE_COMMAND": "a", "VARUNA_SCALE_WORKERS": "x"}, "is no number of workers"),
        ({"VARUNA_SCALE_COMMAND": "a", "VARUNA_SCALE_WORKERS": "0"}, "wants nothing"),
        ({"VARUNA_SCALE_COMMAND": "a", "VARUNA_SCALE_S": "soon"}, "is no number of seconds"),
        ({"VARUNA_SCALE_COMMAND": "a", "VARUNA_SCALE_S": "0"}, "give 1 or more"),
        ({"VARUNA_SCALE_COMMAND": "a", "VARUNA_SCALE_S": "nan"}, "give 1 or more"),
    ],
)
def test_what_cannot_be(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        ScaleConfig.from_env(environ)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["manager", "--state", "x", "--scale-workers", "8"],
        ["run", "--scale-every", "5", "train.py"],
        ["run", "--scale-url", "nowhere", "train.py"],
    ],
)
def test_commands_refuse_them_before_anything_runs(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, arguments)
    assert not list(tmp_path.iterdir())
    assert result.exit_code == 2
    assert "scale" in result.output.lower()


@pytest.mark.parametrize("flags", [["--workers", "1"], ["--workers", "2", "--no-morph"]])
def test_a_job_without_a_manager_asks_nobody(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    result = CliRunner().invoke(main, ["run", *flags, "--scale-command", "ask", "train.py"])
    assert result.exit_code == 2
    assert "There is no manager that could ask for machines" in " ".join(result.output.split())


def test_other_machines_are_not_told_whom_to_ask() -> None:
    environ = {**dict.fromkeys(SCALE_VARIABLES, "x"), "VARUNA_STAGES": "2"}
    assert environ_for([], [], environ) == {"VARUNA_STAGES": "2"}
