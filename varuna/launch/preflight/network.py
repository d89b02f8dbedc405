"""What a machine's network facts mean: its name, its address, which interfaces gloo and NCCL take. Pure.

Varuna tells others numeric addresses, found by asking the kernel which way leads to them, and binds gloo to the
same one. So a host name that is 127.0.1.1 on its own machine, as Debian has it, does no harm. NCCL looks for
interfaces by itself; its rules are in its documentation, under NCCL_SOCKET_IFNAME.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Literal, NamedTuple

from varuna.launch.preflight.facts import Interface, MachineFacts

Level = Literal["ok", "warning", "stops"]
_SLOW_NAME_S = 2.0
_LAST_RESORTS = ("docker", "lo", "virbr")


class Said(NamedTuple):
    """Level, what was found, what to do about it."""

    level: Level
    found: str
    mend: str


def network(facts: MachineFacts, *, has_others: bool) -> dict[str, Said]:
    """What is said of it, by check."""
    said = {"name": name_of(facts), "address": address_of(facts, has_others=has_others)}
    if facts.interfaces:
        said["gloo"] = _gloo(facts)
        if facts.num_visible_gpus:
            said["NCCL"] = _nccl(facts)
    for other in facts.reached:
        said[f"to {other.name}"] = Said("ok", f"{other.address} is reached", "")
        if other.problem:
            mend = (
                "Workers connect to one another on ports that the system chooses: open all TCP ports between "
                "the machines, or give VARUNA_ADDRESS an address that is reached."
            )
            said[f"to {other.name}"] = Said("stops", f"{other.address}: {other.problem}", mend)
    return said


def name_of(facts: MachineFacts) -> Said:
    """What its name resolves to, on the machine itself."""
    name, addresses = facts.host_name, facts.name_addresses
    if facts.name_problem:
        mend = f"Add a line to /etc/hosts: {facts.address or 'ADDRESS'} {name}"
        return Said("warning", f"{name} has no address here: {facts.name_problem}", mend)
    text = f"{name} is {', '.join(addresses)} here"
    if facts.name_s >= _SLOW_NAME_S:
        mend = "Look at /etc/resolv.conf and /etc/nsswitch.conf, or add the name to /etc/hosts."
        return Said("warning", f"{text}, which took {facts.name_s:.1f} s to find out", mend)
    if all(is_loopback(address) for address in addresses):
        return Said("ok", f"{text}; others are told a numeric address instead", "")
    return Said("ok", text, "")


def address_of(facts: MachineFacts, *, has_others: bool) -> Said:
    """By which address and interface others reach it."""
    address = facts.address
    if not address:
        if has_others:
            return Said("stops", "no way leads to the other machines", "Look at its routes: ip route")
        return Said("ok", described(facts.interfaces), "")
    interface = interface_of(facts.interfaces, address)
    text = f"{address} on {interface}" if interface else address
    given = "VARUNA_ADDRESS" in facts.variables
    if facts.listen_problem:
        mend = (
            "Give VARUNA_ADDRESS an address of this machine." if given else "Look at limits and security rules."
        )
        return Said("stops", f"no port can be opened at {text}: {facts.listen_problem}", mend)
    if has_others and is_loopback(address):
        mend = "Give --address or VARUNA_ADDRESS the address that the others reach."
        return Said("stops", f"{text} is reached from this machine alone", mend)
    return Said("ok", text, "")


def interface_of(interfaces: Sequence[Interface], address: str) -> str:
    """The name of the interface that has an address; empty if none has."""
    return next((one.name for one in interfaces if one.address == address), "")


def described(interfaces: Sequence[Interface]) -> str:
    """Interfaces that others could use, by address."""
    usable = [f"{one.address} on {one.name}" for one in interfaces if not _is_local(one.address)]
    return ", ".join(usable) or "none but loopback"


def nccl_interfaces(names: Sequence[str], wanted: str) -> tuple[str, ...]:
    """Those that NCCL takes.

    Args:
        names: of all interfaces that are up and have an address, in the system's order.
        wanted: value of NCCL_SOCKET_IFNAME; empty if unset.
    """
    if wanted:
        excludes, exact = wanted.startswith("^"), wanted.lstrip("^").startswith("=")
        patterns = wanted.lstrip("^").lstrip("=").split(",")
        fits = [
            name
            for name in names
            if (name in patterns if exact else name.startswith(tuple(patterns))) != excludes
        ]
        return tuple(fits)
    infiniband = [name for name in names if name.startswith("ib")]
    usual = [name for name in names if not name.startswith(_LAST_RESORTS)]
    docker = [name for name in names if name.startswith("docker")]
    return tuple(infiniband or usual or docker or names)


def is_loopback(address: str) -> bool:
    """127.0.0.0/8 and ::1."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _is_local(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return parsed.is_loopback or parsed.is_link_local


def _gloo(facts: MachineFacts) -> Said:
    wanted = facts.variables.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    names = list(dict.fromkeys(one.name for one in facts.interfaces))
    own = interface_of(facts.interfaces, facts.address)
    if not wanted:
        return Said("ok", f"takes {own or 'the interface of the address that others reach'}", "")
    if wanted not in names:
        mend = f"Unset it, or name one of {', '.join(names)}."
        return Said("stops", f"GLOO_SOCKET_IFNAME={wanted}, and there is no such interface", mend)
    if own and wanted != own:
        mend = f"Unset it, or GLOO_SOCKET_IFNAME={own}, unless all machines reach one another there."
        return Said("warning", f"takes {wanted}, as GLOO_SOCKET_IFNAME says; others come by {own}", mend)
    return Said("ok", f"takes {wanted}, as GLOO_SOCKET_IFNAME says", "")


def _nccl(facts: MachineFacts) -> Said:
    wanted = facts.variables.get("NCCL_SOCKET_IFNAME", "")
    names = list(dict.fromkeys(one.name for one in facts.interfaces))
    taken = nccl_interfaces(names, wanted)
    why = f", as NCCL_SOCKET_IFNAME={wanted} says" if wanted else ""
    if not taken:
        mend = f"Unset it, or name one of {', '.join(names)}."
        return Said("stops", f"NCCL_SOCKET_IFNAME={wanted} fits no interface", mend)
    own = interface_of(facts.interfaces, facts.address)
    if own and own not in taken:
        mend = f"NCCL_SOCKET_IFNAME={own}, unless all machines reach one another there."
        return Said("warning", f"takes {', '.join(taken)}{why}; others come by {own}", mend)
    return Said("ok", f"takes {', '.join(taken)}{why}", "")
