"""What training feels of a save: the pause in line over a plain copy of the same bytes, save and copy in turn.

Two states, weights and two moments of AdamW each: the GPT of 10 M parameters in many small tensors, and ten
large matrices. The plain copy goes tensor by tensor into
memory that was there before (``copy_``), or into fresh memory (``clone``). Files are written behind, to a
temporary directory, and that has ended before the next measurement. Lower is better.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import torch
from torch import Tensor, nn

from benchmarks import gpt, report
from varuna.checkpoint.collect import SectionState, section_state
from varuna.checkpoint.commit import Committer
from varuna.checkpoint.find import find_checkpoint
from varuna.checkpoint.restore import restore
from varuna.checkpoint.save import Saver
from varuna.checkpoint.shares import Share
from varuna.checkpoint.store import Store, open_store
from varuna.checkpoint.values import JobState, Written

TARGET = 1.2
NUM_SECTIONS = 8


class Matrices(nn.Module):
    """Ten matrices of 16 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(10)))

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, 2048]`` to a scalar."""
        return self.layers(x).square().mean()


class Job:
    """One worker that holds everything, after a step."""

    def __init__(self, store: Store, model: nn.Module, batch: dict[str, Tensor]) -> None:
        self.model = model
        self.batch = batch
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.train()
        self.store = store
        self.saver = Saver(store, "w0")
        self.committer = Committer(store, publish=print)
        self.step = 2
        self.write_s: list[float] = []
        self.memory = [torch.empty_like(tensor) for tensor in self.tensors()]

    def train(self) -> None:
        """One step: what comes before a save in a run, so that all figures are of the same warm process."""
        self.model(**self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sections(self) -> list[SectionState]:
        """The state in eight sections."""
        parameters = list(self.model.named_parameters())
        size = -(-len(parameters) // NUM_SECTIONS)
        return [
            section_state(index, dict(parameters[index * size : (index + 1) * size]), {}, self.optimizer)
            for index in range(NUM_SECTIONS)
        ]

    def tensors(self) -> list[Tensor]:
        """All that a save copies."""
        return [tensor for section in self.sections() for tensor in section.tensors.values()]

    def plain_copy(self) -> float:
        """Seconds for a copy into memory that is there."""
        self.train()
        tensors = self.tensors()
        started_s = time.perf_counter()
        with torch.no_grad():
            for memory, tensor in zip(self.memory, tensors, strict=True):
                memory.copy_(tensor)
        return time.perf_counter() - started_s

    def clone(self) -> float:
        """Seconds for a copy into fresh memory."""
        self.train()
        tensors = self.tensors()
        started_s = time.perf_counter()
        copies = [tensor.clone() for tensor in tensors]
        duration_s = time.perf_counter() - started_s
        del copies
        return duration_s

    def save(self) -> float:
        """Seconds in line: collecting, copying, starting the thread. The rest is waited for after it."""
        self.step += 1
        order = self.committer.begin(self.step)
        names = tuple(name for section in self.sections() for name in (*section.tensors, *section.values))
        share = Share(write=names)
        self.train()
        started_s = time.perf_counter()
        future = self.saver.save(order, self.sections(), share)
        pause_s = time.perf_counter() - started_s
        answer = future.result()
        assert isinstance(answer, Written), answer
        self.write_s.append(answer.write_s)
        state = JobState(step=self.step, num_samples=0, seed=0, batch_size=1, dataset_length=1)
        self.committer.commit(order, state, [answer], required=names, num_sections=NUM_SECTIONS)
        return pause_s

    def load(self) -> float:
        """Seconds to find the newest and read and check all of it."""
        started_s = time.perf_counter()
        found = find_checkpoint(self.store, publish=print)
        assert found is not None
        parameters: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        read = restore(found, parameters, [], optimizer=self.optimizer)
        duration_s = time.perf_counter() - started_s
        assert read.parameters.keys() == parameters.keys()
        return duration_s


def measure(name: str, model: nn.Module, batch: dict[str, Tensor], repeats: int) -> list[list[object]]:
    """Rows of the table for one model."""
    with tempfile.TemporaryDirectory() as place:
        job = Job(open_store(place), model, batch)
        variants = {"pause": job.save, "plain copy": job.plain_copy, "clone": job.clone, "load": job.load}
        for run in variants.values():
            run()  # the first of each touches fresh memory
        job.write_s.clear()
        figures = report.interleaved(repeats, variants)
        job.saver.close()
    size_bytes = sum(tensor.nbytes for tensor in job.tensors())
    figures["written behind"] = job.write_s
    state = f"{name}: {len(job.memory)} tensors, {size_bytes / 1e6:.0f} MB"
    rows: list[list[object]] = []
    for what, seconds in figures.items():
        median_s = statistics.median(seconds)
        ratio = report.median_ratio(seconds, figures["plain copy"])
        target = TARGET if what == "pause" else ""
        rows.append([state, what, median_s * 1000, size_bytes / median_s / 1e9, ratio, target])
    return rows


def main() -> None:
    options = report.arguments(__doc__ or "", repeats=20, threads=1)
    torch.set_num_threads(options.threads)
    dataset = gpt.Text(8)
    batch = torch.utils.data.default_collate([dataset[0], dataset[1]])
    rows = measure("GPT", gpt.build(), batch, options.repeats)
    rows += measure("matrices", Matrices(), {"x": torch.ones(1, 2048)}, options.repeats)
    header = ["state", "what", "ms", "GB/s", "over plain copy", "target"]
    report.report("Checkpoints: what training feels of a save", report.table(header, rows), options.log)


if __name__ == "__main__":
    main()
