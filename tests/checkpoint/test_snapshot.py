"""The copy in line: whole, of that moment, and into memory that is used again."""

from __future__ import annotations

import torch
from torch import Tensor

from varuna.checkpoint.collect import SectionState
from varuna.checkpoint.snapshot import Snapshot, SnapshotFile


def values_of(file: SnapshotFile) -> dict[str, Tensor]:
    return {
        item.form.name: torch.frombuffer(
            bytearray(file.bytes_of(item.form.name)), dtype=getattr(torch, item.form.dtype)
        ).view(item.form.shape)
        for item in file.layout.tensors
    }


def test_a_snapshot_is_of_its_moment_and_contiguous_whatever_the_strides():
    source = torch.arange(12.0).view(3, 4)
    section = SectionState(
        section_index=0,
        tensors={
            "t": source.t(),
            "half": source.to(torch.bfloat16)[:, 1],
            "step": torch.tensor(3.0),
            "flag": torch.tensor([True]),
            "c": torch.complex(source, -source).conj(),
        },
    )
    expected = {name: tensor.clone() for name, tensor in section.tensors.items()}
    (file,) = Snapshot().copy([section])
    source.zero_()
    read = values_of(file)
    assert read.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(read[name], value.resolve_conj()), name
    only = file.only(["half", "flag"])
    assert values_of(only).keys() == {"half", "flag"}
    assert b"".join(only.payload()) == b"".join(bytes(only.bytes_of(i.form.name)) for i in only.layout.tensors)


def test_memory_is_used_again_and_grows_when_a_layout_needs_more():
    snapshot = Snapshot()

    def copy(*sizes: int) -> int:
        files = snapshot.copy(
            [
                SectionState(section_index=index, tensors={"p": torch.full((size,), float(index + 1))})
                for index, size in enumerate(sizes)
            ]
        )
        for index, file in enumerate(files):
            assert values_of(file)["p"].eq(index + 1).all()
        return snapshot._buffer.data_ptr()

    first = copy(100, 200)
    assert copy(100, 200) == first
    assert copy(50) == first
    assert copy(3, 5, 7) == first
    copy(100_000)
    assert snapshot._buffer.nbytes == 400_000
    assert snapshot.copy([]) == ()
