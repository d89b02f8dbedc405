"""Where a job's manager is: at a URL, or at that in a file, for it may come back on another machine."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from varuna.errors import ConfigError
from varuna.morph.client import check_url

URL_NAME = "url"
"""The file in a manager's directory with its URL."""


def place_of(path: Path) -> str:
    """How a file with a URL in it is named where a URL is expected: ``file:///shared/state/url``."""
    return path.absolute().as_uri()


def check_place(place: str) -> None:
    """Raise ``ConfigError`` for what is neither a manager's URL nor a file's."""
    parts = urlsplit(place)
    if parts.scheme != "file":
        check_url(place)
    elif parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ConfigError(f"{place!r} names no file on this machine. Write file:///PATH, with three slashes.")


def manager_url(place: str) -> str:
    """Where the manager is now.

    Raises:
        OSError: the file is not there, or has no URL in it.
    """
    parts = urlsplit(place)
    if parts.scheme != "file":
        return place
    path = Path(unquote(parts.path))
    try:
        url = path.read_text(encoding="ascii").strip()
        check_url(url)
    except (UnicodeError, ConfigError) as error:
        raise OSError(f"{path} has no manager's URL in it: {error}") from error
    return url


def url_now(place: str) -> str:
    """As ``manager_url``, for commands that do not wait for a manager.

    Raises:
        ConfigError: it is no such place, or no manager is there.
    """
    check_place(place)
    try:
        return manager_url(place)
    except OSError as error:
        raise ConfigError(f"No manager is known at {place}: {error}.") from error
