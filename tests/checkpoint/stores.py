"""Stores that are watched, that fail, and that show things late."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from varuna.checkpoint.store import Buffer
from varuna.checkpoint.store_file import FileStore


class WatchedStore(FileStore):
    """A real directory that remembers what was done in which order, and fails where it is told to.

    ``fail_at`` maps an operation and the end of a path to the error to raise.
    """

    def __init__(self, root: Path, fail_at: dict[tuple[str, str], OSError] | None = None) -> None:
        super().__init__(root)
        self.done: list[tuple[str, str]] = []
        self.fail_at = fail_at or {}

    def _note(self, operation: str, path: str) -> None:
        for (what, end), error in self.fail_at.items():
            if what == operation and path.endswith(end):
                raise error
        self.done.append((operation, path))

    def write(self, path: str, chunks: Iterable[Buffer]) -> None:
        super().write(path, chunks)
        self._note("write", path)

    def write_marker(self, path: str, data: bytes) -> None:
        self._note("marker", path)
        super().write_marker(path, data)

    def remove_file(self, path: str) -> None:
        self._note("remove file", path)
        super().remove_file(path)

    def remove_directory(self, directory: str) -> None:
        self._note("remove", directory)
        super().remove_directory(directory)


class LateFileSystem:
    """A file system of fsspec's on which new objects and listings become visible only when time goes on.

    Args:
        fs: the real one.
        delay_s: how long an object stays hidden. ``sleep`` is time.
    """

    def __init__(self, fs: Any, delay_s: float) -> None:
        self._fs = fs
        self.delay_s = delay_s
        self.now_s = 0.0
        self._visible_at: dict[str, float] = {}

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    @property
    def num_hidden(self) -> int:
        return sum(at > self.now_s for at in self._visible_at.values())

    def hide(self, path: str) -> None:
        self._visible_at[path] = self.now_s + self.delay_s

    def open(self, path: str, mode: str) -> Any:
        if "w" in mode:
            self.hide(path)
        return self._fs.open(path, mode)

    def pipe_file(self, path: str, data: bytes) -> None:
        self.hide(path)
        self._fs.pipe_file(path, data)

    def info(self, path: str) -> Any:
        self._check(path)
        return self._fs.info(path)

    def cat_file(self, path: str, **span: Any) -> Any:
        self._check(path)
        return self._fs.cat_file(path, **span)

    def cat_ranges(self, paths: list[str], *spans: Any, **options: Any) -> Any:
        for path in paths:
            self._check(path)
        return self._fs.cat_ranges(paths, *spans, **options)

    def ls(self, path: str, detail: bool) -> Any:
        return [item for item in self._fs.ls(path, detail=detail) if not self._is_hidden(item["name"])]

    def _is_hidden(self, path: str) -> bool:
        return self._visible_at.get(path, 0.0) > self.now_s

    def _check(self, path: str) -> None:
        if self._is_hidden(path):
            raise FileNotFoundError(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)
