"""``varuna run --ray ADDRESS``: a manager here, and an agent on each node of a Ray cluster.

The cluster is watched: a node more is a machine more; a node that Ray drains gets a notice, whose workers hand
over what they hold and leave; one that is gone is done with. An agent that has failed is started again for as
long as its node is there. The job, and this command, end when the manager says so.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from varuna.launch.fleet_host import END_S, FleetHost
from varuna.launch.host import ManagerSettings, run_host
from varuna.launch.orders import Header, Order
from varuna.launch.output import say
from varuna.launch.ray.cluster import RayCluster, RayTrouble
from varuna.launch.ray.machine import AgentEnd, RayCommand, RayMachine
from varuna.launch.ray.nodes import PATIENCE_S, Node, NodeNeeds, Notice, bundles, follow, name_of
from varuna.launch.signals import SignalInbox

_LOOK_AT_NODES_S = 1.0


@dataclass(frozen=True, kw_only=True)
class RayJob:
    """A job on the nodes of a cluster.

    Attributes:
        cluster: that one.
        needs: what is taken of its nodes.
        settings: of the manager.
        command: what runs on each node; its header has no token yet, its ``agent`` no manager.
    """

    cluster: RayCluster
    needs: NodeNeeds
    settings: ManagerSettings
    command: RayCommand


def run_ray_fleet(job: RayJob, environ: Mapping[str, str]) -> int:
    """Run a job to its end; returns its exit code. From the main thread only.

    Raises:
        ConfigError: what ``run_manager`` raises.
    """
    return run_host(job.settings.state_dir, environ, lambda token, inbox: _RayFleet(job, token, environ, inbox))


class _RayFleet(FleetHost):
    """The nodes of a Ray cluster."""

    look_s = 0.1
    places = "nodes"

    def __init__(self, job: RayJob, token: str, environ: Mapping[str, str], inbox: SignalInbox) -> None:
        super().__init__(job.settings, token, environ, inbox)
        self._cluster = job.cluster
        self._needs = job.needs
        self._command = replace(
            job.command,
            agent=("--manager", self.url, *job.command.agent),
            header=Header(token=token, environ=job.command.header.environ),
        )
        self._machines: dict[str, RayMachine] = {}
        self._said: set[str] = set()
        self._next_look_s = 0.0
        self._has_asked = False

    def greet(self) -> None:
        """See ``ManagerHost``."""
        what = ", ".join(f"{name}={number:g}" for name, number in self._needs.reserved.items())
        say(f"machines are the nodes of the Ray cluster that have {what}. Logs: {self.settings.state_dir}")

    @property
    def has_machines(self) -> bool:
        """See ``FleetHost``."""
        return bool(self._machines)

    def look_for_machines(self, now_s: float) -> None:
        """See ``FleetHost``."""
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_AT_NODES_S
            self._look_at_nodes(now_s)

    def stop_agents(self, now_s: float) -> None:
        """See ``FleetHost``."""
        for machine in list(self._machines.values()):
            if machine.placed(now_s).waits_s is None:
                machine.tell(Order(word="stop"))
            else:
                self._forget(machine)

    def close(self) -> None:
        """See ``ManagerHost``."""
        give_up_s = time.monotonic() + (END_S if self.exit_code is not None else 0.0)
        while self._machines and (left_s := give_up_s - time.monotonic()) > 0:
            RayMachine.wait(self._cluster, list(self._machines.values()), left_s)
            self.look_at_agents(time.monotonic())
        for machine in list(self._machines.values()):
            self._forget(machine)
        if self._has_asked:
            self._has_asked = False
            self._ask([])
        super().close()

    # --- nodes ------------------------------------------------------------------------------

    def _look_at_nodes(self, now_s: float) -> None:
        try:
            nodes = self._cluster.nodes()
        except RayTrouble as trouble:
            self._say_once(f"Ray does not tell which nodes there are: {trouble}. Agents stay as they are")
            return
        if not self._has_asked and self._needs.most is not None:
            self._has_asked = True
            self._ask(bundles(self._needs, nodes))
        placed = [machine.placed(now_s) for machine in self._machines.values()]
        follows = follow(placed, nodes, self._needs, not_yet=self.retries.waiting(now_s))
        for name in follows.gone:
            say(f"{name} is not in the Ray cluster any more")
            self._forget(self._machines[name])
        for name in follows.given_up:
            self._forget(self._machines[name])
        for notice in follows.notices:
            self._notice(notice)
        for node in follows.start:
            self._start(node, now_s)
        for one in placed:
            if one.waits_s is not None and one.waits_s >= PATIENCE_S and one.name in self._machines:
                self._say_once(f"{one.name} is busy: Ray has not started the agent there; see `ray status`")
        if not self._machines:
            self._say_once("no node of the Ray cluster has that, and is free to use; waiting for one")

    def _notice(self, notice: Notice) -> None:
        within = "" if notice.within_s is None else f" within {notice.within_s:.0f} s"
        say(f"{notice.name} is drained by Ray and leaves the job{within}")
        self._machines[notice.name].tell(Order(word="leave", within_s=notice.within_s))

    def _start(self, node: Node, now_s: float) -> None:
        name = name_of(node, self._machines)
        self._machines[name] = RayMachine(
            self._cluster,
            self._command,
            node,
            name=name,
            needs=self._needs,
            log_dir=self.settings.state_dir,
            now_s=now_s,
        )

    def _ask(self, wanted: list[dict[str, float]]) -> None:
        try:
            self._cluster.request(wanted)
        except RayTrouble as trouble:
            self._say_once(f"Ray's autoscaler was not asked for nodes: {trouble}")

    # --- agents -----------------------------------------------------------------------------

    def look_at_agents(self, now_s: float) -> None:
        """See ``FleetHost``."""
        for machine in list(self._machines.values()):
            machine.look()
            if machine.ended is None:
                continue
            self._forget(machine)
            if not machine.was_told and self.exit_code is None:
                self._ended_early(machine, machine.ended, now_s)

    def _ended_early(self, machine: RayMachine, ended: AgentEnd, now_s: float) -> None:
        wait_s = self.retries.failed(machine.node_id, now_s)
        how = f"has no agent: {ended.reason}" if ended.code is None else f"ended with exit code {ended.code}"
        say(f"{machine.name} {how}; it is tried again in {wait_s:g} s, as long as its node is there")

    def _forget(self, machine: RayMachine) -> None:
        del self._machines[machine.name]
        machine.close()

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            say(text)
