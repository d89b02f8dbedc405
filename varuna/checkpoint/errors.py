"""What can go wrong with checkpoints."""

from __future__ import annotations

from varuna.errors import RunError, UserError


class CheckpointError(RunError):
    """No checkpoint to read, a store that fails, or a save that did not become a checkpoint."""


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing, cut short or changed; who asked for the newest gets an older one."""


class StateError(UserError):
    """State that cannot be stored without pickle, or that does not fit the model it is for."""
