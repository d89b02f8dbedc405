"""A process that saves one checkpoint after another until it is killed: ``python -m`` it with a directory.

It prints the step of every checkpoint that is durable. The state of a step is a function of the step, so that
who loads one can tell whether it is whole.
"""

from __future__ import annotations

import sys

import torch

from varuna.checkpoint.collect import SectionState
from varuna.checkpoint.commit import Committer
from varuna.checkpoint.find import find_checkpoint
from varuna.checkpoint.retention import Retention
from varuna.checkpoint.save import Saver
from varuna.checkpoint.shares import Share
from varuna.checkpoint.store import open_store
from varuna.checkpoint.values import JobState

NUM_SECTIONS = 3
NAMES = [f"parameters/{index}" for index in range(NUM_SECTIONS)]


def sections_at(step: int) -> list[SectionState]:
    return [
        SectionState(section_index=index, tensors={NAMES[index]: torch.full((20_000,), step + index / 10)})
        for index in range(NUM_SECTIONS)
    ]


def main(root: str) -> None:
    torch.set_num_threads(1)
    store = open_store(root)
    found = find_checkpoint(store, publish=lambda event: sys.exit(str(event)))
    step = 0 if found is None else found.step
    committer = Committer(store, retention=Retention(newest=2), publish=lambda event: sys.exit(str(event)))
    saver = Saver(store, "w0")
    print(f"started {step}", flush=True)
    while True:
        step += 1
        order = committer.begin(step)
        written = saver.save(order, sections_at(step), Share(write=tuple(NAMES))).result()
        job = JobState(step=step, num_samples=step, seed=0, batch_size=1, dataset_length=1)
        committer.commit(order, job, [written], required=NAMES, num_sections=NUM_SECTIONS)
        print(f"durable {step}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
