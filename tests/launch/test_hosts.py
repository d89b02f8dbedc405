"""Jobs over ssh, without ssh: what is in files, and what becomes of it on a command line."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from varuna.cli.hosts import address_facing, environ_for, parse_env_file
from varuna.errors import ConfigError
from varuna.launch.hosts import Changes, HostLine, changes, read_hosts
from varuna.launch.orders import Header, encode_header
from varuna.launch.remote import RemoteCommand, default_ssh, ssh_arguments

SPECIAL = "two words, 'single', \"double\", $HOME, `id`, \\n, \t and\na second line; rm -rf x # é"


def test_a_file_of_machines() -> None:
    text = """
        # ours
        gpu-1.example.org
        me@10.0.0.7  workers=4   # four of eight
        ssh://me@gpu-2:2222 slots=2
        [fe80::1%eth0]
    """
    lines = read_hosts(text, "hosts.txt")
    assert lines == (
        HostLine(destination="gpu-1.example.org"),
        HostLine(destination="me@10.0.0.7", num_workers=4),
        HostLine(destination="ssh://me@gpu-2:2222", num_workers=2),
        HostLine(destination="[fe80::1%eth0]"),
    )
    assert [line.name for line in lines] == ["gpu-1.example.org", "10.0.0.7", "gpu-2", "[fe80::1%eth0]"]
    assert read_hosts("", "hosts.txt") == ()


@pytest.mark.parametrize(
    "text",
    [
        "a b",
        "a workers=0",
        "a workers=x",
        "a workers=1 gpus=3",
        "-oProxyCommand=id",
        "a;id",
        "$(id)",
        "a\nme@a",
    ],
)
def test_lines_that_are_no_machine(text: str) -> None:
    with pytest.raises(ConfigError, match=r"hosts.txt, line [12]: "):
        read_hosts(text, "hosts.txt")


def test_what_a_new_version_of_the_file_means() -> None:
    a, b, c = (HostLine(destination=name) for name in ("me@a", "b", "c"))
    assert changes([], (a, b)) == Changes(added=(a, b), removed=())
    assert changes(["a", "b"], (b, c)) == Changes(added=(c,), removed=("a",))
    assert changes(["a"], (HostLine(destination="a"),)) == Changes(added=(), removed=())


def command(*arguments: str, directory: str = "/a dir") -> RemoteCommand:
    return RemoteCommand(
        ssh=("ssh", "-p", "2222"),
        directory=directory,
        python="/usr/bin/python3",
        agent=arguments,
        header=Header(token="secret-token-0123", environ={"X": SPECIAL}),
    )


def test_arguments_arrive_as_they_were_given(tmp_path: Path) -> None:
    """As a shell there takes the command apart; sh stands for ssh and what it starts."""
    directory = tmp_path / "it's here"
    directory.mkdir()
    (directory / "varuna.py").write_text("import sys\nprint(sys.argv[1:], end='')\n")
    line = HostLine(destination="me@a", num_workers=3)
    arguments = ssh_arguments(command("train.py", SPECIAL, "", "--x=*", directory=str(directory)), line)
    *local, there = arguments
    assert local[:3] == ["ssh", "-p", "2222"]
    assert local[-2:] == ["-T", "me@a"]
    shown = subprocess.run(["/bin/sh", "-c", there], capture_output=True, text=True, check=True).stdout
    assert shown == str(
        ["agent", "--name", "a", "--from-launcher", "--workers", "3", "train.py", SPECIAL, "", "--x=*"]
    )


def test_no_secret_is_on_the_command_line() -> None:
    shown = shlex.join(ssh_arguments(command("train.py"), HostLine(destination="a")))
    assert "secret-token" not in shown
    assert SPECIAL not in shown
    assert "secret-token" not in repr(command().header)
    assert encode_header(command().header).count(b"\n") == 1


def test_the_users_ssh_command_is_kept() -> None:
    assert default_ssh("") == ("ssh",)
    assert default_ssh("ssh -F 'my config' -o User=me") == ("ssh", "-F", "my config", "-o", "User=me")


# --- variables ------------------------------------------------------------------------------


def test_a_file_of_variables() -> None:
    text = "\n".join(
        [
            "# ours",
            "PLAIN=two words  ",
            "export URL=http://x/?a=b#c",
            'DOUBLE="it\'s \\"so\\": \\\\ and',
            'a second line"',
            "SINGLE='$HOME \"x\" \\n'",
            "EMPTY=",
            "",
            "LAST=é",
        ]
    )
    assert parse_env_file(text, "f") == {
        "PLAIN": "two words",
        "URL": "http://x/?a=b#c",
        "DOUBLE": 'it\'s "so": \\ and\na second line',
        "SINGLE": '$HOME "x" \\n',
        "EMPTY": "",
        "LAST": "é",
    }


@pytest.mark.parametrize("line", ["no equals", "1X=2", 'X="no end', "X='no end", "X Y=1", 'X="a" b'])
def test_lines_that_are_no_variable(line: str) -> None:
    with pytest.raises(ConfigError, match="f, line 3 is no NAME=VALUE"):
        parse_env_file(f"A=1\n\n{line}\n", "f")


def test_which_variables_go_along(tmp_path: Path) -> None:
    here = {
        "VARUNA_GRACE_S": "9",
        "VARUNA_TOKEN": "secret",
        "NCCL_DEBUG": "INFO",
        "HOME": "/root",
        "MINE": SPECIAL,
    }
    file = tmp_path / "env"
    file.write_text("NCCL_DEBUG=WARN\nFILE=1\n")
    assert environ_for(["MINE", "Y=a=b"], [file], here) == {
        "VARUNA_GRACE_S": "9",
        "NCCL_DEBUG": "WARN",
        "FILE": "1",
        "MINE": SPECIAL,
        "Y": "a=b",
    }
    for wrong in ("NOT_SET", "A B=1", "=x"):
        with pytest.raises(ConfigError, match="write NAME=VALUE"):
            environ_for([wrong], [], here)


def test_the_address_that_others_reach() -> None:
    assert address_facing(["no-such-name.invalid", "127.0.0.1"]) == "127.0.0.1"
    with pytest.raises(ConfigError, match="--address"):
        address_facing(["no-such-name.invalid"])
