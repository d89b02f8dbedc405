"""Where checkpoints live: a directory or a bucket. What any of them must do, and how a URL becomes one.

A store knows files in directories one level deep. Two things make it safe to build on: when ``write`` returns,
the file is durable and whole; when ``write_marker`` is interrupted, there is no marker. Every method raises
``OSError`` when the store fails (``FileNotFoundError`` for what is not there, or not visible yet).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit, urlunsplit

from varuna.errors import ConfigError

Buffer = bytes | bytearray | memoryview

HOLD_FILE = ".writing"
"""A file in a directory that is being written; its time is when the save began, by the store's own clock."""

INSTALL = {
    "s3": "pip install 'varuna[s3]'",
    "s3a": "pip install 'varuna[s3]'",
    "gs": "pip install gcsfs",
    "gcs": "pip install gcsfs",
    "az": "pip install adlfs",
    "abfs": "pip install adlfs",
}
"""What a kind of URL needs, where the name of the package does not say it."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A file in a listing.

    Attributes:
        name: in its directory.
        size_bytes: of it.
        modified_s: by the store's own clock; only differences mean anything. None if the store does not say.
    """

    name: str
    size_bytes: int
    modified_s: float | None


@dataclass(frozen=True, kw_only=True)
class Span:
    """Bytes of a file, from ``begin`` on, and the memory they go to."""

    begin: int
    into: memoryview


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long what was written may take to become visible.

    Attributes:
        limit_s: after this it counts as missing.
        first_s: the first wait; each is twice the one before.
        sleep: waits that many seconds.
    """

    limit_s: float = 20.0
    first_s: float = 0.1
    sleep: Callable[[float], None] = time.sleep

    def until(self, holds: Callable[[], bool]) -> bool:
        """True as soon as ``holds()`` is; False if it is not within the limit."""
        waited_s = 0.0
        pause_s = self.first_s
        while not holds():
            pause_s = min(pause_s, self.limit_s - waited_s)
            if pause_s <= 0:
                return False
            self.sleep(pause_s)
            waited_s += pause_s
            pause_s *= 2
        return True


class Hold(Protocol):
    """Says to other processes that a directory is being written; ends with the process at the latest."""

    def release(self) -> None:
        """Let go."""


class Store(Protocol):
    """A directory or a bucket."""

    @property
    def url(self) -> str:
        """For messages; without user name and password."""

    @property
    def patience(self) -> Patience:
        """How long to wait for what was written to become visible."""

    def directories(self) -> tuple[str, ...]:
        """Names of the directories in it, in no order; none if the store itself does not exist yet."""

    def files(self, directory: str) -> tuple[FileEntry, ...]:
        """What is in a directory now, ``HOLD_FILE`` included; nothing if it does not exist."""

    def size_of(self, path: str) -> int:
        """Bytes of a file."""

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """Bytes of a file, as many as there are."""

    def read_into(self, path: str, spans: Sequence[Span]) -> None:
        """Fill memory from a file; ``EOFError`` if it is too short."""

    def make_directory(self, directory: str) -> None:
        """Make a directory, durably."""

    def write(self, path: str, chunks: Iterable[Buffer]) -> None:
        """Write a new file. At return it is durable and of full size; if this raises, nothing is left."""

    def write_marker(self, path: str, data: bytes) -> None:
        """Write a small file that is there whole or not at all."""

    def remove_file(self, path: str) -> None:
        """Remove a file if it is there."""

    def remove_directory(self, directory: str) -> None:
        """Remove a directory with its files, whatever of it is there."""

    def hold(self, directory: str) -> Hold:
        """Mark a directory as being written by this process: ``HOLD_FILE``, locked where there are locks."""

    def is_held(self, directory: str) -> bool | None:
        """Whether some process, this one included, holds a directory; None if the store cannot tell."""


def open_store(url: str, *, patience: Patience | None = None) -> Store:
    """The store at a path, a ``file://`` URL or any URL that fsspec knows (``s3://bucket/prefix``, ``gs://...``).

    Credentials and endpoints come from the environment, as the provider's own tools read them.

    Raises:
        ConfigError: the URL cannot be used here.
    """
    from varuna.checkpoint.store_file import FileStore

    check_url(url)
    scheme, separator, _ = url.partition("://")
    if not separator:
        return FileStore(Path(url).absolute())
    if scheme == "file":
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise ConfigError(
                f"{url} names the host {parts.netloc!r}; a file URL is of this machine. Write file:///{parts.netloc}"
                f"{parts.path} for an absolute path."
            )
        return FileStore(Path(unquote(parts.path)))
    from varuna.checkpoint.store_fsspec import open_fsspec

    return open_fsspec(url, patience or Patience())


def check_url(url: str) -> None:
    """Raise ``ConfigError`` for a URL that no store can have; opens nothing, and imports no client."""
    scheme, separator, rest = url.partition("://")
    if not url or (separator and not rest):
        raise ConfigError(
            f"{url!r} is no place for checkpoints. Give a directory, or a URL such as s3://bucket/name."
        )
    if not separator or scheme == "file":
        return
    from fsspec import available_protocols  # type: ignore[import-untyped]

    unknown = [name for name in scheme.split("::") if name not in available_protocols()]
    if unknown:
        raise ConfigError(
            f"{shown_url(url)} is no place for checkpoints: {unknown[0]}:// is not known. Give a directory, or "
            f"a URL such as s3://bucket/name."
        )


def missing_package(url: str) -> str:
    """What has to be installed here for a URL that ``check_url`` lets pass; empty if all is there."""
    scheme, separator, _ = url.partition("://")
    if not separator or scheme == "file":
        return ""
    from fsspec.registry import known_implementations  # type: ignore[import-untyped]

    for name in scheme.split("::"):
        module = known_implementations.get(name, {}).get("class", "").partition(".")[0]
        if module and find_spec(module) is None:
            how = INSTALL.get(name, f"pip install {module}")
            return f"{name}:// needs {module}, which is not installed: {how}"
    return ""


def shown_url(url: str) -> str:
    """A URL without user name and password."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
