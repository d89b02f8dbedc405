"""Where the job stands besides its sections: the same on every member after every step.

Steps done, loss scale, learning rates, options of param groups, the calls of the script, and what the user
registered. Newcomers get it from a member, and checkpoints hold it, in the same form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from varuna.checkpoint.collect import SectionState, encode_state, job_section
from varuna.checkpoint.options import encode_options, restore_options
from varuna.checkpoint.tree import unflatten
from varuna.checkpoint.values import JobState
from varuna.persist.registry import Registry
from varuna.run.call_log import Call, CallLog
from varuna.run.job import JobSpec
from varuna.run.precision import LossScaler
from varuna.run.switches import Switches, switch, switches_of

_LENGTH_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class EncodedStanding:
    """The state as values, and the tensors that belong to it."""

    job: JobState
    tensors: SectionState


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a newcomer is told, but for tensors."""

    job: JobState
    calls: list[Call]
    resumed: list[Call]
    last_sequence: int
    switches: Switches


class Standing:
    """Where this worker's job stands.

    Args:
        model: the user's.
        optimizer, lr_scheduler: over all its parameters.
        scaler: to begin with.
        job: data and arithmetic.
        calls: the script's.
        registry: what the user registered.

    Attributes:
        step_index: the next step.
        scaler: of its losses.
        last_sequence: number of the newest save that any member has heard of.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        lr_scheduler: LRScheduler | None,
        scaler: LossScaler,
        job: JobSpec,
        calls: CallLog,
        registry: Registry,
    ) -> None:
        self.step_index = 0
        self.scaler = scaler
        self.last_sequence = 0
        self.calls = calls
        self.registry = registry
        self.has_scheduler = lr_scheduler is not None
        self._model = model
        self._optimizer = optimizer
        self._lr_scheduler = lr_scheduler
        self._job = job

    def encode(self) -> EncodedStanding:
        """As it is now, without ``model_names``; tensors are references, not copies.

        Raises:
            StateError: something in it could only be stored by pickle.
        """
        scheduler = self._lr_scheduler
        schedule = None if scheduler is None else encode_state(scheduler.state_dict(), "lr scheduler")
        options = encode_options(self._optimizer, dict(self._model.named_parameters()))
        registered = self.registry.encode()
        job = JobState(
            step=self.step_index,
            num_samples=self.step_index * self._job.batch_size,
            seed=self._job.seed,
            batch_size=self._job.batch_size,
            dataset_length=len(self._job.dataset),
            lr_scheduler=None if schedule is None else schedule.json,
            loss_scale=dict(self.scaler.state_dict()) if self.scaler.enabled else None,
            param_groups=options.json,
            registered={name: state.json for name, state in registered.items()},
            train_calls=tuple(msgspec.to_builtins(self.calls.train_calls)),
        )
        states = [options, *registered.values(), *([] if schedule is None else [schedule])]
        return EncodedStanding(job=job, tensors=job_section(*states))

    def load(self, job: JobState, tensors: Mapping[str, Tensor]) -> None:
        """Stand where this state was; the script's calls stay as they are.

        Raises:
            StateError: the optimizer's groups are others; nothing was changed then.
        """
        restore_options(self._optimizer, dict(self._model.named_parameters()), job.param_groups, tensors)
        if self._lr_scheduler is not None and job.lr_scheduler is not None:
            state = unflatten(job.lr_scheduler, tensors, "the learning-rate scheduler")
            self._lr_scheduler.load_state_dict(state)
        if self.scaler.enabled and job.loss_scale is not None:
            self.scaler = self.scaler.with_state(job.loss_scale)
        self.registry.load(job.registered, tensors)
        self.step_index = job.step

    def start_over(self, job: JobState) -> None:
        """The script runs from its beginning, in a job that goes on from this state."""
        self.calls.resume(msgspec.convert(list(job.train_calls), list[Call]))

    # --- to newcomers -----------------------------------------------------------------------

    def tell(self) -> bytes:
        """All of it, for a newcomer. Raises ``StateError`` as ``encode``."""
        encoded = self.encode()
        told = _Told(
            job=encoded.job,
            calls=list(self.calls.calls),
            resumed=list(self.calls.resumed),
            last_sequence=self.last_sequence,
            switches=switches_of(self._model),
        )
        text = msgspec.json.encode(told)
        tensors = {name: _copied(tensor) for name, tensor in encoded.tensors.tensors.items()}
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text + save(tensors)

    def take(self, data: bytes) -> None:
        """What ``tell`` said on another member; this worker is a newcomer."""
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        text, rest = data[_LENGTH_BYTES : _LENGTH_BYTES + length], data[_LENGTH_BYTES + length :]
        told = msgspec.json.decode(text, type=_Told)
        self.load(told.job, load(rest))
        self.calls.take(told.calls)
        self.calls.resume(told.resumed)
        self.last_sequence = told.last_sequence
        switch(self._model, told.switches)


def _copied(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
