"""What a worker has to save of the sections that it holds, and how it takes sections from a checkpoint.

A tensor that several sections use is stored with the first of them. Parameters and buffers that no section uses
go with section 0; such buffers are stored where they have values, since the start never gives them any.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.optim import Optimizer

from varuna.checkpoint.collect import SectionState, section_state
from varuna.checkpoint.find import Checkpoint
from varuna.checkpoint.names import buffer_name, parameter_name
from varuna.checkpoint.restore import check_fits, restore
from varuna.checkpoint.shares import owners
from varuna.checkpoint.values import JOB_SECTION, JobState
from varuna.partition import canonical_names
from varuna.persist.standing import EncodedStanding
from varuna.run.holders import section_parameters
from varuna.run.reform import Worker
from varuna.run.section_state import SectionStates
from varuna.spec import Plan


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What one worker knows of a save.

    Attributes:
        sections: everything that it holds; the live tensors.
        holders: ranks by section, for all sections it holds; of what belongs to none, everyone.
        job: the same on every worker.
        required: names of tensors that the whole checkpoint must have, at least.
        num_sections: of the model.
    """

    sections: tuple[SectionState, ...]
    holders: Mapping[int, tuple[int, ...]]
    job: JobState
    required: frozenset[str]
    num_sections: int


class SectionStore:
    """Sections of one model, to be saved and to be taken from checkpoints.

    Args:
        worker: model and sections.
        optimizer: whose state goes with the parameters.
    """

    def __init__(self, worker: Worker, optimizer: Optimizer) -> None:
        self._worker = worker
        self._optimizer = optimizer
        canonical = canonical_names(worker.model)
        self._canonical = canonical
        self._parameters = dict(worker.model.named_parameters())
        self._buffers: dict[str, Tensor] = {
            canonical[name]: buffer for name, buffer in worker.model.named_buffers()
        }
        partitions = worker.partitions
        self._num_sections = len(partitions.reference.sections)
        self._read = {name for section in partitions.reference.sections for name in section.buffers}
        names = [
            (*section_parameters(partitions, index), *section.buffers)
            for index, section in enumerate(partitions.reference.sections)
        ]
        self._names = names
        self._owners = owners([(*names[0], *self._unread()), *names[1:]])

    def contents(self, plan: Plan, size: int, standing: EncodedStanding) -> Contents:
        """What this worker holds under a plan of ``size`` workers."""
        held = sorted(self._worker.held_sections)
        sections = tuple(self._state(index) for index in held)
        holders = {index: plan.holders_of(index) for index in held}
        return Contents(
            sections=(*sections, standing.tensors),
            holders={**holders, JOB_SECTION: tuple(range(size))},
            job=replace(standing.job, model_names=self._model_names),
            required=self._required,
            num_sections=self._num_sections,
        )

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise ``StateError`` unless the checkpoint is of a model like this one."""
        wanted = {
            name: buffer
            for name, buffer in self._buffers.items()
            if name in self._read or buffer_name(name) in checkpoint.places
        }
        check_fits(checkpoint, self._parameters, wanted)

    def take(self, checkpoint: Checkpoint, section_indices: Iterable[int]) -> None:
        """Hold these sections, with the values of the checkpoint; one after another, to save memory.

        Raises:
            DamagedCheckpoint, CheckpointError: see ``load.read_tensors``.
        """
        worker, device = self._worker, self._worker.world.device
        states = SectionStates(worker.model, worker.holding, worker.partitions, device)
        done: set[str] = set()
        for index in section_indices:
            names = [name for name in self._all_names(index) if name not in done]
            parameters: dict[str, nn.Parameter] = {
                name: self._parameters[name] for name in names if name in self._parameters
            }
            buffers = [
                name
                for name in names
                if name in self._buffers and (name in self._read or buffer_name(name) in checkpoint.places)
            ]
            restored = restore(checkpoint, parameters, buffers, device=device, optimizer=self._optimizer)
            worker.holding.hold(restored.parameters, restored.states)
            for name, value in restored.buffers.items():
                states.set_buffer(name, value)
            worker.held_sections.add(index)
            done.update(names)

    # --- inside -----------------------------------------------------------------------------

    def _unread(self) -> list[str]:
        """Buffers that no section reads and that have values."""
        return [name for name, buffer in self._buffers.items() if name not in self._read and not buffer.is_meta]

    def _all_names(self, section_index: int) -> tuple[str, ...]:
        names = self._names[section_index]
        return (*names, *self._unread()) if section_index == 0 else names

    def _state(self, section_index: int) -> SectionState:
        names = [name for name in self._all_names(section_index) if self._owners[name] == section_index]
        return section_state(
            section_index,
            {name: self._parameters[name] for name in names if name in self._parameters},
            {name: self._buffers[name] for name in names if name in self._buffers},
            self._optimizer,
        )

    @functools.cached_property
    def _required(self) -> frozenset[str]:
        parameters = {parameter_name(name) for name in self._parameters}
        return frozenset(parameters | {buffer_name(name) for name in self._owners if name in self._buffers})

    @functools.cached_property
    def _model_names(self) -> dict[str, str]:
        """Every name of ``model.state_dict()`` that is stored to the name under which it is."""
        names = {}
        for name in self._worker.model.state_dict():
            first = self._canonical.get(name, name)
            if first in self._owners:
                names[name] = parameter_name(first) if first in self._parameters else buffer_name(first)
        return names
