"""Weight gradients that are added to ``.grad`` by the product that makes them.

Autograd writes a micro-batch's gradient of a weight to memory of its own and then adds that to ``.grad``: it
passes through memory four times where a product with an addend needs two, and an embedding's gradient, nearly
all zeros, is as large as its table. Where weights are large and micro-batches small, that is a good part of
backward.

The first micro-batch's gradient becomes ``.grad`` as always. A parameter with hooks gets every gradient through
autograd, such as those to be reduced in the last backward.
"""

from __future__ import annotations

import torch
from torch import nn

from varuna.run.weight_calls import Pair, WeightSink, plain_total
from varuna.run.weight_operators import WeightCall

LEAST_BYTES = 2 << 20
"""Of a weight: what is smaller stays in a core's cache from the product to the sum, and a call through Python
costs as much as it saves."""


class InPlaceWeights(WeightSink):
    """Adds at once; for a stage's whole life.

    Only on CPUs, where it has been measured, and without autocast, whose gradients are rounded before they are
    added up in another precision.
    """

    watches_modules = False

    def wants(self, call: WeightCall, dtype: torch.dtype | None) -> bool:
        """Calls on large parameters whose operator can add as it multiplies."""
        weight = call.weight
        return (
            dtype is None
            and call.operator.adds_in_place
            and isinstance(weight, nn.Parameter)
            and weight.device.type == "cpu"
            and weight.nbytes >= LEAST_BYTES
        )

    def take(self, pair: Pair) -> bool:
        """Adds if there is something to add to."""
        total = plain_total(pair.weight)
        of_bias = None if pair.bias is None else plain_total(pair.bias)
        if total is None or (pair.bias is not None and of_bias is None):
            return False
        with torch.no_grad():
            pair.operator.weight_gradient(pair.gradient, pair.input, pair.weight, total)
            if pair.bias is not None and of_bias is not None:
                of_bias.add_(pair.operator.bias_gradient(pair.gradient, pair.bias))
        return True
