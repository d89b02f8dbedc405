"""How copies of buffers that forward changes are joined after a step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx, nn

from varuna.partition.effects import arguments_of
from varuna.partition.emit import Members
from varuna.partition.flow import Flow
from varuna.partition.section import BufferRule
from varuna.partition.ties import canonical_names

_STATISTICS = (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default)
_COUNTER = (torch.ops.aten.add_.Tensor, torch.ops.aten.add_.Scalar)


def buffer_rules(flow: Flow, model: nn.Module, members: Members) -> dict[str, BufferRule]:
    """A rule for each buffer that a section changes, by its canonical name.

    Running statistics of normalisation decay by ``1 - momentum``; counters add up; anything else is averaged.
    """
    rules: dict[str, BufferRule] = {}
    for slot_name, node in members.buffers.items():
        writers = flow.memory[node].writers
        if writers:
            rules[slot_name] = _together([_rule(flow, writer, node) for writer in writers])
    if flow.captured.training:
        canonical = canonical_names(model)
        for path in members.leaves:
            for name, rule in module_rules(model.get_submodule(path)).items():
                rules[canonical[f"{path}.{name}"]] = rule
    return rules


def writes_statistics_only(flow: Flow, node: fx.Node) -> bool:
    """Whether all that changes a buffer is an operator whose backward does not look at the changed values."""
    return all(writer.target in _STATISTICS for writer in flow.memory[node].writers)


def _together(rules: Sequence[BufferRule]) -> BufferRule:
    """Of several changes in one forward, such as of a normalisation that is used twice."""
    if any(rule.kind != "affine" for rule in rules):
        return BufferRule(kind="mean")
    return BufferRule(kind="affine", decay=math.prod(rule.decay for rule in rules))


def _rule(flow: Flow, writer: fx.Node, buffer: fx.Node) -> BufferRule:
    if writer.target in _STATISTICS:
        momentum = arguments_of(writer, writer.target)["momentum"]
        return BufferRule(kind="affine", decay=1.0 - float(momentum))
    value = buffer.meta.get("val")
    is_integer = isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.is_complex()
    if is_integer and writer.target in _COUNTER and writer.args[0] in flow.memory[buffer].nodes:
        return BufferRule(kind="affine", decay=1.0)
    return BufferRule(kind="mean")


def module_rules(leaf: nn.Module) -> dict[str, BufferRule]:
    """Rules for a module that is run as it is: only normalisation layers are known to change their buffers."""
    rules: dict[str, BufferRule] = {}
    for path, module in leaf.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            known = module.momentum is not None
            kind = BufferRule(kind="affine", decay=1.0 - float(module.momentum or 0.0))
            for name in ("running_mean", "running_var"):
                rules[prefix + name] = kind if known else BufferRule(kind="mean")
            rules[prefix + "num_batches_tracked"] = BufferRule(kind="affine", decay=1.0)
    return rules
