"""Gradients added up in place against added up by autograd: passes of a stage's sections, in turn.

Eight micro-batches forward and backward in one process on one core. The figure is the time in place over
autograd's: lower is better, 1.000 where no weight is large enough.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks import gpt, report
from varuna.partition import Section, partition
from varuna.run.inplace import InPlaceWeights
from varuna.run.weight_calls import tapped

NUM_MICRO_BATCHES, WARM_UP = 8, 1


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of a GPT, and of its micro-batches of sequences of 64 tokens."""

    vocabulary: int
    width: int
    num_blocks: int
    micro_batch_size: int


SIZES = (
    Size(vocabulary=256, width=320, num_blocks=8, micro_batch_size=2),
    Size(vocabulary=8192, width=320, num_blocks=8, micro_batch_size=2),
    Size(vocabulary=256, width=1024, num_blocks=2, micro_batch_size=1),
    Size(vocabulary=256, width=1024, num_blocks=2, micro_batch_size=4),
    Size(vocabulary=50257, width=768, num_blocks=2, micro_batch_size=2),
)


class Step:
    """Forward and backward of all micro-batches; seconds."""

    def __init__(self, model: nn.Module, sections: list[Section], inputs: dict[str, Tensor]) -> None:
        self._model, self._sections, self._inputs = model, sections, inputs
        self._sink = InPlaceWeights(torch.device("cpu"))

    def __call__(self) -> float:
        """From no gradients to their sums."""
        self._model.zero_grad()
        start = time.perf_counter()
        for _ in range(NUM_MICRO_BATCHES):
            values: tuple[Tensor, ...] = ()
            with self._sink.collect(self._sections):
                for section in self._sections:
                    values = section.run(self._inputs, values)
            values[0].backward()
        return time.perf_counter() - start


def steps_of(size: Size) -> dict[str, Step]:
    """Both ways, on the same model; only ``tapped`` sections know of the sink."""
    gpt.VOCABULARY, gpt.WIDTH, gpt.LAYERS, gpt.HEADS = size.vocabulary, size.width, size.num_blocks, 4
    model = gpt.build()
    tokens = torch.randint(0, size.vocabulary, (size.micro_batch_size, gpt.TIME))
    whole = partition(model, (tokens, tokens), training=True)
    inputs = {"0": tokens, "1": tokens}
    return {
        "autograd": Step(model, list(whole.sections), inputs),
        "in place": Step(model, [tapped(section) for section in whole.sections], inputs),
    }


def main() -> None:
    options = report.arguments(__doc__ or "", repeats=9)
    torch.set_num_threads(1)
    rows: list[list[object]] = []
    for size in SIZES:
        steps = steps_of(size)
        report.interleaved(WARM_UP, steps)
        seconds = report.interleaved(options.repeats, steps)
        ours, theirs = seconds["in place"], seconds["autograd"]
        rows.append(
            [
                size.vocabulary, size.width, size.num_blocks, size.micro_batch_size, statistics.median(theirs),
                statistics.median(ours), report.median_ratio(ours, theirs),
            ]
        )  # fmt: skip
    header = ["vocabulary", "width", "blocks", "m", "autograd s", "in place s", "ratio"]
    notes = f"Medians of {options.repeats} rounds in turn."
    report.report("Gradients added up in place", report.table(header, rows), options.log, notes)


if __name__ == "__main__":
    main()
