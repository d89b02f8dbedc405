"""A pickle that gives itself away when somebody loads it."""

from __future__ import annotations

import pickle
from pathlib import Path


class Canary:
    """``data`` makes the file ``path`` when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = pickle.dumps(_Maker(path))

    @property
    def is_silent(self) -> bool:
        """Nobody has unpickled it."""
        return not self.path.exists()


class _Maker:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self._path), "w")
