"""What a section of a transformer costs on a device: its shape and the device's data sheet in, costs out.

Operations. A layer's forward takes ``24 s h² (1 + s / 6h)`` per sample: 24 s h² in its four linear layers and
4 s² h in attention; the head ``2 s h V``; backward twice as many (Narayanan et al. 2021, arXiv:2104.04473,
appendix). Half of a linear layer's backward are input gradients, half weight gradients.

Seconds of a task are a sum of three parts, so that efficiency rises with the micro-batch and levels off:

- matrix products: operations / (peak · efficiency · T / (T + 256)) for T = m · s tokens. A product of few
  tokens is bound by reading the weights and does not fill the device: it reaches half at 256 tokens.
- what lies between them (norms, GELU, dropout, softmax) moves each kept byte twice, written and read, at 80 %
  of memory bandwidth; backward twice that.
- weights, whatever the micro-batch: autocast makes a 16-bit copy of each fp32 weight (read 4, write 2 bytes);
  backward widens its gradient (2 + 4) and adds it to the fp32 sum (8 + 4).

Bytes. A layer keeps ``s m h (34 + 5 a s / h)`` at 16 bit (Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", arXiv:2205.05198, equation 2); without the second term where
attention is fused. Autocast's 16-bit copies of the weights are kept from forward to backward too. The head
keeps ``4 s m h + 4 s m V`` (same paper). Between sections ``2 s m h`` go each way: the residual stream at 16
bit. (Plain autocast keeps it in fp32, which doubles messages.)

Parameters take 16 bytes each under mixed-precision Adam: 4 for the fp32 weight (there is no 16-bit copy besides
autocast's), 4 for its fp32 gradient, 8 for two moments.
"""

from __future__ import annotations

from varuna.plan.estimate_devices import MEMORY_EFFICIENCY, DeviceSheet
from varuna.plan.estimate_models import ModelShape
from varuna.plan.profile import TaskCosts

HALF_EFFICIENCY_TOKENS = 256
"""Tokens at which matrix products reach half of what they reach at many."""

PARAMETER_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 4, 4, 8
"""Per parameter: 16 in all."""

CAST_BYTES, ACCUMULATE_BYTES = 6, 18
"""Memory traffic per weight of a micro-batch: 4 + 2 forward; 2 + 4 + 8 + 4 backward."""

UPDATE_BYTES = 32
"""Memory traffic per parameter of a step: Adam reads 16, writes 12; 4 more for the norm."""


def layer_flops(shape: ModelShape) -> float:
    """Forward operations of one layer for one sample: 24 s h² (1 + s / 6h)."""
    s, h = shape.sequence, shape.hidden
    return 24 * s * h * h * (1 + s / (6 * h))


def head_flops(shape: ModelShape) -> float:
    """Forward operations of the output for one sample: 2 s h V; BERT's transform 2 s h²."""
    s, h = shape.sequence, shape.hidden
    return 2 * s * h * shape.vocabulary + (2 * s * h * h if shape.bert else 0)


def matmul_flops_per_s(device: DeviceSheet, tokens: float) -> float:
    """Operations per second of matrix products over so many tokens: saturating."""
    share = tokens / (tokens + HALF_EFFICIENCY_TOKENS)
    return device.peak_flops_per_s * device.matmul_efficiency * share


def layer_costs(shape: ModelShape, device: DeviceSheet, micro_batch_size: int) -> TaskCosts:
    """One transformer layer."""
    s, h, a, m = shape.sequence, shape.hidden, shape.num_heads, micro_batch_size
    stream = s * m * h
    rate = matmul_flops_per_s(device, s * m)
    scores = 0 if device.fused_attention else 5 * a * s * s * m
    kept = 34 * stream + scores
    weights = 12 * h * h
    products_s = layer_flops(shape) * m / rate
    between_s = _move_s(device, 2 * kept)
    forward_s = products_s + between_s + _move_s(device, CAST_BYTES * weights)
    accumulate_s = _move_s(device, ACCUMULATE_BYTES * weights)
    return TaskCosts(
        micro_batch_size=m,
        forward_s=forward_s,
        recompute_s=forward_s,
        backward_s=2 * (products_s + between_s) + accumulate_s,
        weight_s=24 * s * h * h * m / rate + accumulate_s,
        activation_bytes=kept + 2 * weights,
        # The four linear layers' inputs (2 + 2 + 2 + 8 bytes) and output gradients (6 + 2 + 8 + 2).
        weight_bytes=32 * stream,
        # Gradients of the widest values, and of the largest weight before it is added.
        workspace_bytes=16 * stream + scores + 4 * 4 * h * h,
        output_bytes=2 * stream,
        gradient_bytes=2 * stream,
    )


def embedding_costs(shape: ModelShape, device: DeviceSheet, micro_batch_size: int) -> TaskCosts:
    """Lookup and sum of tables, dropout; backward writes and adds up a gradient as large as the table."""
    s, h, m = shape.sequence, shape.hidden, micro_batch_size
    stream = s * m * h
    forward_s = _move_s(device, 12 * stream)
    return TaskCosts(
        micro_batch_size=m,
        forward_s=forward_s,
        recompute_s=forward_s,
        backward_s=_move_s(device, 12 * stream + 16 * shape.embedding_parameters),
        weight_s=0.0,
        activation_bytes=stream + 8 * s * m,  # dropout's mask, token ids
        workspace_bytes=GRADIENT_BYTES * shape.embedding_parameters,
        output_bytes=2 * stream,
        gradient_bytes=2 * stream,
    )


def head_costs(shape: ModelShape, device: DeviceSheet, micro_batch_size: int) -> TaskCosts:
    """Last norm, product with the tied table, cross-entropy in fp32."""
    s, h, v, m = shape.sequence, shape.hidden, shape.vocabulary, micro_batch_size
    logits = s * m * v
    kept = 4 * s * m * h + 4 * logits
    weights = shape.table_parameters
    products_s = head_flops(shape) * m / matmul_flops_per_s(device, s * m)
    between_s = _move_s(device, 2 * kept)
    forward_s = products_s + between_s + _move_s(device, CAST_BYTES * weights)
    accumulate_s = _move_s(device, ACCUMULATE_BYTES * weights)
    return TaskCosts(
        micro_batch_size=m,
        forward_s=forward_s,
        recompute_s=forward_s,
        backward_s=2 * (products_s + between_s) + accumulate_s,
        weight_s=products_s + accumulate_s,
        activation_bytes=kept + 2 * weights,
        weight_bytes=2 * s * m * h + 2 * logits,
        workspace_bytes=6 * logits + GRADIENT_BYTES * weights,  # 16-bit logits, fp32 gradient; the table's
    )


def update_s(device: DeviceSheet, num_parameters: float) -> float:
    """Seconds of one Adam update."""
    return _move_s(device, UPDATE_BYTES * num_parameters)


def _move_s(device: DeviceSheet, num_bytes: float) -> float:
    return num_bytes / (device.memory_bytes_per_s * MEMORY_EFFICIENCY)
