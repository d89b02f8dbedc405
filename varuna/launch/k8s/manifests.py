"""A job's manifests for Kubernetes: a manager that stays, and agents that come and go. Pure.

The manager is a Deployment of one pod with a volume for what it knows; agents are an indexed Job. A pod that is
taken away is a notice first (SIGTERM), then gone, then replaced: neither counts as a failure of the Job, which
ends when all agents do, with the job that they train.

The Service has no address of its own: its name is the manager's pod, so agents reach any port of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from varuna.launch.k8s.job import POD_VARIABLE, SHARED_MEMORY, K8sJob, check
from varuna.launch.k8s.spot import SPOT_NODES
from varuna.launch.k8s.text import Value
from varuna.launch.machine import AWAY_CODE

Block: TypeAlias = Mapping[str, Value]

PORT = 7000
_STATE = "/var/lib/varuna"
_GROUP = 1000  # may write to the manager's volume, whoever the image runs as
_MARGIN_S = 2
"""An agent is through so long before Kubernetes kills its pod."""

_LEFT = (AWAY_CODE, 130, 138, 143)
"""Exit codes of an agent that left (after SIGINT, SIGUSR1, SIGTERM), or found no manager."""

_KILLED = (134, 135, 137, 139)
"""Exit codes of an agent that was killed, or crashed in native code. All others are the job's own."""


def manifests(job: K8sJob) -> list[Block]:
    """What to apply, in order.

    Raises:
        ConfigError: Kubernetes would not take it.
    """
    check(job)
    secret = [_secret(job)] if job.token else []
    agents = _jobset(job) if job.is_jobset else _agents(job)
    return [*secret, _state_claim(job), _service(job), _manager(job), agents]


# --- what the job needs ---------------------------------------------------------------------


def _secret(job: K8sJob) -> Block:
    """Immutable: the pods that run would not hear of another token."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(job, job.secret_name),
        "immutable": True,
        "stringData": {"token": job.token},
    }


def _state_claim(job: K8sJob) -> Block:
    spec: dict[str, Value] = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": job.state_size}},
    }
    if job.storage_class:
        spec["storageClassName"] = job.storage_class
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(job, f"{job.name}-manager", "manager"),
        "spec": spec,
    }


def _service(job: K8sJob) -> Block:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, f"{job.name}-manager", "manager"),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _labels(job, "manager"),
            "ports": [{"name": "manager", "port": PORT}],
        },
    }


# --- the manager ----------------------------------------------------------------------------


def _manager(job: K8sJob) -> Block:
    command = ["varuna", "manager", "--listen", f"0.0.0.0:{PORT}", "--state", f"{_STATE}/{job.name}"]
    command += ["--min-workers", str(job.min_workers), "--settle", f"{job.settle_s:g}", "--stay"]
    command += ["--replace-lost"] if job.replaces else []
    container: dict[str, Value] = {
        "name": "manager",
        "image": job.image,
        "command": command,
        "env": _env(job),
        "ports": [{"name": "manager", "containerPort": PORT}],
        "resources": {"requests": {"cpu": "250m", "memory": "1Gi"}},
        "volumeMounts": [{"name": "state", "mountPath": _STATE}],
    }
    pod: dict[str, Value] = {
        **_pod(job, container),
        "securityContext": {"fsGroup": _GROUP},
        "volumes": [{"name": "state", "persistentVolumeClaim": {"claimName": f"{job.name}-manager"}}],
    }
    if job.nodes.spot:
        pod["affinity"] = SPOT_NODES[job.nodes.spot].only_elsewhere
    stays: Block = {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(job, f"{job.name}-manager", "manager"),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": _labels(job, "manager")},
            "template": {
                "metadata": {"labels": _labels(job, "manager"), "annotations": stays},
                "spec": pod,
            },
        },
    }


# --- agents ---------------------------------------------------------------------------------


def _agents(job: K8sJob) -> Block:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job, f"{job.name}-agents", "agent"),
        "spec": _agents_spec(job),
    }


def _jobset(job: K8sJob) -> Block:
    template: Block = {"metadata": {"labels": _labels(job, "agent")}, "spec": _agents_spec(job)}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job, job.name, "agent"),
        "spec": {
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [{"name": "agents", "replicas": 1, "template": template}],
        },
    }


def _agents_spec(job: K8sJob) -> Block:
    """A pod that is lost is replaced; one whose exit code is the job's own ends all of them."""
    of_agent: Block = {"containerName": "agent"}
    return {
        "completionMode": "Indexed",
        "completions": job.num_pods,
        "parallelism": job.num_pods,
        "backoffLimitPerIndex": job.num_retries,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                {"action": "Ignore", "onExitCodes": {**of_agent, "operator": "In", "values": _LEFT}},
                {"action": "FailJob", "onExitCodes": {**of_agent, "operator": "NotIn", "values": _KILLED}},
            ]
        },
        "template": {"metadata": {"labels": _labels(job, "agent")}, "spec": _agent_pod(job)},
    }


def _agent_pod(job: K8sJob) -> Block:
    command = ["varuna", "agent", "--manager", f"http://{job.name}-manager:{PORT}"]
    command += ["--name", f"$({POD_VARIABLE})", "--workers", str(job.num_workers)]
    command += ["--grace", str(job.pod_grace_s - _MARGIN_S), *map(_verbatim, job.agent)]
    name: Block = {"name": POD_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    mounts: list[Block] = [{"name": f"volume-{i}", "mountPath": one.path} for i, one in enumerate(job.volumes)]
    container: dict[str, Value] = {
        "name": "agent",
        "image": job.image,
        "command": command,
        "env": [name, *_env(job)],
        "resources": _resources(job),
        "volumeMounts": [{"name": "shm", "mountPath": SHARED_MEMORY}, *mounts],
    }
    if job.work_dir:
        container["workingDir"] = job.work_dir
    claims: list[Block] = [
        {"name": f"volume-{i}", "persistentVolumeClaim": {"claimName": one.claim}}
        for i, one in enumerate(job.volumes)
    ]
    pod: dict[str, Value] = {
        **_pod(job, container),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.pod_grace_s,
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}, *claims],
    }
    if job.nodes.labels:
        pod["nodeSelector"] = dict(job.nodes.labels)
    if job.nodes.spot:
        pod["affinity"] = SPOT_NODES[job.nodes.spot].only_there
    if tolerations := _tolerations(job):
        pod["tolerations"] = tolerations
    return pod


def _resources(job: K8sJob) -> Block:
    wanted = job.resources
    requests: dict[str, Value] = {"cpu": wanted.cpu} if wanted.cpu else {}
    limits: dict[str, Value] = {}
    if wanted.memory:
        requests["memory"] = limits["memory"] = wanted.memory
    if wanted.num_gpus:
        limits[wanted.gpu] = wanted.num_gpus
    return {kind: values for kind, values in (("requests", requests), ("limits", limits)) if values}


def _tolerations(job: K8sJob) -> list[Block]:
    found: list[Block] = list(SPOT_NODES[job.nodes.spot].tolerations) if job.nodes.spot else []
    if job.resources.num_gpus:
        found.append({"key": job.resources.gpu, "operator": "Exists", "effect": "NoSchedule"})
    for one in job.nodes.tolerations:
        value: Block = {"operator": "Equal", "value": one.value} if one.value else {"operator": "Exists"}
        found.append({"key": one.key, **value, **({"effect": one.effect} if one.effect else {})})
    return found


# --- what both have -------------------------------------------------------------------------


def _pod(job: K8sJob, container: dict[str, Value]) -> Block:
    if job.env_secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in job.env_secrets]
    account: Block = {"serviceAccountName": job.service_account} if job.service_account else {}
    return {**account, "enableServiceLinks": False, "containers": [container]}


def _env(job: K8sJob) -> list[Block]:
    key: Block = {"secretKeyRef": {"name": job.secret_name, "key": "token"}}
    given: list[Block] = [{"name": name, "value": _verbatim(value)} for name, value in job.env.items()]
    return [{"name": "VARUNA_TOKEN", "valueFrom": key}, *given]


def _verbatim(text: str) -> str:
    """Text that comes out as it is: ``$(NAME)`` would be another variable's value, and ``$$`` is ``$``."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def _metadata(job: K8sJob, name: str, component: str = "") -> Block:
    place: Block = {"namespace": job.namespace} if job.namespace else {}
    return {"name": name, **place, "labels": _labels(job, component)}


def _labels(job: K8sJob, component: str) -> Block:
    part: Block = {"app.kubernetes.io/component": component} if component else {}
    return {"app.kubernetes.io/name": "varuna", "app.kubernetes.io/instance": job.name, **part}
