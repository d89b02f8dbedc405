"""Models and comparisons that the splitter's tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from varuna.partition import CapturedGraph, CutPoint, Partition, capture, flatten_batch
from varuna.partition.flow import Flow, flow_of
from varuna.partition.loss import loss_of, read_output
from varuna.partition.loss_fn import forward_with_loss

Groups = Sequence[tuple[int, int]]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            t.view(batch, time, 2, width // 2).transpose(1, 2) for t in self.qkv(self.norm_1(x)).split(width, 2)
        )
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + self.out(y.transpose(1, 2).reshape(batch, time, width))
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), self.dropout, self.training)


class GPT(nn.Module):
    """Tied head; optionally a mark after every block."""

    def __init__(
        self, *, layers: int = 3, marks: bool = False, dropout: float = 0.0, tied: bool = True
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(20, 16), nn.Embedding(8, 16)
        self.blocks = nn.ModuleList(Block(16, dropout) for _ in range(layers))
        self.cuts = nn.ModuleList(CutPoint() if marks else nn.Identity() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 20, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block, cut in zip(self.blocks, self.cuts, strict=True):
            x = cut(block(x))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def language_batch(num_samples: int, vocab: int = 20, time: int = 8) -> dict[str, Tensor]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(num_samples)
    ids = torch.randint(vocab, (num_samples, time), generator=generator)
    return {"ids": ids, "labels": ids.roll(1, 1)}


def graph_of(model: nn.Module, batch: object, *, training: bool = True) -> tuple[CapturedGraph, Flow]:
    """A capture and its analysis."""
    graph = capture(model, batch, training=training, autocast=None)
    return graph, flow_of(graph, model)


def open_positions(flow: Flow) -> list[int]:
    """All positions where a cut can be."""
    return [position for position in range(1, len(flow.steps)) if position not in flow.refusals]


def run_staged(partition: Partition, batch: object, groups: Groups) -> Tensor:
    """Forward and backward as separate workers would: every stage has a graph of its own, gradients are handed
    on.
    """
    flat = flatten_batch(batch)
    num_samples = next(iter(flat.tensors.values())).shape[0]
    values: tuple[Tensor, ...] = ()
    stages: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
    for first, end in groups:
        specs = partition.sections[first].received
        received = tuple(
            value.detach().clone().requires_grad_(spec.differentiable)
            for value, spec in zip(values, specs, strict=True)
        )
        for value, spec in zip(received, specs, strict=True):
            assert value.dtype == spec.dtype
            assert spec.batch_dim is None or value.shape[spec.batch_dim] == num_samples
        values = received
        for section in partition.sections[first:end]:
            inputs = {key: flat.tensors[key] for key in section.input_keys}  # nothing else may be read
            values = section.run(inputs, values)
        stages.append((received, values))
    loss = partition.loss_of(values, num_samples).sum
    stages[-1] = (stages[-1][0], (loss,))
    gradients: list[Tensor | None] = [torch.ones_like(loss)]
    for received, sent in reversed(stages):
        pairs = [(v, g) for v, g in zip(sent, gradients, strict=True) if g is not None and v.requires_grad]
        if pairs:
            torch.autograd.backward([v for v, _ in pairs], [g for _, g in pairs])
        gradients = [value.grad for value in received]
    return loss.detach()


def run_plain(model: nn.Module, batch: Any, loss_fn: Callable[..., Any] | None = None) -> Tensor:
    """The model's own forward and backward, as a sum over samples."""
    num_samples = next(iter(flatten_batch(batch).tensors.values())).shape[0]
    with forward_with_loss(model, loss_fn):
        if isinstance(batch, dict):
            output = model(**batch)
        else:
            output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    spec, outputs = read_output(output)
    loss = loss_of(spec, outputs, num_samples).sum
    loss.backward()
    return loss.detach()


def assert_same_step(
    model: nn.Module,
    partition: Partition,
    batch: object,
    *,
    groups: Groups | None = None,
    bound: float = 1e-12,
    loss_fn: Callable[..., Any] | None = None,
) -> None:
    """Loss, every gradient and every buffer after one staged step equal those of the plain step."""
    groups = groups or [(index, index + 1) for index in range(len(partition.sections))]
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    model.zero_grad()
    torch.manual_seed(3)
    expected_loss = run_plain(model, batch, loss_fn)
    expected = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    expected_buffers = {name: value.clone() for name, value in model.named_buffers()}
    with torch.no_grad():
        for name, value in model.named_buffers():
            value.copy_(buffers[name])
    model.zero_grad()
    torch.manual_seed(3)
    loss = run_staged(partition, batch, groups)
    assert abs(loss - expected_loss) <= bound * max(1.0, abs(expected_loss))
    for name, parameter in model.named_parameters():
        difference = _difference(parameter.grad, expected[name])
        assert difference <= bound, f"{name}: {difference}"
    for name, value in model.named_buffers():
        torch.testing.assert_close(value, expected_buffers[name], rtol=bound, atol=bound)
    model.zero_grad()


def _difference(found: Tensor | None, expected: Tensor | None) -> float:
    if found is None or expected is None:
        present = found if found is not None else expected
        return 0.0 if present is None else float(present.abs().max())
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-9))
