"""Operators that take a weight, with their gradients in two parts: for the input, and for weight and bias.

``OPERATORS`` finds the ``WeightCall`` in the arguments of a call, both of aten's names, which graphs hold, and
of torch's, which modules call. What is not there, or called in an unusual way, is run and differentiated as
always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten


class Operator(Protocol):
    """Forward and backward of one call. Its tensors all have the dtype that forward computes in.

    Attributes:
        is_autocast: autocast lowers the precision of its tensors.
        adds_in_place: on a CPU, adding to a total costs less than making the gradient and adding that.
    """

    @property
    def is_autocast(self) -> bool:
        """See above."""

    @property
    def adds_in_place(self) -> bool:
        """See above."""

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The call itself."""

    def input_gradient(self, gradient: Tensor, input: Tensor, weight: Tensor) -> Tensor:
        """From the output's gradient."""

    def weight_gradient(
        self, gradient: Tensor, input: Tensor, weight: Tensor, total: Tensor | None = None
    ) -> Tensor:
        """From the output's gradient; with ``total``, added to that in place."""

    def bias_gradient(self, gradient: Tensor, bias: Tensor) -> Tensor:
        """From the output's gradient."""


class WeightCall(NamedTuple):
    """One call of an operator."""

    operator: Operator
    input: Tensor
    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class _Product:
    """``input [..., in] @ weight + bias``; weight is ``[out, in]`` if ``transposed``, else ``[in, out]``."""

    transposed: bool
    is_autocast: bool = True
    adds_in_place: bool = True

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.transposed:
            return functional.linear(input, weight, bias)
        return input @ weight if bias is None else torch.addmm(bias, input, weight)

    def input_gradient(self, gradient: Tensor, input: Tensor, weight: Tensor) -> Tensor:
        return gradient @ (weight if self.transposed else weight.t())

    def weight_gradient(
        self, gradient: Tensor, input: Tensor, weight: Tensor, total: Tensor | None = None
    ) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        gradients = gradient.reshape(-1, gradient.shape[-1])
        left, right = (gradients, rows) if self.transposed else (rows, gradients)
        return left.t() @ right if total is None else total.addmm_(left.t(), right)

    def bias_gradient(self, gradient: Tensor, bias: Tensor) -> Tensor:
        return gradient.sum_to_size(bias.shape)


@dataclass(frozen=True, kw_only=True)
class _Convolution:
    """1-, 2- or 3-dimensional, over a batch."""

    function: Callable[..., Any]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    is_autocast: bool = True
    adds_in_place: bool = False

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = self.function(
            input, weight, bias, self.stride, self.padding, self.dilation, self.groups
        )
        return result

    def input_gradient(self, gradient: Tensor, input: Tensor, weight: Tensor) -> Tensor:
        return self._backward(gradient, input, weight, (True, False, False))[0]

    def weight_gradient(
        self, gradient: Tensor, input: Tensor, weight: Tensor, total: Tensor | None = None
    ) -> Tensor:
        result = self._backward(gradient, input, weight, (False, True, False))[1]
        return result if total is None else total.add_(result)

    def bias_gradient(self, gradient: Tensor, bias: Tensor) -> Tensor:
        return gradient.sum([dim for dim in range(gradient.dim()) if dim != 1])

    def _backward(
        self, gradient: Tensor, input: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]
    ) -> tuple[Tensor, Tensor, Tensor]:
        results: tuple[Tensor, Tensor, Tensor] = aten.convolution_backward(
            gradient,
            input,
            weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            False,  # not transposed
            [0] * (weight.dim() - 2),  # output padding
            self.groups,
            wanted,
        )
        return results


@dataclass(frozen=True)
class _Embedding:
    """Rows of the weight; its input holds indices, which have no gradient."""

    padding_idx: int
    scale_grad_by_freq: bool
    is_autocast: bool = False

    @property
    def adds_in_place(self) -> bool:
        return not self.scale_grad_by_freq

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = aten.embedding(weight, input, self.padding_idx, self.scale_grad_by_freq, False)
        return result

    def input_gradient(self, gradient: Tensor, input: Tensor, weight: Tensor) -> Tensor:
        raise AssertionError("indices have no gradient")

    def weight_gradient(
        self, gradient: Tensor, input: Tensor, weight: Tensor, total: Tensor | None = None
    ) -> Tensor:
        if total is not None and self.adds_in_place and total.device.type == "cpu":
            return self._add_rows(total, gradient, input)
        result: Tensor = aten.embedding_dense_backward(
            gradient, input, weight.shape[0], self.padding_idx, self.scale_grad_by_freq
        )
        return result if total is None else total.add_(result)

    def _add_rows(self, total: Tensor, gradient: Tensor, input: Tensor) -> Tensor:
        """Only the rows that were looked up. Elsewhere than on a CPU the order of the sums is not fixed."""
        rows = gradient.reshape(-1, gradient.shape[-1])
        indices = input.reshape(-1)
        if self.padding_idx >= 0:
            rows = rows.masked_fill((indices == self.padding_idx)[:, None], 0)
        return total.index_add_(0, indices, rows)

    def bias_gradient(self, gradient: Tensor, bias: Tensor) -> Tensor:
        raise AssertionError("an embedding has no bias")


# --- from a call's arguments ----------------------------------------------------------------

_LINEAR, _MATMUL = _Product(transposed=True), _Product(transposed=False)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> WeightCall | None:
    if weight.dim() != 2:
        return None
    return WeightCall(operator=_LINEAR, input=input, weight=weight, bias=bias)


def _matmul(input: Tensor, weight: Tensor, **options: Any) -> WeightCall | None:
    if options or weight.dim() != 2:
        return None
    return WeightCall(operator=_MATMUL, input=input, weight=weight)


def _addmm(bias: Tensor, *operands: Tensor, **options: Any) -> WeightCall | None:
    usual = options.pop("beta", 1) == 1 and options.pop("alpha", 1) == 1 and not options
    if not usual or len(operands) != 2:
        return None
    input, weight = operands
    return WeightCall(operator=_MATMUL, input=input, weight=weight, bias=bias)


def _convolution(function: Callable[..., Any], num_dims: int) -> Callable[..., WeightCall | None]:
    def describe(
        input: Tensor, weight: Tensor, bias: Tensor | None = None, *settings: Any, **named: Any
    ) -> WeightCall | None:
        found: dict[str, Any] = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
        found |= dict(zip(found, settings, strict=False)) | named
        if isinstance(found["padding"], str) or input.dim() != num_dims + 2:
            return None
        operator = _Convolution(
            function=function,
            stride=_per_dim(found["stride"], num_dims),
            padding=_per_dim(found["padding"], num_dims),
            dilation=_per_dim(found["dilation"], num_dims),
            groups=found["groups"],
        )
        return WeightCall(operator=operator, input=input, weight=weight, bias=bias)

    return describe


def _per_dim(value: int | Sequence[int], num_dims: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * num_dims if len(values) == 1 else values


def _embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> WeightCall | None:
    if sparse:
        return None
    operator = _Embedding(padding_idx, scale_grad_by_freq)
    return WeightCall(operator=operator, input=indices, weight=weight)


def _functional_embedding(input: Tensor, weight: Tensor, *settings: Any, **named: Any) -> WeightCall | None:
    found: dict[str, Any] = {
        "padding_idx": None,
        "max_norm": None,
        "norm_type": 2.0,
        "scale_grad_by_freq": False,
        "sparse": False,
    }
    found |= dict(zip(found, settings, strict=False)) | named
    if found["max_norm"] is not None:  # it changes the weight
        return None
    row = -1 if found["padding_idx"] is None else found["padding_idx"] % weight.shape[0]
    return _embedding(weight, input, row, found["scale_grad_by_freq"], found["sparse"])


OPERATORS: Mapping[Callable[..., Any], Callable[..., WeightCall | None]] = {
    aten.linear.default: _linear,
    functional.linear: _linear,
    **dict.fromkeys((aten.matmul.default, torch.matmul, Tensor.matmul, Tensor.__matmul__), _matmul),
    **dict.fromkeys((aten.mm.default, torch.mm, Tensor.mm), _matmul),
    **dict.fromkeys((aten.addmm.default, torch.addmm, Tensor.addmm), _addmm),
    **dict.fromkeys((aten.conv1d.default, torch.conv1d), _convolution(torch.conv1d, 1)),
    **dict.fromkeys((aten.conv2d.default, torch.conv2d), _convolution(torch.conv2d, 2)),
    **dict.fromkeys((aten.conv3d.default, torch.conv3d), _convolution(torch.conv3d, 3)),
    **dict.fromkeys((aten.embedding.default, torch.embedding), _embedding),
    functional.embedding: _functional_embedding,
}
"""What is called -> how its arguments are read; None: not a call that can be split."""
