"""A job of several machines, each an agent of its own, that come and go as machines do.

Real commands on loopback; what they train is what an undisturbed run trains.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.jobs import Warm
from tests.e2e.machines import Cluster
from tests.e2e.morphing import NUM_STEPS
from tests.e2e.namespace import Namespace, namespace
from tests.launch.jobs import wait_until

Machines = Callable[..., Cluster]


@pytest.fixture
def machines(jobs: Warm, tmp_path: Path, cache: Path) -> Iterator[Machines]:
    """Starts the test's manager; nothing of the job may be left."""
    made: list[Cluster] = []
    (cache / "captures").mkdir(exist_ok=True)

    def start(**options: object) -> Cluster:
        made.append(Cluster(jobs, tmp_path, captures=cache / "captures", **options))  # type: ignore[arg-type]
        return made[0]

    yield start
    for cluster in made:
        cluster.abandon()


def test_machines_come_and_go_and_no_secret_is_seen(machines: Machines, tmp_path: Path) -> None:
    """Two found the job, one of them leaves with notice, another comes, and is killed without a word.

    Workers of a machine are a pipeline, so a's hold everything at any time.
    """
    cluster = machines(limit=8)
    cluster.start_agent("a")
    cluster.start_agent("b", 2, "--grace", "20")
    cluster.steps_done(5)
    ranks = [one.machine for one in cluster.status().workers if one.status == "member"]
    assert ranks in (["a", "a", "b", "b"], ["b", "b", "a", "a"])  # those of a machine in a row
    only_its_owner_can_read(cluster)
    one_leaves_with_notice(cluster)
    cluster.start_agent("c")
    cluster.event("ready", "c.")
    cluster.event("ready", "c.")
    cluster.limit(28)
    wait_until(lambda: set(cluster.members().values()) == {"a", "c"}, 120, "c takes part")
    one_is_killed(cluster)
    cluster.limit(NUM_STEPS)
    cluster.ends_well("a")
    assert any(cluster.directory.glob("steps-c.*.jsonl"))
    cluster.is_exact()
    token = (cluster.state / "token").read_text().strip()
    with_token = {path for path in tmp_path.rglob("*") if path.is_file() and token in _text(path)}
    assert with_token == {cluster.state / "token"}


def only_its_owner_can_read(cluster: Cluster) -> None:
    """Files with it are their owner's; what `ps` shows, ``tests/launch/test_secrets.py`` looks at."""
    modes = {cluster.state: 0o700, cluster.state / "token": 0o600, cluster.state / "journal.sqlite": 0o600}
    assert {path: stat.S_IMODE(path.stat().st_mode) for path in modes} == modes
    (announced,) = (cluster.directory / "cache" / "runs").iterdir()
    assert stat.S_IMODE(announced.stat().st_mode) == 0o600


def one_leaves_with_notice(cluster: Cluster) -> None:
    """SIGTERM: what b's workers hold is handed over, nobody is lost, and the agent ends at once."""
    cluster.signal("b", signal.SIGTERM)
    cluster.event("notice", "(SIGTERM)")
    cluster.limit(18)
    assert cluster.join("b") == 128 + signal.SIGTERM
    told = cluster.told("b")
    assert "varuna: SIGTERM: the workers of this machine leave the job, within 20 s" in told
    assert "SIGKILL" not in told
    cluster.steps_done(16)
    assert set(cluster.members().values()) == {"a"}


def one_is_killed(cluster: Cluster) -> None:
    """Its workers end with it, and the others go on without waiting for a heartbeat."""
    gone = cluster.processes("c")
    assert len(gone) == 4  # agent, zygote, two workers
    cluster.signal("c", signal.SIGKILL)
    wait_until(lambda: not any(_is_alive(one) for one in gone), 60, "its processes end")
    assert cluster.join("c") == -signal.SIGKILL
    wait_until(lambda: set(cluster.members().values()) == {"a"}, 9, "it is found before a heartbeat is missed")


def _text(path: Path) -> str:
    return path.read_bytes().decode("latin-1")


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_manager_is_killed_and_started_again(machines: Machines) -> None:
    """With the store in which the first generation meets: training goes on, and all find the next manager."""
    cluster = machines(limit=6)  # before it compares workers' speeds: nothing is under way
    cluster.start_agent("a")
    cluster.start_agent("b")
    cluster.steps_done(5)
    members, url = cluster.members(), cluster.url
    gone = cluster.processes("manager")
    cluster.signal("manager", signal.SIGKILL)
    assert cluster.join("manager") == -signal.SIGKILL
    wait_until(lambda: not any(_is_alive(one) for one in gone), 60, "all of it is gone")
    cluster.limit(20)
    files = list(cluster.directory.glob("steps-*.jsonl"))
    assert len(files) == 4
    wait_until(lambda: all(len(_text(one).splitlines()) == 20 for one in files), 60, "steps without a manager")
    cluster.start_manager()
    assert cluster.url == url
    wait_until(lambda: all(one.is_connected for one in cluster.status().workers), 120, "all are back")
    assert cluster.members() == members
    cluster.steps_done(18)
    cluster.client.preempt("b")
    cluster.event("notice", "is asked to leave (user)")
    cluster.limit(NUM_STEPS)
    cluster.ends_well("a", "b")
    cluster.is_exact()


def test_all_are_lost_while_the_manager_is_away(machines: Machines, tmp_path: Path) -> None:
    """The job goes back to the newest checkpoint, which was written without it; the one it knows is gone."""
    place = tmp_path / "saved"
    saves = ["--checkpoint", str(place), "--checkpoint-every", "10", "--keep", "1"]
    cluster = machines(limit=3, min_workers=3)
    cluster.start_agent("a", 3, *saves)
    cluster.steps_done(2)
    cluster.client.preempt(sorted(cluster.members())[1])
    cluster.limit(6)
    cluster.event("running", "generation 1")  # its members meet in a store of their own
    cluster.limit(16)
    cluster.event("checkpoint", "step 10 is saved")
    cluster.signal("manager", signal.SIGKILL)
    assert cluster.join("manager") == -signal.SIGKILL
    cluster.limit(28)
    wait_until(lambda: list(place.glob("step-*")) == list(place.glob("step-*20-*")), 60, "step 20 is saved")
    wait_until(lambda: not list(place.glob("*/.writing")), 60, "and complete")
    gone = cluster.processes("a")
    cluster.signal("a", signal.SIGKILL)
    assert cluster.join("a") == -signal.SIGKILL
    wait_until(lambda: not any(_is_alive(one) for one in gone), 60, "all of it is gone")
    cluster.start_manager()
    cluster.start_agent("b", 2, *saves)
    cluster.event("going back", "back to step 20")
    cluster.limit(NUM_STEPS)
    cluster.ends_well("b")
    cluster.is_exact()


def test_a_machine_is_lost_while_the_job_is_founded(machines: Machines) -> None:
    """Nothing was trained yet: with the machine that comes in its place, all begins anew."""
    cluster = machines(limit=NUM_STEPS)
    hold = cluster.directory / "hold"
    hold.touch()
    cluster.start_agent("a")
    cluster.start_agent("b")
    began = cluster.directory.glob
    wait_until(lambda: len(list(began("began-*"))) == 4, 120, "the founders run")
    cluster.signal("b", signal.SIGKILL)
    cluster.join("b")
    cluster.event("founding", "founding begins anew")
    cluster.start_agent("c")
    hold.unlink()
    cluster.ends_well("a", "c")
    cluster.is_exact()


def test_a_worker_gets_sigterm_from_a_stranger(machines: Machines) -> None:
    """As a batch system sends it to every process: the worker leaves in good order."""
    cluster = machines(limit=8, min_workers=3)
    cluster.start_agent("a", 3)
    cluster.steps_done(5)
    name = next(one for one in cluster.members() if one.startswith("a.2."))
    pid = int((cluster.directory / f"began-{name}").read_text())
    os.kill(pid, signal.SIGTERM)
    told = cluster.event("notice", "(SIGTERM)").text
    assert told.startswith(f"{name} is asked to leave within "), told
    cluster.limit(NUM_STEPS)
    cluster.ends_well("a")
    assert "SIGTERM" not in cluster.told("a")
    cluster.is_exact()


def test_agents_that_cannot_take_part(machines: Machines, tmp_path: Path) -> None:
    cluster = machines(min_workers=1)
    assert cluster.url
    wrong = tmp_path / "wrong"
    wrong.write_text("x" * 40)
    wrong.chmod(0o600)
    cluster.start_agent("a", 1, "--token-file", str(wrong))
    assert cluster.join("a") == 1
    assert "refuses this machine: the job's token is missing or wrong" in cluster.told("a")
    wrong.chmod(0o644)
    cluster.start_agent("b", 1, "--token-file", str(wrong))
    assert cluster.join("b") == 1
    assert "can be read by others" in cluster.told("b")
    cluster.start_agent("c", 1, script="ends.py", arguments=("exit",))
    assert cluster.join("c") == 3
    assert cluster.join("manager") == 3
    assert "varuna: the job has failed: c.0." in cluster.told("manager")


def test_the_grace_is_what_the_provider_gives(machines: Machines) -> None:
    """F55: workers that cannot leave, since their scripts wait, are killed when it is over, and not before."""
    cluster = machines(limit=6)
    cluster.start_agent("a")
    cluster.start_agent("b", environ={"VARUNA_GRACE_S": "4"})
    cluster.steps_done(6)
    workers = [process for process in cluster.processes("b") if process.name().startswith("varuna-w")]
    assert len(workers) == 2, [process.name() for process in cluster.processes("b")]
    began_s = time.monotonic()
    cluster.signal("b", signal.SIGTERM)
    psutil.wait_procs(workers, timeout=20)
    assert 3.9 <= time.monotonic() - began_s < 20
    assert cluster.join("b") == 128 + signal.SIGTERM
    assert "the workers of this machine leave the job, within 4 s" in cluster.told("b")
    cluster.limit(NUM_STEPS)
    cluster.ends_well("a")
    cluster.is_exact()


# --- real networks --------------------------------------------------------------------------


@pytest.fixture
def apart() -> Iterator[Namespace]:
    with namespace() as made:
        yield made


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_machines_with_addresses_of_their_own(machines: Machines, apart: Namespace) -> None:
    """One behind a cable, which leaves; one is added there."""
    cluster = machines(limit=8, address=apart.outside)
    cluster.start_agent("a")
    cluster.start_agent("b", namespace=apart.name)
    cluster.steps_done(5)
    assert cluster.url.startswith(f"http://{apart.outside}:")
    command = ["ip", "netns", "exec", apart.name, "ss", "-Htn", "state", "established"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    peers = {tuple(end.rpartition(":")[0].strip("[]") for end in line.split()[2:4]) for line in shown}
    plain = {tuple(end.removeprefix("::ffff:") for end in pair) for pair in peers}
    assert (apart.inside, apart.outside) in plain
    assert {pair[0] for pair in plain} == {apart.inside}
    cluster.signal("b", signal.SIGTERM)
    cluster.event("notice", "(SIGTERM)")
    cluster.limit(20)
    assert cluster.join("b") == 128 + signal.SIGTERM
    cluster.start_agent("c", namespace=apart.name)
    cluster.event("ready", "c.")
    cluster.limit(NUM_STEPS)
    cluster.ends_well("a", "c")
    cluster.is_exact()
