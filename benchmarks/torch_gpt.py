"""The two halves of the GPT under ``torch.distributed.pipelining``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.checkpoint import checkpoint

from benchmarks import gpt


class Recomputed(nn.Module):
    """A stage whose activations are dropped after forward and computed again before backward."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        """What the stage returns."""
        if not torch.is_grad_enabled():
            return self.stage(x)
        return checkpoint(self.stage, x, use_reentrant=False)


def steps(
    name: str,
    rank: int,
    *,
    recompute: bool,
    ids_of: Callable[[int], list[int]],
    micro_batch_size: int,
    rate: float,
) -> Callable[[int], None]:
    """A function that runs step t on this rank: pipeline, then the optimizer over this stage's parameters.

    As in Varuna, the last stage of 1f1b keeps its activations: its backward follows its forward at once.
    """
    model = gpt.build()
    stage_module: nn.Module = (model.first, model.last)[rank]
    if recompute and not (name == "1f1b" and rank == 1):
        stage_module = Recomputed(stage_module)
    optimizer = torch.optim.AdamW(stage_module.parameters(), lr=rate)
    dataset = gpt.Text(4096)
    num_micro_batches = len(ids_of(0)) // micro_batch_size
    tokens = torch.zeros(micro_batch_size, gpt.TIME, dtype=torch.long)
    hidden = torch.zeros(micro_batch_size, gpt.TIME, gpt.WIDTH, requires_grad=True)
    logits = torch.zeros(micro_batch_size, gpt.TIME, gpt.VOCABULARY, requires_grad=True)
    stage = PipelineStage(
        stage_module,
        rank,
        2,
        torch.device("cpu"),
        input_args=((tokens,), (hidden,))[rank],
        output_args=((hidden,), (logits,))[rank],
    )
    schedule = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[name](
        stage, num_micro_batches, loss_fn=gpt.loss_of
    )

    def step(step_index: int) -> None:
        batch = torch.utils.data.default_collate([dataset[index] for index in ids_of(step_index)])
        if rank == 0:
            schedule.step(batch["tokens"], return_outputs=False)
        else:
            schedule.step(target=batch["targets"], losses=[], return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()

    return step
