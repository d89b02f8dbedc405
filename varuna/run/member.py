"""A worker through the generations: runs steps, and when a generation ends goes on in the next.

A generation ends for a member in one of three ways: another worker is lost in the middle of something, the one
who decides says so (``abort``), or a step's commit carried somebody's wish to pause. The member then halts: it
reports where it stands and waits to be told how to go on. What it is told is a ``Verdict``: the outcome of the
step under way, if its commit completed anywhere, and the next formation.

The rule of the commit: if the step's commit completed on any worker, all had reduced gradients, so everyone
makes the update from the scalars; otherwise the step is undone here and runs again in the next generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from varuna.errors import PeerLost
from varuna.generations import Formation, HaltReport, StepReport, Verdict
from varuna.run.commit import Committed, SaveMark, committed_from_text, committed_to_text
from varuna.run.generation import Generation
from varuna.run.meeting import Meeting, StoreOffer, store_as_peer
from varuna.run.reform import Carried, Told, Worker, form, next_generation

_BREAK_S = 1.0
"""How long after the store's end it is to be seen that the manager has ended with it."""

_POLL_S = 0.01
_T = TypeVar("_T")


class Control(Protocol):
    """Whoever decides, as one member sees it; calls come from the training thread."""

    @property
    def is_there(self) -> bool:
        """Whether it can be asked: its line is up."""

    def ready(self, digest: str, store_address: str) -> Formation:
        """A newcomer has captured the model and can take sections; wait for a place.

        ``digest`` is of the sections, ``store_address`` what it offers, as in ``HaltReport``.
        """

    def halted(self, report: HaltReport) -> Verdict:
        """Report, and wait for what follows. Raises ``WantedEnd`` if this worker is to leave."""

    def forming(self, generation: Generation | Meeting) -> None:
        """A generation is about to be formed here; from now on it may be told to ``abort``, from any thread.

        Called twice: first while its members meet, then with the generation itself.
        """

    def formed(self, generation: Generation) -> None:
        """It is open here; from now on it may be told to ``pause``."""

    def step_done(self, report: StepReport) -> None:
        """A step's update has been made here."""

    def finished(self, report: HaltReport, check: Callable[[], None]) -> Verdict | None:
        """This worker's script is over: wait until those of all are.

        None then; a verdict if the generation has ended before that: take part in the next, and come again.
        Meanwhile ``check`` is called now and then, and raises if the others go on without this worker.
        """


class Member:
    """One worker's place in the job.

    Args:
        worker: model, parameters, sections.
        generation: the one at work; None for a newcomer, which must ``join``.
        control: who decides; None if nobody does: then a lost worker ends the job.
        carried: what goes along from one generation to the next besides sections.
        wish: asked on worker 0 before a step: whether the state after it is to be saved.
    """

    def __init__(
        self,
        worker: Worker,
        generation: Generation | None,
        control: Control | None,
        *,
        carried: Carried,
        wish: Callable[[int], SaveMark | None] = lambda _: None,
    ) -> None:
        self._worker = worker
        self._generation = generation
        self._control = control
        self._carried = carried
        self._wish = wish
        self._went_back = False
        self._committed: Committed | None = None
        self._started_s = 0.0  # when the step under way began
        self._formation: Formation | None = None
        self._offer: StoreOffer | None = None
        self._num_applied = 0
        self._num_calls: int | None = None if generation is None else 0
        self._last_call: Callable[[Generation], object] | None = None  # since the last step
        self._was_first = self.rank == 0

    @property
    def rank(self) -> int:
        """This worker among the members of the generation at work."""
        return self._worker.world.rank

    @property
    def worker(self) -> Worker:
        """What outlives its generations."""
        return self._worker

    @property
    def generation(self) -> Generation:
        """The one at work."""
        assert self._generation is not None, "a newcomer that has not joined"
        return self._generation

    def start(self) -> None:
        """Tell that the first generation is open."""
        if self._control is not None:
            self._control.forming(self.generation)
            self._control.formed(self.generation)

    def join(self) -> None:
        """Wait for a place in a generation that is to come, and take it."""
        assert self._control is not None, "nobody who could give a place"
        self._worker.job.at("join")
        self._form(self._control.ready(self._worker.partitions.reference.digest, self._offer_store()))

    def run_step(self, step_index: int, gradient_scale: float) -> Committed | None:
        """The outcome of a step, in however many generations it takes.

        ``update_done`` must follow, and before the next step or call ``go_on``.

        None if the whole job went back to a checkpoint: another step comes next.

        Raises:
            PeerLost: a worker is gone and nobody decides how to go on.
        """
        self._started_s = time.monotonic()
        self._went_back = False
        while not self._went_back:
            self._num_applied = step_index
            self.generation.save = self._wish(step_index) if self.rank == 0 else None
            try:
                with store_as_peer():
                    self._committed = self.generation.run_step(step_index, gradient_scale, self._nobody_decides)
                self._last_call = None  # whoever had not come to its end could not have taken part
                return self._committed
            except PeerLost as error:
                verdict = self._halt(error)
            committed = committed_from_text(verdict.committed) if verdict.committed else None
            if committed is not None and committed.step_index == step_index:
                self.generation.keep_step()
                self._committed = committed
                self._formation = verdict.formation
                return committed
            self.generation.undo_step()
            self._form(verdict.formation)
        return None

    def update_done(self) -> None:
        """The update of the last step has been made."""
        committed = self._committed
        assert committed is not None, "no step was run"
        self._num_applied = committed.step_index + 1
        if self._control is not None:
            self._control.step_done(self._step_report(committed))
        self._was_first = self.rank == 0

    @property
    def has_formation(self) -> bool:
        """The generation has been lost in its last step, and it is known how the next one begins."""
        return self._formation is not None

    def go_on(self) -> None:
        """All that belongs to the last step is done: end the generation if that step was its last."""
        committed = self._committed
        assert committed is not None, "no step was run"
        formation, self._formation = self._formation, None
        if formation is None and committed.pause and self._control is not None:
            self.generation.close()
            formation = self._control.halted(self._report("asked to pause")).formation
        if formation is not None:
            self._form(formation)
        self._was_first = self.rank == 0

    def together(self, call: Callable[[Generation], _T]) -> _T:
        """What all members do together and no step depends on: begun again in the next generation if broken.

        So it may run here once more, for members that did not come to its end, when it is over here already.
        """
        while True:
            try:
                with store_as_peer():
                    result = call(self.generation)
                break
            except PeerLost as error:
                verdict = self._halt(error)
            self._form(verdict.formation)
        assert self._num_calls is not None, "a newcomer that has not joined"
        self._num_calls += 1
        self._last_call = call
        self._was_first = self.rank == 0
        return result

    def finish(self, settle: Callable[[], None]) -> None:
        """This worker's script is over: stay until those of all members are, and help those that are not.

        A member that is lost in the last step may be the last holder of a section but for this one.

        Args:
            settle: called before this worker says so, in every generation: returns when what it began is done,
                or the generation has been given up.

        Raises:
            WantedEnd: it was fenced meanwhile.
            ProtocolError: the others go on to a step or call that this worker's script has left out.
        """
        if self._control is None:
            return
        while True:
            settle()
            report = replace(self._report("its script is over"), is_finished=True, was_first=self._was_first)
            verdict = self._control.finished(report, self.generation.calls.check_nobody_goes_on)
            if verdict is None:
                return
            self.generation.abort("a member is gone")
            self._form(verdict.formation)

    def _nobody_decides(self) -> bool:
        """The store is gone. A step needs nothing of it; only a next generation does, and that needs a manager.

        So where both are gone, with their machine perhaps, steps are made until the manager is back.
        """
        if self._control is None:
            return False
        give_up_s = time.monotonic() + _BREAK_S
        while self._control.is_there:
            if time.monotonic() > give_up_s:
                return False
            time.sleep(_POLL_S)
        return True

    # --- from one generation to the next ----------------------------------------------------

    def _halt(self, error: PeerLost) -> Verdict:
        if self._control is None:
            raise error
        reduced_step = self.generation.reduced_step
        self.generation.abort(str(error))
        return self._control.halted(replace(self._report(str(error)), reduced_step=reduced_step))

    def _report(self, reason: str, generation: int | None = None) -> HaltReport:
        """Where this worker stands; ``generation`` is the one that ended, if it is not the one at work."""
        return HaltReport(
            generation=self.generation.index if generation is None else generation,
            num_applied=self._num_applied,
            reduced_step=None,
            committed_step=None if self._committed is None else self._committed.step_index,
            committed="" if self._committed is None else committed_to_text(self._committed),
            held_sections=tuple(sorted(self._worker.held_sections)),
            reason=reason,
            store_address=self._offer_store(),
            num_calls=self._num_calls or 0,
        )

    def _step_report(self, committed: Committed) -> StepReport:
        return StepReport(
            generation=self.generation.index,
            step_index=committed.step_index,
            duration_s=time.monotonic() - self._started_s,
            num_samples=committed.num_samples,
            committed=committed_to_text(committed),
            work=self.generation.work(),
        )

    def _offer_store(self) -> str:
        """A fresh one for whatever generation comes next; the one before ends, if it was never taken."""
        self._offer = StoreOffer(self._worker.world.address)
        return self._offer.address

    def _form(self, formation: Formation) -> None:
        """Open the next generation; if a member is lost meanwhile, the one after it, and so on."""
        assert self._control is not None
        while True:
            if formation.checkpoint and not self._go_back(formation):
                report = self._report("there is a newer checkpoint", formation.generation)
                formation = self._control.halted(report).formation
                continue
            try:
                with store_as_peer():
                    generation = self._meet(formation)
                    told = form(self._worker, generation, formation, self._carried, self._num_calls)
                break
            except PeerLost as error:
                report = self._report(str(error), formation.generation)
            formation = self._control.halted(report).formation
        if self._generation is None and told.job_state:
            self._carried.take(told.job_state)
        elif self._generation is None:
            self._carried.start_over()
        if formation.checkpoint:
            self._num_calls, self._last_call = told.most_calls, None
        elif self._num_calls is None:  # the call under way is the first one here
            self._num_calls = told.least_calls
        self._generation = generation
        self._control.formed(generation)
        if not formation.checkpoint:
            self._help(told)

    def _go_back(self, formation: Formation) -> bool:
        """Nobody has all of the newest state: what is held here is void, and so is what has been done since."""
        self._worker.held_sections.clear()
        self._worker.holding.keep_only(())
        self._committed, self._num_applied, self._went_back = None, formation.next_step, True
        return self._carried.go_back(formation.checkpoint, self._worker)

    def _help(self, told: Told) -> None:
        """Do a call again that is over here and was broken on another member."""
        assert self._num_calls is not None
        if self._num_calls == told.least_calls:
            return
        assert self._num_calls == told.least_calls + 1, "nobody gets two calls ahead: each waits for all"
        assert self._last_call is not None, (
            "a step has been committed since, without a member that was not there"
        )
        try:
            with store_as_peer():
                self._last_call(self.generation)
        except PeerLost as error:
            verdict = self._halt(error)
        else:
            return
        self._form(verdict.formation)

    def _meet(self, formation: Formation) -> Generation:
        """The next generation, connected to its store; nothing else of it is there yet."""
        assert self._control is not None
        offer, self._offer = self._offer, None
        meeting = Meeting(formation, offer)
        self._control.forming(meeting)
        generation = next_generation(self._worker, formation, meeting.connect(), meeting.hang_up)
        self._control.forming(generation)
        return generation
