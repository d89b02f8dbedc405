"""Where to cut: the user's marks, modules the user named, or places found automatically.

Automatic places have few bytes alive, between pieces of model that are worth having apart. In order:

1. Local minima of the bytes alive, and steps down (a chain that narrows); of neighbours with equal bytes, those
   between the outermost modules, and those between opaque leaves.
2. Places with next to no work between them count as one: the cheapest stays. Work is compute and parameters.
3. A place is dropped if one within a few per cent of the model's work carries noticeably fewer bytes, or if it
   lies between two much cheaper ones. The comparison is local, so that pyramids (ResNet), where bytes fall
   along the model, are cut everywhere.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import nn

from varuna.errors import CutPointError
from varuna.partition.costs import flops_of
from varuna.partition.effects import is_subgraph
from varuna.partition.flow import Flow
from varuna.partition.graph import values_of

NEGLIGIBLE_WORK = 0.1  # of the mean compute between minima: less is not worth a section
NEGLIGIBLE_PARAMETERS = 0.5  # of the mean parameters between minima, likewise
ELEMENT_WORK = 0.1  # of a value's elements, beside its counted FLOPs
WINDOW = 0.06  # of the model's work, to each side: how far places compete
TOLERATED_BYTES = 1.1  # times the bytes of a competitor
HUMP_BYTES = 1.5  # times the bytes on both sides
HUMP_WORK = 0.25  # of the model's work at most between the cheaper places

Position = int


@dataclass(frozen=True, kw_only=True)
class _Work:
    """Work before each position: compute (FLOPs, and a little per element of every value) and parameter
    elements.
    """

    compute: tuple[float, ...]
    parameters: tuple[float, ...]

    def share(self, first: Position, second: Position) -> float:
        """Compute between two positions as a share of the model's."""
        return abs(self.compute[second] - self.compute[first]) / max(self.compute[-1], 1.0)

    def parameter_share(self, first: Position, second: Position) -> float:
        """Parameters between two positions as a share of the model's."""
        return abs(self.parameters[second] - self.parameters[first]) / max(self.parameters[-1], 1.0)


def find_cut_points(
    flow: Flow, model: nn.Module, cut_points: Sequence[str] | None = None
) -> tuple[Position, ...]:
    """Positions between the steps of ``flow`` where the model is divided, ascending.

    The names in ``cut_points`` come first; without them the ``CutPoint`` marks; without these, automatic
    places.

    Raises:
        CutPointError: an unknown name, a module that leaves nothing in the graph, or a place that cannot be a
            cut.
    """
    if cut_points is not None:
        named = {name: _position_after(flow, model, name) for name in cut_points}
        return _accepted(flow, {f"after module {name!r}": position for name, position in named.items()})
    if flow.marks:
        return _accepted(flow, {f"number {i} (from 0)": position for i, position in enumerate(flow.marks)})
    return automatic_positions(flow, model)


def automatic_positions(flow: Flow, model: nn.Module) -> tuple[Position, ...]:
    """Automatic cut positions; see the module's docstring. Empty if the model has no good place."""
    work = _work(flow, model)
    depths = _depths(flow, model)
    minima = _minima(flow, work, depths)
    if not minima:
        return ()
    pieces = len(minima) + 1
    ends = (0, len(flow.steps))
    inner = [p for p in minima if all(_apart(work, p, end, pieces) for end in ends)]
    merged: list[Position] = []
    for position in inner:
        if merged and not _apart(work, merged[-1], position, pieces):
            merged[-1] = min(merged[-1], position, key=lambda p: (flow.live_bytes[p], depths[p], p))
        else:
            merged.append(position)
    return _without_humps(_cheapest_nearby(merged, flow.live_bytes, work), flow.live_bytes, work)


def _accepted(flow: Flow, places: dict[str, Position]) -> tuple[Position, ...]:
    """Positions of the user's places; those that divide nothing are left out."""
    for place, position in places.items():
        if reason := flow.refusals.get(position):
            raise CutPointError(
                f"The model cannot be divided at cut point {place}: {reason}. Move it before or after that "
                f"code."
            )
    return tuple(sorted({position for position in places.values() if 0 < position < len(flow.steps)}))


def _position_after(flow: Flow, model: nn.Module, name: str) -> Position:
    names = [path for path, _ in model.named_modules() if path]
    if name not in names:
        close = difflib.get_close_matches(name, names, n=3)
        hint = (
            f"Did you mean {' or '.join(map(repr, close))}?" if close else "model.named_modules() lists them."
        )
        raise CutPointError(f"cut_points names {name!r}, which is no module of the model. {hint}")
    inside = [
        index
        for index, node in enumerate(flow.steps)
        if (path := node.meta.get("module_path", "")) == name or path.startswith(name + ".")
    ]
    if not inside:
        raise CutPointError(
            f"cut_points names {name!r}, but forward computes nothing in that module that a cut could follow. "
            f"Name a "
            "module that forward calls."
        )
    return inside[-1] + 1


def _work(flow: Flow, model: nn.Module) -> _Work:
    compute = [0.0]
    parameters = [0.0]
    seen: set[object] = set()
    subgraphs = flow.captured.subgraphs
    for node in flow.steps:
        elements = sum(value.numel() for value in values_of(node))
        compute.append(flops_of(node, subgraphs, model) + ELEMENT_WORK * elements)
        new = 0
        if node.op == "call_module":
            new += sum(p.numel() for p in model.get_submodule(str(node.target)).parameters())
        stack = [argument for argument in node.all_input_nodes if argument in flow.free]
        while stack:
            argument = stack.pop()
            if argument in seen:
                continue
            seen.add(argument)
            stack += [inner for inner in argument.all_input_nodes if inner in flow.free]
            if argument.op == "get_attr" and not is_subgraph(argument, subgraphs):
                new += sum(value.numel() for value in values_of(argument))
        parameters.append(float(new))
    return _Work(compute=tuple(accumulate(compute)), parameters=tuple(accumulate(parameters)))


def _minima(flow: Flow, work: _Work, depths: Sequence[int]) -> list[Position]:
    """Of each run of equal bytes with more before it, and more or something costly between it and fewer: its
    places of least depth.
    """
    costly = 0.5 * work.compute[-1] / len(flow.steps)
    runs: list[list[Position]] = []
    for position in range(1, len(flow.steps)):
        if position in flow.refusals or position in flow.clone_positions:
            continue
        if runs and flow.live_bytes[runs[-1][-1]] == flow.live_bytes[position]:
            runs[-1].append(position)
        else:
            runs.append([position])
    sizes = [math.inf, *(flow.live_bytes[run[0]] for run in runs), math.inf]
    found: list[Position] = []
    for index, run in enumerate(runs, start=1):
        if sizes[index - 1] < sizes[index]:
            continue
        next_compute = work.compute[runs[index][0]] if index < len(runs) else 0.0
        is_minimum = sizes[index + 1] > sizes[index]
        places = [p for p in run if is_minimum or next_compute - work.compute[p] > costly]
        least = min((depths[position] for position in places), default=0)
        found += [position for position in places if depths[position] == least]
    return found


def _depths(flow: Flow, model: nn.Module) -> tuple[int, ...]:
    """For each position, how many modules it lies within: those around the steps before it and after it.

    A list of modules is no module that is called. Between two opaque leaves a place is as good as any: each of
    them is whole, and nothing between them can be a part of a larger piece that a cut would divide.
    """
    containers = {
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.ModuleDict)
    }
    paths = [node.meta.get("module_path", "") for node in flow.steps]
    found = [0]
    for index, (before, after) in enumerate(pairwise(flow.steps)):
        between_leaves = before.op == after.op == "call_module"
        found.append(0 if between_leaves else _shared_modules(paths[index], paths[index + 1], containers))
    return (*found, 0)


def _shared_modules(one: str, other: str, containers: Collection[str]) -> int:
    shared = 0
    names = zip(one.split("."), other.split("."), strict=False)
    path: list[str] = []
    for mine, theirs in names:
        if mine != theirs or not mine:
            break
        path.append(mine)
        shared += ".".join(path) not in containers
    return shared


def _apart(work: _Work, first: Position, second: Position, num_pieces: int) -> bool:
    """Whether what lies between is worth a section of its own."""
    return (
        work.share(first, second) > NEGLIGIBLE_WORK / num_pieces
        or work.parameter_share(first, second) > NEGLIGIBLE_PARAMETERS / num_pieces
    )


def _cheapest_nearby(
    positions: Sequence[Position], live_bytes: Sequence[int], work: _Work
) -> tuple[Position, ...]:
    kept: list[Position] = []
    for position in sorted(positions, key=lambda p: (live_bytes[p], p)):
        near = (other for other in kept if work.share(position, other) <= WINDOW)
        if all(live_bytes[position] <= TOLERATED_BYTES * live_bytes[other] for other in near):
            kept.append(position)
    return tuple(sorted(kept))


def _without_humps(
    positions: Sequence[Position], live_bytes: Sequence[int], work: _Work
) -> tuple[Position, ...]:
    """Drops places inside of a block: much cheaper ones on both sides, and not much of the model between
    these.
    """
    kept = list(positions)
    for position in sorted(positions, key=lambda p: -live_bytes[p]):
        cheap = live_bytes[position] / HUMP_BYTES
        before = [p for p in kept if p < position and live_bytes[p] <= cheap]
        after = [p for p in kept if p > position and live_bytes[p] <= cheap]
        if before and after and work.share(before[-1], after[0]) <= HUMP_WORK:
            kept.remove(position)
    return tuple(kept)
