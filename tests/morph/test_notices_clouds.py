"""Every behaviour of the three metadata services that can matter, played by real servers in virtual time."""

from __future__ import annotations

import asyncio
import math
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from tests.morph.cloud_support import START, Heard, play, watching
from varuna.morph.notices import NoticeKind, NoticeWithdrawn, PreemptionHint, PreemptionNotice
from varuna.morph.notices_aws import AwsNotices
from varuna.morph.notices_azure import AzureNotices
from varuna.morph.notices_gcp import GcpNotices
from varuna.testing.clouds import (
    AwsScene,
    AzureEvent,
    AzureScene,
    EmulatedAws,
    EmulatedAzure,
    EmulatedGcp,
    GcpScene,
)
from varuna.testing.virtual_time import VirtualTime


def play_aws(scenes, until_s, *, ttl_s=21600, utc_now=lambda: START, **options):
    time = VirtualTime()
    cloud = EmulatedAws(scenes, waiting=time, server_time=START, **options)
    heard = play(
        cloud,
        time,
        lambda url, report, waiting: AwsNotices(
            "m0", report, base_url=url, waiting=waiting, token_ttl_s=ttl_s, utc_now=utc_now
        ),
        until_s,
    )
    return heard, cloud


def play_gcp(scenes, until_s, *, notice_s=30.0, **options):
    time = VirtualTime()
    cloud = EmulatedGcp(scenes, waiting=time, server_time=START, **options)
    heard = play(
        cloud,
        time,
        lambda url, report, waiting: GcpNotices("m0", report, base_url=url, waiting=waiting, notice_s=notice_s),
        until_s,
    )
    return heard, cloud


def play_azure(scenes, until_s, *, utc_now=lambda: START, **options):
    time = VirtualTime()
    cloud = EmulatedAzure(scenes, waiting=time, server_time=START, **options)
    heard = play(
        cloud,
        time,
        lambda url, report, waiting: AzureNotices("m0", report, base_url=url, waiting=waiting, utc_now=utc_now),
        until_s,
    )
    return heard, cloud


def only(heard: Heard) -> tuple[float, PreemptionNotice]:
    [(at_s, notice)] = heard.told
    assert isinstance(notice, PreemptionNotice)
    return at_s, notice


# --- AWS ------------------------------------------------------------------------------------


@pytest.mark.parametrize("notice_s", [0, 30, 120])
@pytest.mark.parametrize(("action", "kind"), [("terminate", NoticeKind.TERMINATE), ("stop", NoticeKind.STOP)])
def test_aws_404_then_200_is_told_once_with_the_time_that_is_left(action, kind, notice_s):
    heard, cloud = play_aws([AwsScene(at_s=62, action=action, ends_s=62 + notice_s)], until_s=100)
    at_s, notice = only(heard)
    assert at_s == 65  # asked every 5 s
    assert notice.deadline_s == max(0, notice_s - 3)
    assert (notice.machine, notice.kind, notice.source) == ("m0", kind, "aws")
    actions = [request for request in cloud.requests if "instance-action" in request.path]
    assert [request.status for request in actions] == [404] * 13 + [200] * 8
    assert heard.reports == []


def test_aws_hibernation_gives_no_time():
    heard, _ = play_aws([AwsScene(at_s=1, action="hibernate", ends_s=121)], until_s=10)
    assert only(heard)[1].kind is NoticeKind.HIBERNATE
    assert only(heard)[1].deadline_s == 0


def test_aws_rebalance_is_a_hint_and_is_told_once():
    heard, _ = play_aws([AwsScene(at_s=12, rebalance=True)], until_s=60)
    [(at_s, hint)] = heard.told
    assert at_s == 15
    assert isinstance(hint, PreemptionHint)


def test_aws_hint_then_notice_then_withdrawn():
    script = [
        AwsScene(at_s=0, rebalance=True),
        AwsScene(at_s=10, action="terminate", rebalance=True),
        AwsScene(at_s=20, rebalance=True),
    ]
    heard, _ = play_aws(script, until_s=40)
    assert [type(one) for _, one in heard.told] == [PreemptionHint, PreemptionNotice, NoticeWithdrawn]
    notice, withdrawn = heard.told[1][1], heard.told[2][1]
    assert notice.event_id == withdrawn.event_id


def test_aws_token_is_renewed_before_it_ends():
    heard, cloud = play_aws([AwsScene(at_s=200, action="terminate")], until_s=210, ttl_s=60)
    assert only(heard)[0] == 200
    assert 401 not in {request.status for request in cloud.requests}
    tokens = [request.at_s for request in cloud.requests if request.method == "PUT"]
    assert tokens == [0, 55, 110, 165]


def test_aws_token_that_became_void_is_renewed_at_once():
    script = [AwsScene(at_s=12, tokens_are_void=True), AwsScene(at_s=14, action="stop", tokens_are_void=True)]
    heard, cloud = play_aws(script, until_s=30)
    assert only(heard)[0] == 15
    assert [request.at_s for request in cloud.requests if request.status == 401] == [15]
    assert [request.at_s for request in cloud.requests if request.method == "PUT"] == [0, 15]
    assert heard.reports == []


def test_aws_refuses_for_ever_and_is_asked_at_the_usual_pace():
    heard, cloud = play_aws([AwsScene(status=401)], until_s=50)
    assert heard.told == []
    assert len(heard.reports) == 1
    assert len(cloud.requests) <= 2 * 11


# --- GCP ------------------------------------------------------------------------------------


@pytest.mark.parametrize("notice_s", [0, 30, 120])
def test_gcp_notice_is_seen_at_once_and_told_once(notice_s):
    heard, cloud = play_gcp([GcpScene(at_s=1000, preempted=True)], until_s=2000, notice_s=notice_s)
    at_s, notice = only(heard)
    assert at_s == 1000
    assert (notice.deadline_s, notice.kind, notice.source) == (notice_s, NoticeKind.PREEMPT, "gcp")
    assert len(cloud.requests) <= 9  # one in 300 s
    assert heard.reports == []


def test_gcp_503_then_true():
    script = [GcpScene(at_s=100, status=503), GcpScene(at_s=161, preempted=True)]
    heard, cloud = play_gcp(script, until_s=200)
    at_s, _ = only(heard)
    assert 161 <= at_s <= 166
    refused = [request.at_s for request in cloud.requests if request.status == 503]
    assert 10 <= len(refused) <= 20
    assert max(later - sooner for sooner, later in pairwise(refused)) <= 5
    assert heard.reports == []


def test_gcp_dropped_long_poll_loses_nothing():
    script = [GcpScene(at_s=50, drop=True), GcpScene(at_s=52, preempted=True)]
    heard, cloud = play_gcp(script, until_s=100)
    at_s, _ = only(heard)
    assert 52 <= at_s <= 54
    assert [request.status for request in cloud.requests][:2] == [200, 0]
    assert heard.reports == []


def test_gcp_that_stays_away_is_reported_once():
    heard, _ = play_gcp([GcpScene(at_s=50, drop=True)], until_s=200)
    assert heard.told == []
    assert len(heard.reports) == 1


def test_gcp_withdrawn_and_announced_again():
    script = [
        GcpScene(at_s=10, preempted=True),
        GcpScene(at_s=20, preempted=False),
        GcpScene(at_s=30, preempted=True),
    ]
    heard, _ = play_gcp(script, until_s=100)
    assert [(at_s, type(one)) for at_s, one in heard.told] == [
        (10, PreemptionNotice),
        (20, NoticeWithdrawn),
        (30, PreemptionNotice),
    ]


def test_gcp_that_does_not_wait_is_not_asked_without_pause():
    heard, cloud = play_gcp(
        [GcpScene(waits=False), GcpScene(at_s=60, preempted=True, waits=False)], until_s=100
    )
    assert only(heard)[0] == 60
    assert 90 < len(cloud.requests) < 110


# --- Azure ----------------------------------------------------------------------------------


@pytest.mark.parametrize("notice_s", [0, 30, 120])
@pytest.mark.parametrize("event_type", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_azure_event_is_told_once(event_type, notice_s):
    event = AzureEvent(event_type=event_type, ends_s=10.5 + notice_s)
    heard, cloud = play_azure([AzureScene(at_s=10.5, events=(event,))], until_s=30)
    at_s, notice = only(heard)
    assert at_s == 11  # asked every second
    assert abs(notice.deadline_s - max(0, notice_s - 0.5)) <= 1
    assert notice.kind is NoticeKind(event_type.lower())
    assert notice.event_id == event.event_id
    assert len([request for request in cloud.requests if "compute/name" in request.path]) == 1
    assert heard.reports == []


def test_azure_first_call_of_two_minutes():
    heard, _ = play_azure([AzureScene(at_s=130, events=(AzureEvent(),))], until_s=140, first_call_s=120)
    assert only(heard)[0] == 130
    assert heard.reports == []


@pytest.mark.parametrize(
    "event",
    [
        AzureEvent(event_type="Freeze"),
        AzureEvent(event_type="Freeze", started=True),
        AzureEvent(resources=("vm_1", "vm_2")),
        AzureEvent(resources=()),
        AzureEvent(event_type="SomethingNew"),
    ],
)
def test_azure_what_must_not_react_does_not(event):
    heard, _ = play_azure([AzureScene(at_s=1, events=(event,))], until_s=30)
    assert heard.told == []
    assert heard.reports == []


def test_azure_own_event_among_others():
    events = (
        AzureEvent(event_id="a", resources=("vm_1",)),
        AzureEvent(event_id="b", resources=("VM_0", "vm_2")),
    )
    heard, _ = play_azure([AzureScene(at_s=1, events=events)], until_s=10)
    notice = only(heard)[1]
    assert notice.event_id == "b"
    assert notice.shared_with == ("vm_2",)


def test_azure_started_with_empty_not_before_means_now():
    heard, _ = play_azure([AzureScene(at_s=1, events=(AzureEvent(started=True),))], until_s=10)
    assert only(heard)[1].deadline_s == 0


def test_azure_brought_forward_by_another_is_told_again():
    script = [
        AzureScene(at_s=10, events=(AzureEvent(ends_s=40),)),
        AzureScene(at_s=20, events=(AzureEvent(started=True),)),
    ]
    heard, _ = play_azure(script, until_s=60)
    assert [(at_s, one.deadline_s) for at_s, one in heard.told] == [(10, 30), (20, 0)]


def test_azure_cancelled_event_is_withdrawn():
    heard, _ = play_azure([AzureScene(at_s=10, events=(AzureEvent(),)), AzureScene(at_s=20)], until_s=60)
    assert [(at_s, type(one)) for at_s, one in heard.told] == [(10, PreemptionNotice), (20, NoticeWithdrawn)]


def test_azure_fault_does_not_withdraw():
    events = (AzureEvent(ends_s=300),)
    script = [
        AzureScene(at_s=10, events=events),
        AzureScene(at_s=20, status=500),
        AzureScene(at_s=30, body='{"Events": [{"EventId": 7}]}'),
        AzureScene(at_s=40, drop=True),
        AzureScene(at_s=50, events=events),
    ]
    heard, _ = play_azure(script, until_s=80)
    assert only(heard)[0] == 10


def test_azure_is_acknowledged_only_when_told_and_then_not_told_again():
    async def run():
        time = VirtualTime()
        cloud = EmulatedAzure(
            [AzureScene(at_s=10, events=(AzureEvent(event_id="e", ends_s=310),))],
            waiting=time,
            server_time=START,
        )
        async with (
            cloud,
            watching(
                lambda url, report, waiting: AzureNotices("m0", report, base_url=url, waiting=waiting),
                cloud.url,
                time,
            ) as heard,
        ):
            [source] = heard.sources
            assert not await source.acknowledge("e")  # nobody announced it yet
            await time.run_until(60)
            assert cloud.acknowledged == []
            assert await source.acknowledge("e")
            assert not await source.acknowledge("other")
            await time.run_until(120)
            assert cloud.acknowledged == ["e"]
            assert [at_s for at_s, _ in heard.told] == [10]

    asyncio.run(run())


# --- all of them ----------------------------------------------------------------------------

PLAYERS = {
    "aws": (play_aws, AwsScene, {"action": "terminate", "ends_s": 140}),
    "gcp": (play_gcp, GcpScene, {"preempted": True}),
    "azure": (play_azure, AzureScene, {"events": (AzureEvent(ends_s=140),)}),
}


@pytest.fixture(params=sorted(PLAYERS))
def player(request):
    return PLAYERS[request.param]


@pytest.mark.parametrize(
    "body",
    ["", "{", "null", "[]", '{"action": 3}', '{"Events": 3}', "<html>no</html>", "\x00\udcff" * 9, "1" * 5000],
)
def test_malformed_is_reported_once_and_asking_goes_on(player, body):
    run, scene, notice = player
    heard, _ = run([scene(at_s=10, body=body), scene(at_s=60, **notice)], until_s=100)
    assert 60 <= only(heard)[0] <= 65
    assert len(heard.reports) == 1


@pytest.mark.parametrize("fault", [{"status": 500}, {"status": 302}, {"drop": True}, {"hold_s": 10}])
def test_faults_are_reported_once_and_asking_goes_on(player, fault):
    run, scene, notice = player
    heard, _ = run([scene(at_s=10, **fault), scene(at_s=60, **notice)], until_s=100)
    assert 60 <= only(heard)[0] <= 76
    assert len(heard.reports) <= 1


def test_same_notice_at_every_poll_is_told_once(player):
    run, scene, notice = player
    heard, _ = run([scene(at_s=10, **notice), scene(at_s=30, **notice), scene(at_s=50, **notice)], until_s=300)
    assert only(heard)[0] == 10


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata", "America/St_Johns", "Pacific/Kiritimati"])
@pytest.mark.parametrize("off_s", [-120, 0, 120])
def test_zone_and_clock_of_this_machine_change_nothing(player, zone, off_s, local_zone):
    run, scene, notice = player
    local_zone(zone)
    options = {} if run is play_gcp else {"utc_now": lambda: datetime.now(UTC) + timedelta(seconds=off_s)}
    heard, _ = run([scene(at_s=110, **notice)], until_s=130, **options)
    assert only(heard)[1].deadline_s == 30


@pytest.mark.parametrize(("off_s", "deadline_s"), [(-120, 120), (0, 30), (120, 0)])
@pytest.mark.parametrize(("run", "most_s"), [(play_aws, 120), (play_azure, 30)])
def test_without_a_date_the_local_clock_is_held_to_the_promise(run, most_s, off_s, deadline_s):
    scene, notice = (AwsScene, {"action": "stop", "ends_s": 140})
    if run is play_azure:
        scene, notice = (AzureScene, {"events": (AzureEvent(ends_s=140),)})
    local = START + timedelta(seconds=110 + off_s)
    heard, _ = run([scene(at_s=110, **notice)], until_s=120, sends_date=False, utc_now=lambda: local)
    assert only(heard)[1].deadline_s == min(deadline_s, most_s)


def test_two_machines_at_once():
    async def run():
        time = VirtualTime()
        script = [AzureScene(at_s=10, events=(AzureEvent(resources=("vm_0", "vm_1")),))]
        clouds = [
            EmulatedAzure(script, vm_name=f"vm_{index}", waiting=time, server_time=START) for index in range(3)
        ]
        async with clouds[0], clouds[1], clouds[2]:
            heard = []
            async with (
                watching(_azure("m0"), clouds[0].url, time) as first,
                watching(_azure("m1"), clouds[1].url, time) as second,
                watching(_azure("m2"), clouds[2].url, time) as bystander,
            ):
                await time.run_until(30, num_pausing=3)
                heard = [first.told, second.told, bystander.told]
        assert [len(told) for told in heard] == [1, 1, 0]
        assert heard[0][0][1].machine == "m0"
        assert heard[1][0][1].machine == "m1"

    asyncio.run(run())


def _azure(machine):
    return lambda url, report, waiting: AzureNotices(machine, report, base_url=url, waiting=waiting)


def test_never_answers_after_detection(player):
    run, scene, _ = player
    heard, cloud = run([scene(at_s=10, hold_s=math.inf)], until_s=4000)
    assert heard.told == []
    assert len(heard.reports) == 1
    assert len(cloud.requests) < 50  # none is answered after the first few
