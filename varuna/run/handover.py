"""Sections change hands: from workers that hold them to those that will, at the start of a generation.

Every member of the generation walks the same list of transfers and takes part in its own, so two workers meet
at the same transfer and nobody waits in a circle. The destination says what it lacks (a tied weight may be here
already), the source answers with a header and the tensors, all of a section at once: one after the other, each
would cost a way there and back.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from varuna.errors import ProtocolError
from varuna.generations import SectionTransfer
from varuna.run.group import Group
from varuna.run.section_state import SectionStates, decode_header, encode_header


def hand_over(
    group: Group,
    transfers: tuple[SectionTransfer, ...],
    states: SectionStates,
    *,
    rank: int,
    before: Callable[[], None],
    arrived: Callable[[int], None],
) -> None:
    """Carry out the transfers that this worker takes part in.

    Args:
        group: of all members.
        transfers: the same list on every member.
        states: this worker's sections.
        rank: this worker.
        before: called before each transfer that this worker takes part in.
        arrived: told each section that is complete here.

    Raises:
        PeerLost: the other side is gone. What arrived whole is held; the generation must be given up.
        ProtocolError: the two sides do not mean the same.
    """
    fresh: set[str] = set()
    for transfer in transfers:
        if rank in (transfer.source, transfer.destination):
            before()
        if rank == transfer.source:
            _send(group, transfer, states)
        elif rank == transfer.destination:
            wanted = states.missing(transfer.section_index, fresh)
            _receive(group, transfer, states, wanted)
            fresh.update(wanted)
            arrived(transfer.section_index)


def _send(group: Group, transfer: SectionTransfer, states: SectionStates) -> None:
    wanted = msgspec.json.decode(group.receive_bytes(transfer.destination), type=list[str])
    if not set(wanted) <= set(states.names(transfer.section_index)):
        raise ProtocolError(
            f"Worker {transfer.destination} asks for {wanted[:3]} of section {transfer.section_index}, which "
            f"has {list(states.names(transfer.section_index))[:3]}."
        )
    header, tensors = states.take_out(wanted)
    group.send_bytes(encode_header(header), transfer.destination)
    placed = [group.place(tensor).contiguous() for tensor in tensors if tensor.numel()]
    under_way = [group.start_send(tensor, transfer.destination) for tensor in placed]
    for pending in under_way:
        pending.wait()


def _receive(group: Group, transfer: SectionTransfer, states: SectionStates, wanted: tuple[str, ...]) -> None:
    group.send_bytes(msgspec.json.encode(wanted), transfer.source)
    try:
        header = decode_header(group.receive_bytes(transfer.source))
    except msgspec.DecodeError as error:
        raise ProtocolError(
            f"What worker {transfer.source} sent for section {transfer.section_index} is no header: {error}."
        ) from error
    tensors = states.empty(header)
    placed = [group.place(tensor) for tensor in tensors]
    under_way = [group.start_receive(tensor, transfer.source) for tensor in placed if tensor.numel()]
    for pending in under_way:
        pending.wait()
    for tensor, arrived in zip(tensors, placed, strict=True):
        if arrived is not tensor:
            tensor.copy_(arrived)
    states.put_in(header, tensors)
