"""Models that cannot be captured but are a chain of modules: every module, run as it is, is a section of its
own.

``nn.Sequential`` is tried with capture first, like any model. What crosses the cuts is learned by running a
temporary copy of one module after another on zeros, for two batch sizes; so no worker needs the whole model for
it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from varuna.errors import CutPointError, UserError
from varuna.partition.cutpoint import CutPoint
from varuna.partition.loss import OutputSpec
from varuna.partition.loss_fn import LossFunction, divide_batch
from varuna.partition.modules import ModulesProgram
from varuna.partition.probe import Probed, probe_chain
from varuna.partition.program import buffer_slot
from varuna.partition.rules import module_rules
from varuna.partition.section import BufferRule, Partition, Section, ValueSpec
from varuna.partition.signature import InputSignature, Node
from varuna.partition.ties import canonical_names
from varuna.spec import SectionSpec


def as_module(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """The model itself; a list or tuple of modules becomes an ``nn.Sequential`` of them.

    Raises:
        UserError: neither a module nor a list of modules.
    """
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        return model
    parts = list(model) if isinstance(model, (list, tuple, nn.ModuleList)) else []
    if not parts or not all(isinstance(part, nn.Module) for part in parts):
        raise UserError(
            f"The model is a {type(model).__name__}; it must be an nn.Module, or a list of nn.Modules to run "
            f"one "
            "after another."
        )
    return nn.Sequential(*parts)


def is_chain(model: nn.Module) -> bool:
    """Whether a model runs its children one after another."""
    own = "forward" in model.__dict__
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward and not own


@dataclass(frozen=True, kw_only=True)
class ChainBatch:
    """How a batch is given to a chain: the model's input, and what the loss function gets."""

    entry: Node
    rest: tuple[Node, ...]

    @classmethod
    def of(cls, model: nn.Module, signature: InputSignature, loss_fn: LossFunction | None) -> ChainBatch:
        """Divides a batch's tree.

        Raises:
            UserError: the chain takes one value, and there is no loss function for the others.
        """
        tree = signature.tree
        is_mapping = tree.kind == "mapping"
        named = dict(zip(tree.names, tree.children, strict=True)) if is_mapping else {}
        listed = tree.children if tree.kind in ("list", "tuple") else (() if is_mapping else (tree,))
        taken, by_name, rest = divide_batch(model.forward, listed, named)
        entries = (*taken, *by_name.values())
        if loss_fn is None and (rest or len(entries) != 1):
            raise UserError(
                "The model is a chain of modules, which takes one value, but the batch has "
                f"{len(listed) + len(named)}. Give loss_fn=..., which gets the others, or return one value "
                "from the collate function."
            )
        if len(entries) != 1:
            raise UserError(
                "The model is a chain of modules, which takes one value. The batch must be a tuple whose "
                "first value is for the model, or a dict with the key 'input'."
            )
        return cls(entry=entries[0], rest=rest)


def partition_chain(
    model: nn.Sequential,
    signature: InputSignature,
    *,
    training: bool,
    cut_points: Sequence[str] | None = None,
    loss_fn: LossFunction | None = None,
    like: Partition | None = None,
) -> Partition:
    """Sections of a chain: every child one, or what lies between the children named in ``cut_points`` or its
    marks.

    Raises:
        UserError: the batch does not fit, a module cannot be run or copied, or the last one gives no loss.
    """
    groups = _groups(model, cut_points, like)
    batch = ChainBatch.of(model, signature, loss_fn)
    probed = probe_chain(
        model,
        groups,
        entry=batch.entry,
        rest=batch.rest,
        loss_fn=loss_fn,
        signature=signature,
        training=training,
    )
    sections = [
        _section(model, groups, index, probed=probed, batch=batch, loss_fn=loss_fn, training=training)
        for index in range(len(groups))
    ]
    return Partition(
        sections=tuple(sections),
        digest=_digest(model, groups, signature, training),
        signature=signature,
        training=training,
        output_spec=probed[-1].output_spec or OutputSpec(form="mean"),
        dynamic_batch=True,
        example_batch_size=probed[0].num_samples,
    )


def _groups(
    model: nn.Sequential, cut_points: Sequence[str] | None, like: Partition | None
) -> tuple[tuple[str, ...], ...]:
    names = [name for name, _ in model.named_children()]
    if like is not None:
        return _groups_like(model, like)
    if cut_points is not None:
        unknown = [name for name in cut_points if name not in names]
        if unknown:
            raise CutPointError(
                f"cut_points names {unknown[0]!r}. This model cannot be captured as a graph, so it can only "
                f"be divided "
                f"between its own modules: {', '.join(names)}."
            )
        ends = [index + 1 for index, name in enumerate(names) if name in cut_points]
    elif any(isinstance(child, CutPoint) for child in model.children()):
        ends = [index for index, child in enumerate(model.children()) if isinstance(child, CutPoint)]
    else:
        ends = list(range(1, len(names)))
    bounds = sorted({0, len(names), *ends})
    return tuple(tuple(names[a:b]) for a, b in pairwise(bounds))


def _groups_like(model: nn.Sequential, like: Partition) -> tuple[tuple[str, ...], ...]:
    """Children by the section that holds their parameters; those without go with the child before."""
    canonical = canonical_names(model)
    groups: list[list[str]] = [[] for _ in like.sections]
    current = 0
    for path, child in model.named_children():
        names = {canonical[f"{path}.{name}"] for name, _ in child.named_parameters()}
        while current < len(groups) and not names <= set(like.sections[current].parameters):
            current += 1
        if current == len(groups):
            raise CutPointError(
                f"Module {path!r} does not fit into one section of the model as it was first divided."
            )
        groups[current].append(path)
    if not all(groups):
        raise CutPointError("The model as it was first divided has a section that holds no whole module.")
    return tuple(tuple(group) for group in groups)


def _section(
    model: nn.Sequential,
    groups: Sequence[tuple[str, ...]],
    index: int,
    *,
    probed: Sequence[Probed],
    batch: ChainBatch,
    loss_fn: LossFunction | None,
    training: bool,
) -> Section:
    paths = groups[index]
    modules = tuple(model.get_submodule(path) for path in paths)
    is_first, is_last = index == 0, index == len(groups) - 1
    inside = set(_names_inside(model, paths))
    parameters = {name: p for name, p in model.named_parameters() if name in inside}
    buffers = [name for name, _ in model.named_buffers() if name in inside]
    entries = ([batch.entry] if is_first else []) + (list(batch.rest) if is_last else [])
    program = ModulesProgram(
        paths=paths,
        modules=modules,
        training=training,
        entry=batch.entry if is_first else None,
        received=None if is_first else probed[index - 1].structure,
        sent=None if is_last else probed[index].structure,
        clones=probed[index].changed_inputs,
        loss_fn=loss_fn if is_last else None,
        rest=batch.rest if is_last else (),
        slots=tuple(buffer_slot(model, name) for name in buffers),
    )
    return Section(
        spec=_spec(index, paths[0], parameters, probed[index], is_last=is_last),
        parameters=parameters,
        mutated_buffers=_rules(model, paths) if training else {},
        input_keys=tuple(dict.fromkeys(key for node in entries for key in _keys(node))),
        received=() if is_first else probed[index - 1].values,
        sent=probed[index].values,
        uses_random=True,
        activation_bytes=probed[index].activation_bytes,
        program=program,
    )


def _spec(
    index: int, name: str, parameters: dict[str, nn.Parameter], probed: Probed, *, is_last: bool
) -> SectionSpec:
    sent = () if is_last else probed.values
    return SectionSpec(
        index=index,
        name=name,
        parameter_names=tuple(parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters.values()),
        forward_flops=probed.flops,
        output_bytes=sum(_sample_bytes(value, probed.num_samples) for value in sent),
    )


def _names_inside(model: nn.Module, paths: Sequence[str]) -> list[str]:
    """Canonical names of all parameters and buffers in these modules."""
    canonical = canonical_names(model)
    prefixes = tuple(f"{path}." for path in paths)
    return [first for name, first in canonical.items() if name.startswith(prefixes)]


def _rules(model: nn.Module, paths: Sequence[str]) -> dict[str, BufferRule]:
    canonical = canonical_names(model)
    return {
        canonical[f"{path}.{name}"]: rule
        for path in paths
        for name, rule in module_rules(model.get_submodule(path)).items()
    }


def _sample_bytes(value: ValueSpec, num_samples: int) -> int:
    size = math.prod(value.shape) * value.dtype.itemsize
    return size // (num_samples if value.batch_dim is not None else 1)


def _keys(node: Node) -> tuple[str, ...]:
    own = (node.key,) if node.kind == "tensor" else ()
    return (*own, *(key for child in node.children for key in _keys(child)))


def _digest(
    model: nn.Module, groups: Sequence[tuple[str, ...]], signature: InputSignature, training: bool
) -> str:
    text = hashlib.sha256()
    canonical = canonical_names(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        text.update(f"{name} {canonical[name]} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
    for path, child in model.named_modules():
        text.update(f"{path} {type(child).__qualname__}\n".encode())
    text.update(f"{groups} {training} {signature.to_json()}".encode())
    return text.hexdigest()
