"""Findings as text for people: a line each, what to do about it below, and how many there are of each kind."""

from __future__ import annotations

from collections.abc import Sequence

from varuna.launch.preflight.findings import Finding

_MARKS = {"ok": "ok", "warning": "warning", "stops": "STOPS"}


def render_findings(findings: Sequence[Finding], *, shows_ok: bool) -> str:
    """All of them, machine by machine in the order given.

    Args:
        findings: of any machines.
        shows_ok: list what is in order, too; else a machine where all is says so in one line.
    """
    machines = list(dict.fromkeys(finding.machine for finding in findings))
    width = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for machine in machines:
        own = [finding for finding in findings if finding.machine == machine]
        shown = [finding for finding in own if shows_ok or finding.level != "ok"]
        lines.append(machine if shown else f"{machine}: all is well")
        for finding in shown:
            lines.append(f"  {_MARKS[finding.level]:<7}  {finding.check:<{width}}  {finding.found}")
            if finding.mend:
                lines.append(f"  {'':<7}  {'':<{width}}  -> {finding.mend}")
    return "\n".join([*lines, "", _summary(findings)]) + "\n"


def _summary(findings: Sequence[Finding]) -> str:
    num_stops = sum(finding.level == "stops" for finding in findings)
    num_warnings = sum(finding.level == "warning" for finding in findings)
    warnings = f"{num_warnings} warning{'' if num_warnings == 1 else 's'}"
    if num_stops:
        return f"{num_stops} thing{'' if num_stops == 1 else 's'} would stop a job; {warnings}."
    return f"Nothing would stop a job; {warnings}."
