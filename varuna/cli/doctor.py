"""``varuna doctor``: what would stop a job on this machine, on those of a file, or at a manager's. No torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from varuna.cli.hosts import address_facing, environ_for
from varuna.errors import ConfigError

if TYPE_CHECKING:
    from varuna.launch.preflight.findings import Finding

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.option("--hosts", type=_FILE, help="Look at all machines of this file, too, over ssh.")
@click.option(
    "--address", default="", help="With --hosts: of this machine, as the others reach it. Default: found."
)
@click.option("--manager", "url", default="", metavar="URL", help="Ask a manager that runs, too.")
@click.option(
    "--token-file",
    type=_FILE,
    help="With --manager: file with the job's token. Default: the variable VARUNA_TOKEN.",
)
@click.option(
    "--checkpoint", "checkpoint_url", default="", metavar="URL", help="Where checkpoints would be saved."
)
@click.option("-v", "--verbose", is_flag=True, help="With --hosts: list what is in order, too.")
@click.option("--from-launcher", is_flag=True, hidden=True, help="Questions come on standard input.")
def doctor(
    *,
    hosts: Path | None,
    address: str,
    url: str,
    token_file: Path | None,
    checkpoint_url: str,
    verbose: bool,
    from_launcher: bool,
) -> None:
    """Look for what would stop a job: network, versions, clock, disks, memory, GPUs.

    Nothing is started and nothing is changed. Exits with 1 if something would stop a job; warnings do not.
    """
    from varuna.launch.preflight.findings import findings_of, stops
    from varuna.launch.preflight.gather import gather_facts
    from varuna.launch.preflight.survey import answer
    from varuna.launch.preflight.text import render_findings
    from varuna.launch.token import read_token
    from varuna.morph.whereabouts import url_now

    if from_launcher:
        answer(os.environ)
        return
    if hosts is not None and url:
        raise ConfigError("--hosts is for a job that starts, --manager for one that runs: give one of them.")
    if address and hosts is None:
        raise ConfigError(f"--address {address} belongs to --hosts FILE, which is missing.")
    if token_file is not None and not url:
        raise ConfigError(f"--token-file {token_file} belongs to --manager URL, which is missing.")
    uses_bucket = "://" in checkpoint_url
    if hosts is not None:
        findings = _on_hosts(hosts, address, checkpoint_url)
    else:
        manager = (url_now(url), read_token(os.environ, token_file)) if url else None
        facts = gather_facts("", os.environ, checkpoint_url=checkpoint_url, manager=manager)
        findings = findings_of(facts, has_others=False, uses_bucket=uses_bucket)
    click.echo(render_findings(findings, shows_ok=verbose or hosts is None), nl=False)
    if stops(findings):
        sys.exit(1)


def _on_hosts(hosts: Path, address: str, checkpoint_url: str) -> tuple[Finding, ...]:
    """What is found on this machine, where the manager would be, and on those of a file."""
    from msgspec.structs import replace

    from varuna.launch.fleet import hosts_in
    from varuna.launch.orders import Header
    from varuna.launch.preflight.findings import findings_between, findings_of
    from varuna.launch.preflight.gather import gather_facts
    from varuna.launch.preflight.survey import survey
    from varuna.launch.remote import RemoteCommand, default_ssh

    lines = hosts_in(hosts)
    own = address or address_facing([line.name for line in lines])
    here = gather_facts("", {**os.environ, "VARUNA_ADDRESS": own})
    here = replace(here, name=f"{here.host_name} (here)")
    command = RemoteCommand(
        ssh=default_ssh(os.environ.get("VARUNA_SSH", "")),
        directory=os.getcwd(),
        python=os.environ.get("VARUNA_REMOTE_PYTHON") or sys.executable,
        agent=(),
        header=Header(token="", environ=environ_for([], [], os.environ)),
    )
    bucket, others = "://" in checkpoint_url, len(lines) > 1
    found = list(findings_of(here, has_others=others))
    if any(one.check == "address" and one.level == "stops" for one in found):
        return tuple(found)
    surveyed = survey(here, lines, command, checkpoint_url)
    between = findings_between(here, surveyed.facts, uses_bucket=bucket)
    for facts in surveyed.facts:
        own_findings = findings_of(facts, has_others=others, uses_bucket=bucket)
        compared = [finding for finding in between if finding.machine == facts.name]
        replaced = {finding.check for finding in compared}
        found += [*(finding for finding in own_findings if finding.check not in replaced), *compared]
    return (*found, *surveyed.silent)
