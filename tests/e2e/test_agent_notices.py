"""Clouds announce what they do to machines of a real job: who must leave leaves, and nobody else does.

Emulated metadata services, each of one machine, play what the real ones may say; what is trained meanwhile is
what an undisturbed run trains.
"""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.jobs import Warm
from tests.e2e.machines import Cluster
from tests.e2e.morphing import NUM_STEPS
from tests.launch.jobs import wait_until
from varuna.testing.clouds import (
    AwsScene,
    AzureEvent,
    AzureScene,
    EmulatedAws,
    EmulatedAzure,
    EmulatedGcp,
    GcpScene,
)

OURS = AzureEvent(event_id="ours", ends_s=1e6)
SHARED = AzureEvent(event_id="shared", resources=("vm_0", "vm_9"), ends_s=1e6)


@pytest.fixture
def cluster(jobs: Warm, tmp_path: Path, cache: Path) -> Iterator[Cluster]:
    (cache / "captures").mkdir(exist_ok=True)
    made = Cluster(jobs, tmp_path, captures=cache / "captures", limit=6)
    yield made
    made.abandon()


def notices(cluster: Cluster) -> list[str]:
    """What the manager has heard of machines that go."""
    return [event.text for event in cluster.client.events() if event.kind == "notice"]


def wait_for(condition: Callable[[], object], what: str) -> None:
    wait_until(condition, 120, what)


def asked(cloud: EmulatedAws | EmulatedGcp | EmulatedAzure, status: int, since: int, path: str = "") -> bool:
    """A request was answered so after the ``since``-th; 0 is a connection that was cut."""
    return any(one.status == status and path in one.path for one in cloud.requests[since:])


def test_three_clouds(cluster: Cluster) -> None:
    with (
        EmulatedAws().serving() as aws,
        EmulatedGcp().serving() as gcp,
        EmulatedAzure(first_call_s=2.0).serving() as azure,
    ):
        for name, cloud in (("a", None), ("b", aws), ("c", gcp), ("d", azure)):
            cluster.start_agent(name, 1, environ=cloud.environ if cloud else None)
        cluster.steps_done(6)
        nobody_reacts_to_what_is_none_of_theirs(cluster, aws, gcp, azure)
        a_notice_is_withdrawn_in_time(cluster, azure)
        one_leaves_and_hears_it_again_and_again(cluster, aws)
        two_leave_at_once(cluster, gcp, azure)
        cluster.limit(NUM_STEPS)
        cluster.ends_well("a", "b", "c", "d")
        cluster.is_exact()
    told = {name: cluster.told(name) for name in "abcd"}
    assert "goes away" not in told["a"]
    assert "aws says that this machine is more likely than before to go away" in told["b"]
    assert told["b"].count("its workers leave") == told["c"].count("its workers leave") == 1
    assert "in 30 s (preempt); its workers leave" in told["c"]
    assert "azure says that this machine does not go away after all" in told["d"]
    assert "at any moment (preempt); its workers leave" in told["d"]


def nobody_reacts_to_what_is_none_of_theirs(
    cluster: Cluster, aws: EmulatedAws, gcp: EmulatedGcp, azure: EmulatedAzure
) -> None:
    """Nothing planned, malformed answers, void tokens, a higher risk, cut polls, others' events, a freeze."""
    wait_for(lambda: asked(aws, 404, 0, "instance-action"), "AWS says that nothing is planned")
    wait_for(lambda: asked(gcp, 200, 0), "GCP says FALSE")
    gcp.show(GcpScene(status=503))
    wait_for(lambda: asked(gcp, 503, 0), "GCP asks to try again")
    wait_for(lambda: asked(azure, 200, 0, "scheduledevents"), "Azure has answered its slow first call")
    num_aws, num_gcp, num_azure = len(aws.requests), len(gcp.requests), len(azure.requests)
    aws.show(AwsScene(body='{"action": '))
    gcp.show(GcpScene())
    azure.show(AzureScene(body="<html>"))
    wait_for(lambda: asked(gcp, 200, num_gcp), "GCP says FALSE again")
    gcp.show(GcpScene(drop=True))
    wait_for(lambda: asked(gcp, 0, num_gcp), "GCP's long poll is cut")
    gcp.show(GcpScene())
    wait_for(lambda: asked(azure, 200, num_azure), "Azure has said something malformed")
    num_azure = len(azure.requests)
    azure.show(
        AzureScene(
            events=(
                AzureEvent(event_id="pause", event_type="Freeze"),
                AzureEvent(event_id="not us", resources=("vm_1", "vm_2")),
            )
        )
    )
    wait_for(lambda: asked(azure, 200, num_azure), "Azure has told of others")
    wait_for(lambda: asked(aws, 200, num_aws, "instance-action"), "AWS has said something malformed")
    num_aws = len(aws.requests)
    aws.show(AwsScene(rebalance=True, tokens_are_void=True))
    wait_for(lambda: asked(aws, 401, num_aws), "AWS refuses the token")
    wait_for(lambda: asked(aws, 200, num_aws, "rebalance"), "AWS tells of a higher risk")
    assert notices(cluster) == []
    assert azure.acknowledged == []
    assert len(cluster.members()) == 4


def a_notice_is_withdrawn_in_time(cluster: Cluster, azure: EmulatedAzure) -> None:
    """The step has not ended yet: nobody leaves."""
    azure.show(AzureScene(events=(OURS,)))
    cluster.event("notice", "d.")
    azure.show(AzureScene())
    cluster.event("notice", "may stay after all (azure)")
    cluster.limit(12)
    cluster.steps_done(12)
    assert len(cluster.members()) == 4
    assert azure.acknowledged == []


def one_leaves_and_hears_it_again_and_again(cluster: Cluster, aws: EmulatedAws) -> None:
    """AWS says the same at every poll. What it says is told once."""
    aws.show(AwsScene(action="terminate"))
    event = cluster.event("notice", "b.")
    assert "(aws)" in event.text
    cluster.limit(18)
    wait_for(lambda: "b" not in cluster.members().values(), "b has left")
    num_aws = len(aws.requests)
    wait_for(lambda: asked(aws, 200, num_aws, "instance-action"), "AWS says it again")
    assert sum("b." in text for text in notices(cluster)) == 1
    cluster.steps_done(18)


def two_leave_at_once(cluster: Cluster, gcp: EmulatedGcp, azure: EmulatedAzure) -> None:
    """30 s and none at all: the event has started. One is shared with another machine and not acknowledged."""
    azure.show(
        AzureScene(events=(AzureEvent(event_id="now", started=True), AzureEvent(event_id=SHARED.event_id)))
    )
    gcp.show(GcpScene(preempted=True))
    wait_for(lambda: sum(name in text for text in notices(cluster) for name in ("c.", "d.")) >= 4, "both")
    cluster.limit(24)
    wait_for(lambda: set(cluster.members().values()) == {"a"}, "c and d have left")
    wait_for(lambda: "now" in azure.acknowledged, "Azure may go ahead")


def test_an_event_that_others_share_is_not_acknowledged(cluster: Cluster) -> None:
    with EmulatedAzure().serving() as azure:
        cluster.start_agent("a", 2)
        cluster.start_agent("d", 2, environ=azure.environ)
        cluster.steps_done(6)
        azure.show(AzureScene(events=(SHARED,)))
        cluster.event("notice", "d.")
        cluster.limit(20)
        wait_for(lambda: set(cluster.members().values()) == {"a"}, "d has left")
        num_azure = len(azure.requests)
        azure.show(AzureScene(events=(SHARED, OURS)))
        wait_for(lambda: "ours" in azure.acknowledged, "what is ours alone is acknowledged")
        assert len(azure.requests) > num_azure
        azure.show(AzureScene())
        cluster.event("ready", "d.")  # all is off: the machine offers its workers again
        cluster.limit(NUM_STEPS)
        cluster.ends_well("a", "d")
        cluster.is_exact()
    assert azure.acknowledged == ["ours"]


# --- off the cloud --------------------------------------------------------------------------


class _Nobody(http.server.BaseHTTPRequestHandler):
    """Some server that is no metadata service."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_error(404)

    do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        """Silence."""


@contextlib.contextmanager
def nobody() -> Iterator[tuple[str, list[str]]]:
    """Where a server is, and what it was asked."""
    handler = type("Handler", (_Nobody,), {"asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", handler.asked
        finally:
            server.shutdown()
            thread.join()


def test_off_the_cloud_it_is_silent_and_cheap(cluster: Cluster) -> None:
    """Three questions at the start, none ever after, no thread, no word; next to nothing of the processor."""
    with nobody() as (url, questions):
        environ = {
            "VARUNA_CLOUD": "",
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": url,
            "GCE_METADATA_HOST": url.removeprefix("http://"),
            "VARUNA_AZURE_METADATA_URL": url,
        }
        cluster.start_agent("a", 4, environ=environ)
        cluster.steps_done(6)
        agent, *_ = cluster.processes("a")
        num_threads = 3  # the launcher's, and two of its line to the manager
        wait_for(lambda: len(questions) >= 3 and agent.num_threads() == num_threads, "the search is over")
        before = agent.cpu_times()
        psutil.cpu_percent(interval=3.0)  # nothing else happens here: the job waits
        after = agent.cpu_times()
        assert after.user + after.system - before.user - before.system < 0.15
        assert len(questions) == 3
        cluster.limit(NUM_STEPS)
        cluster.ends_well("a")
        assert len(questions) == 3
    told = cluster.told("a").lower()
    assert not any(word in told for word in ("aws", "gcp", "azure", "metadata", "goes away"))
