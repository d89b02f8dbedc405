"""Whether all workers make the same calls: train, evaluate and full_state_dict are things that all do together.

Every worker tells in the store which call it makes, as number and name: one message per step that nobody
answers. A call that is rare waits until all others make it too, and so finds out if one of them makes another
one, which would leave both waiting for messages that never come. A worker whose script is over, and that stays
for the others, looks whether they go on without it.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from varuna.errors import PeerLost, ProtocolError
from varuna.run.failure import published_failure
from varuna.run.world import World

_POLL_S = 0.01
_SHORT_POLL_S = 0.001
_MOST_WAIT_S = 5.0
"""Rank 0 waits no longer than this for others to see that all have come: one may have died just then."""
_END = "the end of its script"
_NUM_LOOKED_AT = 4
_T = TypeVar("_T")


class Calls:
    """The calls of one generation on this worker.

    Args:
        world: this worker.
        generation: number of the generation.

    Attributes:
        store_is_lost: a step has been made although it could not be told: the store is gone.
    """

    def __init__(self, world: World, generation: int) -> None:
        self._world = world
        self._generation = generation
        self._store = PrefixStore(f"calls-{generation}", world.store)
        self._made = [0]
        self._is_alone = world.size == 1
        self._others = deque(rank for rank in range(world.size) if rank != world.rank)
        self._others.rotate(-world.rank)  # each begins with whoever follows it
        self._aborted = ""
        self.store_is_lost = False
        self._end = weakref.finalize(self, _tell_end, self._store, world.rank, self._made)
        if self._is_alone:
            self._end.detach()

    def announce(self, call: str, note: str = "") -> None:
        """Tell that this worker makes this call now, and do not wait; ``note`` is for ``note_of``."""
        self._made[0] += 1
        if self._aborted:  # the store may not answer any more
            raise PeerLost(f"Did not come to {call}: {self._aborted}.")
        if not self._is_alone:
            self._store.set(str(self._world.rank), f"{self._made[0]} {call}\n{note}")

    def announce_step(self, step_index: int, goes_on: Callable[[], bool], note: str = "") -> None:
        """Tell that this worker makes this step now.

        Args:
            step_index: which.
            goes_on: asked if the store is gone: whether training goes on all the same.
            note: for ``note_of``.
        """
        try:
            self.announce(_step(step_index), note)
        except DistError:
            if not goes_on():
                raise
            self.store_is_lost = True

    def note_of(self, rank: int, step_index: int) -> str:
        """What another worker has noted on this step, which is announced here; waits until it comes to it.

        Raises:
            ProtocolError, PeerLost: as ``meet``.
        """
        self._wait_for(rank, _step(step_index))
        return self._told(rank)[1]

    def abort(self, reason: str) -> None:
        """End every wait of this generation's calls here, from any thread."""
        self._aborted = reason or "aborted"
        self._end.detach()

    def meet(self, call: str) -> None:
        """Return when every worker has made this call; on rank 0, which may serve the store, also when every
        other worker has seen that: its script may end now, and the store with it.

        Raises:
            ProtocolError: another worker makes a different one, or its script has ended.
            PeerLost: another worker has told that it failed.
        """
        self.announce(call)
        if self._is_alone:
            return
        for rank in self._others:
            self._wait_for(rank, call)
        if self._world.rank != 0:
            self._store.set(f"seen/{self._world.rank}", str(self._made[0]))
            return
        go_on_s = time.monotonic() + _MOST_WAIT_S
        for rank in self._others:
            while not self._has_seen(rank) and time.monotonic() < go_on_s:
                self._check_life(rank, call)
                time.sleep(_SHORT_POLL_S)

    def check_nobody_goes_on(self) -> None:
        """For a worker whose script is over: look at some others, each time at the next ones.

        Raises:
            ProtocolError: one of them makes a call that this worker will not make.
        """
        if self._aborted:
            return
        with contextlib.suppress(DistError):  # whoever serves the store is lost: that is heard of elsewhere
            for _ in range(min(_NUM_LOOKED_AT, len(self._others))):
                self._others.rotate(-1)
                rank = self._others[-1]
                index, name = self._call_of(rank) or (0, _END)
                if index > self._made[0] and name != _END:
                    raise ProtocolError(
                        f"The script of worker {self._world.rank} is over, but worker {rank} goes on to "
                        f"{name}. All workers must leave a train loop after the same step and make the same "
                        f"calls: decide by what is equal on all of them, such as step.loss or what evaluate "
                        f"returns."
                    )

    def in_turn(self, call: str, work: Callable[[], _T]) -> _T:
        """Do ``work`` on rank 0 and each machine's first worker, then on the others: it is in the cache.

        Raises:
            ProtocolError, PeerLost: as ``meet``.
        """
        leads = self._world.rank == 0 or self._world.local_rank == 0
        if leads:
            result = work()
        self.meet(call)
        return result if leads else work()

    def _wait_for(self, rank: int, call: str) -> None:
        mine = self._made[0]
        while True:
            theirs = self._call_of(rank)
            if theirs is not None:
                index, name = theirs
                if (index == mine and name not in (call, _END)) or (index < mine and name == _END):
                    raise ProtocolError(
                        f"Worker {self._world.rank} is at {call}, but worker {rank} is at {name}. Call train, "
                        f"evaluate and full_state_dict on every worker, in the same order and never under "
                        f"`if job.rank == 0`."
                    )
                if index >= mine:
                    return
            self._check_life(rank, call)
            time.sleep(_POLL_S)

    def _check_life(self, rank: int, call: str) -> None:
        """Raise ``PeerLost`` if it makes no sense to wait any longer."""
        if self._aborted:
            raise PeerLost(f"Gave up waiting for worker {rank} to come to {call}: {self._aborted}.")
        failure = published_failure(self._world.store, self._generation, timeout_s=0.0)
        if failure is not None:
            raise PeerLost(f"Gave up waiting for worker {rank} to come to {call}.")

    def _has_seen(self, rank: int) -> bool:
        key = f"seen/{rank}"
        return self._store.check([key]) and int(self._store.get(key)) >= self._made[0]

    def _call_of(self, rank: int) -> tuple[int, str] | None:
        if not self._store.check([str(rank)]):
            return None
        index, _, name = self._told(rank)[0].partition(" ")
        return int(index), name

    def _told(self, rank: int) -> tuple[str, str]:
        """Number and name of a worker's call, and its note."""
        call, _, note = self._store.get(str(rank)).decode().partition("\n")
        return call, note


def _step(step_index: int) -> str:
    return f"training step {step_index}"


def _tell_end(store: Store, rank: int, made: list[int]) -> None:
    with contextlib.suppress(DistError):  # the store went first: the job is over
        store.set(str(rank), f"{made[0]} {_END}")
