"""Learns what modules of a chain hand to one another, by running copies of them on zeros."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from varuna.errors import CaptureError, VarunaError
from varuna.partition.loss import OutputSpec, read_output
from varuna.partition.loss_fn import LossFunction
from varuna.partition.modules import Structure, tensors_of
from varuna.partition.program import modules_mode
from varuna.partition.section import ValueSpec
from varuna.partition.signature import InputSignature, Node, example_batch, flatten_batch, rebuild

_BATCH_SIZES = (2, 3)


@dataclass(frozen=True, kw_only=True)
class Probed:
    """What one section of a chain gives.

    Attributes:
        structure: of what its last module returns.
        values: the tensors in it (the loss on the last section).
        changed_inputs: received tensors that it changes in place.
        flops: one sample's forward, taken as one product of every parameter with every row of the input.
        activation_bytes: of the tensors that its modules return, for one sample.
        num_samples: that ``values`` stand for.
        output_spec: on the last section, how the loss is read.
    """

    structure: Structure
    values: tuple[ValueSpec, ...]
    changed_inputs: tuple[int, ...]
    flops: float
    activation_bytes: int
    num_samples: int
    output_spec: OutputSpec | None


@dataclass(frozen=True)
class _Run:
    value: Any
    outputs: tuple[Tensor, ...]
    changed: tuple[int, ...]
    rows: int
    total_bytes: int
    output_spec: OutputSpec | None


def probe_chain(
    model: nn.Sequential,
    groups: Sequence[tuple[str, ...]],
    *,
    entry: Node,
    rest: Sequence[Node],
    loss_fn: LossFunction | None,
    signature: InputSignature,
    training: bool,
) -> list[Probed]:
    """Runs every group for two batch sizes, one group in memory at a time. The model is not changed.

    Raises:
        CaptureError: a module cannot be copied or run, or gives other things for another batch size.
        LossError: the last one gives no loss.
    """
    batches = [flatten_batch(example_batch(signature, n, "cpu")).tensors for n in _BATCH_SIZES]
    given: list[Any] = [rebuild(entry, tensors) for tensors in batches]
    probed: list[Probed] = []
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(0)
        for index, paths in enumerate(groups):
            copies = [(path, _real_copy(model.get_submodule(path), path)) for path in paths]
            is_last = index == len(groups) - 1
            runs = []
            for value, tensors in zip(given, batches, strict=True):
                ending = ([rebuild(node, tensors) for node in rest], loss_fn) if is_last else None
                runs.append(_run(copies, value, ending, training))
            num_parameters = sum(p.numel() for _, module in copies for p in module.parameters())
            probed.append(_learn(index, paths[-1], runs, num_parameters))
            given = [_detached(run.value, run.outputs) for run in runs] if not is_last else []
    return probed


def _run(
    copies: Sequence[tuple[str, nn.Module]],
    value: Any,
    ending: tuple[list[Any], LossFunction | None] | None,
    training: bool,
) -> _Run:
    inputs = tensors_of(value)
    work = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
    leaves = [tensor.clone() for tensor in work]
    value = Structure.of(value).build(leaves)
    versions = [tensor._version for tensor in leaves]
    total = 0
    with modules_mode([module for _, module in copies], training):
        for path, module in copies:
            try:
                value = module(value)
            except VarunaError:
                raise
            except Exception as error:
                raise CaptureError(
                    f"Module {path!r} ({type(module).__name__}) cannot be run on an example batch of zeros: "
                    f"{type(error).__name__}: {error}"
                ) from error
            total += sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(value))
    changed = tuple(i for i, tensor in enumerate(leaves) if tensor._version != versions[i])
    rows = inputs[0].numel() // max(inputs[0].shape[-1], 1) if inputs and inputs[0].dim() > 0 else 1
    outputs, spec = tensors_of(value), None
    if ending is not None:
        others, loss_fn = ending
        spec, outputs = read_output(value if loss_fn is None else loss_fn(value, *others))
    return _Run(value, outputs, changed, rows, total, spec)


def _detached(value: Any, tensors: Sequence[Tensor]) -> Any:
    return Structure.of(value).build([t.detach().requires_grad_(t.requires_grad) for t in tensors])


def _learn(index: int, path: str, runs: Sequence[_Run], num_parameters: int) -> Probed:
    first, second = runs
    structure = Structure.of(first.value)
    if structure.tree != Structure.of(second.value).tree or len(first.outputs) != len(second.outputs):
        raise CaptureError(f"Module {path!r} returns other things for another batch size.")
    values = tuple(
        ValueSpec(
            name=f"{path}:{position}",
            dtype=one.dtype,
            differentiable=one.requires_grad,
            shape=tuple(one.shape),
            batch_dim=_batch_dim(one, other),
        )
        for position, (one, other) in enumerate(zip(first.outputs, second.outputs, strict=True))
    )
    return Probed(
        structure=structure,
        values=values,
        changed_inputs=first.changed if index else (),
        flops=2.0 * num_parameters * first.rows / _BATCH_SIZES[0],
        activation_bytes=first.total_bytes // _BATCH_SIZES[0],
        num_samples=_BATCH_SIZES[0],
        output_spec=first.output_spec,
    )


def _batch_dim(one: Tensor, other: Tensor) -> int | None:
    pairs = enumerate(zip(one.shape, other.shape, strict=False))
    return next((dim for dim, sizes in pairs if sizes == _BATCH_SIZES), None)


def _real_copy(module: nn.Module, path: str) -> nn.Module:
    """A copy on the CPU; tensors without values get random ones."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        memo[id(tensor)] = _real_tensor(tensor)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise CaptureError(
            f"Module {path!r} ({type(module).__name__}) cannot be copied, which is needed to learn what it "
            f"returns: "
            f"{type(error).__name__}: {error}"
        ) from error


def _real_tensor(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        value = torch.zeros(tensor.shape, dtype=tensor.dtype)
        if value.is_floating_point():
            value.normal_(std=0.02)
    else:
        value = tensor.detach().to("cpu", copy=True)
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
