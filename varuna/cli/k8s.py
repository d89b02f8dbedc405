"""``varuna k8s render``: a job's manifests for Kubernetes. Starts without torch."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from varuna.cli.checkpoint import checkpoint_environ, checkpoint_options
from varuna.cli.hosts import named_variables, parse_env_files
from varuna.cli.start import layout_options
from varuna.errors import ConfigError
from varuna.launch.k8s.job import K8sJob, Nodes, Resources, Toleration, Volume
from varuna.launch.k8s.spot import SPOT_NODES
from varuna.launch.token import VARIABLE, read_token

_UP = click.IntRange(min=1)
_PODS = click.IntRange(min=1, max=10_000)
_TOLERATION = re.compile(r"(?P<key>[^=:]+)(?:=(?P<value>[^:]*))?(?::(?P<effect>.*))?")

_Command = TypeVar("_Command", bound=Callable[..., Any])


@click.group()
def k8s() -> None:
    """Run on Kubernetes."""


def _several(*options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    def add(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


_size_options = _several(
    click.option("--pods", type=_PODS, default=1, show_default=True, help="Agents, each in a pod."),
    click.option("-w", "--workers", type=_UP, help="Of each. Default: one per GPU, else 1."),
    click.option("--gpus", type=click.IntRange(min=0), default=0, show_default=True, help="Of each pod."),
    click.option("--gpu-resource", default="nvidia.com/gpu", show_default=True, help="Their name there."),
    click.option("--cpu", default="", help="Cores that a pod asks for: 4, 500m."),
    click.option("--memory", default="", help="Memory of a pod: 16Gi."),
    click.option("--min-workers", type=_UP, help="Begin with no fewer. Default: all."),
    click.option(
        "--settle",
        type=click.FloatRange(min=0),
        default=5.0,
        show_default=True,
        help="Seconds without a new agent before it begins.",
    ),
    click.option("--replace-lost", "replaces", is_flag=True, help="Start a worker for each that is lost."),
)
_place_options = _several(
    click.option("--spot", type=click.Choice(tuple(SPOT_NODES)), help="Agents belong on spot nodes of these."),
    click.option(
        "--grace",
        type=_UP,
        help="Seconds from SIGTERM to the end of a pod. Default: 30; with --spot, what such nodes give.",
    ),
    click.option(
        "--retries",
        type=click.IntRange(min=0),
        default=20,
        show_default=True,
        help="How often a pod may be killed or crash; nodes that go do not count.",
    ),
    click.option("--node-label", "labels", multiple=True, metavar="KEY=VALUE", help="Nodes must have it."),
    click.option(
        "--toleration",
        "tolerations",
        multiple=True,
        metavar="KEY[=VALUE][:EFFECT]",
        help="Nodes may have this taint.",
    ),
    click.option("--jobset", is_flag=True, help="Agents as a JobSet (https://jobset.sigs.k8s.io)."),
)
_content_options = _several(
    click.option("--env", multiple=True, metavar="NAME[=VALUE]", help="One variable."),
    click.option(
        "--env-file",
        "env_files",
        multiple=True,
        type=click.Path(dir_okay=False, path_type=Path),
        help="Variables, NAME=VALUE lines.",
    ),
    click.option(
        "--env-from", "env_secrets", multiple=True, metavar="SECRET", help="All variables of a Secret."
    ),
    click.option("--volume", "volumes", multiple=True, metavar="CLAIM:/PATH", help="A claim that exists."),
    click.option("--service-account", default="", help="Of all pods, for access to buckets, say."),
    click.option("--workdir", default="", help="Where the script runs. Default: the image's."),
    click.option(
        "--secret",
        default="",
        help="A Secret that exists, with the job's token under `token`. "
        f"Default: a new one, with {VARIABLE} or a new token.",
    ),
    click.option("--state-size", default="1Gi", show_default=True, help="Of the manager's volume."),
    click.option("--storage-class", default="", help="Of the manager's volume. Default: the cluster's."),
)


@k8s.command(context_settings={"allow_interspersed_args": False})
@click.option("--image", required=True, help="With varuna, torch and SCRIPT in it.")
@click.option("--name", default="", help="What all of it is called. Default: after SCRIPT.")
@click.option("-n", "--namespace", default="", help="Default: that of `kubectl apply`.")
@_size_options
@_place_options
@_content_options
@checkpoint_options
@layout_options
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is the name of a module, as for python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def render(script: str, **given: Any) -> None:
    """Print manifests for a job that runs SCRIPT, a path in the image, on Kubernetes.

    varuna k8s render --image IMAGE --pods 8 --gpus 8 --spot gke --checkpoint s3://bucket/gpt train.py

    Keep it in a file, which has the job's token. `kubectl apply -f FILE` starts a manager with a volume for
    what it knows, and agents; `kubectl delete -f FILE` removes all of it.
    """
    from varuna.launch.k8s.manifests import manifests
    from varuna.launch.k8s.text import to_yaml

    click.echo(to_yaml(manifests(_job(script, **given))), nl=False)


def _job(
    script: str,
    *,
    name: str,
    gpus: int,
    workers: int | None,
    pods: int,
    min_workers: int | None,
    secret: str,
    spot: str | None,
    labels: Sequence[str],
    tolerations: Sequence[str],
    volumes: Sequence[str],
    env: Sequence[str],
    env_files: Sequence[Path],
    checkpoint_url: str | None,
    checkpoint_every: str | None,
    keep: int | None,
    resume: str | None,
    **given: Any,
) -> K8sJob:
    num_workers = workers or gpus or 1
    saved = checkpoint_environ({}, url=checkpoint_url, every=checkpoint_every, keep=keep, resume=resume)
    shared = tuple(Volume(claim=a, path=b) for a, b in (_pair(text, ":", "--volume") for text in volumes))
    _check_place(checkpoint_url, shared)
    variables = {**parse_env_files(env_files), **named_variables(env, os.environ), **_set(saved)}
    return K8sJob(
        name=name or _name_of(script),
        namespace=given["namespace"],
        image=given["image"],
        num_pods=pods,
        num_workers=num_workers,
        min_workers=min_workers or pods * num_workers,
        settle_s=given["settle"],
        replaces=given["replaces"],
        agent=_agent_arguments(script, **given),
        grace_s=given["grace"],
        num_retries=given["retries"],
        resources=Resources(cpu=given["cpu"], memory=given["memory"], num_gpus=gpus, gpu=given["gpu_resource"]),
        nodes=Nodes(
            spot=spot or "",
            labels=dict(_pair(text, "=", "--node-label") for text in labels),
            tolerations=tuple(_toleration(text) for text in tolerations),
        ),
        env=variables,
        env_secrets=given["env_secrets"],
        volumes=shared,
        service_account=given["service_account"],
        work_dir=given["workdir"],
        state_size=given["state_size"],
        storage_class=given["storage_class"],
        token="" if secret else _token(),
        secret=secret,
        is_jobset=given["jobset"],
    )


def _agent_arguments(
    script: str,
    *,
    stages: int | None,
    micro_batch_size: int | None,
    schedule: str | None,
    recompute: bool | None,
    no_check: bool,
    is_module: bool,
    arguments: Sequence[str],
    **_: Any,
) -> tuple[str, ...]:
    """What follows ``varuna agent`` and its own flags."""
    flags = {"--stages": stages, "--micro-batch-size": micro_batch_size, "--schedule": schedule}
    words = [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
    if recompute is not None:
        words.append("--recompute" if recompute else "--no-recompute")
    words += ["--no-check"] if no_check else []
    words += ["-m"] if is_module else []
    return (*words, script, *arguments)


def _check_place(url: str | None, volumes: Sequence[Volume]) -> None:
    if url is None or "://" in url:
        return
    if not any(Path(url).is_relative_to(volume.path) for volume in volumes):
        raise ConfigError(
            f"--checkpoint {url}: a pod's own folder ends with the pod. Give a bucket, or a folder on a claim "
            f"that all pods share: --volume CLAIM:{url if url.startswith('/') else '/checkpoints'}"
        )


def _name_of(script: str) -> str:
    """A name for the job, as near to the script's as Kubernetes takes."""
    stem = re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")
    return stem if stem[:1].isalpha() else f"job-{stem}".rstrip("-")


def _token() -> str:
    return read_token(os.environ, None) if os.environ.get(VARIABLE) else secrets.token_urlsafe(32)


def _set(variables: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if value}


def _pair(text: str, between: str, flag: str) -> tuple[str, str]:
    first, found, second = text.partition(between)
    if not found:
        raise ConfigError(f"{flag} {text!r}: there is no {between!r} in it. See `varuna k8s render --help`.")
    return first, second


def _toleration(text: str) -> Toleration:
    found = _TOLERATION.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"--toleration {text!r}: write KEY, KEY=VALUE, KEY:NoSchedule or KEY=VALUE:NoSchedule."
        )
    return Toleration(key=found["key"], value=found["value"] or "", effect=found["effect"] or "")
