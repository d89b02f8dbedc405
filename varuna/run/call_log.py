"""Which calls the script has made, in order: what a newcomer, or a job that was started again, has to know.

``train``, ``evaluate`` and ``full_state_dict`` are calls that all workers make together. A newcomer runs the
same script from its beginning: calls that were over when it came are passed over, the one under way it joins.

Where a ``train`` call ends is counted from step 0: each begins where the one before it has ended. So a job that
is started again and goes on from a checkpoint passes through its first ``train`` calls without a step until it
comes to the one in which the checkpoint was written; all other calls it makes again.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from varuna.errors import ProtocolError

TRAIN = "train"


class Call(msgspec.Struct, kw_only=True):
    """One call that all workers make together, in the order of the script.

    Attributes:
        name: ``train``, ``evaluate`` or ``full_state_dict``.
        end_step: of ``train``: where it ends; None until its first step.
        was_left: of ``train``: its loop was left before that; ``end_step`` is where.
        value: of ``evaluate``: what it returned; None until it has.
        in_loop: made in the body of a ``train`` loop.
    """

    name: str
    end_step: int | None = None
    was_left: bool = False
    value: float | None = None
    in_loop: bool = False


class CallLog:
    """The calls of this worker's script and of those that were there before it.

    Attributes:
        in_loop: whether the script is in the body of a ``train`` loop.
    """

    def __init__(self) -> None:
        self.in_loop = False
        self._calls: list[Call] = []
        self._num_made = 0
        self._num_before = 0
        self._resumed: list[Call] = []

    @property
    def calls(self) -> tuple[Call, ...]:
        """All made so far in this life of the job; the last one may be under way."""
        return tuple(self._calls)

    @property
    def train_calls(self) -> tuple[Call, ...]:
        """The ``train`` calls over the life of the job: what a checkpoint keeps."""
        made = [call for call in self._calls if call.name == TRAIN]
        return (*made, *self._resumed[len(made) :])

    @property
    def resumed(self) -> tuple[Call, ...]:
        """The ``train`` calls that the checkpoint knew of from which this life of the job began."""
        return tuple(self._resumed)

    def begin(self, name: str, step_index: int = 0) -> tuple[Call, bool]:
        """The next call of the script, and whether it was over before this newcomer came.

        A newcomer comes to a ``train`` loop between two steps: what was called in its body is over.

        Args:
            name: of the call.
            step_index: the next step.

        Raises:
            ProtocolError: the others had made another one.
        """
        if self._num_made == len(self._calls):
            self._calls.append(Call(name=name, in_loop=self.in_loop))
        call = self._calls[self._num_made]
        self._num_made += 1
        if call.name != name:
            raise ProtocolError(
                f"Call {self._num_made} of this worker's script is {name}, and was {call.name} on the workers "
                f"that were there before it. Every worker must run the same script."
            )
        if name != TRAIN or self._num_made > self._num_before:
            return call, self._num_made < self._num_before
        while self._num_made < self._num_before and self._calls[self._num_made].in_loop:
            self._num_made += 1
        return call, call.end_step is not None and (call.was_left or step_index >= call.end_step)

    def end_of(self, call: Call, num_steps: int) -> int:
        """Where a ``train`` call of this log ends that is about to make its first step here."""
        if call.end_step is None:
            trains = [one for one in self._calls if one.name == TRAIN]
            index = [one is call for one in trains].index(True)
            before = self._resumed[index] if index < len(self._resumed) else None
            if before is not None and before.was_left:
                call.end_step, call.was_left = before.end_step, True
            else:
                begins = [one.end_step for one in trains[:index] if one.end_step is not None]
                call.end_step = (begins[-1] if begins else 0) + num_steps
        assert call.end_step is not None
        return call.end_step

    def leave(self, call: Call, step_index: int) -> None:
        """The loop of a ``train`` call was left before its end."""
        call.end_step, call.was_left = step_index, True

    def take(self, calls: Sequence[Call]) -> None:
        """This worker is a newcomer: what the others have made."""
        self._calls = list(calls)
        self._num_before = len(self._calls)

    def resume(self, train_calls: Sequence[Call]) -> None:
        """The job was started again: the ``train`` calls that a checkpoint knows of."""
        self._resumed = list(train_calls)
