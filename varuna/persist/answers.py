"""What members tell of a save, through the store in which their generation meets.

That store may be gone with its generation. So each member keeps what it has told until the next save, and tells
it again in the next generation's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import msgspec
from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from varuna.persist.verdict import Answer


class Answers:
    """One member's answers, and those it asks for. Any thread may call anything.

    Args:
        store: of the generation at work.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._mine: dict[str, str] = {}

    def tell(self, key: str, answer: Answer) -> None:
        """Tell an answer, now and in every generation to come."""
        text = msgspec.json.encode(answer).decode()
        with self._lock:
            self._mine[key] = text
            self._put(key, text)

    def ask(self, key: str) -> Answer | None:
        """An answer, if somebody has told it."""
        with self._lock:
            store = self._store
        try:
            if not store.check([key]):
                return None
            return msgspec.json.decode(bytes(store.get(key)), type=Answer)
        except DistError:  # its generation is over; in the next one it is told again
            return None

    def drop(self, keys: Iterable[str]) -> None:
        """A save is over: take its answers out of the store."""
        with self._lock:
            store = self._store
        try:
            for key in keys:
                store.delete_key(key)
        except DistError:  # its generation is over, and all that was in it
            return

    def forget(self) -> None:
        """A save is over: its answers are not told any more."""
        with self._lock:
            self._mine.clear()

    def move(self, store: Store) -> None:
        """Another generation, another store."""
        with self._lock:
            self._store = store
            for key, text in self._mine.items():
                self._put(key, text)

    def _put(self, key: str, text: str) -> None:
        try:
            self._store.set(key, text)
        except DistError:  # its generation is over; in the next one it is told again
            return
