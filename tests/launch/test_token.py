"""Where a job's token comes from, and what an agent is told on standard input."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from varuna.errors import ConfigError
from varuna.launch.orders import Header, Order, encode_header, encode_order
from varuna.launch.token import keep_token, read_token

TOKEN = "a-token-0123456789"


def private(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_a_token_is_made_once_and_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "token"
    made = keep_token({}, path)
    assert len(made) > 40
    assert keep_token({}, path) == made == read_token({}, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keep_token({}, tmp_path / "other") != made


def test_the_environment_comes_first_and_then_no_file_is_made(tmp_path: Path) -> None:
    assert keep_token({"VARUNA_TOKEN": TOKEN}, tmp_path / "token") == TOKEN
    assert list(tmp_path.iterdir()) == []
    assert read_token({"VARUNA_TOKEN": TOKEN}, None) == TOKEN
    assert read_token({"VARUNA_TOKEN": TOKEN}, private(tmp_path / "token", "x" * 20 + "\n")) == "x" * 20


def test_no_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--token-file FILE, or in VARUNA_TOKEN"):
        read_token({}, None)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token({}, tmp_path / "none")
    for text in ("", "short", "with spaces in it, many", "é" * 20):
        with pytest.raises(ConfigError, match=r"is no token|cannot be read"):
            read_token({}, private(tmp_path / "token", text))


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_a_file_that_others_can_touch_is_refused(tmp_path: Path, mode: int) -> None:
    path = private(tmp_path / "token", TOKEN)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_token({}, path)


READ = """
import sys
from varuna.errors import ConfigError
from varuna.launch.orders import LauncherOrders
try:
    orders = LauncherOrders()
except ConfigError as error:
    sys.exit(str(error))
said = []
while not orders.is_over:
    said += [(order.word, order.within_s) for order in orders.read()]
print(orders.header.token, orders.header.environ, said, repr(sys.stdin.read()))
"""


def told(data: bytes) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-c", READ], input=data, capture_output=True, check=False)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def test_an_agent_is_told_on_standard_input_which_workers_do_not_read() -> None:
    header = Header(token=TOKEN, environ={"X": "two\nlines"})
    said = [encode_order(Order(word="leave", within_s=12.5)), b"nonsense\nleave x\nstop now\nleave\nstop\n"]
    done = told(encode_header(header) + b"".join(said))
    heard = "[('leave', 12.5), ('leave', None), ('stop', None), ('gone', None)]"
    assert done.stdout == f"{TOKEN} {{'X': 'two\\nlines'}} {heard} ''\n", done.stderr


@pytest.mark.parametrize(
    "data", [b"", b"no end", b"{}\n", b'{"token":1}\n', b"\xff\n", os.urandom(100) + b"\n"]
)
def test_what_is_no_header_is_refused(data: bytes) -> None:
    done = told(data)
    assert done.returncode == 1
    assert "standard input" in done.stderr
