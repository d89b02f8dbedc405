"""Backward in two parts: gradients of inputs now (B), gradients of weights later (W). Nothing is run twice.

    pending = PendingWeights(device)
    with pending.collect(sections): outputs = ...    # forward, or recompute
    torch.autograd.backward(outputs, gradients)      # B
    pending.run()                                    # W: adds to .grad

In forward, an operator of ``weight_operators.py`` on a parameter runs as an autograd function whose backward
computes the input's gradient and keeps (input, gradient of the output); the rest of what forward saved is freed
by B. W makes weight gradients of these pairs and adds them to ``.grad``: itself if nobody watches, through
autograd if there are hooks. All other parameters (norms, scales) get their gradients in B.

Graphs call the operators through ``deferring``'s copy of the section. Modules that run as they are (opaque
leaves, chains) are watched by a torch function mode.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from varuna.partition import Section
from varuna.partition.program import GraphProgram
from varuna.run.weight_operators import OPERATORS, Operator, WeightCall


class _Pair(NamedTuple):
    """What one call left behind for W; ``dtype`` is what autocast lowered it to."""

    operator: Operator
    input: Tensor
    gradient: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype | None

    def accumulate(self) -> None:
        """Add to ``.grad`` of weight and bias, in their own dtype."""
        with torch.no_grad():
            total = _plain_total(self.weight) if self.dtype is None else None
            lowered = _lowered(self.weight, self.dtype)
            of_weight = self.operator.weight_gradient(self.gradient, self.input, lowered, total)
            if total is None:
                _accumulate(self.weight, of_weight)
            if self.bias is not None:
                _accumulate(self.bias, self.operator.bias_gradient(self.gradient, self.bias))


def _accumulate(weight: Tensor, gradient: Tensor) -> None:
    total = _plain_total(weight)
    gradient = gradient.to(weight.dtype)
    if total is None:
        torch.autograd.backward(weight, gradient)
    else:
        total.add_(gradient)


def _plain_total(weight: Tensor) -> Tensor | None:
    """The ``.grad`` to add to where autograd would do no more than that: of a parameter, without hooks."""
    if not isinstance(weight, nn.Parameter) or weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return None
    return weight.grad


class PendingWeights:
    """Weight gradients of one micro-batch that B put off.

    Args:
        device: where the stage computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._pairs: deque[_Pair] = deque()
        # An input of every deferred call that nobody asks a gradient of: see ``_puts_off``.
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        self._anchor_node = get_gradient_edge(self._anchor).node

    @contextlib.contextmanager
    def collect(self, sections: Iterable[Section]) -> Iterator[None]:
        """Around forward, or recompute, of sections that ``deferring`` made."""
        token = _collecting.set(self)
        try:
            with _Watch(self) if any(map(_runs_modules, sections)) else contextlib.nullcontext():
                yield
        finally:
            _collecting.reset(token)

    def additions(self) -> Mapping[nn.Parameter, int]:
        """How often ``run`` will add to each parameter's gradient."""
        added = [tensor for pair in self._pairs for tensor in (pair.weight, pair.bias) if tensor is not None]
        return Counter(parameter for parameter in map(_parameter_of, added) if parameter is not None)

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept; a tensor that several calls share counts once."""
        tensors = [tensor for pair in self._pairs for tensor in (pair.input, pair.gradient)]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        return sum(storage.nbytes() for storage in storages.values())

    def run(self) -> None:
        """W: last layer first, each pair let go when its gradient is made."""
        while self._pairs:
            self._pairs.popleft().accumulate()

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``function(*args, **kwargs)`` with the weight's gradient put off if it can be."""
        call = OPERATORS[function](*args, **kwargs) if torch.is_grad_enabled() else None
        if call is None or not _can_put_off(call):
            return function(*args, **kwargs)
        how = _How(self, call.operator, _autocast_dtype(call))
        return _Deferred.apply(  # type: ignore[no-untyped-call]
            how, self._anchor, _lowered(call.input, how.dtype), call.weight, call.bias
        )

    def _puts_off(self) -> bool:
        """Whether the backward that runs now adds to ``.grad`` all that it meets, as B does.

        Not so ``torch.autograd.grad`` inside forward or inside somebody's backward, which wants gradients of
        some tensors, now: it never executes the anchor's node.
        """
        return torch._C._will_engine_execute_node(self._anchor_node)

    def _put(self, pair: _Pair) -> None:
        self._pairs.append(pair)


_collecting: ContextVar[PendingWeights | None] = ContextVar("collecting", default=None)


class _How(NamedTuple):
    """What a deferred call needs besides tensors; ``dtype`` is what autocast lowers it to."""

    pending: PendingWeights
    operator: Operator
    dtype: torch.dtype | None


class _Deferred(torch.autograd.Function):
    """One call of an operator. The weight stays an input, for those backwards that cannot be put off."""

    @staticmethod
    def forward(ctx: Any, how: _How, *tensors: Tensor) -> Tensor:
        _anchor, input, weight, bias = tensors
        ctx.how = how
        # Not the lowered weight: every micro-batch in flight would hold a copy of it.
        ctx.save_for_backward(input, weight, bias)
        ctx.set_materialize_grads(False)
        lowered_bias = None if bias is None else _lowered(bias, how.dtype)
        return how.operator.forward(input, _lowered(weight, how.dtype), lowered_bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        (gradient,) = gradients
        if gradient is None:
            return (None,) * 5
        input, weight, bias = ctx.saved_tensors
        _, _, needs_input, _, needs_bias = ctx.needs_input_grad
        how: _How = ctx.how
        lowered = _lowered(weight, how.dtype)
        of_input = how.operator.input_gradient(gradient, input, lowered) if needs_input else None
        bias = bias if needs_bias else None
        if how.pending._puts_off():
            how.pending._put(_Pair(how.operator, input, gradient, weight, bias, how.dtype))
            return None, None, of_input, None, None
        of_weight = how.operator.weight_gradient(gradient, input, lowered).to(weight.dtype)
        of_bias = None if bias is None else how.operator.bias_gradient(gradient, bias).to(bias.dtype)
        return None, None, of_input, of_weight, of_bias


class _Watch(TorchFunctionMode):
    """Sees what modules call."""

    def __init__(self, pending: PendingWeights) -> None:
        super().__init__()
        self._pending = pending

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in OPERATORS and not _is_special():
            return self._pending.call(func, args, kwargs or {})
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


def _parameter_of(weight: Tensor) -> nn.Parameter | None:
    """The parameter that a tensor is, or is a view of."""
    if isinstance(weight, nn.Parameter):
        return weight
    return weight._base if isinstance(weight._base, nn.Parameter) else None


def _can_put_off(call: WeightCall) -> bool:
    if not _is_trainable(call.weight):
        return False
    return call.bias is None or not call.bias.requires_grad or _is_trainable(call.bias)


def _is_trainable(weight: Tensor) -> bool:
    """A parameter or a view of one, without hooks: those would run in B too, without a gradient."""
    parameter = _parameter_of(weight) if weight.requires_grad else None
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


def _lowered(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """As autocast does, but without its cache, which must not learn of casts that have no gradient."""
    if dtype is None or not tensor.is_floating_point() or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(dtype)


# --- sections -------------------------------------------------------------------------------


def _runs_modules(section: Section) -> bool:
    """Whether a section runs modules as they are, alone or inside its graph."""
    return not isinstance(section.program, GraphProgram) or bool(section.program.leaves)


def deferring(section: Section) -> Section:
    """The section, its graph calling the operators through the ``PendingWeights`` that collects, if any."""
    program = section.program
    if _runs_modules(section) or not isinstance(program, GraphProgram):
        return section
    return replace(section, program=replace(program, module=_with_deferred_calls(program.module)))


def _with_deferred_calls(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _CALLS:
            node.target = _CALLS[node.target]
    children = {
        name: _with_deferred_calls(child) if isinstance(child, fx.GraphModule) else child
        for name, child in module.named_children()
    }
    return fx.GraphModule(children, graph, class_name=type(module).__name__)


def _call_of(function: Callable[..., Any]) -> Callable[..., Any]:
    def deferred(*args: Any, **kwargs: Any) -> Any:
        pending = _collecting.get()
        return function(*args, **kwargs) if pending is None else pending.call(function, args, kwargs)

    deferred.__name__ = f"deferred_{function.__name__.replace('.', '_')}"
    return deferred


_CALLS = {function: _call_of(function) for function in OPERATORS}
