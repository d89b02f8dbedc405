"""The thread in which a save becomes a checkpoint, on the member that commits it; training goes on meanwhile.

It opens the save, waits until every member has answered, and writes the manifest. When a generation ends in the
middle of that, it stands still (``pause``) until the members of the next one have met and it is known whose
answers will come (``go_on``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from varuna.checkpoint.commit import Committer
from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.values import JobState, SaveOrder, Written
from varuna.persist.answers import Answers
from varuna.persist.verdict import Action, Answer, judge

_POLL_S = 0.05
_PATIENCE_S = 2.0
"""How long a save may still take whose members will not meet again, because the job is over."""

_TAKE_OVER_S = 5.0
"""How long the last committer, who leaves, may take to let go of a save."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A save is over.

    Attributes:
        order: which.
        size_bytes: of the checkpoint; 0 if it did not become one.
        pause_s: how long training stood still for it, at most.
        write_s: from its beginning to its manifest.
        failure: why it did not become a checkpoint.
    """

    order: SaveOrder
    size_bytes: int = 0
    pause_s: float = 0.0
    write_s: float = 0.0
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class Commission:
    """What is to be committed.

    Attributes:
        order: the save.
        job, required, num_sections: as in ``Committer.commit``.
    """

    order: SaveOrder
    job: JobState
    required: frozenset[str]
    num_sections: int


class Committing:
    """One save on its way. All methods are called by the training thread.

    Args:
        thread: in which it goes; a process does not end before all that was given to it is done.
        committer: of this process.
        answers: of the members.
        commission: what to commit.
        expected: keys of the answers to wait for.
        is_over: whether the members will not meet again.
        before_manifest: called when all parts are there.
        ended: called in the thread, once.
        takes_over: another member had begun, and is gone.
    """

    def __init__(
        self,
        thread: ThreadPoolExecutor,
        committer: Committer,
        answers: Answers,
        commission: Commission,
        expected: Collection[str],
        *,
        is_over: Callable[[], bool],
        before_manifest: Callable[[], None],
        ended: Callable[[Saved], None],
        takes_over: bool = False,
    ) -> None:
        self._committer = committer
        self._answers = answers
        self._commission = commission
        self._expected = frozenset(expected)
        self._is_over = is_over
        self._before_manifest = before_manifest
        self._ended = ended
        self._takes_over = takes_over
        self._changed = threading.Condition()
        self._is_paused = False
        self._is_decided = False
        self._reason = ""
        self._is_left = False
        self._seen: dict[str, Answer] = {}
        self._started_s = time.monotonic()
        self._done = thread.submit(self._run)

    def pause(self) -> bool:
        """Decide nothing until ``go_on``; False if all is decided."""
        with self._changed:
            self._is_paused = not self._is_decided
            return self._is_paused

    def go_on(self, expected: Collection[str]) -> None:
        """The members of the next generation have met: these answers will come."""
        with self._changed:
            self._expected = frozenset(expected)
            self._is_paused = False
            self._changed.notify()

    def give_up(self, reason: str) -> None:
        """It is not wanted any more; nothing happens if all is decided."""
        with self._changed:
            self._reason = reason
            self._changed.notify()

    def leave(self) -> None:
        """This member goes, and another takes the save over; nothing happens if all is decided."""
        with self._changed:
            self._is_left = True
            self._changed.notify()
        self._done.result()

    @property
    def is_alive(self) -> bool:
        """Whether it is not over yet."""
        return not self._done.done()

    def wait(self) -> None:
        """Until it is over."""
        self._done.result()

    # --- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        order = self._commission.order
        saved: Saved | None
        try:
            saved = self._saved()
        except Exception as error:  # of whatever kind: people hear of it, and training goes on
            what = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
            saved = Saved(order=order, failure=f"{what}{error}")
        if saved is not None:
            self._answers.drop(self._seen)
            self._ended(saved)

    def _saved(self) -> Saved | None:
        """How it ended; None if this member leaves it to another."""
        commission, order = self._commission, self._commission.order
        if self._takes_over and self._committer.is_complete(order):
            return Saved(order=order)
        self._open()
        reason = self._until_decided()
        if self._is_left:
            self._committer.let_go(order)
            return None
        if reason:
            self._committer.abandon(order)
            return Saved(order=order, failure=reason)
        self._before_manifest()
        written = list(self._written())
        manifest = self._committer.commit(
            order,
            commission.job,
            written,
            required=commission.required,
            num_sections=commission.num_sections,
        )
        return Saved(
            order=order,
            size_bytes=manifest.size_bytes,
            pause_s=max(part.pause_s for part in written),
            write_s=time.monotonic() - self._started_s,
        )

    def _open(self) -> None:
        """The save's directory is ours; a committer that leaves holds it for a moment yet."""
        give_up_s = time.monotonic() + (_TAKE_OVER_S if self._takes_over else 0.0)
        while True:
            try:
                self._committer.open(self._commission.order)
                return
            except CheckpointError:
                if time.monotonic() >= give_up_s:
                    raise
            time.sleep(_POLL_S)

    def _until_decided(self) -> str:
        """Wait for the answers; why the save is to be given up, empty if it is not."""
        over_s: float | None = None
        while True:
            for key in self._expected - self._seen.keys():
                answer = self._answers.ask(key)
                if answer is not None:
                    self._seen[key] = answer
            if over_s is None and self._is_over():
                over_s = time.monotonic()
            with self._changed:
                if self._reason or self._is_left:
                    self._is_decided = True
                    return self._reason
                if not self._is_paused:
                    verdict = judge(self._seen, self._expected, self._commission.required)
                    if verdict.action is not Action.WAIT:
                        self._is_decided = True
                        return verdict.reason
                if over_s is not None and time.monotonic() > over_s + _PATIENCE_S:
                    self._is_decided = True
                    return "the job ended before all its workers had written their parts"
                self._changed.wait(_POLL_S)

    def _written(self) -> Iterator[Written]:
        for answer in self._seen.values():
            if answer.written is not None:
                yield answer.written
