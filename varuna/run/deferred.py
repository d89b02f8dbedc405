"""Backward in two parts: gradients of inputs now (B), gradients of weights later (W). Nothing is run twice.

    pending = PendingWeights(device)
    with pending.collect(sections): outputs = ...    # forward, or recompute
    torch.autograd.backward(outputs, gradients)      # B
    pending.run()                                    # W: adds to .grad

B keeps the pairs (input, gradient of the output) of calls on weights, and frees the rest of what forward saved.
W makes weight gradients of these pairs and adds them to ``.grad``: itself if nobody watches, through autograd
if there are hooks. All other parameters (norms, scales) get their gradients in B.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from varuna.run.weight_calls import Pair, WeightSink, lowered, parameter_of, plain_total
from varuna.run.weight_operators import WeightCall


class PendingWeights(WeightSink):
    """Weight gradients of one micro-batch that B put off.

    Args:
        device: where the stage computes.
    """

    watches_modules = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._pairs: deque[Pair] = deque()

    def wants(self, call: WeightCall, dtype: torch.dtype | None) -> bool:
        """Every call."""
        return True

    def take(self, pair: Pair) -> bool:
        """Keeps it for W."""
        self._pairs.append(pair)
        return True

    def additions(self) -> Mapping[nn.Parameter, int]:
        """How often ``run`` will add to each parameter's gradient."""
        added = [tensor for pair in self._pairs for tensor in (pair.weight, pair.bias) if tensor is not None]
        return Counter(parameter for parameter in map(parameter_of, added) if parameter is not None)

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept; a tensor that several calls share counts once."""
        tensors = [tensor for pair in self._pairs for tensor in (pair.input, pair.gradient)]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        return sum(storage.nbytes() for storage in storages.values())

    def run(self) -> None:
        """W: last layer first, each pair let go when its gradient is made."""
        while self._pairs:
            _add(self._pairs.popleft())


def _add(pair: Pair) -> None:
    """To ``.grad`` of weight and bias, in their own dtype."""
    with torch.no_grad():
        total = plain_total(pair.weight) if pair.dtype is None else None
        weight = lowered(pair.weight, pair.dtype)
        of_weight = pair.operator.weight_gradient(pair.gradient, pair.input, weight, total)
        if total is None:
            _accumulate(pair.weight, of_weight)
        if pair.bias is not None:
            _accumulate(pair.bias, pair.operator.bias_gradient(pair.gradient, pair.bias))


def _accumulate(weight: Tensor, gradient: Tensor) -> None:
    total = plain_total(weight)
    gradient = gradient.to(weight.dtype)
    if total is None:
        torch.autograd.backward(weight, gradient)
    else:
        total.add_(gradient)
