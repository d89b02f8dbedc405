"""Floating point operations of graph nodes, from the shapes in their metadata; nothing is run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.utils.flop_counter import conv_flop_count, sdpa_flop_count

from varuna.partition.effects import region_of
from varuna.partition.graph import values_of


def flops_of(node: fx.Node, subgraphs: Mapping[str, fx.GraphModule], model: nn.Module) -> float:
    """Floating point operations of one node's forward for the example batch.

    Matrix products, convolutions and attention are counted; everything else is taken as free. An opaque leaf is
    taken as one product of every parameter with every row of its first input.
    """
    region = region_of(node, subgraphs)
    if region is not None:
        children = {n: m for n, m in region.named_children() if isinstance(m, fx.GraphModule)}
        return sum(flops_of(inner, {**subgraphs, **children}, model) for inner in region.graph.nodes)
    if node.op == "call_module":
        return _leaf_flops(node, model)
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return 0.0
    count = _COUNTS.get(str(node.target).split(".")[-2])
    if count is None:
        return 0.0
    arguments = [_shape(argument) for argument in node.args]
    outputs = values_of(node)
    return float(count(arguments, tuple(outputs[0].shape) if outputs else (), node))


def _shape(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        value = argument.meta.get("val")
        return tuple(value.shape) if isinstance(value, Tensor) else value
    return [_shape(item) for item in argument] if isinstance(argument, (list, tuple)) else argument


def _leaf_flops(node: fx.Node, model: nn.Module) -> float:
    rows = next((math.prod(v.shape[:-1]) for n in node.all_input_nodes for v in values_of(n)[:1]), 1)
    return 2.0 * rows * sum(p.numel() for p in model.get_submodule(str(node.target)).parameters())


def _product(sizes: Iterable[int]) -> float:
    return float(math.prod(sizes))


def _linear(arguments: list[Any], output: tuple[int, ...], node: fx.Node) -> float:
    return 2.0 * _product(output) * float(arguments[0][-1])


def _product_after_bias(arguments: list[Any], output: tuple[int, ...], node: fx.Node) -> float:
    return 2.0 * _product(output) * float(arguments[1][-1])


def _convolution(arguments: list[Any], output: tuple[int, ...], node: fx.Node) -> float:
    transposed = "transpose" in str(node.target) or (len(arguments) > 6 and arguments[6] is True)
    return float(conv_flop_count(list(arguments[0]), list(arguments[1]), list(output), transposed=transposed))


def _attention(arguments: list[Any], output: tuple[int, ...], node: fx.Node) -> float:
    query, key, value = (tuple(shape) for shape in arguments[:3])
    if len(query) != 4 or query[1] != key[1]:  # grouped heads, or no batch
        products = 2.0 * _product(query[:-1]) * key[-2]
        return float(products * (query[-1] + value[-1]))
    return float(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _einsum(arguments: list[Any], output: tuple[int, ...], node: fx.Node) -> float:
    sizes: dict[str, int] = {}
    for names, shape in zip(arguments[0].replace(" ", "").split("->")[0].split(","), arguments[1], strict=True):
        if "." in names:
            return 0.0
        sizes.update(zip(names, shape, strict=True))
    return 2.0 * _product(sizes.values())


def _grouped(arguments: list[Any], output: tuple[int, ...], node: fx.Node) -> float:
    return 2.0 * _product(arguments[0]) * output[-1]


def _recurrent(arguments: list[Any], output: tuple[int, ...], node: fx.Node) -> float:
    weights = next(a for a in reversed(arguments) if isinstance(a, list) and a and isinstance(a[0], tuple))
    return 2.0 * _product(arguments[0][:-1]) * sum(_product(shape) for shape in weights)


_COUNTS: dict[str, Callable[[list[Any], tuple[int, ...], fx.Node], float]] = {
    "linear": _linear,
    "matmul": _linear,
    "mm": _linear,
    "bmm": _linear,
    "mv": _linear,
    "addmm": _product_after_bias,
    "baddbmm": _product_after_bias,
    "addbmm": _product_after_bias,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
    "convolution": _convolution,
    "conv_transpose1d": _convolution,
    "conv_transpose2d": _convolution,
    "conv_transpose3d": _convolution,
    "scaled_dot_product_attention": _attention,
    "einsum": _einsum,
    "_grouped_mm": _grouped,
    "grouped_mm_fallback": _grouped,
    "lstm": _recurrent,
    "gru": _recurrent,
    "rnn_tanh": _recurrent,
    "rnn_relu": _recurrent,
}
