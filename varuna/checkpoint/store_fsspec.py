"""Checkpoints in a bucket, or anywhere else that fsspec reaches.

There, closing a file is not yet durability, a rename is a copy, and a listing may be old. So a file counts as
written when its size, read back, is right; the manifest is one upload, last; caches of listings are never used.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from varuna.checkpoint.store import HOLD_FILE, INSTALL, Buffer, FileEntry, Patience, Span, shown_url
from varuna.errors import ConfigError

_PIECE_BYTES = 16 << 20
_BATCH_BYTES = 256 << 20
_MAX_GAP_BYTES = 1 << 20
_MODIFIED_KEYS = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")


class FsspecStore:
    """A prefix of a bucket, through a file system object of fsspec.

    Args:
        fs: the file system.
        root: path of the prefix in it.
        url: for messages.
        patience: how long what was written may take to become visible.
    """

    def __init__(self, fs: Any, root: str, url: str, patience: Patience) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        self._url = url
        self._patience = patience

    @property
    def url(self) -> str:
        """For messages; without user name and password."""
        return self._url

    @property
    def patience(self) -> Patience:
        """How long to wait for what was written to become visible."""
        return self._patience

    # --- reading ----------------------------------------------------------------------------

    def directories(self) -> tuple[str, ...]:
        """See ``Store``."""
        return tuple(_name(item) for item in self._list("") if item["type"] == "directory")

    def files(self, directory: str) -> tuple[FileEntry, ...]:
        """See ``Store``."""
        return tuple(
            FileEntry(name=_name(item), size_bytes=int(item["size"]), modified_s=_modified_s(item))
            for item in self._list(directory)
            if item["type"] == "file" and _name(item)
        )

    def size_of(self, path: str) -> int:
        """See ``Store``."""
        with self._explained(path):
            self._fs.invalidate_cache()
            return int(self._fs.info(self._full(path))["size"])

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """See ``Store``."""
        with self._explained(path):
            if begin == 0 and end is None:
                return bytes(self._fs.cat_file(self._full(path)))
            return bytes(self._fs.cat_file(self._full(path), start=begin, end=end))

    def read_into(self, path: str, spans: Sequence[Span]) -> None:
        """See ``Store``: in pieces, several at a time."""
        for batch in _batches(_requests(spans)):
            with self._explained(path):
                found = self._fs.cat_ranges(
                    [self._full(path)] * len(batch),
                    [request.begin for request in batch],
                    [request.end for request in batch],
                    on_error="raise",
                )
            for request, data in zip(batch, found, strict=True):
                request.scatter(data)

    # --- writing ----------------------------------------------------------------------------

    def make_directory(self, directory: str) -> None:
        """See ``Store``: buckets have no directories; where there are some, they are made."""
        with self._explained(directory):
            if not getattr(self._fs, "bucket_based", _is_bucket(self._fs)):
                self._fs.makedirs(self._full(directory), exist_ok=True)

    def write(self, path: str, chunks: Iterable[Buffer]) -> None:
        """See ``Store``."""
        full = self._full(path)
        size_bytes = 0
        with self._explained(path):
            file = self._fs.open(full, "wb")
            try:
                for chunk in chunks:
                    view = memoryview(chunk).cast("B")
                    for start in range(0, len(view), _PIECE_BYTES):
                        file.write(view[start : start + _PIECE_BYTES])
                    size_bytes += len(view)
            except BaseException:
                self._throw_away(file, full)
                raise
            file.close()
        self._verify(path, size_bytes)

    def write_marker(self, path: str, data: bytes) -> None:
        """See ``Store``: one upload, which is there whole or not at all."""
        with self._explained(path):
            self._fs.pipe_file(self._full(path), data)
        self._verify(path, len(data))

    def remove_file(self, path: str) -> None:
        """See ``Store``."""
        with contextlib.suppress(FileNotFoundError), self._explained(path):
            self._fs.rm_file(self._full(path))

    def remove_directory(self, directory: str) -> None:
        """See ``Store``."""
        with contextlib.suppress(FileNotFoundError), self._explained(directory):
            self._fs.invalidate_cache()
            self._fs.rm(self._full(directory), recursive=True)

    # --- who writes where -------------------------------------------------------------------

    def hold(self, directory: str) -> ObjectHold:
        """See ``Store``: a bucket has no locks, so this only says when the save began."""
        path = f"{directory}/{HOLD_FILE}"
        self.write_marker(path, b"being written\n")
        return ObjectHold(self, path)

    def is_held(self, directory: str) -> bool | None:
        """See ``Store``: a bucket cannot tell."""
        return None

    # --- inside -----------------------------------------------------------------------------

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _list(self, directory: str) -> list[dict[str, Any]]:
        with self._explained(directory):
            self._fs.invalidate_cache()
            try:
                return list(self._fs.ls(self._full(directory), detail=True))
            except FileNotFoundError:
                return []

    def _verify(self, path: str, size_bytes: int) -> None:
        """An upload counts when its size, read back, is right."""
        found: int | None = None

        def is_right() -> bool:
            nonlocal found
            try:
                found = self.size_of(path)
            except FileNotFoundError:
                found = None
            return found == size_bytes

        if not self._patience.until(is_right):
            what = "no file" if found is None else f"{found} bytes"
            raise OSError(
                f"{self._url}/{path}: wrote {size_bytes} bytes and found {what} for {self._patience.limit_s} s"
            )

    def _throw_away(self, file: Any, full: str) -> None:
        """End an upload so that no half file appears: closing it would complete what was sent so far."""
        discard: Callable[[], None] | None = getattr(file, "discard", None)
        if discard is not None:
            discard()
        file.closed = True
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(full)

    @contextlib.contextmanager
    def _explained(self, path: str) -> Iterator[None]:
        """Errors of any client library as ``OSError`` with the file's name."""
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, str(error), f"{self._url}/{path}") from error
        except Exception as error:
            raise OSError(f"{self._url}/{path}: {type(error).__name__}: {error}") from error


class ObjectHold:
    """The hold file of a directory; ``release`` removes it."""

    def __init__(self, store: FsspecStore, path: str) -> None:
        self._store = store
        self._path = path

    def release(self) -> None:
        """Let go; a second time does nothing."""
        self._store.remove_file(self._path)


def open_fsspec(url: str, patience: Patience) -> FsspecStore:
    """The store at a URL of fsspec's.

    Raises:
        ConfigError: fsspec or what this kind of URL needs is not installed, or the URL is not understood.
    """
    scheme = url.partition("://")[0]
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        fs, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        how = INSTALL.get(scheme, "install the package that fsspec asks for")
        raise ConfigError(
            f"Checkpoints at {scheme}:// need a package that is not installed ({error}). {how}."
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{shown_url(url)} is no place for checkpoints: {error}. Give a directory, or a URL such as "
            f"s3://bucket/name."
        ) from error
    return FsspecStore(fs, root, shown_url(url), patience)


def _is_bucket(fs: Any) -> bool:
    protocol = fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,)
    return bool({"s3", "gs", "gcs", "abfs", "az", "oss"} & set(protocol))


def _name(item: dict[str, Any]) -> str:
    return str(item["name"]).rstrip("/").rpartition("/")[2]


def _modified_s(item: dict[str, Any]) -> float | None:
    for key in _MODIFIED_KEYS:
        value = item.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value).timestamp()
            except ValueError:
                continue
    return None


@dataclass(kw_only=True)
class _Request:
    """What one request fetches: bytes ``begin <= i < end`` for some spans."""

    begin: int
    end: int
    spans: list[Span]

    def scatter(self, data: bytes) -> None:
        """Fill the spans."""
        for span in self.spans:
            end = span.begin + len(span.into)
            if self.begin + len(data) < end:
                raise EOFError(self.begin + len(data))
            span.into[:] = data[span.begin - self.begin : end - self.begin]


def _requests(spans: Iterable[Span]) -> Iterator[_Request]:
    """Near neighbours together, large spans in pieces."""
    request: _Request | None = None
    for piece in sorted(_pieces(spans), key=lambda piece: piece.begin):
        end = piece.begin + len(piece.into)
        if request is not None:
            is_near = piece.begin - request.end <= _MAX_GAP_BYTES
            if is_near and max(end, request.end) - request.begin <= _PIECE_BYTES:
                request.end = max(end, request.end)
                request.spans.append(piece)
                continue
            yield request
        request = _Request(begin=piece.begin, end=end, spans=[piece])
    if request is not None:
        yield request


def _pieces(spans: Iterable[Span]) -> Iterator[Span]:
    for span in spans:
        for start in range(0, len(span.into), _PIECE_BYTES):
            yield Span(begin=span.begin + start, into=span.into[start : start + _PIECE_BYTES])


def _batches(requests: Iterable[_Request]) -> Iterator[list[_Request]]:
    """As many requests as are under way together."""
    batch: list[_Request] = []
    size_bytes = 0
    for request in requests:
        batch.append(request)
        size_bytes += request.end - request.begin
        if size_bytes >= _BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch
