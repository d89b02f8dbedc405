"""What is left to do when a script has come to its end, while its process still can do anything."""

from __future__ import annotations

import functools
from collections.abc import Callable


class ScriptEnd:
    """Like ``atexit``, but before the interpreter goes down, and only where the script has ended well."""

    def __init__(self) -> None:
        self._works: list[Callable[[], None]] = []

    def register(self, work: Callable[[], None]) -> None:
        """Have ``work`` done then."""
        self._works.append(work)

    def came(self) -> None:
        """The script has ended well: do what is left, each once, in the order of registering."""
        while self._works:
            self._works.pop(0)()


@functools.lru_cache(maxsize=1)
def script_end() -> ScriptEnd:
    """The end of this process's script."""
    return ScriptEnd()
