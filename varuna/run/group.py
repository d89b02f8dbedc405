"""One process group: some workers that talk to one another, by their ranks in the world."""

from __future__ import annotations

import json
import threading
import traceback
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed import Backend, BroadcastOptions

from varuna.errors import PeerLost
from varuna.run.pending import Pending, Wait, reason_of, wait_for_collective, wait_for_message, wait_for_stream

JsonValue = Any
"""What ``json.dumps`` takes: None, bool, int, float, str, lists and string-keyed dicts of these."""


class Group:
    """Some workers that talk to one another. ``ranks`` are ranks of the world, ascending.

    With one member every operation is a no-op on the spot. An error means that the whole group is dead.
    """

    def __init__(
        self, ranks: tuple[int, ...], rank: int, process_group: Backend | None, device: torch.device
    ) -> None:
        self.ranks = ranks
        self.process_group = process_group
        self._rank = rank
        self._device = device
        is_gloo = device.type == "cpu"
        # Whoever drops the last reference waits for gloo's thread: never the one that works with the group.
        self._in_use: AbstractContextManager[Any] = threading.Lock() if is_gloo else nullcontext()
        self._wait_for_collective: Wait = wait_for_collective if is_gloo else wait_for_stream
        self._wait_for_message: Wait = wait_for_message if is_gloo else wait_for_stream

    def close(self) -> Backend | None:
        """No operation begins any more. What is returned is to be shut down and dropped."""
        with self._in_use:
            process_group, self.process_group = self.process_group, None
            return process_group

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def start_all_reduce_sum(self, tensor: torch.Tensor) -> Pending:
        """Begin to replace ``tensor`` (contiguous, same size and dtype on all) by the sum over members."""
        if self.size == 1:
            return Pending(None, "", self._wait_for_collective, self._is_closed)
        return self._start("all-reduce", lambda group: group.allreduce([tensor]))

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` by the sum over members: bit-equal on all of them."""
        self.start_all_reduce_sum(tensor).wait()

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Replace ``tensor`` by that of world rank ``source``."""
        if self.size == 1:
            return
        root = self.ranks.index(source)
        options = BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        self._start("broadcast", lambda group: group.broadcast([tensor], options)).wait()

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send to world rank ``to``; it returns when the peer has received. Contiguous tensors only."""
        self.start_send(tensor, to).wait()

    def start_send(self, tensor: torch.Tensor, to: int) -> Pending:
        """Begin to send; several to one peer arrive in this order. Keep the tensor until ``wait`` is over."""
        peer = self.ranks.index(to)
        what = f"send to worker {to}"
        return self._start(what, lambda group: group.send([tensor], peer, 0), is_message=True)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fill ``tensor`` (same size and dtype as sent) from world rank ``source``."""
        self.start_receive(tensor, source).wait()

    def start_receive(self, tensor: torch.Tensor, source: int) -> Pending:
        """Begin to fill ``tensor``; several from one peer are filled in this order."""
        peer = self.ranks.index(source)
        what = f"receive from worker {source}"
        return self._start(what, lambda group: group.recv([tensor], peer, 0), is_message=True)

    def send_bytes(self, data: bytes, to: int) -> None:
        """Send bytes of any length to world rank ``to``."""
        self.send(self.place(torch.tensor([len(data)], dtype=torch.int64)), to)
        if data:
            self.send(self.place(torch.frombuffer(bytearray(data), dtype=torch.uint8)), to)

    def receive_bytes(self, source: int) -> bytes:
        """What world rank ``source`` sent with ``send_bytes``."""
        length = self.place(torch.zeros(1, dtype=torch.int64))
        self.receive(length, source)
        data = self.place(torch.empty(int(length.item()), dtype=torch.uint8))
        if data.numel():
            self.receive(data, source)
        return bytes(data.cpu().numpy())

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every member's bytes, in the order of ``ranks``; lengths may differ."""
        if self.size == 1:
            return [data]
        lengths = self.place(torch.zeros(self.size, dtype=torch.int64))
        own = self.ranks.index(self._rank)
        lengths[own] = len(data)
        self.all_reduce_sum(lengths)
        sizes = [int(length) for length in lengths.tolist()]
        width = max(*sizes, 1)
        mine = torch.zeros(width, dtype=torch.uint8)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        mine = self.place(mine)
        rows = [torch.empty_like(mine) for _ in self.ranks]
        self._start("all-gather", lambda group: group.allgather([rows], [mine])).wait()
        return [bytes(row.cpu().numpy()[:size]) for row, size in zip(rows, sizes, strict=True)]

    def all_gather_json(self, value: JsonValue) -> list[JsonValue]:
        """Every member's value, in the order of ``ranks``, as JSON (tuples become lists)."""
        return [json.loads(data) for data in self.all_gather_bytes(json.dumps(value).encode())]

    def barrier(self) -> None:
        """Return when every member has called it."""
        self.all_reduce_sum(self.place(torch.zeros(1)))

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor where this group's backend can work on it (NCCL: on the device)."""
        return tensor.to(self._device)

    def _start(self, what: str, call: Any, *, is_message: bool = False) -> Pending:
        wait_for = self._wait_for_message if is_message else self._wait_for_collective
        what = f"Worker {self._rank}: {what} among workers {list(self.ranks)}"
        with self._in_use:
            if self.process_group is None:  # closed by another thread
                raise PeerLost(f"{what} came after its generation was closed.")
            try:
                return Pending(call(self.process_group), what, wait_for, self._is_closed)
            except RuntimeError as error:
                traceback.clear_frames(error.__traceback__)  # they refer to the group
                raise PeerLost(f"{what} failed: {reason_of(error)}.") from error

    def _is_closed(self) -> bool:
        return self.process_group is None
