"""`varuna run --hosts`: real OpenSSH to machines of their own, whose list is edited while the job runs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.e2e.jobs import REPOSITORY, SCRIPTS, Warm
from tests.e2e.machines import Cluster
from tests.e2e.morphing import NUM_STEPS
from tests.e2e.sshd import HERE, SSHD, Machines, machines
from tests.launch.jobs import wait_until

ODD = "two words, 'single', \"double\", $HOME `id` \\n\nand a second line; é"

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(SSHD is None, reason="needs sshd (apt-get install openssh-server)"),
]


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(tmp_path_factory.mktemp("sshd"), "alpha", "beta") as made:
        yield made


class Hosts(Cluster):
    """A job whose agents are started by `varuna run --hosts`."""

    def __init__(
        self, warm: Warm, directory: Path, there: Machines, captures: Path, lines: Sequence[str]
    ) -> None:
        self.there = there
        self.odd = ODD
        self.write(directory, lines)
        super().__init__(warm, directory, captures=captures, limit=8)
        self.state = directory / "logs"

    def write(self, directory: Path, lines: Sequence[str]) -> None:
        """A new version of the file."""
        (directory / "hosts.part").write_text("# machines\n" + "".join(f"{line}\n" for line in lines))
        (directory / "hosts.part").rename(directory / "hosts.txt")

    def edit(self, *lines: str) -> None:
        """As a person does."""
        self.write(self.directory, lines)

    def start_manager(self) -> None:
        """The one command that there is."""

    def run(self, *arguments: str, odd: str = ODD) -> None:
        """Start it."""
        cache = self.directory / "cache"
        flags = ["--hosts", "hosts.txt", "--address", HERE, "--stages", "2", "--micro-batch-size", "2"]
        flags += ["--log-dir", "logs", "--env", "ODD", "--env", f"VARUNA_CACHE_DIR={cache}"]
        flags += ["--env", f"TMPDIR={self.directory}"]
        environ = {
            "VARUNA_SSH": self.there.ssh,
            "VARUNA_SETTLE_S": "5",
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "ODD": odd,
        }
        self._start("manager", ["run", *flags, str(SCRIPTS / "hosts.py"), str(NUM_STEPS), *arguments], environ)

    def processes_at(self, name: str) -> list[psutil.Process]:
        """All that runs on a machine, but for its sshd."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.there.namespaces[name]], capture_output=True, text=True, check=True
        )
        found = []
        for pid in map(int, listed.stdout.split()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if not process.name().startswith("sshd") and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def is_empty(self) -> bool:
        """Nothing is left on any machine."""
        return not any(self.processes_at(name) for name in self.there.namespaces)


Start = Callable[..., Hosts]


@pytest.fixture
def start(jobs: Warm, tmp_path: Path, cache: Path, there: Machines) -> Iterator[Start]:
    """Starts the test's job on machines of a file."""
    (cache / "captures").mkdir(exist_ok=True)
    made: list[Hosts] = []

    def start(*lines: str, arguments: Sequence[str] = (), odd: str = ODD) -> Hosts:
        made.append(Hosts(jobs, tmp_path, there, cache / "captures", lines))
        made[0].run(*arguments, odd=odd)
        return made[0]

    yield start
    for hosts in made:
        hosts.abandon()
        for name in there.namespaces:
            for process in hosts.processes_at(name):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def test_the_file_is_edited_while_the_job_runs(start: Start, tmp_path: Path, there: Machines) -> None:
    """Found on two machines; one crashes and comes back; one is taken out of the file.

    F65: each machine's own name is 127.0.1.1 there, and it says by which address and interface it is reached.
    F67: variables of several lines with quotes and spaces, and arguments, arrive; the user's ssh options count.
    """
    hosts = start("alpha workers=2", "root@beta workers=2", arguments=("an argument", "'quoted'"))
    wait_until(lambda: hosts.status().num_committed >= 5, 120, "the job trains")
    assert sorted(hosts.members().values()) == ["alpha", "alpha", "beta", "beta"]
    for process in hosts.processes_at("beta"):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    hosts.limit(20)
    hosts.steps_done(18)
    assert set(hosts.members().values()) == {"alpha"}
    wait_until(
        lambda: any("beta" in event.text for event in hosts.client.events() if event.kind == "ready"), 120
    )
    hosts.edit("root@beta workers=2")
    hosts.event("notice", "alpha.")
    hosts.limit(30)
    wait_until(lambda: set(hosts.members().values()) == {"beta"}, 120, "alpha has left, beta works")
    wait_until(lambda: not hosts.processes_at("alpha"), 120, "nothing is left at alpha")
    hosts.limit(NUM_STEPS)
    assert hosts.join("manager") == 0, hosts.told("manager")
    assert hosts._warm.left() == []
    assert hosts.is_empty()
    hosts.is_exact()
    told = hosts.told("manager")
    assert "varuna: beta cannot be reached" in told or "varuna: beta ended with exit code" in told
    assert "alpha is not in hosts.txt any more and leaves the job" in told
    assert "SIGHUP" not in told
    for name, address in there.addresses.items():
        assert re.search(rf"\[{name}\] varuna: {name} is in run job-\S+, reached at {address} \(eth0\);", told)
    odd = [path.read_text() for path in tmp_path.glob("odd-*")]
    assert len(odd) == 6
    assert set(odd) == {f"{ODD}an argument|'quoted'"}


@pytest.mark.services
def test_a_machine_is_lost_whose_ssh_does_not_know_it(start: Start, there: Machines) -> None:
    """F61: no exit code says so, for ssh still waits; that nothing is heard of its workers does."""
    hosts = start("alpha workers=2", "beta workers=2")
    wait_until(lambda: hosts.status().num_committed >= 5, 120, "the job trains")
    assert set(hosts.members().values()) == {"alpha", "beta"}
    there.unplug("beta")
    try:
        hosts.limit(20)
        wait_until(lambda: set(hosts.members().values()) == {"alpha"}, 120, "beta is given up")
        hosts.steps_done(18)
        assert "beta cannot be reached" not in hosts.told("manager")
        assert "beta ended" not in hosts.told("manager")
        hosts.edit("alpha workers=2")
        hosts.limit(NUM_STEPS)
        assert hosts.join("manager") == 0, hosts.told("manager")
        hosts.is_exact()
    finally:
        there.plug_in("beta")


def test_an_exit_code_comes_back_and_nothing_is_left(start: Start) -> None:
    """F67."""
    hosts = start("alpha workers=1", odd="exit")
    assert hosts.join("manager") == 7, hosts.told("manager")
    assert "the job has failed" in hosts.told("manager")
    assert hosts.is_empty()


@pytest.mark.services
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_command(start: Start, signum: signal.Signals) -> None:
    """F68."""
    hosts = start("alpha workers=2")
    wait_until(lambda: hosts.status().num_committed >= 5, 120, "the job trains")
    hosts.signal("manager", signum)
    code = hosts.join("manager")
    assert code == (130 if signum == signal.SIGINT else -signal.SIGKILL)
    wait_until(hosts.is_empty, 120, "nothing is left at alpha")


def test_a_preflight_of_all_machines(there: Machines, tmp_path: Path) -> None:
    """F65: names that are 127.0.1.1 at home are in order; F67: the user's ssh options count."""
    (tmp_path / "hosts.txt").write_text("alpha workers=2\nroot@beta\n")
    command = [sys.executable, "-m", "varuna", "doctor", "--hosts", "hosts.txt", "--address", HERE, "-v"]
    environ = {"VARUNA_SSH": there.ssh, "PYTHONPATH": str(REPOSITORY), "GLOO_SOCKET_IFNAME": "eth0"}
    result = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )
    told = result.stdout
    for name, other in (("alpha", "beta"), ("beta", "alpha")):
        own = told[told.index(f"\n{name}\n") :]
        assert re.search(r"^  ok +name +\S+ is 127\.0\.1\.1 here; others are told a numeric address", own, re.M)
        assert re.search(rf"^  ok +address +{there.addresses[name]} on eth0$", own, re.M)
        assert re.search(rf"^  ok +to {other} +{there.addresses[other]} is reached$", own, re.M)
        assert re.search(r"^  ok +gloo +takes eth0, as GLOO_SOCKET_IFNAME says$", own, re.M)
        assert re.search(r"^  ok +clock ", own, re.M)
    assert result.returncode == ("STOPS" in told), "this machine may have no eth0"
    assert "STOPS" not in told[told.index("\nalpha\n") :]
