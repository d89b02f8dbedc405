"""Asking for machines: real commands, a real server on loopback, and what becomes of it when they fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from tests.launch.jobs import wait_until
from tests.morph.test_hub import Clock
from tests.morph.test_scaling import EVERY_S, NAMES, lose, running, scaling
from varuna.config_scale import ScaleConfig
from varuna.morph.hub import Hub
from varuna.morph.scale_hook import KIND, ScaleHook
from varuna.morph.views import LoggedEvent

CALL = {"run_id": "gpt-1", "workers_present": 3, "workers_wanted": 4, "phase": "ending"}


class Asking:
    """A job that has lost a worker, and asks."""

    def __init__(self, config: ScaleConfig, limit_s: float = 20.0) -> None:
        self.clock, manager = Clock(), running()
        self.hub = Hub(manager, self.clock)
        self.hook = ScaleHook(config, scaling(), self.hub, self.clock, command_limit_s=limit_s)
        self.hook.tick()
        lose(manager, NAMES[-1], self.clock.time_s)

    def events(self) -> list[LoggedEvent]:
        return [event for event in self.hub.events.after(0) if event.kind == KIND]

    def ask(self, seconds: float = 6.0) -> None:
        """Time passes until a call is due."""
        self.hook.tick()
        self.clock.time_s += seconds
        self.hook.tick()

    def answered(self) -> list[str]:
        """The call is over; what was told of it."""

        def is_over() -> bool:
            self.hook.tick()
            return self.hook._under_way is None

        wait_until(is_over, 120, "the call is over")
        return [event.text for event in self.events()]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "asked"


def asking(command: str, limit_s: float = 20.0) -> Asking:
    return Asking(ScaleConfig(command=command), limit_s)


def test_a_command_is_told_what_is_wanted(asked: Path) -> None:
    job = asking(f"cat >> {asked}; echo started 1 machine")
    job.ask()
    [text] = job.answered()
    assert (
        text
        == "asking the command for machines: 3 of 4 workers are there: b.3.0 is gone: was ended by signal 9"
    )
    told = json.loads(asked.read_text())
    assert told.pop("why") == text.partition(": ")[2]
    assert told == CALL
    [event] = job.events()
    assert event.figures == {"present": 3.0, "wanted": 4.0}
    job.ask(EVERY_S - 6.0)
    assert len(job.answered()) == 1
    job.ask(6.0)
    assert len(job.answered()) == 2
    assert len(asked.read_text().splitlines()) == 2
    job.hook.close()


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("echo asking...; echo no quota >&2; exit 3", "the command exited with code 3: no quota"),
        ("exit 1", "the command exited with code 1"),
        ("printf '\\377\\n'; exit 1", "the command exited with code 1: \N{REPLACEMENT CHARACTER}"),
        ("no-such-command-here", "the command exited with code 127: "),
        ("kill -9 $$", "the command exited with code -9"),
        ("exec <&-; exit 2", "the command exited with code 2"),
    ],
)
def test_a_command_that_fails_is_an_event(asked: Path, command: str, told: str) -> None:
    job = asking(command)
    job.ask()
    texts = job.answered()
    assert len(texts) == 2
    assert texts[1].startswith(f"asking for machines has failed: {told}")
    job.ask(EVERY_S)
    assert len(job.answered()) == 2  # less often than before
    job.ask(EVERY_S)
    assert len(job.answered()) == 4
    job.hook.close()


def test_a_command_that_hangs_is_ended_with_all_that_it_began(asked: Path) -> None:
    job = asking(f"sleep 1000 & echo $! > {asked}; wait", limit_s=0.5)
    job.ask()
    assert job.answered()[-1] == "asking for machines has failed: the command was ended after 0.5 s"
    wait_until(lambda: not _lives(int(asked.read_text())), 120, "its child is gone")
    job.hook.close()


def test_one_call_at_a_time_and_none_after_the_end(asked: Path) -> None:
    job = asking(f"echo $$ >> {asked}; exec sleep 1000")
    job.ask()
    wait_until(asked.exists, 120, "it runs")
    for _ in range(5):
        job.ask(10 * EVERY_S)
    assert len(job.events()) == 1
    job.hook.close()
    [pid] = map(int, asked.read_text().split())
    assert not _lives(pid)
    job.answered()
    job.ask(100 * EVERY_S)
    job.answered()
    assert len(asked.read_text().split()) == 1


def test_what_a_command_leaves_in_the_background_is_its_own_affair(asked: Path) -> None:
    """It is not waited for, though it holds on to the command's output."""
    job = asking(f"sleep 1000 & echo $! > {asked}")
    job.ask()
    assert len(job.answered()) == 1
    child = psutil.Process(int(asked.read_text()))
    child.kill()
    job.hook.close()


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- a webhook ------------------------------------------------------------------------------


class Webhook(ThreadingHTTPServer):
    """Answers with ``status``, and keeps what was posted."""

    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 204
        self.posted: list[tuple[str, str, dict[str, object]]] = []


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Webhook)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.posted.append((self.path, self.headers["Content-Type"], body))
        self.send_response(server.status)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Not on the terminal."""


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_webhook_is_posted_to(webhook: Webhook) -> None:
    secret = "?key=secret"
    job = Asking(ScaleConfig(url=f"http://127.0.0.1:{webhook.server_port}/scale{secret}"))
    job.ask()
    [text] = job.answered()
    assert text.startswith("asking http://127.0.0.1 for machines: 3 of 4 workers are there")
    assert "secret" not in text
    [(path, kind, body)] = webhook.posted
    assert (path, kind) == (f"/scale{secret}", "application/json")
    del body["why"]
    assert body == CALL
    job.hook.close()


@pytest.mark.parametrize(
    ("status", "told"),
    [(503, "answered 503 Service Unavailable"), (404, "answered 404 Not Found"), (302, "answered 302 Found")],
)
def test_a_webhook_that_refuses_is_an_event(webhook: Webhook, status: int, told: str) -> None:
    webhook.status = status
    job = Asking(ScaleConfig(url=f"http://127.0.0.1:{webhook.server_port}/"))
    job.ask()
    assert job.answered()[-1] == f"asking for machines has failed: http://127.0.0.1 {told}"
    assert len(webhook.posted) == 1
    job.hook.close()


def test_a_webhook_that_is_not_there_is_an_event(webhook: Webhook) -> None:
    with Webhook() as gone:
        port = gone.server_port
    job = Asking(ScaleConfig(url=f"http://127.0.0.1:{port}/"))
    job.ask()
    assert "has failed: http://127.0.0.1 cannot be reached: " in job.answered()[-1]
    job.hook.close()


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    job = asking("true")
    job.ask()
    job.answered()
    job.hook.close()
    assert threading.active_count() == before
