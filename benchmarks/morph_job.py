"""The job of ``bench_morph``: the GPT of 10 M parameters, trained until somebody ends it.

varuna run -w 4 -p 2 -b 1 -m benchmarks.morph_job
"""

from __future__ import annotations

import argparse

import torch

import varuna
from benchmarks import gpt

_NUM_SAMPLES = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1_000_000)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = gpt.GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    job = varuna.Varuna(model, optimizer, gpt.Text(_NUM_SAMPLES), batch_size=options.batch_size, progress=False)
    for _ in job.train(options.steps):
        pass


if __name__ == "__main__":
    main()
