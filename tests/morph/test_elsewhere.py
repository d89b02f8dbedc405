"""Commands on another machine than the manager's, and agents whose versions are not the job's."""

from __future__ import annotations

import select
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.launch.jobs import wait_until
from tests.morph.serving import TOKEN, ServedManager, place
from varuna import cli
from varuna.errors import ConfigError
from varuna.launch.agent import Agent
from varuna.morph.client import RunClient, check_url, run_at
from varuna.morph.link import Refusal
from varuna.morph.messages import WorkerStarted, encode
from varuna.versions import UNKNOWN, Versions, installed_versions, refusal_of_versions

HERE = installed_versions()


def test_commands_find_a_manager_by_its_url(tmp_path: Path) -> None:
    """Without anything in the cache directory."""
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    runner = CliRunner(env={"VARUNA_CACHE_DIR": str(tmp_path / "none"), "COLUMNS": "150", "VARUNA_TOKEN": ""})
    with place() as at:
        served = ServedManager(at)
        started = WorkerStarted(incarnation="vm.0.abcd", machine="vm", rank=0)
        at.loop.call(served.hub.from_agent, "vm", encode(started))
        where = ["--manager", f"{at.url}/", "--token-file", str(token)]
        shown = runner.invoke(cli.main, ["status", *where])
        assert shown.exit_code == 0, shown.output
        assert "a-run: founding" in shown.output
        asked = runner.invoke(cli.main, ["preempt", "vm", *where])
        assert (asked.exit_code, asked.output) == (0, "asked to leave: vm.0.abcd\n")
        (tmp_path / "url").write_text(f"{at.url}\n")
        in_file = ["--manager", (tmp_path / "url").as_uri(), "--token-file", str(token)]
        assert "a-run: founding" in runner.invoke(cli.main, ["status", *in_file]).output
        told = runner.invoke(cli.main, ["events", "--manager", at.url], env={"VARUNA_TOKEN": TOKEN})
        assert '"kind":"notice"' in told.output, told.output
        added = runner.invoke(cli.main, ["workers", "add", "1", *where])
        assert "no agent is connected" in added.output
        for arguments, words in (
            (["--manager", at.url], "No token: give the manager's"),
            (["--manager", at.url, "--run", "x"], "--run x is for runs on this machine"),
            (["--manager", f"file://{tmp_path}/none", "--token-file", str(token)], "No manager is known at"),
            (["--token-file", str(token)], "belongs to --manager URL"),
            (["--manager", "vm:7000", "--token-file", str(token)], "is no URL of a manager"),
        ):
            wrong = runner.invoke(cli.main, ["status", *arguments])
            assert (wrong.exit_code, words in wrong.output) == (2, True), wrong.output
        token.write_text("another-token-0123\n")
        assert "the job's token is missing or wrong" in runner.invoke(cli.main, ["status", *where]).output


def test_following_elsewhere_ends_with_the_manager() -> None:
    with place() as at:
        served = ServedManager(at)
        client = RunClient(run_at(at.url, TOKEN))
        assert client.is_alive()
        heard: list[str] = []
        reader = threading.Thread(target=lambda: heard.extend(e.kind for e in client.events(follow=True)))
        before = served.num_asked()
        reader.start()
        wait_until(lambda: served.num_asked() > before, 120, "it follows")
        at.end()
        at.close()
        reader.join(20)
        assert not reader.is_alive()
        assert not client.is_alive()


def test_the_manager_says_what_it_is() -> None:
    with place() as at:
        ServedManager(at)
        about = RunClient(run_at(at.url, TOKEN)).about()
        assert (about.run_id, about.versions) == ("a-run", HERE)
        assert abs(about.unix_s - time.time()) < 10


@pytest.mark.parametrize(
    "url", ["", "vm", "https://vm:1", "http://vm", "http://vm:x", "http://u@vm:1", "http://vm:1/x"]
)
def test_what_is_no_url_of_a_manager(url: str) -> None:
    with pytest.raises(ConfigError, match="is no URL of a manager"):
        check_url(url)
    assert check_url("http://[::1]:7000/") == "::1"


@pytest.mark.parametrize(
    ("there", "refusal"),
    [
        ({}, ""),
        ({"torch": "2.13.0+cu130", "python": "3.12.1"}, ""),
        (
            {"torch": "2.12.1+cpu"},
            "it has torch 2.12.1, the job has torch 2.13.0. All machines need the same: ",
        ),
        (
            {"torch": UNKNOWN, "varuna": "0.2.0"},
            "it has varuna 0.2.0 and torch unknown, the job has varuna 0.1.0 and",
        ),
    ],
)
def test_which_versions_may_work_together(there: dict[str, str], refusal: str) -> None:
    job = Versions(varuna="0.1.0", torch="2.13.0+cpu", python="3.11.2")
    told = refusal_of_versions(replace(job, **there), job)
    assert told.startswith(refusal)
    assert bool(told) == bool(refusal)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (HERE, ""),
        (replace(HERE, torch="1.0.0"), "the job has torch 1.0.0"),
        (replace(HERE, varuna="9.9.9"), "the job has varuna 9.9.9"),
    ],
)
def test_an_agent_of_another_version_is_refused(job: Versions, words: str) -> None:
    with place() as at:
        served = ServedManager(at, versions=job)
        agent = Agent(at.url, TOKEN, "vm")
        if not words:
            wait_until(lambda: agent.is_connected, 120, "it is let in")
        else:
            assert select.select([agent], [], [], 10)[0]
            (refusal,) = agent.orders()
            assert isinstance(refusal, Refusal)
            assert (refusal.status, words in refusal.reason) == (403, True), refusal
            assert at.loop.call(lambda: served.hub.connected) == frozenset()
        agent.close()
