"""Checkpoints in a directory that all machines share (or of one machine).

Durable means: the file was synced and so was the directory that names it. Files are read with ``pread`` into
the memory they are for, and not through a memory map: a map turns a read error of the disk, or a file that
someone cuts short, into a signal that kills the process, and it needs a second copy to own the values.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from varuna.checkpoint.store import HOLD_FILE, Buffer, FileEntry, Patience, Span

_CANNOT_LOCK = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_CHUNK_BYTES = 16 << 20
_NEVER_LATE = Patience(limit_s=0.0)


class FileStore:
    """A directory of the file system."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def url(self) -> str:
        """Its path."""
        return str(self._root)

    @property
    def patience(self) -> Patience:
        """What was written is visible at once."""
        return _NEVER_LATE

    def path_of(self, path: str) -> Path:
        """Where a file or directory of the store is."""
        return self._root / path

    # --- reading ----------------------------------------------------------------------------

    def directories(self) -> tuple[str, ...]:
        """See ``Store``."""
        try:
            return tuple(entry.name for entry in os.scandir(self._root) if entry.is_dir())
        except FileNotFoundError:
            return ()

    def files(self, directory: str) -> tuple[FileEntry, ...]:
        """See ``Store``."""
        try:
            return tuple(_entries(self._root / directory))
        except FileNotFoundError:
            return ()

    def size_of(self, path: str) -> int:
        """See ``Store``."""
        return os.stat(self._root / path).st_size

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """See ``Store``."""
        with open(self._root / path, "rb") as file:
            file.seek(begin)
            return file.read(-1 if end is None else max(0, end - begin))

    def read_into(self, path: str, spans: Sequence[Span]) -> None:
        """See ``Store``."""
        descriptor = os.open(self._root / path, os.O_RDONLY)
        try:
            for span in spans:
                _read_span(descriptor, span)
        finally:
            os.close(descriptor)

    # --- writing ----------------------------------------------------------------------------

    def make_directory(self, directory: str) -> None:
        """See ``Store``."""
        os.makedirs(self._root / directory, exist_ok=True)
        _sync_directory(self._root)
        _sync_directory(self._root.parent)

    def write(self, path: str, chunks: Iterable[Buffer]) -> None:
        """See ``Store``."""
        full = self._root / path
        descriptor = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                for chunk in chunks:
                    _write_all(descriptor, chunk)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            _sync_directory(full.parent)
        except BaseException as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(full)
            if isinstance(error, OSError) and error.filename is None:
                raise OSError(error.errno, error.strerror, str(full)) from error
            raise

    def write_marker(self, path: str, data: bytes) -> None:
        """See ``Store``."""
        full = self._root / path
        unfinished = f"{path}.{uuid.uuid4().hex[:8]}.unfinished"
        self.write(unfinished, [data])
        try:
            os.rename(self._root / unfinished, full)
        except BaseException:
            os.unlink(self._root / unfinished)
            raise
        _sync_directory(full.parent)

    def remove_file(self, path: str) -> None:
        """See ``Store``."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._root / path)
            _sync_directory((self._root / path).parent)

    def remove_directory(self, directory: str) -> None:
        """See ``Store``."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._root / directory)

    # --- who writes where -------------------------------------------------------------------

    def hold(self, directory: str) -> FileHold:
        """See ``Store``: a lock on a file in it, which the kernel drops when the process ends in any way."""
        descriptor = os.open(self._root / directory / HOLD_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _CANNOT_LOCK:  # a file system without locks: ``is_held`` will not know
                os.close(descriptor)
                raise
        return FileHold(descriptor, self._root / directory / HOLD_FILE)

    def is_held(self, directory: str) -> bool | None:
        """See ``Store``."""
        try:
            descriptor = os.open(self._root / directory / HOLD_FILE, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno not in _CANNOT_LOCK:
                raise
            return None
        finally:
            os.close(descriptor)
        return False


class FileHold:
    """A lock on the ``.writing`` file of a directory; ``release`` removes the file."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path

    def release(self) -> None:
        """Let go; a second time does nothing."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        os.close(self._descriptor)
        self._descriptor = -1


def _entries(directory: Path) -> Iterator[FileEntry]:
    for entry in os.scandir(directory):
        if not entry.is_file():
            continue
        try:
            status = entry.stat()
        except FileNotFoundError:  # removed meanwhile
            continue
        yield FileEntry(name=entry.name, size_bytes=status.st_size, modified_s=status.st_mtime)


def _read_span(descriptor: int, span: Span) -> None:
    position = 0
    while position < len(span.into):
        count = os.preadv(descriptor, [span.into[position : position + _CHUNK_BYTES]], span.begin + position)
        if count == 0:
            raise EOFError(span.begin + position)
        position += count


def _write_all(descriptor: int, chunk: Buffer) -> None:
    view = memoryview(chunk).cast("B")
    while view:
        view = view[os.write(descriptor, view[:_CHUNK_BYTES]) :]


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
