"""One profile, one cluster and one wish, as arrays: what all layouts of a search have in common, cached."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from varuna.plan.borders import Rows
from varuna.plan.cluster import Cluster
from varuna.plan.memory import BUCKET_BYTES
from varuna.plan.placement import Devices, Kind, Placement, place
from varuna.plan.profile import LinkProfile, Profile
from varuna.plan.sharing import slowdowns
from varuna.plan.slowest import tables_of
from varuna.plan.tables import Floats
from varuna.plan.wish import Wish


class Ways:
    """Links of one pipeline, ``[P, 2]`` by sending stage and direction (activations, gradients).

    Attributes:
        bytes_per_s, latency_s, send_s: of the link.
        quantiles: of the extra delays, stage by stage, activations before gradients.
    """

    def __init__(self, links: Sequence[LinkProfile]) -> None:
        """``links[s]`` is that from stage s to the next."""
        pairs = list(zip(links, [links[0], *links[:-1]], strict=True))
        self.bytes_per_s = np.array([[link.bytes_per_s for link in pair] for pair in pairs])
        self.latency_s = np.array([[link.latency_s for link in pair] for pair in pairs])
        self.send_s = np.array([[link.send_s for link in pair] for pair in pairs])
        self.quantiles = [link.jitter_s for pair in pairs for link in pair] if len(links) > 1 else []


class Setting:
    """What a search is about.

    Attributes:
        profile, wish: as given.
        tables: the profile's numbers as arrays, ``sections`` and ``residents`` among them.
        devices: the cluster's.
        link_share: bytes per second of a stream alone over what all streams of a machine share; 0 if unshared.
    """

    def __init__(self, profile: Profile, cluster: Cluster, wish: Wish) -> None:
        self.profile = profile
        self.wish = wish
        self.tables = tables_of(profile)
        self.sections = self.tables.sections
        self.residents = self.tables.residents
        self.devices = Devices(cluster, profile.device_memory_bytes)
        link = profile.across_machines
        self.link_share = link.bytes_per_s / link.shared_bytes_per_s if link.shared_bytes_per_s else 0.0
        self._placements: dict[tuple[int, int, int, str], Placement] = {}
        self._rows: dict[int, Rows] = {}
        self._ways: dict[int, Ways] = {}
        self._late: dict[tuple[int, int, bool], Floats] = {}
        self._reductions: dict[tuple[int, bool, bool], tuple[Floats, Floats]] = {}
        self._slowdowns: dict[tuple[int, int, int], float] = {}

    def num_micro_batches(self, micro_batch_size: int) -> int:
        """N."""
        return -(-self.wish.batch_size // micro_batch_size)

    def link(self, crosses: bool) -> LinkProfile:
        """Between two stages, by whether they are on two machines."""
        return self.profile.across_machines if crosses else self.profile.within_machine

    def resident_bytes(self, num_pipelines: int) -> Floats:
        """``[S + 1, S + 1]`` of a stage with as many replicas."""
        return self.residents.shared_bytes if num_pipelines > 1 else self.residents.alone_bytes

    def place(self, num_stages: int, num_pipelines: int, num_deeper: int, layout: str) -> Placement:
        """``num_pipelines`` of ``num_stages``, of which ``num_deeper`` have one more."""
        key = (num_stages, num_pipelines, num_deeper, layout)
        if key not in self._placements:
            depths, counts = [num_stages], [num_pipelines - num_deeper]
            if num_deeper:
                depths, counts = [num_stages, num_stages + 1], [num_pipelines - num_deeper, num_deeper]
            self._placements[key] = place(self.devices, depths, counts, layout)
        return self._placements[key]

    def rows(self, kind: Kind) -> Rows:
        """The devices and links of a kind, from its last stage upwards."""
        if id(kind) not in self._rows:
            recompute = self.wish.recompute
            self._rows[id(kind)] = Rows(
                memory_bytes=kind.memory_bytes[::-1],
                speed=kind.speed[::-1],
                crosses=kind.crosses[::-1],
                recompute=recompute[::-1] if isinstance(recompute, tuple) else recompute,
                within=self.profile.within_machine,
                across=self.profile.across_machines,
            )
        return self._rows[id(kind)]

    def ways(self, kind: Kind) -> Ways:
        """What messages of a kind's stages take besides their bytes."""
        if id(kind) not in self._ways:
            links = [self.link(bool(crosses)) for crosses in kind.crosses]
            self._ways[id(kind)] = Ways(links)
        return self._ways[id(kind)]

    def late_s(self, placement: Placement, kind: Kind, micro_batch_size: int, *, split: bool) -> Floats:
        """``[S + 1, S + 1]``: seconds from a stage's last task until its gradients are reduced
        (``reductions``).

        They leave section by section while the last backward (or weight task) goes on, from the last section to
        the first.
        """
        cached = (id(kind), micro_batch_size, split)
        if cached not in self._late:
            self._late[cached] = self._late_s(placement, kind, micro_batch_size, split=split)
        return self._late[cached]

    def _late_s(self, placement: Placement, kind: Kind, micro_batch_size: int, *, split: bool) -> Floats:
        num, across = placement.num_pipelines, placement.reduces_across
        apart = across or bool(kind.crosses.any())
        key = (num, across, apart)
        if key not in self._reductions:
            self._reductions[key] = (
                self.residents.reduce_s(num, across),
                self.residents.ties_s(num, apart),
            )
        reduce_s, ties_s = self._reductions[key]
        if across:
            reduce_s = reduce_s * max(1.0, placement.groups_per_machine * self.link_share)
        if apart:
            ties_s = ties_s * max(1.0, len(self.profile.ties) * self.link_share)
        runs = self.sections.runs(micro_batch_size)
        last_s = (runs.weight_s if split else runs.backward_s) / float(kind.speed.min())
        if not self.profile.reduces_beside:
            last_s = np.zeros_like(last_s)
        whole_s = np.maximum(0.0, last_s[None, :] - last_s[:, None])
        own_s = np.diff(last_s, prepend=0.0)  # of the section before an index
        first_s = np.append(np.diagonal(reduce_s, offset=1), 0.0)  # of the section that is ready last
        is_one = self.residents.gradient_bytes <= BUCKET_BYTES  # all wait for the section that is ready last
        after_s = np.where(is_one, reduce_s, np.maximum(first_s[:, None], reduce_s - whole_s + own_s[None, :]))
        return np.asarray(after_s + ties_s + self.residents.update_s)

    def slowdown(self, placement: Placement, kind: Kind, micro_batch_size: int) -> float:
        """About how much longer a message takes because others leave the same machine."""
        if not self.link_share or len(self.profile.sections) < 2:
            return 1.0
        cached = (placement.streams_per_machine, id(kind), micro_batch_size)
        if cached not in self._slowdowns:
            self._slowdowns[cached] = self._slowdown(placement.streams_per_machine, kind, micro_batch_size)
        return self._slowdowns[cached]

    def _slowdown(self, streams_per_machine: int, kind: Kind, micro_batch_size: int) -> float:
        runs = self.sections.runs(micro_batch_size)
        cycle_s = (runs.forward_s[-1] + runs.backward_s[-1]) / kind.num_stages / float(kind.speed.min())
        mean_bytes = float(np.mean(runs.forward_bytes[1:-1]))
        share = min(1.0, mean_bytes / self.profile.across_machines.bytes_per_s / max(cycle_s, 1e-12))
        count = max(1, streams_per_machine)
        alike = slowdowns(np.zeros(count, dtype=np.int64), np.full(count, share), 1.0 / self.link_share)
        return float(alike[0])
