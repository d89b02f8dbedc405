"""Flattening batches, and signatures that say everything but the values and the number of samples."""

import collections
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from varuna.errors import DataError
from varuna.partition.signature import (
    InputSignature,
    call_arguments,
    example_batch,
    flatten_batch,
    num_samples_of,
    rebuild,
    signature_of,
)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor | None


@dataclass
class Record:
    image: Tensor
    label: Tensor
    name: str = "x"


IDS = torch.zeros(3, 5, dtype=torch.int64)

BATCHES: dict[str, Any] = {
    "tensor": IDS,
    "dict": {"input_ids": IDS, "labels": {"x": IDS, "y": None}, "flag": True, "rate": 0.1, "tag": "a"},
    "tuple": (IDS, [IDS, IDS.float()], 7),
    "list": [IDS, IDS],
    "namedtuple": Pair(IDS, None),
    "dataclass": Record(IDS.float(), IDS),
    "nested types": {"pair": Pair(IDS, IDS), "record": Record(IDS, IDS, "y")},
    "mapping": collections.UserDict({"input_ids": IDS}),
}


def test_names_follow_the_path() -> None:
    flat = flatten_batch({"input_ids": IDS, "labels": {"x": IDS}, "more": [None, IDS, 2.5]})
    assert list(flat.tensors) == ["input_ids", "labels.x", "more.1"]
    assert flat.constants == {"more.0": None, "more.2": 2.5}
    assert list(flatten_batch(IDS).tensors) == ["0"]
    assert list(flatten_batch((IDS, IDS)).tensors) == ["0", "1"]
    assert list(flatten_batch(Record(IDS, IDS)).tensors) == ["image", "label"]


@pytest.mark.parametrize("name", BATCHES)
def test_round_trip(name: str) -> None:
    batch = BATCHES[name]
    signature = signature_of(batch)
    again = InputSignature.from_json(signature.to_json())
    assert again == signature
    assert hash(again) == hash(signature)
    assert again.digest == signature.digest
    assert len(signature.digest) == 16
    flat = flatten_batch(batch)
    assert flatten_batch(rebuild(signature.tree, flat.tensors)).tree == flat.tree
    made = example_batch(signature, 3)
    assert signature_of(made, 3) == signature
    assert all(tensor.is_meta for tensor in flatten_batch(made).tensors.values())
    assert num_samples_of(flatten_batch(example_batch(signature, 4, device="cpu"))) == 4


def test_the_number_of_samples_is_left_out() -> None:
    assert signature_of(torch.zeros(3, 5)) == signature_of(torch.zeros(1, 5))
    assert signature_of(torch.zeros(3, 5)) != signature_of(torch.zeros(3, 6))
    assert signature_of(torch.zeros(3, 5)) != signature_of(torch.zeros(3, 5, dtype=torch.float64))


@pytest.mark.parametrize(
    ("one", "other"), [(True, 1), (1, 1.0), ("1", 1), (None, "None"), (0.0, -0.0), (False, None)]
)
def test_constants_of_different_types_differ(one: Any, other: Any) -> None:
    assert signature_of({"x": IDS, "c": one}) != signature_of({"x": IDS, "c": other})


def test_special_numbers_survive() -> None:
    signature = signature_of({"x": IDS, "a": float("inf"), "b": float("nan"), "c": 0.1})
    made = rebuild(InputSignature.from_json(signature.to_json()).tree, {"x": IDS})
    assert made["a"] == float("inf")
    assert made["b"] != made["b"]
    assert made["c"] == 0.1


def test_tensors_without_a_batch_dimension() -> None:
    batch = {
        "x": torch.zeros(3, 5),
        "y": torch.zeros(3),
        "table": torch.zeros(9, 2),
        "scale": torch.tensor(2.0),
    }
    signature = signature_of(batch)
    assert [spec.has_batch_dim for spec in signature.tensors] == [True, True, False, False]
    assert signature.tensor("table").full_shape(7) == (9, 2)
    assert signature.tensor("x").full_shape(7) == (7, 5)
    assert [spec.has_batch_dim for spec in signature_of(batch, 9).tensors] == [False, False, True, False]
    with pytest.raises(DataError, match="no tensor 'z'"):
        signature.tensor("z")


def test_how_forward_is_called() -> None:
    for batch, args, kwargs in (
        ({"a": 1, "t": IDS}, (), {"a": 1, "t": IDS}),
        ((IDS, 2), (IDS, 2), {}),
        ([IDS, 2], (IDS, 2), {}),
        (IDS, (IDS,), {}),
    ):
        flat = flatten_batch(batch)
        assert call_arguments(flat.tree, flat.tensors) == (args, kwargs)
    flat = flatten_batch(Record(IDS, IDS))
    (record,), kwargs = call_arguments(flat.tree, flat.tensors)
    assert isinstance(record, Record)
    assert kwargs == {}


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({}, "no tensor"),
        (3, "no tensor"),
        ([None, "a"], "no tensor"),
        ({"x": IDS, "y": object()}, "holds a object at y"),
        ({1: IDS}, "keys that are not text"),
        ({"a.b": IDS, "a": {"b": IDS}}, "same path 'a.b'"),
    ],
)
def test_bad_batches(batch: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        signature_of(batch)


def test_unknown_type_is_not_imported() -> None:
    text = signature_of(Pair(IDS, None)).to_json().replace("test_signature:Pair", "no_such_module:Pair")
    signature = InputSignature.from_json(text)
    with pytest.raises(DataError, match="no_such_module"):
        example_batch(signature, 2)


def test_batch_encoding() -> None:
    from transformers import BatchEncoding

    flat = flatten_batch(BatchEncoding({"input_ids": IDS}))
    assert call_arguments(flat.tree, flat.tensors)[1].keys() == {"input_ids"}
