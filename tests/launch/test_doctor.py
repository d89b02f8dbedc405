"""`varuna doctor` on real machines: this one, and "others" that a shell script in ssh's place starts here."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from tests.launch.jobs import PACKAGE_ROOT
from tests.morph.serving import TOKEN, ServedManager, place
from varuna import cli
from varuna.launch.hosts import HostLine
from varuna.launch.orders import Header
from varuna.launch.preflight.facts import Reach
from varuna.launch.preflight.gather import (
    address_towards,
    ask_manager,
    gather_facts,
    interfaces,
    look_at,
    reach,
)
from varuna.launch.preflight.start import check_places
from varuna.launch.preflight.survey import survey
from varuna.launch.remote import RemoteCommand
from varuna.versions import Versions, installed_versions

SSH = """#!/bin/sh
while [ $# -gt 1 ]; do host=$1; shift; done
case $host in
    gone) echo "ssh: connect to host gone port 22: No route to host" >&2; exit 255;;
    bare) echo "Welcome to bare"; echo "sh: python: not found" >&2; exit 127;;
    mute) exec sleep 600;;
    old) exec sed -u 's/.*/Welcome/';;
    late) echo "Last login: yesterday"; export VARUNA_ADDRESS=10.255.255.1;;
esac
exec /bin/sh -c "$1"
"""


def doctor(directory: Path, *arguments: str, environ: dict[str, str] | None = None) -> Result:
    runner = CliRunner(
        env={"VARUNA_CACHE_DIR": str(directory / "cache"), "VARUNA_TOKEN": "", **(environ or {})}
    )
    return runner.invoke(cli.main, ["doctor", *arguments])


@pytest.fixture
def here(tmp_path: Path) -> str:
    """An address of this machine that is not loopback."""
    usable = [one.address for one in interfaces() if not one.address.startswith(("127.", "fe80", "::1"))]
    if not usable:
        pytest.skip("this machine has no network")
    return usable[0]


@pytest.fixture
def ssh(tmp_path: Path) -> str:
    path = tmp_path / "ssh"
    path.write_text(SSH)
    path.chmod(0o755)
    return str(path)


def test_this_machine(tmp_path: Path) -> None:
    result = doctor(tmp_path, "--checkpoint", str(tmp_path / "gpt"))
    assert result.exit_code == 0, result.output
    versions = installed_versions()
    assert f"varuna {versions.varuna}, torch {versions.torch}, Python {versions.python}" in result.output
    assert f"{tmp_path / 'gpt'}: " in result.output
    assert result.output.splitlines()[-1].startswith("Nothing would stop a job; ")
    assert not (tmp_path / "gpt").exists(), "nothing is changed"
    assert not (tmp_path / "cache").exists()


def test_what_would_stop_a_job(tmp_path: Path) -> None:
    """A cache directory that cannot be, and an interface that is not there."""
    environ = {"VARUNA_CACHE_DIR": "/proc/none/cache", "GLOO_SOCKET_IFNAME": "none0"}
    result = doctor(tmp_path, environ=environ)
    assert result.exit_code == 1
    assert "  STOPS    cache " in result.output
    assert "/proc/none/cache: nothing can be written" in result.output
    assert "GLOO_SOCKET_IFNAME=none0, and there is no such interface" in result.output
    assert result.output.splitlines()[-1].startswith("2 things would stop a job; ")


def test_launchers_refuse_by_themselves(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    script = str(tmp_path / "train.py")
    runner = CliRunner(env={"VARUNA_CACHE_DIR": "/proc/none/cache", "VARUNA_TOKEN": "t" * 16})
    logs = ["--log-dir", str(tmp_path / "logs")]
    for command in (["run", "--workers", "2"], ["agent", "--manager", "http://127.0.0.1:9", "--workers", "1"]):
        result = runner.invoke(cli.main, [*command, *logs, script])
        assert result.exit_code == 2
        assert "cache: /proc/none/cache: nothing can be written" in result.output
        assert not (tmp_path / "logs").exists(), "nothing was started"


def test_a_place_for_checkpoints_that_cannot_be_is_told_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check_places({"VARUNA_CACHE_DIR": str(tmp_path), "VARUNA_CHECKPOINT": "/proc/none/gpt"})
    assert capfd.readouterr().err.startswith(
        "varuna: warning: checkpoints: /proc/none/gpt: nothing can be written"
    )
    check_places({"VARUNA_CACHE_DIR": str(tmp_path), "VARUNA_CHECKPOINT": "s3://bucket/gpt"})
    assert capfd.readouterr().err == ""


# --- facts ----------------------------------------------------------------------------------


def test_facts_travel_as_json(tmp_path: Path) -> None:
    environ = {"VARUNA_CACHE_DIR": str(tmp_path), "NCCL_SOCKET_IFNAME": "eth0", "SECRET": "no"}
    found = gather_facts("box", environ, checkpoint_url=str(tmp_path), facing="127.0.0.1")
    assert msgspec.json.decode(msgspec.json.encode(found), type=type(found)) == found
    assert (found.name, found.host_name) == ("box", socket.gethostname())
    assert (found.address, found.listen_problem) == ("127.0.0.1", "")
    assert found.variables == {"NCCL_SOCKET_IFNAME": "eth0"}
    assert [one.what for one in found.places] == ["cache", "logs", "checkpoints"]
    assert all(one.free_bytes > 0 and not one.problem for one in found.places)
    assert ("lo", "127.0.0.1") in [(one.name, one.address) for one in found.interfaces]
    assert abs(found.unix_s - time.time()) < 60
    wrong = gather_facts("", {**environ, "VARUNA_ADDRESS": "192.0.2.200"})
    assert (wrong.name, wrong.address) == (socket.gethostname(), "192.0.2.200")
    assert wrong.listen_problem == "no interface of this machine has that address"


def test_places(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert look_at("cache", tmp_path / "a" / "b").problem == ""
    assert look_at("cache", tmp_path / "file" / "b").problem.startswith("Not a directory in ")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    assert address_towards("no-such-name.invalid") == ""


def test_reaching_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        (found,) = reach([Reach(name="a", address=f"127.0.0.1 {port}")])
        assert found == Reach(name="a", address="127.0.0.1")
    (found,) = reach([Reach(name="a", address=f"127.0.0.1 {port}")])
    assert "refused" in found.problem


# --- a manager ------------------------------------------------------------------------------


def test_at_a_manager(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    with place() as at:
        ServedManager(at, versions=Versions(varuna="9.9.9", torch=installed_versions().torch))
        result = doctor(tmp_path, "--manager", at.url, "--token-file", str(token))
        assert result.exit_code == 1
        assert f"{at.url} answers within " in result.output
        assert "the job has varuna 9.9.9" in result.output
        asked = ask_manager(at.url, TOKEN)
        assert abs(asked.ahead_s) <= asked.round_trip_s + 0.1
        token.write_text("another-token-0123")
        assert (
            "Give the manager's token: STATE/token"
            in doctor(tmp_path, "--manager", at.url, "--token-file", str(token)).output
        )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--manager", "vm:7000"], "is no URL of a manager"),
        (["--manager", "http://vm:7000"], "No token"),
        (["--token-file", "x"], "belongs to --manager"),
        (["--address", "x"], "belongs to --hosts"),
        (["--hosts", "absent"], "absent cannot be read"),
        (["--hosts", "absent", "--manager", "http://vm:1"], "give one of them"),
    ],
)
def test_wrong_flags(tmp_path: Path, arguments: list[str], words: str) -> None:
    result = doctor(tmp_path, *arguments)
    assert (result.exit_code, words in result.output) == (2, True), result.output


# --- machines of a file ---------------------------------------------------------------------


def test_machines_of_a_file(tmp_path: Path, here: str, ssh: str) -> None:
    """Two are well, one cannot be reached by the others, one has no ssh, one no Python."""
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("me@alpha\nbeta workers=2\nlate\ngone\nbare\n")
    environ = {"VARUNA_SSH": ssh, "PYTHONPATH": PACKAGE_ROOT}
    result = doctor(tmp_path, "--hosts", str(hosts), "--address", here, environ=environ)
    assert result.exit_code == 1, result.output
    told = result.output.splitlines()
    assert "alpha: all is well" in told
    assert "beta: all is well" in told
    assert "no port can be opened at 10.255.255.1" in told[told.index("late") + 1]
    assert told[told.index("gone") + 1].endswith("ssh: connect to host gone port 22: No route to host")
    assert "ssh -o BatchMode=yes gone true" in told[told.index("gone") + 2]
    assert told[told.index("bare") + 1].endswith("(exit code 127): sh: python: not found")
    hosts.write_text("alpha\nbeta\n")
    every = doctor(tmp_path, "--hosts", str(hosts), "--address", here, "-v", environ=environ)
    assert every.exit_code == 0, every.output
    for machine, other in (("alpha", "beta"), ("beta", "alpha")):
        own = every.output[every.output.index(f"\n{machine}\n") :]
        assert f"  ok       to {other}" in own
        assert f"  ok       to {socket.gethostname()} (here)" in own
        assert "  ok       clock " in own


def test_machines_that_say_nothing(tmp_path: Path, ssh: str) -> None:
    """One never answers, one says other things; neither holds the others up for longer than its time."""
    facts = gather_facts("box", {"VARUNA_CACHE_DIR": str(tmp_path)}, facing="127.0.0.1")
    lines = [HostLine(destination=name) for name in ("mute", "old", "alpha")]
    command = RemoteCommand(
        ssh=(ssh,),
        directory=str(tmp_path),
        python=sys.executable,
        agent=(),
        header=Header(token="", environ={"VARUNA_CACHE_DIR": str(tmp_path), "PYTHONPATH": PACKAGE_ROOT}),
    )
    began_s = time.monotonic()
    found = survey(facts, lines, command, "", limit_s=5.0)
    assert time.monotonic() - began_s < 20
    assert [one.name for one in found.facts] == ["alpha"]
    assert [one.name for one in found.facts[0].reached] == ["box"]
    assert not found.facts[0].reached[0].problem
    assert [one.machine for one in found.silent] == ["mute", "old"]
    assert found.silent[0].found == "no answer within 5 s"


@pytest.mark.parametrize("asked", ["", "\n", "{}\n", '{"name": 1}\n', "\\xff\n"])
def test_questions_that_are_none(asked: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "varuna", "doctor", "--from-launcher"],
        input=asked,
        env={**os.environ, "PYTHONPATH": PACKAGE_ROOT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "--from-launcher is for `varuna doctor --hosts`" in result.stderr
    assert not result.stdout


def test_buckets(tmp_path: Path) -> None:
    """Nothing is asked of them; what is missing to ask is told."""
    assert "s3://bucket/gpt is known here" in doctor(tmp_path, "--checkpoint", "s3://bucket/gpt").output
    for url, words in (
        ("oci://bucket/gpt", "oci:// needs ocifs, which is not installed: pip install ocifs"),
        ("s4://bucket/gpt", "s4:// is not known"),
    ):
        result = doctor(tmp_path, "--checkpoint", url)
        assert (result.exit_code, words in result.output) == (1, True), result.output
