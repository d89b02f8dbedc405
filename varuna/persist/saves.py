"""One worker's part in the saves of its job, from the training thread.

Worker 0 decides when to save. Its wish travels in a step's commit (``SaveMark``), so that all members know of
it exactly if they make that step's update; then each copies its share (``begin``) and goes on. A thread writes,
and on the member that commits another one makes the files a checkpoint.

When a generation ends in the middle of a save, members say in which save they have a part when they meet again
(``tell``, ``hear``): who has kept what dead ones owed writes it, and the first survivor commits.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store as MeetingStore  # type: ignore[attr-defined]

from varuna.checkpoint.commit import Committer
from varuna.checkpoint.save import Answer as SaverAnswer
from varuna.checkpoint.save import Saver
from varuna.checkpoint.shares import Share, planned_shares, reassign
from varuna.checkpoint.store import Store
from varuna.checkpoint.values import SaveOrder, Written
from varuna.events import CheckpointFailed, CheckpointSaved, Event, Notice
from varuna.persist.answers import Answers
from varuna.persist.committing import Commission, Committing, Saved
from varuna.persist.contents import Contents
from varuna.persist.schedule import SaveSchedule
from varuna.persist.standing import Standing
from varuna.persist.verdict import Answer
from varuna.run.commit import SaveMark

_POLL_S = 0.02


@dataclass(kw_only=True)
class _Pending:
    """A save that this member has a part in, and that is not known to be over.

    Attributes:
        order: which.
        rank: of this member in it.
        size: members that have a part in it.
        planned: shares, as far as this member knows them.
        commission: for whoever commits it.
        committer: rank in it of the member that commits.
        committing: the thread that does so, if it is this one.
    """

    order: SaveOrder
    rank: int
    size: int
    planned: Mapping[int, Share]
    commission: Commission
    committer: int = 0
    committing: Committing | None = None

    def key(self, rank: int, generation: int | None = None) -> str:
        """Of a member's answer; of what it wrote for others when a generation met."""
        key = f"save/{self.order.save_id}/{rank}"
        return key if generation is None else f"{key}/{generation}"

    @property
    def ended_key(self) -> str:
        """Of the answer that says that it is over."""
        return f"save/{self.order.save_id}/over"


class Saves:
    """Saves of one worker.

    Args:
        store: where checkpoints go.
        saver: copies and writes.
        schedule: when.
        meeting: the store in which the generation meets.
        make_committer: what numbers, begins and commits saves, given who hears what people should read.
        standing: of the job; it knows the number of the newest save.
        at: called at named points, in whichever thread comes to them.
        complete: told of each new checkpoint; in a thread.
        is_aborted: whether the generation at work has been given up, or none of its saves could be completed.
        obstacle: why that is so though training goes on; empty if it is not so.
    """

    def __init__(
        self,
        store: Store,
        saver: Saver,
        schedule: SaveSchedule,
        meeting: MeetingStore,
        *,
        make_committer: Callable[[Callable[[Event], None]], Committer],
        standing: Standing,
        at: Callable[[str], None],
        complete: Callable[[SaveOrder], None],
        is_aborted: Callable[[], bool],
        obstacle: Callable[[], str] = lambda: "",
    ) -> None:
        self._standing = standing
        self._store = store
        self._saver = saver
        self._schedule = schedule
        self._answers = Answers(meeting)
        self._at = at
        self._complete = complete
        self._is_aborted = is_aborted
        self._obstacle = obstacle
        self._has_told_obstacle = False
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._committer = make_committer(self._events.put)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="varuna-checkpoint-commit")
        self._planned: tuple[Any, Mapping[int, Share]] = (None, {})
        self._pending: _Pending | None = None
        self._committing: Committing | None = None  # the last one, which may be over
        self._over = ""
        self._futures: list[Future[SaverAnswer]] = []
        self._is_closing = False
        self._has_failed = False
        self._num_skipped = 0
        self._last_was_last = False

    # --- when -------------------------------------------------------------------------------

    def wish(self, step: int, *, is_last: bool) -> SaveMark | None:
        """On worker 0, before a step: what its commit is to carry.

        Args:
            step: steps done after it.
            is_last: the script's call of ``train`` ends with it. A save that is under way is waited for then,
                unless it was of the end of a call, too.
        """
        if not self._schedule.is_due(step, time.monotonic(), is_last=is_last):
            return None
        if is_last and not self._last_was_last:
            while self._is_under_way() and not self._is_aborted():
                time.sleep(_POLL_S)
        if self._is_aborted():
            self._tell_obstacle(step, is_last=is_last)
            return None  # asked again in the next generation
        if self._is_under_way():
            self._skip(step)
            return None
        self._last_was_last = is_last
        return SaveMark(sequence=self._standing.last_sequence + 1, number=secrets.randbits(32))

    def begin(self, mark: SaveMark, step: int, rank: int, contents: Contents) -> None:
        """A step's commit has carried this wish, and its update is made: copy, and write behind."""
        self._has_told_obstacle = False
        self._schedule.saved(step, time.monotonic())
        self._standing.last_sequence = max(self._standing.last_sequence, mark.sequence)
        order = SaveOrder(save_id=f"{mark.number:08x}", sequence=mark.sequence, step=step)
        sizes = {section.section_index: section.sizes for section in contents.sections}
        planned = self._planned_shares(rank, sizes, contents.holders)
        pending = _Pending(
            order=order,
            rank=rank,
            size=len(contents.holders[-1]),
            planned=planned,
            commission=Commission(
                order=order,
                job=contents.job,
                required=contents.required,
                num_sections=contents.num_sections,
            ),
        )
        self._answers.forget()
        self._pending = pending
        if rank == 0:
            keys = [pending.key(other) for other in range(pending.size)]
            self._commit(pending, keys, takes_over=False)
        future = self._saver.save(order, contents.sections, planned[rank])
        self._tell_when_done(pending.key(rank), future)

    # --- from one generation to the next ----------------------------------------------------

    def tell(self) -> dict[str, Any]:
        """What this member says when the next generation meets."""
        pending = self._pending
        if pending is not None and pending.committing is not None and not pending.committing.pause():
            self._over, self._pending = pending.order.save_id, None  # decided: it needs nobody any more
        told: dict[str, Any] = {"over": self._over}
        if self._pending is not None:
            told |= {"save": self._pending.order.save_id, "rank": self._pending.rank}
        return told

    def hear(self, told: Sequence[Mapping[str, Any]], generation: int, meeting: MeetingStore) -> None:
        """What all members said, in the order of their ranks."""
        self._answers.move(meeting)
        pending = self._pending
        if pending is None:
            return
        save_id = pending.order.save_id
        if any(one.get("over") == save_id for one in told):
            self._pending = None
            return
        alive = sorted(one["rank"] for one in told if one.get("save") == save_id)
        if pending.committer not in alive:
            pending.committer = alive[0]
        self._write_for_dead(pending, alive, generation)
        if pending.rank != pending.committer:
            return
        keys = [key for rank in alive for key in (pending.key(rank), pending.key(rank, generation))]
        if pending.committing is None:
            self._commit(pending, keys, takes_over=True)
        else:
            pending.committing.go_on(keys)

    def go_back(self) -> None:
        """The whole job goes back to an older step: what is under way is not wanted."""
        if self._pending is not None and self._pending.committing is not None:
            self._pending.committing.give_up("the job went back to an older step")
        self._pending = None
        self._answers.forget()

    def leave(self) -> None:
        """This worker goes while others go on: leave commits to another, and write what it owes."""
        if self._committing is not None:
            self._committing.leave()
        self._saver.close()
        self._thread.shutdown()

    # --- the end ----------------------------------------------------------------------------

    def fail(self) -> None:
        """The job has failed: nobody will meet again."""
        self._has_failed = True

    def settle(self) -> None:
        """Return when this member has nothing under way, or the generation has been given up."""
        while self._has_work() and not self._is_aborted():
            time.sleep(_POLL_S)

    def close(self) -> None:
        """The job is over: finish what is under way."""
        self._is_closing = True
        self._saver.close()
        if self._committing is not None:
            self._committing.wait()
        self._thread.shutdown()

    def news(self) -> Iterator[Event]:
        """What people should hear of saves, since the last call."""
        while not self._events.empty():
            yield self._events.get()

    # --- inside -----------------------------------------------------------------------------

    def _has_work(self) -> bool:
        is_committing = self._committing is not None and self._committing.is_alive
        return is_committing or any(not future.done() for future in self._futures)

    def _is_under_way(self) -> bool:
        if self._committing is not None and self._committing.is_alive:
            return True
        pending = self._pending
        return pending is not None and self._answers.ask(pending.ended_key) is None

    def _skip(self, step: int) -> None:
        self._num_skipped += 1
        if self._num_skipped == 1:
            text = (
                f"No checkpoint of step {step}, since the one before is still being written. Save less often, "
                f"or to a faster place."
            )
            self._events.put(Notice(text=text))

    def _tell_obstacle(self, step: int, *, is_last: bool) -> None:
        """Once, and at the end of a call, where there will be no other."""
        reason = self._obstacle()
        if reason and (is_last or not self._has_told_obstacle):
            self._has_told_obstacle = True
            self._events.put(CheckpointFailed(step=step, url=self._store.url, reason=reason))

    def _planned_shares(
        self, rank: int, sizes: Mapping[int, Mapping[str, int]], holders: Mapping[int, Sequence[int]]
    ) -> Mapping[int, Share]:
        """As ``planned_shares``; those of the last save if nothing has changed."""
        key = (rank, sizes, holders)
        if self._planned[0] != key:
            self._planned = (key, planned_shares(rank, sizes, holders))
        return self._planned[1]

    def _commit(self, pending: _Pending, keys: Collection[str], *, takes_over: bool) -> None:
        self._committing = pending.committing = Committing(
            self._thread,
            self._committer,
            self._answers,
            pending.commission,
            keys,
            is_over=self._will_not_meet,
            before_manifest=lambda: self._at("manifest"),
            ended=lambda saved: self._ended(pending, saved),
            takes_over=takes_over,
        )

    def _will_not_meet(self) -> bool:
        is_closing = self._is_closing or not threading.main_thread().is_alive()
        return self._has_failed or (is_closing and self._is_aborted())

    def _ended(self, pending: _Pending, saved: Saved) -> None:
        """In the committing thread."""
        order = saved.order
        url = f"{self._store.url}/{order.directory}"
        if saved.failure:
            self._events.put(CheckpointFailed(step=order.step, url=self._store.url, reason=saved.failure))
        else:
            self._complete(order)
            self._events.put(
                CheckpointSaved(
                    step=order.step,
                    url=url,
                    size_bytes=saved.size_bytes,
                    pause_s=saved.pause_s,
                    write_s=saved.write_s,
                )
            )
        self._answers.tell(pending.ended_key, Answer())

    def _tell_when_done(self, key: str, future: Future[SaverAnswer], lost: tuple[str, ...] = ()) -> None:
        def done(finished: Future[SaverAnswer]) -> None:
            result = finished.result()
            if isinstance(result, Written):
                self._answers.tell(key, Answer(written=result, lost=lost))
            else:
                self._answers.tell(key, Answer(failed=result, lost=lost))

        self._futures = [*(one for one in self._futures if not one.done()), future]
        future.add_done_callback(done)

    def _write_for_dead(self, pending: _Pending, alive: Sequence[int], generation: int) -> None:
        """What members that are gone owed and this one has kept."""
        again = reassign(pending.planned, alive)
        names = again.write.get(pending.rank, ())
        key = pending.key(pending.rank, generation)
        if names:
            future = self._saver.write_kept(pending.order, names, suffix=f"-kept{generation}")
            self._tell_when_done(key, future, again.lost)
        else:
            self._answers.tell(key, Answer(lost=again.lost))
