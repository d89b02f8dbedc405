"""The ``varuna`` command; ``commands.py`` lists its subcommands, a module each."""

from __future__ import annotations

from varuna.cli.commands import main

__all__ = ["main"]
