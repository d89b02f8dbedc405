"""What facts of machines mean: every finding, without any machine that has it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from varuna.launch.preflight.facts import Interface, MachineFacts, ManagerFacts, Place, Reach
from varuna.launch.preflight.findings import Finding, findings_between, findings_of, stops
from varuna.launch.preflight.network import nccl_interfaces
from varuna.launch.preflight.text import render_findings
from varuna.versions import UNKNOWN, Versions

GIB = 1 << 30
MIB = 1 << 20
HAS = Versions(varuna="0.1.0", torch="2.13.0+cu130", python="3.11.2")
WELL = MachineFacts(
    name="gpu-1",
    host_name="gpu-1",
    name_addresses=("10.0.0.7",),
    name_s=0.01,
    interfaces=(
        Interface(name="lo", address="127.0.0.1"),
        Interface(name="docker0", address="172.17.0.1"),
        Interface(name="eth0", address="10.0.0.7"),
        Interface(name="eth0", address="fe80::1"),
    ),
    address="10.0.0.7",
    versions=HAS,
    places=(
        Place(what="cache", path="/home/me/.cache/varuna", free_bytes=100 * GIB),
        Place(what="logs", path="/tmp", free_bytes=100 * GIB),
        Place(what="checkpoints", path="/shared/gpt", free_bytes=1000 * GIB),
    ),
    shared_memory_bytes=8 * GIB,
    num_gpus=4,
    num_visible_gpus=4,
    unix_s=1000.0,
    manager=ManagerFacts(url="http://10.0.0.1:7000", round_trip_s=0.002, ahead_s=0.1, versions=HAS),
    reached=(Reach(name="gpu-2", address="10.0.0.8"),),
)


def facts(**unlike: Any) -> MachineFacts:
    return msgspec.structs.replace(WELL, **unlike)


def the(check: str, found: tuple[Finding, ...]) -> Finding:
    (one,) = [finding for finding in found if finding.check == check]
    return one


def test_a_machine_where_all_is_well() -> None:
    found = findings_of(WELL, has_others=True)
    assert {finding.level for finding in found} == {"ok"}
    assert not stops(found)
    assert not any(finding.mend for finding in found)
    assert the("gloo", found).found == "takes eth0"
    assert the("NCCL", found).found == "takes eth0"
    assert the("address", found).found == "10.0.0.7 on eth0"


def test_a_name_that_is_loopback_on_its_own_machine_is_in_order() -> None:
    """F65: others are told the numeric address, and which interface it is on."""
    found = findings_of(facts(name_addresses=("127.0.1.1",)), has_others=True)
    name = the("name", found)
    assert (name.level, name.found) == (
        "ok",
        "gpu-1 is 127.0.1.1 here; others are told a numeric address instead",
    )
    assert the("address", found).found == "10.0.0.7 on eth0"
    assert the("gloo", found).found == "takes eth0"


CACHE = Place(what="cache", path="/c", free_bytes=100 * GIB)


@pytest.mark.parametrize(
    ("unlike", "check", "level", "words", "mend"),
    [
        (
            {"versions": Versions(varuna="0.1.0", python="3.11.2"), "manager": None},
            "versions",
            "stops",
            "not installed",
            "pip install",
        ),
        (
            {"name_addresses": (), "name_problem": "no such name"},
            "name",
            "warning",
            "no such name",
            "10.0.0.7 gpu-1",
        ),
        ({"name_s": 5.0}, "name", "warning", "took 5.0 s", "resolv.conf"),
        ({"address": ""}, "address", "stops", "no way leads", "ip route"),
        ({"address": "127.0.0.1"}, "address", "stops", "from this machine alone", "--address"),
        ({"listen_problem": "refused"}, "address", "stops", "at 10.0.0.7 on eth0: refused", "limits"),
        (
            {
                "listen_problem": "no interface",
                "address": "10.9.9.9",
                "variables": {"VARUNA_ADDRESS": "10.9.9.9"},
            },
            "address",
            "stops",
            "at 10.9.9.9: no interface",
            "VARUNA_ADDRESS",
        ),
        (
            {"variables": {"GLOO_SOCKET_IFNAME": "eth7"}},
            "gloo",
            "stops",
            "no such interface",
            "lo, docker0, eth0",
        ),
        ({"variables": {"GLOO_SOCKET_IFNAME": "docker0"}}, "gloo", "warning", "takes docker0", "=eth0"),
        ({"variables": {"GLOO_SOCKET_IFNAME": "eth0"}}, "gloo", "ok", "takes eth0, as", ""),
        (
            {"variables": {"NCCL_SOCKET_IFNAME": "ens"}},
            "NCCL",
            "stops",
            "fits no interface",
            "lo, docker0, eth0",
        ),
        ({"variables": {"NCCL_SOCKET_IFNAME": "=docker0"}}, "NCCL", "warning", "others come by eth0", "=eth0"),
        (
            {"places": (Place(what="cache", path="/c", problem="Read-only"),)},
            "cache",
            "stops",
            "Read-only",
            "VARUNA_CACHE",
        ),
        (
            {"places": (Place(what="cache", path="/c", free_bytes=MIB),)},
            "cache",
            "stops",
            "0.0 GiB",
            "Make room",
        ),
        (
            {"places": (Place(what="cache", path="/c", free_bytes=500 * MIB),)},
            "cache",
            "warning",
            "0.5 GiB",
            "1 GiB",
        ),
        ({"places": (Place(what="logs", path="/t", problem="full"),)}, "logs", "stops", "full", "TMPDIR"),
        (
            {"places": (Place(what="checkpoints", path="/s", problem="Read-only"),)},
            "checkpoints",
            "warning",
            "/s: nothing can be written: Read-only",
            "--checkpoint",
        ),
        (
            {"places": (Place(what="checkpoints", path="/s", free_bytes=GIB),)},
            "checkpoints",
            "warning",
            "1.0",
            "20 GiB",
        ),
        ({"shared_memory_bytes": 64 * MIB}, "shared memory", "warning", "64 MiB", "--shm-size"),
        ({"shared_memory_bytes": None}, "shared memory", "warning", "no /dev/shm", "--shm-size"),
        (
            {"num_visible_gpus": 0, "variables": {"CUDA_VISIBLE_DEVICES": ""}},
            "GPUs",
            "warning",
            "0 of 4 visible: CUDA_VISIBLE_DEVICES=''",
            "Unset",
        ),
        (
            {"versions": Versions(torch="2.13.0+cpu")},
            "GPUs",
            "warning",
            "torch 2.13.0+cpu cannot",
            "CUDA build",
        ),
        ({"num_gpus": 0, "num_visible_gpus": 0}, "GPUs", "ok", "on the CPU", ""),
        (
            {"reached": (Reach(name="gpu-2", address="10.0.0.8", problem="timed out"),)},
            "to gpu-2",
            "stops",
            "10.0.0.8: timed out",
            "open all TCP ports",
        ),
        (
            {"manager": ManagerFacts(url="http://m:1", problem="does not answer")},
            "manager",
            "stops",
            "does not answer",
            "--listen",
        ),
        (
            {"manager": ManagerFacts(url="http://m:1", problem="the job's token is wrong")},
            "manager",
            "stops",
            "token",
            "STATE/token",
        ),
        (
            {"manager": ManagerFacts(url="http://m:1", ahead_s=-120.0, versions=HAS)},
            "clock",
            "warning",
            "120.0 s ahead of the manager's",
            "NTP",
        ),
        (
            {
                "manager": ManagerFacts(
                    url="http://m:1", versions=Versions(varuna="0.1.0", torch="2.14.0", python="3")
                )
            },
            "versions",
            "stops",
            "it has torch 2.13.0, the job has torch 2.14.0",
            "",
        ),
    ],
)
def test_what_is_wrong_and_how_to_mend_it(
    unlike: dict[str, Any], check: str, level: str, words: str, mend: str
) -> None:
    one = the(check, findings_of(facts(**unlike), has_others=True))
    assert one.level == level
    assert words in one.found
    assert mend in one.mend
    assert bool(one.mend) == bool(mend)
    assert stops((one,)) == (level == "stops")


def test_alone_loopback_is_enough() -> None:
    for address in ("", "127.0.0.1"):
        assert not stops(findings_of(facts(address=address, reached=()), has_others=False))


def test_a_clock_that_a_bucket_refuses() -> None:
    """F76: training itself does not mind."""
    other = facts(name="gpu-2", unix_s=WELL.unix_s + 1000.0)
    for uses_bucket, words in ((True, "Buckets refuse"), (False, "Training does not mind")):
        one = the("clock", findings_between(WELL, [other], uses_bucket=uses_bucket))
        assert (one.level, words in one.mend) == ("warning", True)
    assert one.found == "1000.0 s ahead of gpu-1"
    near = facts(name="gpu-2", unix_s=WELL.unix_s - 3.0)
    assert the("clock", findings_between(WELL, [near])).level == "ok"


@pytest.mark.parametrize(
    ("versions", "level", "words"),
    [
        (Versions(varuna="0.1.0", torch="2.12.0", python="3.11.2"), "stops", "the job has torch 2.13.0"),
        (Versions(varuna="0.2.0", torch="2.13.0+cu130", python="3.11.2"), "stops", "it has varuna 0.2.0"),
        (Versions(varuna=UNKNOWN, torch="2.13.0", python="3.11.2"), "stops", "varuna unknown"),
        (
            Versions(varuna="0.1.0", torch="2.13.0+cpu", python="3.12.1"),
            "warning",
            "Python 3.12.1 here, 3.11.2 on",
        ),
    ],
)
def test_machines_of_other_versions(versions: Versions, level: str, words: str) -> None:
    found = findings_between(WELL, [facts(name="gpu-2", versions=versions), facts(name="gpu-3")])
    one = the("versions", found)
    assert (one.machine, one.level, words in one.found) == ("gpu-2", level, True), one


def test_one_machine_without_gpus() -> None:
    found = findings_between(WELL, [WELL, facts(name="cpu-1", num_gpus=0, num_visible_gpus=0)])
    assert (the("GPUs", found).machine, the("GPUs", found).level) == ("cpu-1", "warning")


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [
        ("", ("ib0", "ib1")),
        ("eth", ("eth0", "eth1")),
        ("=eth0", ("eth0",)),
        ("=eth0,ib1", ("eth0", "ib1")),
        ("^eth,ib", ("lo", "docker0")),
        ("^=eth0", ("lo", "docker0", "eth1", "ib0", "ib1")),
        ("ens", ()),
    ],
)
def test_which_interfaces_nccl_takes(wanted: str, taken: tuple[str, ...]) -> None:
    assert nccl_interfaces(["lo", "docker0", "eth0", "eth1", "ib0", "ib1"], wanted) == taken


def test_nccl_takes_docker_and_loopback_last() -> None:
    assert nccl_interfaces(["lo", "docker0", "eth0"], "") == ("eth0",)
    assert nccl_interfaces(["lo", "docker0"], "") == ("docker0",)
    assert nccl_interfaces(["lo"], "") == ("lo",)


def test_findings_as_text() -> None:
    found = (
        Finding(machine="gpu-1", check="versions", level="ok", found="varuna 0.1.0"),
        Finding(machine="gpu-2", check="versions", level="ok", found="varuna 0.1.0"),
        Finding(
            machine="gpu-2",
            check="shared memory",
            level="warning",
            found="64 MiB",
            mend="docker run --shm-size 8g",
        ),
        Finding(machine="gpu-3", check="ssh", level="stops", found="cannot be reached"),
    )
    assert render_findings(found, shows_ok=False) == (
        "gpu-1: all is well\n"
        "gpu-2\n"
        "  warning  shared memory  64 MiB\n"
        "                          -> docker run --shm-size 8g\n"
        "gpu-3\n"
        "  STOPS    ssh            cannot be reached\n"
        "\n"
        "1 thing would stop a job; 1 warning.\n"
    )
    assert render_findings(found[:1], shows_ok=True) == (
        "gpu-1\n  ok       versions  varuna 0.1.0\n\nNothing would stop a job; 0 warnings.\n"
    )
