"""``capture``: the user's model and the shape of a batch become a ``CapturedGraph``.

``torch.export`` runs the model's forward once on shapes (no memory, no values), in the run's own autocast, with
one symbolic number of samples. If the model fixes the number of samples, the graph is for that number only.
Modules that cannot be traced become opaque leaves, innermost first.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram

from varuna.errors import CaptureError, LossError, VarunaError
from varuna.partition.convert import Names, convert
from varuna.partition.customgrad import custom_gradients_stop
from varuna.partition.fakes import fake_inputs, fake_tensors, training_mode
from varuna.partition.gradmode import RecordGradMode
from varuna.partition.graph import Autocast, CapturedGraph
from varuna.partition.leaf import LeafTracer
from varuna.partition.leafprobe import ProbeError
from varuna.partition.loss import OutputSpec, read_output
from varuna.partition.retry import (
    DATA_DEPENDENT,
    as_error,
    is_opaque,
    leaf_paths,
    next_leaves,
    raise_own,
    what_happened,
)
from varuna.partition.signature import (
    InputSignature,
    call_arguments,
    check_call,
    flatten_batch,
    num_samples_of,
    signature_of,
)
from varuna.partition.watch import watched

EXAMPLE_BATCH_SIZE = 2
_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")


def capture(
    model: nn.Module,
    batch: object,
    *,
    training: bool,
    autocast: Autocast | None,
    opaque: Sequence[str] = (),
    num_samples: int | None = None,
) -> CapturedGraph:
    """Captures forward, loss included. The model, its modes and its hooks are as before afterwards.

    Args:
        model: on any device, the meta device included; its forward returns the loss.
        batch: one batch, or an ``InputSignature`` (no data needed).
        training: capture in train mode or in eval mode; a captured graph cannot change its mode.
        autocast: the precision it will run under; its device type is the one the graph is captured for.
        opaque: paths of modules to keep as opaque leaves.
        num_samples: the batch size to use if the model fixes it; by default the batch's own.

    Raises:
        CaptureError: forward cannot be captured; says which line stopped it.
        CutPointError: a ``CutPoint`` is misused.
        LossError: forward does not return a loss.
        DataError: the batch is not made of tensors and constants, or is not what forward takes.
    """
    signature, fixed_size = _signature(batch, num_samples)
    attempt = _Attempt(model=model, signature=signature, training=training, autocast=autocast)
    leaves = leaf_paths(model, opaque)
    reasons: dict[str, Exception] = {}
    for _ in range(sum(1 for _ in model.modules()) + 1):
        try:
            with _without_torchs_logs():
                return _capture_with(attempt, leaves, fixed_size)
        except ProbeError as failed:
            raise as_error(reasons.get(failed.path, failed), model) from failed
        except VarunaError:
            raise
        except Exception as error:
            check_call(model.forward, signature.tree)
            found = next_leaves(error, model, leaves)
            reasons.update(dict.fromkeys(found, error))
            leaves = leaf_paths(model, [*leaves, *found])
    raise AssertionError("every retry adds a leaf, so there are no more retries than modules")


@contextlib.contextmanager
def _without_torchs_logs() -> Iterator[None]:
    """An attempt that fails is no news: its error is raised here, or answered with another attempt."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# --- one attempt ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """What stays the same over the retries of one capture."""

    model: nn.Module
    signature: InputSignature
    training: bool
    autocast: Autocast | None

    @property
    def device(self) -> str:
        """The device type that tensors claim."""
        if self.autocast is not None:
            device = self.autocast.device_type
        else:
            device = next((p.device.type for p in self.model.parameters() if not p.is_meta), "cpu")
        if device == "cuda" and not torch.cuda.is_available():
            raise CaptureError("The precision is for CUDA, but this process sees no CUDA device.")
        return device


class _StoppedError(Exception):
    """Forward looked at a tensor's values; the cause says where."""


class _Whole(nn.Module):
    """What is exported: takes the batch's tensors as one list, returns the loss's tensors."""

    def __init__(self, attempt: _Attempt, tracer: LeafTracer, found: list[OutputSpec]) -> None:
        super().__init__()
        self.model = attempt.model
        self._attempt = attempt
        self._tracer = tracer
        self._found = found

    def forward(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        """Calls the user's forward as a plain loop would."""
        specs = self._attempt.signature.tensors
        by_key = {spec.key: tensor for spec, tensor in zip(specs, tensors, strict=True)}
        batched = next((by_key[spec.key] for spec in specs if spec.has_batch_dim), None)
        self._tracer.batch = 1 if batched is None else batched.shape[0]
        args, kwargs = call_arguments(self._attempt.signature.tree, by_key)
        try:
            with watched(self.model), RecordGradMode(), custom_gradients_stop():
                output = self.model(*args, **kwargs)
        except DATA_DEPENDENT as error:
            raise _StoppedError from error  # the exporter prints the whole graph for a RuntimeError
        output_spec, outputs = read_output(output)
        if self._attempt.training and not outputs[0].requires_grad:
            raise LossError(
                "The loss that forward returned does not depend on any trainable parameter: it was detached, "
                "computed under torch.no_grad or from integers, or every parameter is frozen. Return the loss "
                "with its graph, and leave at least one parameter with requires_grad."
            )
        self._found.append(output_spec)
        return outputs


def _capture_with(attempt: _Attempt, leaves: Sequence[str], fixed_size: int) -> CapturedGraph:
    """With a symbolic number of samples if the model allows it, else with a fixed one."""
    reason = "no tensor of the batch has a batch dimension"
    has_batch_dim = any(spec.has_batch_dim for spec in attempt.signature.tensors)
    if has_batch_dim:
        try:
            return _capture_once(attempt, leaves, Dim("batch", min=1), EXAMPLE_BATCH_SIZE)
        except (VarunaError, ProbeError):
            raise
        except Exception as error:
            raise_own(error)
            if is_opaque(error):
                raise
            reason = what_happened(error, attempt.model)
    try:
        return replace(_capture_once(attempt, leaves, None, fixed_size), static_reason=reason)
    except Exception as error:
        raise_own(error)
        raise


def _capture_once(attempt: _Attempt, leaves: Sequence[str], dim: Any, example_batch_size: int) -> CapturedGraph:
    model = attempt.model
    canonical = _canonical_names(model)
    found: list[OutputSpec] = []
    mode = FakeTensorMode()
    with (
        _quiet(),
        training_mode(model, attempt.training),
        fake_tensors(model, mode, attempt.device) as originals,
        torch.enable_grad(),
    ):
        tracer = LeafTracer(originals=originals, device=attempt.device)
        inputs = fake_inputs(attempt.signature, example_batch_size, mode, attempt.device)
        shapes = [
            {0: dim} if dim is not None and spec.has_batch_dim else None for spec in attempt.signature.tensors
        ]
        with tracer.installed(model, leaves), _autocast_context(attempt.autocast):
            exported: ExportedProgram = torch.export.export(
                _Whole(attempt, tracer, found), (inputs,), dynamic_shapes=(shapes,), strict=False
            )
    names = Names(canonical=canonical, input_keys=attempt.signature.keys)
    converted = convert(exported, names, tracer.calls, example_batch_size)
    return CapturedGraph(
        graph=converted.graph,
        input_keys=attempt.signature.keys,
        constants=converted.constants,
        subgraphs=converted.subgraphs,
        output_spec=found[-1],
        signature=attempt.signature,
        training=attempt.training,
        dynamic_batch=dim is not None,
        example_batch_size=example_batch_size,
        opaque=tuple(leaves),
        device=attempt.device,
        aliases={name: first for name, first in canonical.items() if name != first},
    )


@contextlib.contextmanager
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _autocast_context(autocast: Autocast | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if autocast is None else autocast.context()


def _signature(batch: object, num_samples: int | None) -> tuple[InputSignature, int]:
    if isinstance(batch, InputSignature):
        return batch, num_samples or EXAMPLE_BATCH_SIZE
    size = num_samples or num_samples_of(flatten_batch(batch))
    return signature_of(batch, size), size


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the first name of the same tensor."""
    first: dict[int, str] = {}
    canonical: dict[str, str] = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, value in named:
            canonical[name] = first.setdefault(id(value), name)
    return canonical
