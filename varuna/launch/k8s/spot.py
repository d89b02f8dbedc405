"""Nodes that a cloud may take away, as each platform marks them. Pure.

Agents belong on them and the manager does not. A platform that taints such nodes lets nobody on them who does
not tolerate it; one that only labels them is asked by affinity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from varuna.launch.k8s.text import Value


@dataclass(frozen=True, kw_only=True)
class SpotNodes:
    """One platform.

    Attributes:
        label, value: of nodes that may be taken away.
        is_tainted: they have a taint of the same name, NoSchedule, or usually are given it.
        grace_s: what pods get at most from the announcement to the end.
    """

    label: str
    value: str
    is_tainted: bool
    grace_s: int

    @property
    def only_there(self) -> Value:
        """Affinity of pods that belong there."""
        return self._affinity("In")

    @property
    def only_elsewhere(self) -> Value:
        """Affinity of pods that belong on nodes that stay."""
        return self._affinity("NotIn")

    @property
    def tolerations(self) -> list[Mapping[str, Value]]:
        """Of pods that belong there."""
        if not self.is_tainted:
            return []
        return [{"key": self.label, "operator": "Equal", "value": self.value, "effect": "NoSchedule"}]

    def _affinity(self, operator: str) -> Value:
        term: Value = {"matchExpressions": [{"key": self.label, "operator": operator, "values": [self.value]}]}
        required: Value = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
        return {"nodeAffinity": required}


SPOT_NODES: Mapping[str, SpotNodes] = {
    # The kubelet keeps 15 of the 30 s that Compute Engine gives for pods of the system.
    "gke": SpotNodes(label="cloud.google.com/gke-spot", value="true", is_tainted=True, grace_s=15),
    # Managed node groups; two minutes, of which some pass before a node is drained.
    "eks": SpotNodes(label="eks.amazonaws.com/capacityType", value="SPOT", is_tainted=False, grace_s=90),
    "karpenter": SpotNodes(label="karpenter.sh/capacity-type", value="spot", is_tainted=False, grace_s=90),
    "aks": SpotNodes(label="kubernetes.azure.com/scalesetpriority", value="spot", is_tainted=True, grace_s=25),
}
"""By the names that ``--spot`` takes."""
