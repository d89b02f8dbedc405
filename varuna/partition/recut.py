"""Cuts another capture of the same model (eval mode, other shapes) so that its sections hold the same
parameters.

Which section holds which parameter was decided once, by the first partition; workers hold their parameters by
it. For another capture the cheapest cuts (bytes alive) are chosen among those that give every section only
parameters, and buffers that forward changes, which it already has.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from torch import fx, nn

from varuna.errors import CutPointError
from varuna.partition.autocut import Position
from varuna.partition.flow import Flow
from varuna.partition.section import Partition
from varuna.partition.ties import canonical_names

_Names = frozenset[str]


def positions_like(flow: Flow, model: nn.Module, reference: Partition) -> tuple[Position, ...]:
    """Cut positions in ``flow`` that agree with ``reference``.

    Raises:
        CutPointError: there are none; names the section whose parameters are used out of order.
    """
    held = [
        frozenset(section.parameters) | frozenset(section.mutated_buffers) for section in reference.sections
    ]
    names_at = _names_at_steps(flow, model, frozenset().union(*held))
    limits = [_first_foreign(names_at, names) for names in held]
    costs: dict[Position, tuple[float, tuple[Position, ...]]] = {0: (0.0, ())}
    for index in range(len(held) - 1):
        costs = _extend(flow, costs, limits[index])
        if not costs:
            raise _impossible(reference, index)
    end = len(flow.steps)
    complete = [found for start, found in costs.items() if limits[-1](start) >= end]
    if not complete:
        raise _impossible(reference, len(held) - 1)
    return min(complete)[1]


def _extend(
    flow: Flow, costs: dict[Position, tuple[float, tuple[Position, ...]]], limit: Callable[[Position], Position]
) -> dict[Position, tuple[float, tuple[Position, ...]]]:
    """Best cost for each end of the next section: the cheapest start from which it can reach that far."""
    extended: dict[Position, tuple[float, tuple[Position, ...]]] = {}
    starts = sorted(costs)
    usable: list[tuple[float, tuple[Position, ...], Position]] = []
    next_start = 0
    for position in range(starts[0], len(flow.steps) + 1):
        while next_start < len(starts) and starts[next_start] <= position:
            start = starts[next_start]
            heapq.heappush(usable, (*costs[start], limit(start)))
            next_start += 1
        while usable and usable[0][2] < position:
            heapq.heappop(usable)
        if usable and position not in flow.refusals:
            cost, path, _ = usable[0]
            extended[position] = (cost + flow.live_bytes[position], (*path, position))
    return extended


def _first_foreign(names_at: Sequence[_Names], held: _Names) -> Callable[[Position], Position]:
    """Function of a start: the first step from there on that uses what this section does not hold."""
    limits = [len(names_at)] * (len(names_at) + 1)
    for index in range(len(names_at) - 1, -1, -1):
        limits[index] = limits[index + 1] if names_at[index] <= held else index
    return limits.__getitem__


def _names_at_steps(flow: Flow, model: nn.Module, placed: _Names) -> list[_Names]:
    """Parameters and placed buffers that each step uses, through free nodes too."""
    canonical = canonical_names(model)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    found: list[_Names] = []
    for node in flow.steps:
        names: set[str] = set()
        if node.op == "call_module":
            prefix = f"{node.target}."
            names |= {canonical[name] for name in parameters if name.startswith(prefix)}
        stack = [argument for argument in node.all_input_nodes if argument in flow.free]
        seen: set[fx.Node] = set()
        while stack:
            argument = stack.pop()
            if argument in seen:
                continue
            seen.add(argument)
            stack += [inner for inner in argument.all_input_nodes if inner in flow.free]
            name = str(argument.target)
            if argument.op == "get_attr" and (name in parameters or canonical.get(name) in placed):
                names.add(canonical[name])
        found.append(frozenset(names))
    return found


def _impossible(reference: Partition, index: int) -> CutPointError:
    section = reference.sections[index]
    return CutPointError(
        f"This capture of the model uses parameters in another order than the one it was cut by: no cut "
        f"leaves section "
        f"{index} ({section.spec.name}) with its own parameters ({', '.join(list(section.parameters)[:4])}, "
        f"...) only. "
        "The order of the modules must not depend on the shapes or on train and eval mode; move the cut point "
        "out "
        "of that region."
    )
