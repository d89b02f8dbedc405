"""Operators on parameters, their weight gradients given to a sink of ours instead of autograd's accumulation.

    sections = [tapped(section) for section in sections]
    with sink.collect(sections): outputs = ...       # forward, or recompute
    torch.autograd.backward(outputs, gradients)      # the sink gets what it wanted, autograd the rest

In forward, an operator of ``weight_operators.py`` on a parameter runs as an autograd function whose backward
computes the input's gradient and offers the sink the pair (input, gradient of the output). What the sink does
not take becomes a gradient as always. Sinks: ``PendingWeights`` (later), ``InPlaceWeights`` (at once).

Graphs call the operators through ``tapped``'s copy of the section. Modules that run as they are (opaque leaves,
chains) can be watched by a torch function mode.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from varuna.partition import Section
from varuna.partition.program import GraphProgram
from varuna.run.weight_operators import OPERATORS, Operator, WeightCall


class Pair(NamedTuple):
    """What one call leaves for the gradient of its weight; ``dtype`` is what autocast lowered it to."""

    operator: Operator
    input: Tensor
    gradient: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype | None


class WeightSink(abc.ABC):
    """Takes what weight gradients are made of.

    Args:
        device: where the stage computes.
    """

    watches_modules: ClassVar[bool]
    """Whether it gets calls of modules that run as they are, too."""

    def __init__(self, device: torch.device) -> None:
        # An input of every call that nobody asks a gradient of: see ``adds_to_all``.
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        self._anchor_node = get_gradient_edge(self._anchor).node

    @abc.abstractmethod
    def wants(self, call: WeightCall, dtype: torch.dtype | None) -> bool:
        """In forward: whether to offer this call's pair; ``dtype`` is what autocast lowers it to."""

    @abc.abstractmethod
    def take(self, pair: Pair) -> bool:
        """In a backward that adds to ``.grad``: False if autograd shall make and add the gradients."""

    @contextlib.contextmanager
    def collect(self, sections: Iterable[Section]) -> Iterator[None]:
        """Around forward, or recompute, of sections that ``tapped`` made."""
        token = _collecting.set(self)
        watching = self.watches_modules and any(map(_runs_modules, sections))
        try:
            with _Watch(self) if watching else contextlib.nullcontext():
                yield
        finally:
            _collecting.reset(token)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``function(*args, **kwargs)``, its pair offered if it is wanted."""
        call = OPERATORS[function](*args, **kwargs) if torch.is_grad_enabled() else None
        if call is None or not _can_be_taken(call):
            return function(*args, **kwargs)
        dtype = _autocast_dtype(call)
        if not self.wants(call, dtype):
            return function(*args, **kwargs)
        return _WeightFunction.apply(  # type: ignore[no-untyped-call]
            _How(self, call.operator, dtype), self._anchor, lowered(call.input, dtype), call.weight, call.bias
        )

    def adds_to_all(self) -> bool:
        """Whether the backward that runs now adds to ``.grad`` all that it meets, as a stage's does.

        Not so ``torch.autograd.grad`` inside forward or inside somebody's backward, which wants gradients of
        some tensors, now: it never executes the anchor's node.
        """
        return torch._C._will_engine_execute_node(self._anchor_node)


_collecting: ContextVar[WeightSink | None] = ContextVar("collecting", default=None)


class _How(NamedTuple):
    """What a call needs besides tensors; ``dtype`` is what autocast lowers it to."""

    sink: WeightSink
    operator: Operator
    dtype: torch.dtype | None


class _WeightFunction(torch.autograd.Function):
    """One call of an operator. The weight stays an input, for gradients that the sink does not take."""

    @staticmethod
    def forward(ctx: Any, how: _How, *tensors: Tensor) -> Tensor:
        _anchor, input, weight, bias = tensors
        ctx.how = how
        # Not the lowered weight: every micro-batch in flight would hold a copy of it.
        ctx.save_for_backward(input, weight, bias)
        ctx.set_materialize_grads(False)
        lowered_bias = None if bias is None else lowered(bias, how.dtype)
        return how.operator.forward(input, lowered(weight, how.dtype), lowered_bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        (gradient,) = gradients
        if gradient is None:
            return (None,) * 5
        input, weight, bias = ctx.saved_tensors
        _, _, needs_input, _, needs_bias = ctx.needs_input_grad
        how: _How = ctx.how
        weight_now = lowered(weight, how.dtype)
        of_input = how.operator.input_gradient(gradient, input, weight_now) if needs_input else None
        bias = bias if needs_bias else None
        if how.sink.adds_to_all() and how.sink.take(
            Pair(how.operator, input, gradient, weight, bias, how.dtype)
        ):
            return None, None, of_input, None, None
        of_weight = how.operator.weight_gradient(gradient, input, weight_now).to(weight.dtype)
        of_bias = None if bias is None else how.operator.bias_gradient(gradient, bias).to(bias.dtype)
        return None, None, of_input, of_weight, of_bias


class _Watch(TorchFunctionMode):
    """Sees what modules call."""

    def __init__(self, sink: WeightSink) -> None:
        super().__init__()
        self._sink = sink

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in OPERATORS and not _is_special():
            return self._sink.call(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _is_special() -> bool:
    """Inside ``torch.func`` transforms, ``torch.compile``, or hooks on what backward needs.

    These have their own ways with functions; with such hooks ``torch.utils.checkpoint`` runs forward again in
    backward, unwatched, and compares what is saved.
    """
    return (
        torch._C._are_functorch_transforms_active()
        or torch.compiler.is_compiling()
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    )


# --- which calls ----------------------------------------------------------------------------


def parameter_of(weight: Tensor) -> nn.Parameter | None:
    """The parameter that a tensor is, or is a view of."""
    if isinstance(weight, nn.Parameter):
        return weight
    return weight._base if isinstance(weight._base, nn.Parameter) else None


def _can_be_taken(call: WeightCall) -> bool:
    if not _is_trainable(call.weight):
        return False
    return call.bias is None or not call.bias.requires_grad or _is_trainable(call.bias)


def _is_trainable(weight: Tensor) -> bool:
    """A parameter or a view of one, without hooks: those would run in backward without a gradient."""
    parameter = parameter_of(weight) if weight.requires_grad else None
    return (
        parameter is not None
        and parameter.is_leaf
        and not weight._backward_hooks
        and not parameter._backward_hooks
        and not parameter._post_accumulate_grad_hooks
    )


def _autocast_dtype(call: WeightCall) -> torch.dtype | None:
    device_type = call.input.device.type
    if not call.operator.is_autocast or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def lowered(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """As autocast does, but without its cache, which must not learn of casts that have no gradient."""
    if dtype is None or not tensor.is_floating_point() or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(dtype)


def plain_total(weight: Tensor) -> Tensor | None:
    """The ``.grad`` to add to where autograd would do no more than that: of a parameter, without hooks."""
    if not isinstance(weight, nn.Parameter) or weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return None
    return weight.grad if weight.grad is not None and weight.grad.layout is torch.strided else None


# --- sections -------------------------------------------------------------------------------


def _runs_modules(section: Section) -> bool:
    """Whether a section runs modules as they are, alone or inside its graph."""
    return not isinstance(section.program, GraphProgram) or bool(section.program.leaves)


def tapped(section: Section) -> Section:
    """The section, its graph calling the operators through the sink that collects, if any; made once."""
    program = section.program
    if _runs_modules(section) or not isinstance(program, GraphProgram):
        return section
    found = _tapped.get(section)
    if found is None:
        module = _with_tapped_calls(program.module)
        found = _tapped[section] = replace(section, program=replace(program, module=module))
    return found


_tapped: WeakKeyDictionary[Section, Section] = WeakKeyDictionary()


def _with_tapped_calls(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _CALLS:
            node.target = _CALLS[node.target]
    children = {
        name: _with_tapped_calls(child) if isinstance(child, fx.GraphModule) else child
        for name, child in module.named_children()
    }
    return fx.GraphModule(children, graph, class_name=type(module).__name__)


def _call_of(function: Callable[..., Any]) -> Callable[..., Any]:
    def tapped_call(*args: Any, **kwargs: Any) -> Any:
        sink = _collecting.get()
        return function(*args, **kwargs) if sink is None else sink.call(function, args, kwargs)

    tapped_call.__name__ = f"tapped_{function.__name__.replace('.', '_')}"
    return tapped_call


_CALLS = {function: _call_of(function) for function in OPERATORS}
