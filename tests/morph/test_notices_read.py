"""Deciding from an answer, without sockets."""

from __future__ import annotations

import json
import signal
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.errors import ConfigError
from varuna.morph.notices import Backoff, NoticeKind, NoticeMemory, NoticeWithdrawn, PreemptionNotice, Reading
from varuna.morph.notices_aws import read_action, read_rebalance
from varuna.morph.notices_azure import read_events
from varuna.morph.notices_gcp import read_preempted
from varuna.morph.notices_http import Answer
from varuna.morph.notices_signal import Grace, notice_of_signal
from varuna.morph.notices_time import parse_utc, seconds_until

NOW = datetime(2017, 9, 18, 8, 20, 0, tzinfo=UTC)
DATE = {"date": "Mon, 18 Sep 2017 08:20:00 GMT"}

# --- dates ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2017-09-18T08:22:00Z", datetime(2017, 9, 18, 8, 22, tzinfo=UTC)),
        ("2017-09-18T08:22:00", datetime(2017, 9, 18, 8, 22, tzinfo=UTC)),
        ("2017-09-18T10:22:00+02:00", datetime(2017, 9, 18, 8, 22, tzinfo=UTC)),
        ("Mon, 11 Apr 2026 22:26:58 GMT", datetime(2026, 4, 11, 22, 26, 58, tzinfo=UTC)),  # it is a Saturday
        (" Sat, 11 Apr 2026 22:26:58 -0000 ", datetime(2026, 4, 11, 22, 26, 58, tzinfo=UTC)),
        ("", None),
        ("soon", None),
        ("Mon, 99 Apr 2026 22:26:58 GMT", None),
        ("99999-01-01T00:00:00Z", None),
    ],
)
@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata", "America/Los_Angeles"])
def test_dates_are_utc_in_every_zone(text, moment, zone, local_zone):
    local_zone(zone)
    assert parse_utc(text) == moment


@given(st.text())
def test_no_text_breaks_the_date_reader(text):
    parse_utc(text)


@given(st.integers(-200, 200), st.integers(-(10**6), 10**6))
def test_servers_own_date_makes_the_local_clock_irrelevant(left_s, off_s):
    moment = NOW + timedelta(seconds=left_s)
    local = NOW + timedelta(seconds=off_s)
    with_date = seconds_until(moment, server_date=DATE["date"], utc_now=lambda: local, promised_s=30)
    assert with_date == max(0, left_s)
    without = seconds_until(moment, server_date="", utc_now=lambda: local, promised_s=30)
    assert without == min(max(0, left_s - off_s), 30)


# --- answers --------------------------------------------------------------------------------


def test_the_documented_answer_of_aws():
    body = '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'
    reading = read_action(Answer(status=200, body=body, headers=DATE), machine="m")
    assert reading.notices == (
        PreemptionNotice(
            machine="m",
            kind=NoticeKind.TERMINATE,
            deadline_s=120,
            source="aws",
            event_id="terminate 2017-09-18T08:22:00Z",
        ),
    )


@pytest.mark.parametrize(
    "body", ['{"action": "terminate"}', '{"action": "terminate", "time": "?"}', '{"action": "new-word"}']
)
def test_aws_unknown_words_mean_leave_now(body):
    [notice] = read_action(Answer(status=200, body=body), machine="m").notices
    assert (notice.kind, notice.deadline_s) == (NoticeKind.TERMINATE, 0)


def test_the_documented_answer_of_azure():
    event = {
        "EventId": "f020ba2e-3bc0-4c40-a10b-86575a9eabd5",
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": ["vm_0"],
        "EventStatus": "Scheduled",
        "NotBefore": "Mon, 18 Sep 2017 08:20:30 GMT",
        "DurationInSeconds": -1,
    }
    good = Answer(status=200, body=json.dumps({"DocumentIncarnation": 2, "Events": [event]}), headers=DATE)
    [notice] = read_events(good, machine="m", vm_name="vm_0").notices
    assert (notice.kind, notice.deadline_s, notice.event_id) == (NoticeKind.PREEMPT, 30, event["EventId"])
    started = json.dumps({"Events": [{**event, "EventStatus": "Started"}]})
    answer = Answer(status=200, body=started, headers=DATE)
    assert read_events(answer, machine="m", vm_name="vm_0").notices[0].deadline_s == 0
    half_bad = Answer(status=200, body=json.dumps({"Events": [{"EventId": 1}, event, 7]}), headers=DATE)
    reading = read_events(half_bad, machine="m", vm_name="vm_0")
    assert reading.notices == (notice,)
    assert reading.problem


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(
            st.sampled_from(
                ["Events", "EventId", "EventType", "EventStatus", "Resources", "NotBefore", "action", "time"]
            ),
            inner,
        )
    ),
)


@given(st.one_of(st.text(), JSON.map(json.dumps)), st.sampled_from([200, 204, 301, 400, 404, 500, 503]))
def test_no_answer_breaks_a_reader(body, status):
    answer = Answer(status=status, body=body)
    readings = [
        read_action(answer, machine="m"),
        read_preempted(answer, machine="m"),
        read_events(answer, machine="m", vm_name="vm_0"),
    ]
    read_rebalance(answer, machine="m")
    for reading in readings:
        assert status == 200 or not reading.notices


# --- told once ------------------------------------------------------------------------------


def notice(event_id: str, deadline_s: float) -> PreemptionNotice:
    return PreemptionNotice(
        machine="m", kind=NoticeKind.PREEMPT, deadline_s=deadline_s, source="azure", event_id=event_id
    )


@given(st.lists(st.sampled_from(["a", "b", "c"]), unique=True), st.integers(2, 20))
def test_the_same_notices_are_told_once_however_often_they_are_seen(names, num_polls):
    memory = NoticeMemory()
    told = []
    for poll in range(num_polls):
        reading = Reading(notices=tuple(notice(name, 30 - poll) for name in names))
        told += memory.update(reading, now_s=float(poll))
    assert [one.event_id for one in told] == names


@given(st.lists(st.tuples(st.frozensets(st.sampled_from("abc")), st.booleans()), max_size=12))
def test_what_was_told_and_not_withdrawn_is_what_is_in_force(polls):
    memory = NoticeMemory()
    believed: set[str] = set()
    truth: set[str] = set()
    for now_s, (names, is_readable) in enumerate(polls):
        reading = Reading(
            notices=tuple(notice(name, 1e6) for name in sorted(names)), problem="" if is_readable else "half"
        )
        for told in memory.update(reading, float(now_s)):
            if isinstance(told, NoticeWithdrawn):
                believed.remove(told.event_id)
            else:
                assert told.event_id not in believed
                believed.add(told.event_id)
        truth = set(names) if is_readable else truth | names
        assert believed == truth


def test_brought_forward_is_told_again_and_put_off_is_not():
    memory = NoticeMemory()
    assert memory.update(Reading(notices=(notice("a", 600),)), 0.0)
    assert not memory.update(Reading(notices=(notice("a", 900),)), 1.0)
    assert not memory.update(Reading(notices=(notice("a", 597.5),)), 1.0)  # dates have whole seconds
    assert memory.update(Reading(notices=(notice("a", 0),)), 2.0)
    assert not memory.update(Reading(notices=(notice("a", 0),)), 100.0)


def test_an_unreadable_answer_withdraws_nothing():
    memory = NoticeMemory()
    memory.update(Reading(notices=(notice("a", 30),)), 0.0)
    assert memory.update(Reading(problem="status 500"), 1.0) == []
    assert memory.knows("a")
    assert memory.update(Reading(), 2.0) == [NoticeWithdrawn(machine="m", source="azure", event_id="a")]
    assert not memory.knows("a")


def test_backoff_is_bounded_and_begins_anew():
    backoff = Backoff(first_s=0.5, most_s=5.0)
    assert [backoff.failed() for _ in range(6)] == [0.5, 1, 2, 4, 5, 5]
    backoff.succeeded()
    assert backoff.failed() == 0.5


# --- signals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "sigterm_s", "usr1_s"),
    [({}, 30, 60), ({"VARUNA_GRACE_S": "90"}, 90, 90), ({"VARUNA_GRACE_S": "0"}, 0, 0)],
)
def test_signals_without_a_word_from_the_cloud(environ, sigterm_s, usr1_s):
    grace = Grace.from_env(environ)
    sigterm = notice_of_signal(signal.SIGTERM, machine="m", grace=grace)
    usr1 = notice_of_signal(signal.SIGUSR1, machine="m", grace=grace)
    assert (sigterm.deadline_s, sigterm.source, sigterm.event_id) == (sigterm_s, "signal", "SIGTERM")
    assert (usr1.deadline_s, usr1.kind, usr1.event_id) == (usr1_s, NoticeKind.SIGNAL, "SIGUSR1")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, 64, 0])
def test_other_signals_announce_nothing(signum):
    assert notice_of_signal(signum, machine="m", grace=Grace()) is None


@pytest.mark.parametrize("text", ["x", "-1", "nan", "inf", "30s"])
def test_a_grace_that_cannot_be_is_refused(text):
    with pytest.raises(ConfigError, match="VARUNA_GRACE_S"):
        Grace.from_env({"VARUNA_GRACE_S": text})
