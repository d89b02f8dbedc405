"""What ``varuna k8s render`` prints: against the schemas that Kubernetes publishes, and our own commands."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner, Result
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from varuna.cli import main
from varuna.cli.machines import agent, manager
from varuna.launch.k8s.job import K8sJob
from varuna.launch.k8s.spot import SPOT_NODES
from varuna.launch.k8s.text import to_yaml

VERSION = "1.37"
TOKEN = "t" * 20
PLAIN = ("--image", "registry.example.org:5000/ml/gpt:1.0", "train.py")
WORDS = """--name gpt-2 --namespace ml --pods 4 --gpus 8 --cpu 96 --memory 900Gi --min-workers 16 --settle 9
    --spot gke --grace 20 --retries 3 --node-label zone=a --toleration team=ml:NoSchedule --toleration odd
    --replace-lost --env-from keys --volume data:/data --workdir /app --service-account trainer
    --storage-class fast.ssd --state-size 2Gi --checkpoint s3://bucket/gpt --checkpoint-every 300s
    --stages 4 -b 2 --schedule 1f1b --recompute --no-check"""
FULL = (
    *WORDS.split(),
    *("--image", "gpt@sha256:" + "0a" * 32, "--env", "NOTE=no: $(HOME) $$ é\n1"),
    *("-m", "gpt.train", "--lr", "1e-3", "$(date)", "$$"),
)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["k8s", "render", *arguments], env={"VARUNA_TOKEN": TOKEN})


def rendered(*arguments: str) -> dict[str, dict[str, Any]]:
    """The documents by kind."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    documents = list(yaml.safe_load_all(result.output))
    assert list(yaml.safe_load_all(to_yaml(documents))) == documents
    return {document["kind"]: document for document in documents}


@pytest.fixture(scope="module", autouse=True)
def schemas_are_read_once() -> Iterator[None]:
    """All that Kubernetes publishes is six megabytes, which would be read for every document."""
    with pytest.MonkeyPatch.context() as patch:
        cached = functools.cache(kubernetes_validate.utils.schema_contents)
        patch.setattr(kubernetes_validate.utils, "schema_contents", cached)
        yield


def check_schema(document: dict[str, Any]) -> None:
    """Raise ``ValidationError`` for a field that Kubernetes does not know, or of another type."""
    kubernetes_validate.validate(document, VERSION, strict=True)


def container_of(document: dict[str, Any]) -> dict[str, Any]:
    [container] = document["spec"]["template"]["spec"]["containers"]
    return container


def expanded(text: str, variables: dict[str, str]) -> str:
    """As the kubelet does it: ``$(NAME)`` is a variable, ``$$`` is ``$``."""
    shown, index = "", 0
    while index < len(text):
        if text[index] == "$" and text[index + 1 : index + 2] == "$":
            shown, index = shown + "$", index + 2
        elif text[index] == "$" and text[index + 1 : index + 2] == "(" and ")" in text[index:]:
            end = text.index(")", index)
            name = text[index + 2 : end]
            shown, index = shown + variables.get(name, f"$({name})"), end + 1
        else:
            shown, index = shown + text[index], index + 1
    return shown


def parsed(command: click.Command, words: Sequence[str]) -> dict[str, Any]:
    """What our own command takes a container's command line for."""
    assert words[:2] == ["varuna", command.name]
    return command.make_context(str(command.name), list(words[2:])).params


# --- schemas --------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [PLAIN, FULL], ids=["plain", "full"])
def test_manifests_are_what_kubernetes_publishes(arguments: tuple[str, ...]) -> None:
    documents = rendered(*arguments)
    assert list(documents) == ["Secret", "PersistentVolumeClaim", "Service", "Deployment", "Job"]
    for document in documents.values():
        check_schema(document)


@pytest.mark.parametrize("spot", list(SPOT_NODES))
def test_spot_nodes_of_every_platform(spot: str) -> None:
    documents = rendered("--spot", spot, *PLAIN)
    nodes = SPOT_NODES[spot]
    shown = {}
    for kind in ("Deployment", "Job"):
        check_schema(documents[kind])
        pod = documents[kind]["spec"]["template"]["spec"]
        required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        [[expression]] = [term["matchExpressions"] for term in required["nodeSelectorTerms"]]
        assert (expression["key"], expression["values"]) == (nodes.label, [nodes.value])
        shown[kind] = (expression["operator"], bool(pod.get("tolerations")))
    assert shown == {"Deployment": ("NotIn", False), "Job": ("In", nodes.is_tainted)}
    assert documents["Job"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == nodes.grace_s


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Job", ("spec", "backOffLimitPerIndex"), 3),
        ("Job", ("spec", "template", "spec", "terminationGraceSeconds"), 3),
        ("Job", ("spec", "template", "spec", "terminationGracePeriodSeconds"), "30"),
        ("Job", ("spec", "podFailurePolicy", "rules", 0, "onPodConditions", 0, "kind"), "x"),
        ("Deployment", ("spec", "template", "spec", "containers", 0, "mounts"), []),
        ("Service", ("spec", "ports", 0, "port"), "manager"),
        ("PersistentVolumeClaim", ("spec", "accessModes"), "ReadWriteOnce"),
        ("Secret", ("string_data",), {}),
    ],
)
def test_a_wrong_field_is_found(kind: str, path: tuple[str | int, ...], value: object) -> None:
    """The check above can fail."""
    document = inner = rendered(*PLAIN)[kind]
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        check_schema(document)


def test_a_jobset() -> None:
    documents = rendered("--jobset", *FULL)
    jobset = documents["JobSet"]
    assert JobsetV1alpha2JobSet.from_dict(jobset).to_dict() == jobset
    [replicated] = jobset["spec"]["replicatedJobs"]
    job = rendered(*FULL)["Job"]
    assert replicated["template"]["spec"] == job["spec"]
    wrong = {**jobset, "spec": {**jobset["spec"], "replicas": 2}}
    assert JobsetV1alpha2JobSet.from_dict(wrong).to_dict() != wrong


# --- what is in them ------------------------------------------------------------------------


def test_the_manager_is_one_and_keeps_what_it_knows() -> None:
    documents = rendered(*FULL)
    spec = documents["Deployment"]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    container = container_of(documents["Deployment"])
    given = parsed(manager, container["command"])
    assert (given["min_workers"], given["stay"], given["replaces"]) == (16, True, True)
    [mount] = container["volumeMounts"]
    assert given["state"].is_relative_to(mount["mountPath"])
    [volume] = spec["template"]["spec"]["volumes"]
    claim = documents["PersistentVolumeClaim"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["storageClassName"] == "fast.ssd"
    service = documents["Service"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    [port] = service["spec"]["ports"]
    assert given["listen"] == f"0.0.0.0:{port['port']}"


def test_agents_run_what_was_asked() -> None:
    documents = rendered(*FULL)
    container = container_of(documents["Job"])
    command = [expanded(word, {"VARUNA_POD": "gpt-2-agents-0-x7k2p"}) for word in container["command"]]
    given = parsed(agent, command)
    service = documents["Service"]["metadata"]["name"]
    assert given["url"] == f"http://{service}:{documents['Service']['spec']['ports'][0]['port']}"
    assert (given["name"], given["workers"]) == ("gpt-2-agents-0-x7k2p", 8)
    layout = {key: given[key] for key in ("stages", "micro_batch_size", "schedule", "recompute", "no_check")}
    assert layout == {
        "stages": 4,
        "micro_batch_size": 2,
        "schedule": "1f1b",
        "recompute": True,
        "no_check": True,
    }
    assert (given["is_module"], given["script"]) == (True, "gpt.train")
    assert given["arguments"] == ("--lr", "1e-3", "$(date)", "$$")
    variables = {one["name"]: expanded(one.get("value", ""), {}) for one in container["env"]}
    assert variables["NOTE"] == "no: $(HOME) $$ é\n1"
    assert variables["VARUNA_CHECKPOINT"] == "s3://bucket/gpt"
    assert variables["VARUNA_CHECKPOINT_EVERY"] == "300s"
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert container["resources"] == {
        "requests": {"cpu": "96", "memory": "900Gi"},
        "limits": {"memory": "900Gi", "nvidia.com/gpu": 8},
    }
    assert {one["mountPath"] for one in container["volumeMounts"]} == {"/dev/shm", "/data"}
    pod = documents["Job"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"zone": "a"}
    assert {one["key"] for one in pod["tolerations"]} == {
        "cloud.google.com/gke-spot",
        "nvidia.com/gpu",
        "team",
        "odd",
    }


def test_leaving_fits_into_what_kubernetes_waits() -> None:
    """SIGTERM is the notice; the agent is through before SIGKILL."""
    pod = rendered(*FULL)["Job"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] == 20
    assert parsed(agent, container["command"])["grace"] == 18


def outcome(job: dict[str, Any], code: int, *, is_disrupted: bool = False) -> str:
    """What becomes of a pod's end, by the rules of a Job's pod failure policy."""
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        conditions, codes = rule.get("onPodConditions"), rule.get("onExitCodes")
        if conditions is not None:
            assert conditions == [{"type": "DisruptionTarget", "status": "True"}]
        elif codes is not None:
            assert codes["containerName"] == container_of(job)["name"]
            assert codes["values"] == sorted(set(codes["values"]))
        is_in = codes is not None and (code in codes["values"]) == (codes["operator"] == "In")
        if (conditions is not None and is_disrupted) or is_in:
            return str(rule["action"])
    return "Count"


def test_a_lost_pod_is_replaced_and_a_failed_script_ends_the_job() -> None:
    job = rendered(*PLAIN)["Job"]
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == 1
    assert (spec["backoffLimitPerIndex"], spec["podReplacementPolicy"]) == (20, "Failed")
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # which a pod failure policy needs
    assert outcome(job, 137, is_disrupted=True) == "Ignore"
    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        assert outcome(job, 128 + signum) == "Ignore"
    assert outcome(job, os.EX_TEMPFAIL) == "Ignore"  # no manager yet
    for signum in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS):
        assert outcome(job, 128 + signum) == "Count"
    for code in (1, 2, 3, 128):
        assert outcome(job, code) == "FailJob"


def test_the_token_is_in_a_secret_alone() -> None:
    result = invoke(*FULL)
    assert result.output.count(TOKEN) == 1
    documents = rendered(*FULL)
    secret = documents["Secret"]
    assert secret["stringData"] == {"token": TOKEN}
    assert secret["immutable"] is True
    for kind in ("Deployment", "Job"):
        [found] = [one for one in container_of(documents[kind])["env"] if one["name"] == "VARUNA_TOKEN"]
        assert found["valueFrom"]["secretKeyRef"] == {"name": secret["metadata"]["name"], "key": "token"}
    known = rendered("--secret", "mine", *PLAIN)
    assert "Secret" not in known
    assert TOKEN not in str(known)
    assert container_of(known["Job"])["env"][1]["valueFrom"]["secretKeyRef"]["name"] == "mine"


def test_a_token_of_its_own() -> None:
    runner = CliRunner()
    tokens = {runner.invoke(main, ["k8s", "render", *PLAIN]).output.partition("token: ")[2][:43] for _ in "ab"}
    assert len(tokens) == 2


@pytest.mark.parametrize(
    ("script", "name"),
    [("train.py", "train"), ("a/My_GPT.v2.py", "my-gpt-v2"), ("2b.py", "job-2b"), ("é.py", "job")],
)
def test_a_name_after_the_script(script: str, name: str) -> None:
    documents = rendered("--image", "gpt", script)
    assert documents["Service"]["metadata"]["name"] == f"{name}-manager"
    for document in documents.values():
        check_schema(document)


def test_the_longest_name_leaves_room() -> None:
    """For a pod of a JobSet: NAME-agents-0-INDEX-RANDOM in 63 letters."""
    name = "a" * 40
    assert rendered("--name", name, *PLAIN)
    assert len(f"{name}-agents-0-9999-x7k2p") <= 63


# --- what Kubernetes would refuse -----------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--name", "GPT"), "--name 'GPT': Kubernetes takes small letters, digits and '-'"),
        (("--name", "2b"), "a letter first"),
        (("--name", "a-"), "no '-' last"),
        (("--name", "a" * 41), "40 at most"),
        (("--namespace", "a.b"), "--namespace 'a.b': Kubernetes takes"),
        (("--image", "A/b:c d"), "--image 'A/b:c d' is no image"),
        (("--image", "Gpt"), "is no image"),
        (("--cpu", "0"), "is no number of cores"),
        (("--cpu", "4Gi"), "is no number of cores"),
        (("--memory", "16GB"), "--memory '16GB' is no size"),
        (("--memory", "0"), "is no size"),
        (("--state-size", "-1Gi"), "is no size"),
        (("--gpu-resource", "gpu"), "is no name of a device"),
        (("--gpu-resource", "nvidia.com/a b"), "--gpu-resource 'nvidia.com/a b'"),
        (("--spot", "gcp"), "'gcp' is not one of"),
        (("--grace", "4"), "--grace 4 is too short"),
        (("--min-workers", "3"), "would never begin: it waits for 3 workers, and 1 pods of 1 offer 1"),
        (("--node-label", "zone"), "there is no '=' in it"),
        (("--node-label", "zone=a b"), "--node-label 'a b'"),
        (("--node-label", "-a=b"), "--node-label '-a'"),
        (("--toleration", ":NoSchedule"), "write KEY, KEY=VALUE"),
        (("--toleration", "a:Never"), "Kubernetes knows NoSchedule"),
        (("--env", "1A=b"), "write NAME=VALUE"),
        (("--env", "VARUNA_TOKEN=secret"), "--env VARUNA_TOKEN: that variable is set from elsewhere"),
        (("--env", "A=\udcff"), "is no text that a manifest can have"),
        (("--env-from", "My_Keys"), "The Secret 'My_Keys'"),
        (("--secret", "a..b"), "The Secret 'a..b'"),
        (("--service-account", "A"), "--service-account 'A'"),
        (("--storage-class", "A"), "--storage-class 'A'"),
        (("--volume", "data"), "there is no ':' in it"),
        (("--volume", "Data:/data"), "--volume 'Data'"),
        (("--volume", "data:data"), "is no folder in a container"),
        (("--volume", "a:/x", "--volume", "b:/x/"), "there is something at /x/"),
        (("--volume", "a:/dev/shm"), "there is something at /dev/shm"),
        (("--workdir", "app"), "is no folder in a container"),
        (("--checkpoint", "/ckpt"), "a pod's own folder ends with the pod"),
        (("--keep", "2"), "needs a place for checkpoints"),
    ],
)
def test_what_would_be_refused_is_told_with_the_rule(arguments: tuple[str, ...], said: str) -> None:
    result = invoke(*PLAIN[:2], *arguments, "train.py")
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert "apiVersion" not in result.output


def test_a_folder_that_pods_share_may_have_checkpoints() -> None:
    documents = rendered("--volume", "shared:/mnt", "--checkpoint", "/mnt/gpt", *PLAIN)
    variables = {one["name"]: one.get("value") for one in container_of(documents["Job"])["env"]}
    assert variables["VARUNA_CHECKPOINT"] == "/mnt/gpt"


ODD = (
    "no Yes 1 1.0 0x1 -1 .5 .inf 1:20 2026-01-01 null ~ 'a' *a &a !a %a @a `a [a] {a} | > ? --- ... --a -a = <<"
)


@pytest.mark.parametrize(
    "text",
    [
        *ODD.split(),
        *("", "a: b", "a #b", "- a", '"', "a\nb\n", "\t", "é", "\u2028", "\x07", "\U0001f600"),
        *(" a", "a ", "a:", "http://a:1", "\\n"),
    ],
)
def test_text_is_read_back_as_it_was(text: str) -> None:
    document = {text or "x": text, "list": [text, [text, {"a": text}], {"b": [text]}, {}, [], True, -3]}
    assert yaml.safe_load(to_yaml([document])) == document


def test_defaults_of_values_are_those_of_the_command() -> None:
    """Whoever makes a ``K8sJob`` in Python gets the same."""
    job = K8sJob(name="a", image="b", num_pods=1, min_workers=1, agent=["train.py"], token=TOKEN)
    command = main.commands["k8s"].commands["render"]  # type: ignore[attr-defined]
    defaults = {option.name: option.default for option in command.params}
    assert (defaults["retries"], defaults["state_size"]) == (job.num_retries, job.state_size)
    assert (defaults["settle"], defaults["gpu_resource"]) == (job.settle_s, job.resources.gpu)
