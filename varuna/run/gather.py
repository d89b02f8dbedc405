"""The whole model on worker 0, from whoever holds which part."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from varuna.partition import canonical_names
from varuna.run.generation import Generation
from varuna.run.groups import Groups
from varuna.run.holders import tensor_holders


def gather_state(model: nn.Module, generation: Generation) -> dict[str, Tensor]:
    """``model.state_dict()`` with every value, on the CPU, on worker 0; an empty dict on other workers.

    Every worker calls it. Names are the user's own; tied names have equal values.
    """
    rank = generation.world.rank
    holders = tensor_holders(generation.plan, generation.partitions)
    canonical = canonical_names(model)
    local = model.state_dict()
    wanted = {name: canonical.get(name, name) for name, value in local.items() if isinstance(value, Tensor)}
    values = _collect(_named_tensors(model), sorted(set(wanted.values())), holders, generation.groups, rank)
    if rank != 0:
        return {}
    return {
        name: values[source] if source in values else _to_cpu(local[name]) for name, source in wanted.items()
    }


def _collect(
    tensors: Mapping[str, Tensor],
    names: list[str],
    holders: Mapping[str, tuple[int, ...]],
    groups: Groups,
    rank: int,
) -> dict[str, Tensor]:
    """Send what worker 0 lacks, in one order on both sides."""
    sources = {name: holders[name][0] for name in names if name in holders}
    groups.prepare([(0, source) for source in set(sources.values()) if source != 0])
    values: dict[str, Tensor] = {}
    for name, source in sources.items():
        tensor = tensors[name]
        if rank == 0 and source == 0:
            values[name] = _to_cpu(tensor)
        elif rank == 0:
            group = groups.of((0, source))
            received = group.place(torch.empty(tensor.shape, dtype=tensor.dtype))
            group.receive(received, source)
            values[name] = received.cpu()
        elif rank == source:
            group = groups.of((0, source))
            group.send(group.place(tensor.detach()).contiguous(), 0)
    return values


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    named: dict[str, Tensor] = dict(model.named_buffers())
    named.update(model.named_parameters())
    return named


def _to_cpu(value: Tensor) -> Tensor:
    """A copy on the CPU without a graph."""
    return value.detach().to("cpu", copy=True).contiguous()
