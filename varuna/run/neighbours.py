"""One stage's neighbours during one step: what has arrived, checked; what is sent; what is waited for.

Between the channels, which know nothing of steps, and the engine, which knows nothing of messages.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from varuna.errors import PeerLost, ProtocolError
from varuna.run.channel import StageChannels
from varuna.run.wire import Direction, Message, MessageHeader


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """Which step this is and where: what messages are checked against and what errors say.

    Attributes:
        generation: membership and plan.
        step_index: optimizer step, or number of the evaluation pass.
        operation: "train" or "evaluate"; must agree between neighbours.
        first_micro_batch: k of the pipeline's micro-batch 0 in the global batch.
        rank, pipeline_index, stage_index: who this is, for errors.
    """

    generation: int
    step_index: int
    operation: str
    first_micro_batch: int
    rank: int = 0
    pipeline_index: int = 0
    stage_index: int = 0

    @property
    def place(self) -> str:
        """Who this is, in words."""
        return (
            f"worker {self.rank} (pipeline {self.pipeline_index}, stage {self.stage_index}, "
            f"{socket.gethostname()})"
        )


class Neighbours:
    """Messages of one step of one stage.

    Args:
        channels: None for a pipeline of one stage.
        context: what every message must agree with.
        num_micro_batches: messages expected in each direction.
        is_first, is_last: ends of the pipeline have no neighbour on that side.
    """

    def __init__(
        self,
        channels: StageChannels | None,
        context: StepContext,
        *,
        num_micro_batches: int,
        is_first: bool,
        is_last: bool,
    ) -> None:
        if channels is None and not (is_first and is_last):
            raise AssertionError("a pipeline of several stages needs channels")
        self.context = context
        self._channels = channels
        self._num_micro_batches = num_micro_batches
        self._receives = {Direction.ACTIVATION: not is_first, Direction.GRADIENT: not is_last}
        self._sends = {Direction.ACTIVATION: not is_last, Direction.GRADIENT: not is_first}
        self._num_taken = {Direction.ACTIVATION: 0, Direction.GRADIENT: 0}

    def check(self) -> int:
        """Raise what went wrong on any channel, if anything did; else the version to hand to ``wait``."""
        if self._channels is None:
            return 0
        mailbox = self._channels.mailbox
        version = mailbox.version
        if mailbox.failure is not None:
            self._raise(mailbox.failure, "")
        return version

    def num_arrived(self, direction: Direction) -> int:
        """Messages of this step that arrived, taken ones included; all of them where there is no neighbour."""
        if self._channels is None or not self._receives[direction]:
            return self._num_micro_batches
        # The neighbour may be a step ahead already: its next messages are not this step's.
        num_arrived = self._num_taken[direction] + self._channels.mailbox.num_unread(direction)
        return min(num_arrived, self._num_micro_batches)

    def wait(self, version: int, *, forwards_done: int, backwards_done: int) -> None:
        """Sleep until something changed since ``version``. Raises ``PeerLost`` if nothing more can come."""
        assert self._channels is not None, "nothing to wait for in a pipeline of one stage"
        mailbox = self._channels.mailbox
        done = {Direction.ACTIVATION: forwards_done, Direction.GRADIENT: backwards_done}
        for direction, receives in self._receives.items():
            missing = receives and self.num_arrived(direction) < self._num_micro_batches
            if missing and mailbox.has_ended(direction):
                peer = self._channels.peer_of(direction)
                self._raise(PeerLost(f"{peer} closed its connection."), self._awaited(done))
        mailbox.wait_past(version)
        if mailbox.failure is not None:
            self._raise(mailbox.failure, self._awaited(done))

    def wait_unsent(self, direction: Direction, max_unsent: int) -> None:
        """Sleep while more than ``max_unsent`` messages wait to be sent."""
        if self._channels is not None and self._sends[direction]:
            self._channels.wait_unsent(direction, max_unsent)

    def receive(self, direction: Direction, micro_batch_index: int) -> Message | None:
        """The next message, arrived already, checked to be of this micro-batch; None without a neighbour."""
        if self._channels is None or not self._receives[direction]:
            return None
        arrival = self._channels.mailbox.take(direction)
        self._num_taken[direction] += 1
        expected = self._header(direction, micro_batch_index)
        if arrival.header != expected:
            peer = self._channels.peer_of(direction)
            raise ProtocolError(
                f"The {self.context.place} expected {expected}, but {peer} sent {arrival.header}. All workers "
                f"must call train and evaluate in the same order, the same number of times."
            )
        return arrival.message

    def send(self, direction: Direction, micro_batch_index: int, message: Message | None) -> None:
        """Hand a message to its channel, without waiting; there is none where there is no neighbour."""
        if self._channels is None or not self._sends[direction]:
            return
        if message is None:
            raise AssertionError(f"{self.context.place} made no {direction.value} to send")
        self._channels.send(self._header(direction, micro_batch_index), message)

    def _header(self, direction: Direction, micro_batch_index: int) -> MessageHeader:
        context = self.context
        return MessageHeader(
            generation=context.generation,
            step_index=context.step_index,
            micro_batch_index=micro_batch_index,
            operation=context.operation,
            direction=direction,
        )

    def _awaited(self, done: dict[Direction, int]) -> str:
        first = self.context.first_micro_batch
        return " or ".join(
            f"{direction.value} of micro-batch {first + done[direction]}"
            for direction, receives in self._receives.items()
            if receives and done[direction] < self._num_micro_batches
        )

    def _raise(self, failure: Exception, awaited: str) -> None:
        """Raise a channel's error with what this stage was doing."""
        if not isinstance(failure, PeerLost):
            raise failure
        doing = f"was waiting for {awaited}" if awaited else "was computing"
        context = self.context
        raise PeerLost(
            f"{failure} The {context.place} {doing} in step {context.step_index} ({context.operation}), "
            f"generation {context.generation}."
        ) from failure
