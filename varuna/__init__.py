"""Varuna: train PyTorch models too large for one GPU on whatever machines there are.

    job = varuna.Varuna(model, optimizer, dataset, batch_size=256)
    for step in job.train(num_steps=1000):
        ...

Names are imported when first used, so that ``import varuna`` (and the command line) does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from varuna.versions import VARUNA_VERSION

if TYPE_CHECKING:
    from varuna.config import LayoutConfig as Layout
    from varuna.config_checkpoint import CheckpointConfig as Checkpoints
    from varuna.errors import (
        CaptureError,
        CheckFailed,
        ConfigError,
        CutPointError,
        DataError,
        LossError,
        NonFiniteLoss,
        OptimizerError,
        PeerLost,
        PlanError,
        ProtocolError,
        RunError,
        UserError,
        VarunaError,
        WeightsDiffer,
        WorkerFailed,
    )
    from varuna.order import sample_ids
    from varuna.partition.cutpoint import CutPoint
    from varuna.partition.loss import Loss
    from varuna.session import Varuna
    from varuna.spec import Plan, SectionSpec, Step

__version__ = VARUNA_VERSION

__all__ = [
    "CaptureError",
    "CheckFailed",
    "Checkpoints",
    "ConfigError",
    "CutPoint",
    "CutPointError",
    "DataError",
    "Layout",
    "Loss",
    "LossError",
    "NonFiniteLoss",
    "OptimizerError",
    "PeerLost",
    "Plan",
    "PlanError",
    "ProtocolError",
    "RunError",
    "SectionSpec",
    "Step",
    "UserError",
    "Varuna",
    "VarunaError",
    "WeightsDiffer",
    "WorkerFailed",
    "__version__",
    "sample_ids",
]

_ELSEWHERE = {
    "Checkpoints": "varuna.config_checkpoint",
    "CutPoint": "varuna.partition.cutpoint",
    "Layout": "varuna.config",
    "Loss": "varuna.partition.loss",
    "Plan": "varuna.spec",
    "SectionSpec": "varuna.spec",
    "Step": "varuna.spec",
    "Varuna": "varuna.session",
    "sample_ids": "varuna.order",
}

_NAMED = {"Checkpoints": "CheckpointConfig", "Layout": "LayoutConfig"}
"""What some are called where they are defined."""


def __getattr__(name: str) -> object:
    if name not in __all__ or name == "__version__":
        raise AttributeError(f"module 'varuna' has no attribute {name!r}")
    module = importlib.import_module(_ELSEWHERE.get(name, "varuna.errors"))
    value = getattr(module, _NAMED.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
