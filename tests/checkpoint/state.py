"""A small training job whose whole state can be made on one process, divided among many, and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from varuna.checkpoint.collect import SectionState, encode_state, job_section, section_state
from varuna.checkpoint.commit import Committer
from varuna.checkpoint.names import buffer_name, parameter_name
from varuna.checkpoint.options import encode_options
from varuna.checkpoint.save import Answer, Saver
from varuna.checkpoint.shares import owners, planned_shares
from varuna.checkpoint.store import Store
from varuna.checkpoint.values import JOB_SECTION, JobState, Manifest, Written

NUM_SECTIONS = 4


class Net(nn.Module):
    """Four sections; the first and last share a weight, the third has running statistics."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.third = nn.BatchNorm1d(width)
        self.fourth = nn.Linear(width, width)
        self.fourth.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.fourth(self.third(self.second(self.first(x))))


@dataclass
class Trained:
    """A model, its optimizer and scheduler after some steps."""

    model: Net
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    num_steps: int

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    @property
    def buffers(self) -> dict[str, Tensor]:
        return dict(self.model.named_buffers())


def trained(num_steps: int = 3, seed: int = 0, width: int = 8) -> Trained:
    """Steps of AdamW with two param groups and a scheduler."""
    torch.manual_seed(seed)
    model = Net(width)
    decay = [p for name, p in model.named_parameters() if name.endswith("weight")]
    rest = [p for name, p in model.named_parameters() if not name.endswith("weight")]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 5e-3}], lr=1e-2
    )
    scheduler = LambdaLR(optimizer, lambda step: 0.9**step)
    state = Trained(model, optimizer, scheduler, 0)
    train(state, num_steps)
    return state


def train(state: Trained, num_steps: int) -> None:
    for _ in range(num_steps):
        torch.manual_seed(100 + state.num_steps)
        state.optimizer.zero_grad()
        state.model(torch.randn(16, state.model.first.in_features)).square().mean().backward()
        state.optimizer.step()
        state.scheduler.step()
        state.num_steps += 1


# --- a job divided among workers ------------------------------------------------------------

SECTION_NAMES = (
    ("first.weight", "first.bias"),
    ("second.weight", "second.bias"),
    ("third.weight", "third.bias", "third.running_mean", "third.running_var", "third.num_batches_tracked"),
    ("first.weight", "fourth.bias"),
)


def layout(num_stages: int, num_pipelines: int) -> dict[int, tuple[int, ...]]:
    """Holders of every section; worker = pipeline * P + stage. Stages as even as they can be."""
    bounds = [round(i * NUM_SECTIONS / num_stages) for i in range(num_stages + 1)]
    stage_of = {
        section: stage for stage in range(num_stages) for section in range(bounds[stage], bounds[stage + 1])
    }
    return {
        section: tuple(pipeline * num_stages + stage for pipeline in range(num_pipelines))
        for section, stage in stage_of.items()
    }


def sections_of(state: Trained, held: Sequence[int]) -> list[SectionState]:
    """What a worker that holds these sections saves; a tied weight is in the first of its sections."""
    owner = owners(SECTION_NAMES)
    return [
        section_state(
            index,
            {name: p for name, p in state.parameters.items() if owner[name] == index},
            {name: b for name, b in state.buffers.items() if owner[name] == index},
            state.optimizer,
        )
        for index in held
    ]


def job_parts(state: Trained, registered: Mapping[str, Any] | None = None) -> tuple[JobState, SectionState]:
    """What is the same on every worker."""
    options = encode_options(state.optimizer, state.parameters)
    scheduler = encode_state(state.scheduler.state_dict(), "lr scheduler")
    encoded = {name: encode_state(value, "registered", name) for name, value in (registered or {}).items()}
    names = {}
    for name, _ in state.model.named_parameters(remove_duplicate=False):
        names[name] = parameter_name("first.weight" if name == "fourth.weight" else name)
    for name, _ in state.model.named_buffers():
        names[name] = buffer_name(name)
    job = JobState(
        step=state.num_steps,
        num_samples=16 * state.num_steps,
        seed=7,
        batch_size=16,
        dataset_length=1000,
        lr_scheduler=scheduler.json,
        loss_scale={"scale": 1024.0, "good_steps": 5},
        param_groups=options.json,
        registered={name: value.json for name, value in encoded.items()},
        model_names=names,
    )
    return job, job_section(options, scheduler, *encoded.values())


def begin_save(
    committer: Committer,
    savers: Mapping[int, Saver],
    state: Trained,
    holders: Mapping[int, tuple[int, ...]],
    registered: Mapping[str, Any] | None = None,
) -> tuple[Any, JobState, dict[int, Future[Answer]]]:
    """Every worker copies and starts to write its share."""
    order = committer.begin(state.num_steps)
    job, extra = job_parts(state, registered)
    everyone = tuple(sorted(savers))
    futures = {}
    for worker, saver in savers.items():
        held = [index for index in range(NUM_SECTIONS) if worker in holders[index]]
        sections = [*sections_of(state, held), extra]
        sizes = {section.section_index: section.sizes for section in sections}
        planned = planned_shares(worker, sizes, {**holders, JOB_SECTION: everyone})
        futures[worker] = saver.save(order, sections, planned[worker])
    return order, job, futures


def required_names(state: Trained) -> set[str]:
    return {parameter_name(name) for name in state.parameters} | {buffer_name(name) for name in state.buffers}


def save(
    store: Store,
    state: Trained,
    num_stages: int = 1,
    num_pipelines: int = 1,
    *,
    committer: Committer | None = None,
    registered: Mapping[str, Any] | None = None,
) -> Manifest:
    """One whole save by P x D workers, all in this process."""
    committer = committer or Committer(store, publish=lambda event: None)
    savers = {w: Saver(store, f"w{w}") for w in range(num_stages * num_pipelines)}
    holders = layout(num_stages, num_pipelines)
    try:
        order, job, futures = begin_save(committer, savers, state, holders, registered)
        answers = [future.result(timeout=30) for future in futures.values()]
        assert all(isinstance(answer, Written) for answer in answers), answers
        return committer.commit(order, job, answers, required=required_names(state), num_sections=NUM_SECTIONS)
    finally:
        for saver in savers.values():
            saver.close()
