"""Every error Varuna raises on purpose, as one tree::

    VarunaError
    ├── UserError (also ValueError): something the user gave cannot work; nothing was changed
    │   ├── ConfigError      an argument, flag or environment variable
    │   ├── CaptureError     the model's forward cannot be captured
    │   ├── CutPointError    a mark or a named cut point
    │   ├── PlanError        a layout that does not fit the model, the workers or the batch
    │   ├── DataError        dataset, collate function or batch
    │   ├── LossError        what forward returned is not a loss
    │   └── OptimizerError   an optimizer that cannot be split over workers
    └── RunError (also RuntimeError): the run met something while it worked
        ├── WorkerFailed     an exception in user code on a worker: which one, where, what
        ├── PeerLost         a neighbour's connection or process group broke
        ├── ProtocolError    a message of another generation, step, shape or operation
        ├── CheckFailed      the split step differs from the unsplit step
        ├── WeightsDiffer    workers built different initial weights
        └── NonFiniteLoss    loss or gradient became inf or nan

A message says what happened, the values, and what to do.
"""

from __future__ import annotations


class VarunaError(Exception):
    """Root of every error that Varuna raises on purpose."""


class UserError(VarunaError, ValueError):
    """Something the user gave cannot work."""


class ConfigError(UserError):
    """An argument, a flag or an environment variable."""


class CaptureError(UserError):
    """The model's forward cannot be captured as a graph."""


class CutPointError(UserError):
    """A ``CutPoint`` mark or a named cut point cannot be used."""


class PlanError(UserError):
    """A layout that does not fit the model, the workers or the batch."""


class DataError(UserError):
    """The dataset, the collate function or a batch they made."""


class LossError(UserError):
    """What the model's forward returned cannot be taken as a loss."""


class OptimizerError(UserError):
    """An optimizer whose update cannot be computed parameter by parameter."""


class RunError(VarunaError, RuntimeError):
    """The run met something while it worked."""


class WorkerFailed(RunError):
    """An exception in user code on one worker, with the place where it happened."""


class PeerLost(RunError):
    """A neighbour's connection or process group broke."""


class ProtocolError(RunError):
    """A message of another generation, step, shape or operation than the one expected."""


class CheckFailed(RunError):
    """The split step differs from the unsplit step."""


class WeightsDiffer(RunError):
    """Workers built different initial weights."""


class NonFiniteLoss(RunError):
    """Loss or gradient became infinite or not-a-number."""


class WantedEnd(SystemExit):
    """No error: this worker's script ends here, exit code 0, because that was asked for (it left, say)."""

    def __init__(self) -> None:
        super().__init__(0)
