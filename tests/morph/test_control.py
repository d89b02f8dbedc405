"""A member's control against a real manager's server, with orders that a test puts in its mouth."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from tests.launch.jobs import wait_until
from tests.morph.serving import TOKEN, Place, place
from tests.morph.world_parts import DESCRIBED
from varuna.errors import ConfigError, ProtocolError, RunError
from varuna.generations import (
    Formation,
    FormingTimes,
    HaltReport,
    SampleShare,
    StepReport,
    StepWork,
    Verdict,
)
from varuna.morph import control, script_watch
from varuna.morph.control import ManagedControl
from varuna.morph.link import REASON_HEADER
from varuna.morph.messages import (
    Abort,
    Beat,
    Described,
    Finished,
    Form,
    Formed,
    FromWorker,
    Halted,
    InScript,
    Leave,
    Pause,
    Ready,
    StepDone,
    ToWorker,
    decode_from_worker,
    encode,
)
from varuna.spec import PipelineSpec, Plan, StageSpec

TIMEOUT_S = 60
PLAN = Plan(
    pipelines=(
        PipelineSpec(
            stages=(StageSpec(worker_index=0, first_section=0, end_section=2),),
            first_micro_batch=0,
            end_micro_batch=4,
        ),
    ),
    num_workers=1,
    num_sections=2,
    batch_size=8,
    micro_batch_size=2,
    schedule="varuna",
)


@dataclass
class Generation:
    """What the control needs of one."""

    index: int
    pause: bool = False
    plan: Plan = PLAN
    forming_times: FormingTimes = field(
        default_factory=lambda: FormingTimes(meet_s=0.25, transfer_s=0.5, open_s=1.0)
    )
    aborted: list[str] = field(default_factory=list)

    def abort(self, reason: str) -> None:
        self.aborted.append(reason)


class Mouth:
    """A manager that says what the test wants."""

    def __init__(self) -> None:
        self.got: queue.SimpleQueue[FromWorker] = queue.SimpleQueue()
        self.sockets: list[web.WebSocketResponse] = []
        self.refusal: tuple[int, str] | None = None

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/worker", self.handle)
        return app

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.refusal is not None:
            status, reason = self.refusal
            return web.Response(status=status, headers={REASON_HEADER: reason})
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.sockets.append(socket)
        async for message in socket:
            self.got.put(decode_from_worker(message.data))
        return socket

    def next(self, kind: type) -> Any:
        """The next message of a kind; beats between are left out."""
        while isinstance(message := self.got.get(timeout=TIMEOUT_S), Beat):
            continue
        assert isinstance(message, kind), message
        return message


class Setup:
    """One control and its manager."""

    def __init__(self, at: Place) -> None:
        self.at = at
        self.mouth = Mouth()
        at.serve(self.mouth.app())
        self.control = ManagedControl(at.url, TOKEN, "vm.1.abcd")
        wait_until(lambda: self.control._link.is_connected, TIMEOUT_S, "it connects and has greeted")
        wait_until(lambda: self.mouth.sockets, TIMEOUT_S, "its manager has seen that")
        self.control.in_script(False)  # tests call it as a script's call does

    def say(self, message: ToWorker) -> None:
        self.at.loop.run(self.mouth.sockets[-1].send_bytes(encode(message)))

    def cut(self, refusal: tuple[int, str] | None = None) -> None:
        self.mouth.refusal = refusal
        self.at.loop.run(self.mouth.sockets[-1].close())


@pytest.fixture
def setup() -> Iterator[Setup]:
    with place() as at:
        made = Setup(at)
        yield made
        made.control.close()


def formation(generation: int, rank: int = 1) -> Formation:
    return Formation(
        generation=generation, rank=rank, size=2, plan=PLAN, transfers=(), state_rank=0, next_step=3
    )


def report(generation: int) -> HaltReport:
    return HaltReport(
        generation=generation,
        num_applied=3,
        reduced_step=None,
        committed_step=2,
        committed="text",
        held_sections=(0, 1),
        reason="gone",
    )


def test_a_newcomer_gets_a_place(setup: Setup) -> None:
    found: list[Formation] = []
    waiting = threading.Thread(target=lambda: found.append(setup.control.ready("digest", "")))
    waiting.start()
    assert setup.mouth.next(Ready).digest == "digest"
    setup.say(Form(formation=formation(4)))
    waiting.join(TIMEOUT_S)
    assert found == [formation(4)]


def test_what_it_tells(setup: Setup) -> None:
    generation = Generation(index=0)
    setup.control.forming(generation)
    setup.control.formed(generation)
    assert setup.mouth.next(Formed) == Formed(generation=0, plan=PLAN, times=generation.forming_times)
    samples = SampleShare(first=0, end=8, digest="d")
    setup.control.step_done(
        StepReport(
            generation=0,
            step_index=7,
            duration_s=0.5,
            num_samples=8,
            committed="outcome",
            work=StepWork(busy_s=0.25, samples=samples),
        )
    )
    assert setup.mouth.next(StepDone) == StepDone(
        generation=0,
        step_index=7,
        duration_s=0.5,
        busy_s=0.25,
        num_samples=8,
        committed="outcome",
        samples=samples,
    )
    setup.control.formed(Generation(index=2))
    assert setup.mouth.next(Formed) == Formed(generation=2, plan=None, times=generation.forming_times)


@pytest.mark.parametrize("at_once", [True, False])
def test_what_the_job_is_is_told_once_and_at_the_latest_when_the_first_generation_ends(
    setup: Setup, at_once: bool
) -> None:
    generation = Generation(index=0)
    setup.control.describe(DESCRIBED, at_once=at_once)
    setup.control.forming(generation)
    setup.control.formed(generation)
    order = [Described, Formed, Halted, Halted] if at_once else [Formed, Described, Halted, Halted]
    setup.say(Form(formation=formation(1)))
    setup.control.halted(report(0))
    setup.say(Form(formation=formation(2)))
    setup.control.halted(report(1))
    for kind in order:
        setup.mouth.next(kind)


def test_a_halted_member_goes_on_once_for_each_order(setup: Setup) -> None:
    setup.say(Form(formation=formation(1), committed="outcome"))
    setup.say(Form(formation=formation(1), committed="outcome"))  # a manager that was started again
    setup.say(Form(formation=formation(2)))
    verdict = setup.control.halted(report(0))
    assert (verdict.formation, verdict.committed) == (formation(1), "outcome")
    assert setup.mouth.next(Halted).report == report(0)
    assert setup.control.halted(report(1)).formation == formation(2)


def test_after_a_break_it_tells_again_where_it_stands(setup: Setup) -> None:
    found: list[Formation] = []
    waiting = threading.Thread(target=lambda: found.append(setup.control.halted(report(0)).formation))
    waiting.start()
    assert setup.mouth.next(Halted).report == report(0)
    setup.cut()
    assert setup.mouth.next(Halted).report == report(0)
    setup.say(Form(formation=formation(1)))
    waiting.join(TIMEOUT_S)
    assert found == [formation(1)]


def test_an_abort_ends_its_generation_at_once_and_no_other(setup: Setup) -> None:
    first, second, third = (Generation(index=index) for index in range(3))
    setup.control.forming(first)
    setup.say(Abort(generation=0, reason="worker 2 is gone"))
    wait_until(lambda: first.aborted == ["worker 2 is gone"], TIMEOUT_S, "the abort")
    setup.say(Abort(generation=2, reason="early"))
    setup.say(Form(formation=formation(9)))
    setup.control.halted(report(0))  # so the abort has arrived, too
    setup.control.forming(second)
    assert second.aborted == []
    setup.control.forming(third)
    assert third.aborted == ["early"]


def test_a_script_in_code_of_its_own_is_waited_for(setup: Setup) -> None:
    setup.control.forming(Generation(index=3))
    setup.control.in_script(True)
    for _ in range(2):  # a manager that was started again says it again, and hears it again
        setup.say(Abort(generation=3, reason="worker 2 is gone"))
        assert setup.mouth.next(InScript) == InScript(generation=3, is_there=True)
    setup.control.in_script(False)
    assert setup.mouth.next(InScript) == InScript(generation=3, is_there=False)
    setup.say(Form(formation=formation(4)))
    setup.control.halted(report(3))
    setup.control.in_script(True)  # of no interest any more
    setup.control.formed(Generation(index=4))
    assert setup.mouth.next(Halted).report == report(3)
    setup.mouth.next(Formed)


def test_a_call_that_is_broken_off_tells_nothing_else(setup: Setup) -> None:
    generation = Generation(index=3)
    setup.control.forming(generation)
    setup.say(Abort(generation=3, reason="worker 2 is gone"))
    wait_until(lambda: generation.aborted, TIMEOUT_S, "the abort")
    setup.say(Form(formation=formation(4)))
    setup.control.halted(report(3))
    setup.mouth.next(Halted)


def test_who_has_ended_its_generation_before_it_is_told_to_keeps_nobody_waiting(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_watch, "PATIENCE_S", 0.0)
    generation = Generation(index=3)
    setup.control.forming(generation)
    setup.say(Form(formation=formation(4)))
    setup.control.halted(report(3))
    setup.control.in_script(True)
    setup.say(Abort(generation=3, reason="worker 2 is gone"))
    wait_until(lambda: generation.aborted, TIMEOUT_S, "the abort")
    setup.control.formed(Generation(index=4))
    setup.mouth.next(Halted)
    setup.mouth.next(Formed)
    assert setup.control._watch._timer is None


def test_who_keeps_the_others_waiting_says_where_it_is(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script_watch, "PATIENCE_S", 0.1)
    setup.control.in_script(True)
    setup.control.forming(Generation(index=3))
    setup.say(Abort(generation=3, reason="worker 2 is gone"))
    told: list[str] = []

    def has_told() -> bool:
        told.append(capsys.readouterr().err)
        return bool(told[-1])

    wait_until(has_told, TIMEOUT_S, "it tells")
    assert told[-1].startswith(
        "varuna: vm.1.abcd was told 0.1 s ago that generation 3 ends, and the others wait for it: "
        "its script is in code of its own here:\n"
    )
    assert "in test_who_keeps_the_others_waiting_says_where_it_is" in told[-1]


def test_a_generation_that_cannot_be_given_up_ends_the_worker(setup: Setup) -> None:
    class Broken(Generation):
        def abort(self, reason: str) -> None:
            raise OSError("no such socket")

    setup.control.forming(Broken(index=3))
    setup.say(Abort(generation=3, reason="worker 2 is gone"))
    with pytest.raises(RunError, match=r"could not be done here: OSError\('no such socket'\)"):
        setup.control.halted(report(3))


def test_a_pause_is_for_its_generation_whenever_it_comes(setup: Setup) -> None:
    first, second = Generation(index=0), Generation(index=1)
    setup.control.forming(first)
    setup.control.formed(first)
    setup.say(Pause(generation=0))
    wait_until(lambda: first.pause, TIMEOUT_S, "the pause")
    setup.say(Pause(generation=1))
    setup.say(Form(formation=formation(9)))
    setup.control.halted(report(0))
    setup.control.forming(second)
    setup.control.formed(second)
    assert second.pause
    third = Generation(index=2)
    setup.control.forming(third)
    setup.control.formed(third)
    assert not third.pause


def test_told_to_leave_it_ends_in_good_order(setup: Setup) -> None:
    setup.say(Leave(reason="not needed"))
    with pytest.raises(SystemExit) as ended:
        setup.control.halted(report(0))
    assert ended.value.code == 0


def test_a_fenced_worker_gives_up_what_it_does_and_ends(setup: Setup) -> None:
    generation = Generation(index=0)
    setup.control.forming(generation)
    setup.cut((410, "vm.1.abcd is out: silent"))
    expected = ["the manager refuses this worker: vm.1.abcd is out: silent"]
    wait_until(lambda: generation.aborted == expected, TIMEOUT_S, "the abort")
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            setup.control.halted(report(0))
        assert ended.value.code == 0


def agrees() -> None:
    """The others make no call that this worker does not make."""


def test_a_worker_that_has_finished_stays_until_it_gets_leave(setup: Setup) -> None:
    found: list[Verdict | None] = []
    waiting = threading.Thread(target=lambda: found.append(setup.control.finished(report(0), agrees)))
    waiting.start()
    assert setup.mouth.next(Finished).report == report(0)
    setup.say(Abort(generation=7, reason="another generation"))
    setup.cut()
    assert setup.mouth.next(Finished).report == report(0), "a manager that was started again hears it again"
    setup.say(Leave(reason="the job is done"))
    waiting.join(TIMEOUT_S)
    assert found == [None]


@pytest.mark.parametrize("is_early", [True, False])
def test_a_worker_that_has_finished_helps_if_its_generation_ends(setup: Setup, is_early: bool) -> None:
    generation = Generation(index=0)
    setup.control.forming(generation)
    abort = Abort(generation=0, reason="w2 is gone")
    if is_early:
        setup.say(abort)
        wait_until(lambda: generation.aborted, TIMEOUT_S, "the abort")
    found: list[Verdict | None] = []
    waiting = threading.Thread(target=lambda: found.append(setup.control.finished(report(0), agrees)))
    waiting.start()
    if not is_early:
        setup.mouth.next(Finished)
        setup.say(abort)
    assert setup.mouth.next(Halted).report == report(0)
    setup.say(Form(formation=formation(1), committed="outcome"))
    waiting.join(TIMEOUT_S)
    assert found == [Verdict(formation=formation(1), committed="outcome")]


def test_a_worker_that_has_finished_does_not_wait_for_ever_for_a_manager(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "GIVE_UP_S", 0.2)
    monkeypatch.setattr(control, "_LOOK_S", 0.05)
    setup.at.end()
    assert setup.control.finished(report(0), agrees) is None


def test_a_worker_that_has_finished_looks_whether_the_others_go_on(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_LOOK_S", 0.05)
    looks = iter([None, None, ProtocolError("worker 2 goes on to training step 11")])

    def check() -> None:
        error = next(looks)
        if error is not None:
            raise error

    with pytest.raises(ProtocolError, match="goes on to training step 11"):
        setup.control.finished(report(0), check)


def test_a_further_job_of_a_script_says_what_it_cannot() -> None:
    managed = {"VARUNA_INCARNATION": "vm.0.1", "VARUNA_JOINS": "0"}
    assert "only the first job of a script goes on" in control.note_on_further_job(managed)
    assert control.note_on_further_job({**managed, "VARUNA_MANAGER": "http://127.0.0.1:1"}) == ""
    assert control.note_on_further_job({"VARUNA_INCARNATION": ""}) == ""
    for changed in ({"VARUNA_JOINS": "1"}, {"VARUNA_REFORMED": "1"}):
        with pytest.raises(RunError, match="needs the workers that were started together"):
            control.note_on_further_job({**managed, **changed})


def test_a_wrong_token_is_an_error(setup: Setup) -> None:
    setup.cut((401, "the job's token is missing or wrong"))
    with pytest.raises(RunError, match="refuses this worker: the job's token is missing or wrong"):
        setup.control.ready("digest", "")


def test_the_first_job_of_a_process_gets_the_manager() -> None:
    with place() as at:
        mouth = Mouth()
        at.serve(mouth.app())
        environ = {"VARUNA_MANAGER": at.url, "VARUNA_INCARNATION": "vm.0.1", "VARUNA_TOKEN": TOKEN}
        control = ManagedControl.from_env(environ)
        assert control is not None
        assert ManagedControl.from_env(environ) is None
        control.close()
    assert ManagedControl.from_env({}) is None
    assert ManagedControl.from_env({"VARUNA_MANAGER": ""}) is None
    with pytest.raises(ConfigError, match="but not VARUNA_INCARNATION"):
        ManagedControl.from_env({"VARUNA_MANAGER": "http://127.0.0.1:1"})
