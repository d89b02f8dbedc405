"""``varuna run --hosts FILE``: what its flags mean. Starts without torch."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import click

from varuna.cli.elsewhere import ElsewhereFlags
from varuna.cli.start import log_directory
from varuna.config import MorphConfig
from varuna.config_scale import SCALE_VARIABLES
from varuna.errors import ConfigError
from varuna.launch.naming import new_run_id

_FORWARDED = ("VARUNA_", "NCCL_", "GLOO_", "OMP_", "PYTHON", "TORCH_", "CUDA_", "HF_")
_NOT_FORWARDED = (
    "VARUNA_TOKEN",
    "VARUNA_SSH",
    "VARUNA_CACHE_DIR",
    "VARUNA_ADDRESS",
    "PYTHONHOME",
    "CUDA_VISIBLE_DEVICES",
    *SCALE_VARIABLES,
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ANY_PORT = 9  # nothing is sent


_Command = TypeVar("_Command", bound=Callable[..., object])


def hosts_options(command: _Command) -> _Command:
    """The flags of `varuna run` about other machines."""
    for option in (
        click.option(
            "--env-file",
            "env_files",
            multiple=True,
            type=click.Path(dir_okay=False, path_type=Path),
            help="With --hosts, --ray or --slurm: variables for the machines, NAME=VALUE lines.",
        ),
        click.option(
            "--env", multiple=True, metavar="NAME[=VALUE]", help="With --hosts, --ray or --slurm: one variable."
        ),
        click.option(
            "--address",
            default="",
            help="With --hosts or --ray: of this machine, as the others reach it. Default: found.",
        ),
        click.option(
            "--hosts",
            type=click.Path(dir_okay=False, path_type=Path),
            help="File of machines to run on over ssh, one a line; edit it while the job runs. VARUNA_SSH is "
            "the command, if not ssh.",
        ),
    ):
        command = option(command)
    return command


def check_machine_flags(
    elsewhere: Mapping[str, object],
    *,
    address: str,
    env: Sequence[str],
    env_files: Sequence[Path],
    morphs: bool | None,
) -> None:
    """Raise ``ConfigError`` for flags that mean nothing on this machine, or elsewhere.

    Args:
        elsewhere: values of the flags that name other machines; None for those that were not given.
        address: of this machine, for others.
        env: variables for others.
        env_files: files of such.
        morphs: whether workers may come and go, if that was said.
    """
    given = [flag for flag, value in elsewhere.items() if value]
    names = [f"--env {one.partition('=')[0]}" for one in env] + [f"--env-file {path}" for path in env_files]
    useless = [*([f"--address {address}"] if address else []), *names]
    if useless and not given:
        raise ConfigError(
            f"{useless[0]} is for other machines, and the workers are on this one, with the variables that it "
            f"has. Leave it out, or add one of {', '.join(elsewhere)}."
        )
    if morphs is False and given:
        raise ConfigError(f"--no-morph is for one machine; {given[0]} is for machines that come and go.")


def run_on_hosts(hosts: Path, flags: ElsewhereFlags, environ: Mapping[str, str]) -> int:
    """Run it on the machines of a file; returns the exit code."""
    from varuna.launch.fleet import FleetJob, hosts_in, run_fleet
    from varuna.launch.host import ManagerSettings
    from varuna.launch.orders import Header
    from varuna.launch.remote import RemoteCommand, default_ssh
    from varuna.morph.notices_signal import duration_from_env

    lines = hosts_in(hosts)
    morph = MorphConfig.from_env(environ, True, flags.replaces)
    assert morph is not None
    settings = ManagerSettings(
        host=flags.address or address_facing([line.name for line in lines]),
        port=0,
        state_dir=log_directory(flags.log_dir, new_run_id(flags.script[0])),
        min_workers=1,
        settle_s=duration_from_env("VARUNA_SETTLE_S", environ.get("VARUNA_SETTLE_S") or "10"),
        morph=morph,
    )
    workers = [] if flags.workers is None else ["--workers", str(flags.workers)]
    command = RemoteCommand(
        ssh=default_ssh(environ.get("VARUNA_SSH", "")),
        directory=os.getcwd(),
        python=environ.get("VARUNA_REMOTE_PYTHON") or sys.executable,
        agent=(*workers, *flags.agent, *flags.script),
        header=Header(token="", environ={**environ_for(flags.env, flags.env_files, environ), **flags.environ}),
    )
    return run_fleet(FleetJob(hosts=hosts, settings=settings, command=command), environ)


def environ_for(env: Sequence[str], env_files: Sequence[Path], environ: Mapping[str, str]) -> dict[str, str]:
    """Variables for other machines: those of libraries that training uses, then files, then flags.

    Raises:
        ConfigError: a line or flag is no variable.
    """
    found = {
        name: value
        for name, value in environ.items()
        if name.startswith(_FORWARDED) and name not in _NOT_FORWARDED
    }
    return {**found, **parse_env_files(env_files), **named_variables(env, environ)}


def parse_env_files(paths: Sequence[Path]) -> dict[str, str]:
    """Variables in files; of two with the same name, the later one's.

    Raises:
        ConfigError: one cannot be read, or has a line that is no variable.
    """
    found: dict[str, str] = {}
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}.") from error
        found |= parse_env_file(text, str(path))
    return found


def named_variables(given: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """What ``--env`` says: ``NAME=VALUE``, or ``NAME`` for the value that it has here.

    Raises:
        ConfigError: one is neither.
    """
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not _NAME.fullmatch(name) or (not equals and name not in environ):
            raise ConfigError(f"--env {text!r}: write NAME=VALUE, or NAME for one that is set here.")
        found[name] = value if equals else environ[name]
    return found


def parse_env_file(text: str, where: str) -> dict[str, str]:
    r"""Lines ``NAME=VALUE``, empty lines and comments.

    A value in double quotes may have several lines, and ``\"``, ``\\`` and ``\n`` in it; in single quotes it is
    taken as it is. Without quotes it is the rest of the line.

    Raises:
        ConfigError: a line is none of these.
    """
    found: dict[str, str] = {}
    entry = re.compile(
        r"""[ \t]*(?:export[ \t]+)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)="""
        r"""(?:"(?P<double>(?:[^"\\]|\\.)*)"|'(?P<single>[^']*)'|(?P<plain>(?:[^\n"'][^\n]*)?))"""
        r"""[ \t]*(?:\n|$)""",
        re.DOTALL,
    )
    skipped = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\n|$)")
    position = 0
    while position < len(text):
        match = skipped.match(text, position)
        if match is None:
            match = entry.match(text, position)
            if match is None:
                number = text.count("\n", 0, position) + 1
                raise ConfigError(f"{where}, line {number} is no NAME=VALUE, or its quotes do not end.")
            found[match["name"]] = _value_of(match)
        position = match.end()
    return found


def _value_of(match: re.Match[str]) -> str:
    if match["double"] is not None:
        return re.sub(
            r"\\(.)", lambda one: {"n": "\n", "t": "\t"}.get(one[1], one[1]), match["double"], flags=re.S
        )
    return match["single"] if match["single"] is not None else match["plain"].strip()


def address_facing(names: Sequence[str]) -> str:
    """This machine's address on the way to others.

    Raises:
        ConfigError: there is no way to any of them, or their names say nothing here.
    """
    for name in names:
        try:
            family, kind, _, _, target = socket.getaddrinfo(
                name.strip("[]"), _ANY_PORT, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    raise ConfigError(
        f"By which address is this machine reached from {', '.join(names) or 'the machines'}? None of these "
        f"names has an address here (ssh's configuration may have one). Give this machine's with --address."
    )
