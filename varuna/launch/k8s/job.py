"""A job on Kubernetes as values, checked: what ``varuna k8s render`` is given. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from varuna.errors import ConfigError
from varuna.launch.k8s import names
from varuna.launch.k8s.spot import SPOT_NODES

GRACE_S = 30
"""Kubernetes' own, and what a machine of its own has."""

LEAST_GRACE_S = 5
POD_VARIABLE = "VARUNA_POD"
OWN_VARIABLES = ("VARUNA_TOKEN", POD_VARIABLE)
SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True, kw_only=True)
class Volume:
    """A claim that exists, and where agents see it."""

    claim: str
    path: str


@dataclass(frozen=True, kw_only=True)
class Toleration:
    """A taint that agents do not mind; an empty ``value`` is any, an empty ``effect`` all."""

    key: str
    value: str = ""
    effect: str = ""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Of one agent's pod.

    Attributes:
        cpu, memory: asked for, and memory is the limit, too; empty for none.
        num_gpus, gpu: how many, and what the cluster calls them.
    """

    cpu: str = ""
    memory: str = ""
    num_gpus: int = 0
    gpu: str = "nvidia.com/gpu"


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Where agents belong.

    Attributes:
        spot: a key of ``SPOT_NODES``: on such nodes, and the manager elsewhere; empty: anywhere.
        labels: that the node must have.
        tolerations: taints that it may have.
    """

    spot: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Toleration] = ()


@dataclass(frozen=True, kw_only=True)
class K8sJob:
    """A job.

    Attributes:
        name: what everything is called after.
        namespace: where; empty leaves it to whoever applies the manifests.
        image: with varuna, torch and the script in it; for manager and agents.
        num_pods: agents.
        num_workers: of each.
        min_workers, settle_s: when the job begins; see ``Policy``.
        replaces: the agent of a lost worker starts another one.
        agent: what follows ``varuna agent`` and its own flags: more of them, the script, its arguments.
        grace_s: from the notice to the end of a pod; None for what the nodes give.
        num_retries: how often a pod may end for a reason that is neither the node's nor the job's.
        resources, nodes: of agents.
        env: variables of agents and manager; ``env_secrets`` are Secrets that have more.
        volumes: of agents.
        service_account: of all pods; empty for the namespace's.
        work_dir: where the script runs; empty for the image's.
        state_size, storage_class: of the manager's volume.
        token: the job's, for a new Secret; empty if ``secret`` is there already, with the key ``token``.
        secret: its name; empty to name it after the job.
        is_jobset: agents are a JobSet of one Job, for clusters that queue these.
    """

    name: str
    namespace: str = ""
    image: str
    num_pods: int
    num_workers: int = 1
    min_workers: int
    settle_s: float = 5.0
    replaces: bool = False
    agent: Sequence[str]
    grace_s: int | None = None
    num_retries: int = 20
    resources: Resources = field(default_factory=Resources)
    nodes: Nodes = field(default_factory=Nodes)
    env: Mapping[str, str] = field(default_factory=dict)
    env_secrets: Sequence[str] = ()
    volumes: Sequence[Volume] = ()
    service_account: str = ""
    work_dir: str = ""
    state_size: str = "1Gi"
    storage_class: str = ""
    token: str
    secret: str = ""
    is_jobset: bool = False

    @property
    def pod_grace_s(self) -> int:
        """Seconds from the notice to the end of a pod."""
        if self.grace_s is not None:
            return self.grace_s
        return SPOT_NODES[self.nodes.spot].grace_s if self.nodes.spot else GRACE_S

    @property
    def secret_name(self) -> str:
        """Of the Secret with the token."""
        return self.secret or f"{self.name}-token"


def check(job: K8sJob) -> None:
    """Whether Kubernetes would take it, as far as that can be told without asking.

    Raises:
        ConfigError: with the rule that is broken.
    """
    names.check_job_name(job.name, "--name")
    if job.namespace:
        names.check_namespace(job.namespace, "--namespace")
    names.check_image(job.image, "--image")
    for name in (*job.env_secrets, *([job.secret] if job.secret else ())):
        names.check_object_name(name, "The Secret")
    if job.service_account:
        names.check_object_name(job.service_account, "--service-account")
    if job.storage_class:
        names.check_object_name(job.storage_class, "--storage-class")
    names.check_bytes(job.state_size, "--state-size")
    if job.work_dir:
        names.check_path(job.work_dir, "--workdir")
    _check_numbers(job)
    _check_resources(job.resources)
    _check_nodes(job.nodes)
    _check_volumes(job.volumes)
    _check_env(job.env)
    _check_text(job.agent)


def _check_numbers(job: K8sJob) -> None:
    num_offered = job.num_pods * job.num_workers
    if job.min_workers > num_offered:
        raise ConfigError(
            f"The job would never begin: it waits for {job.min_workers} workers, and {job.num_pods} pods of "
            f"{job.num_workers} offer {num_offered}. Give a smaller --min-workers or more --pods."
        )
    if job.pod_grace_s < LEAST_GRACE_S:
        raise ConfigError(
            f"--grace {job.pod_grace_s} is too short to hand anything over. Give {LEAST_GRACE_S} s or more."
        )


def _check_resources(resources: Resources) -> None:
    if resources.cpu:
        names.check_cpu(resources.cpu, "--cpu")
    if resources.memory:
        names.check_bytes(resources.memory, "--memory")
    names.check_label_key(resources.gpu, "--gpu-resource")
    if "/" not in resources.gpu:
        raise ConfigError(
            f"--gpu-resource {resources.gpu!r} is no name of a device. Write nvidia.com/gpu, say."
        )


def _check_nodes(nodes: Nodes) -> None:
    for key, value in nodes.labels.items():
        names.check_label_key(key, "--node-label")
        names.check_label_value(value, "--node-label")
    for toleration in nodes.tolerations:
        names.check_label_key(toleration.key, "--toleration")
        names.check_label_value(toleration.value, "--toleration")
        if toleration.effect not in ("", "NoSchedule", "PreferNoSchedule", "NoExecute"):
            raise ConfigError(
                f"--toleration with the effect {toleration.effect!r}: Kubernetes knows NoSchedule, "
                f"PreferNoSchedule and NoExecute."
            )


def _check_volumes(volumes: Sequence[Volume]) -> None:
    paths: list[str] = []
    for volume in volumes:
        names.check_object_name(volume.claim, "--volume")
        names.check_path(volume.path, "--volume")
        if volume.path.rstrip("/") in (*paths, SHARED_MEMORY, ""):
            raise ConfigError(f"--volume {volume.claim}:{volume.path}: there is something at {volume.path}.")
        paths.append(volume.path.rstrip("/"))


def _check_env(env: Mapping[str, str]) -> None:
    for name in OWN_VARIABLES:
        if name in env:
            raise ConfigError(f"--env {name}: that variable is set from elsewhere. Leave it out.")
    _check_text(env.values())


def _check_text(texts: Iterable[str]) -> None:
    for text in texts:
        if "\0" in text or not _is_unicode(text):
            raise ConfigError(f"{text[:80]!r} is no text that a manifest can have.")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
