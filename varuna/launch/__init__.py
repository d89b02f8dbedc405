"""Starts workers on this machine and sees the job to its end, whatever ends it. Never imports torch itself."""

from varuna.launch.devices import visible_gpus
from varuna.launch.job import LocalJob
from varuna.launch.local import run_local

__all__ = ["LocalJob", "run_local", "visible_gpus"]
