"""The job's token: from the environment or a file that only its owner can read, never from the command line."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from varuna.errors import ConfigError

VARIABLE = "VARUNA_TOKEN"
_OTHERS = 0o077


def read_token(environ: Mapping[str, str], path: Path | None) -> str:
    """The token in a file, or else in ``VARUNA_TOKEN``.

    Raises:
        ConfigError: there is none, it is none, or others may read the file.
    """
    if path is None:
        token = environ.get(VARIABLE, "")
        if not token:
            raise ConfigError(
                f"No token: give the manager's with --token-file FILE, or in {VARIABLE}. `varuna manager` says "
                f"where it is."
            )
        return _checked(token, VARIABLE)
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"The token cannot be read from {path}: {error}.") from error
    if mode & _OTHERS:
        raise ConfigError(f"{path} can be read by others (mode {mode & 0o777:o}). Do: chmod 600 {path}")
    return _checked(text.strip(), str(path))


def keep_token(environ: Mapping[str, str], path: Path) -> str:
    """The token of a job that is managed here: from ``VARUNA_TOKEN``, else from the file, made if needed.

    Raises:
        ConfigError: as ``read_token``, or the file cannot be written.
    """
    if environ.get(VARIABLE):
        return read_token(environ, None)
    if not path.exists():
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise ConfigError(f"The token cannot be written to {path}: {error}.") from error
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
    return read_token(environ, path)


def _checked(token: str, where: str) -> str:
    if len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"What is in {where} is no token: it must be 16 or more printable ASCII characters without spaces."
        )
    return token
