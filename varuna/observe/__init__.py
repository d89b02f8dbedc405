"""Listens to events; nothing that works calls it."""

from varuna.observe.progress import progress_listener, show_progress

__all__ = ["progress_listener", "show_progress"]
