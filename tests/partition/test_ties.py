"""Tied names: by identity, any number, any depth, parameters and buffers."""

from __future__ import annotations

import torch
from torch import nn

from varuna.partition import canonical_names, tied_groups


def _tied() -> nn.Module:
    model = nn.Module()
    model.embed = nn.Embedding(4, 3)
    model.deep = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(3, 4, bias=False), nn.Linear(3, 4)])})
    model.head = nn.Linear(3, 4, bias=False)
    model.deep["a"][0].weight = model.embed.weight
    model.head.weight = model.embed.weight
    model.register_buffer("table", torch.zeros(2))
    model.inner = nn.Module()
    model.inner.register_buffer("again", model.table)
    return model


def test_first_name_in_model_order_stands_for_all() -> None:
    names = canonical_names(_tied())
    assert names["deep.a.0.weight"] == names["head.weight"] == names["embed.weight"] == "embed.weight"
    assert names["deep.a.1.weight"] == "deep.a.1.weight"
    assert names["inner.again"] == "table"


def test_groups_list_canonical_first() -> None:
    assert tied_groups(_tied()) == (
        ("embed.weight", "deep.a.0.weight", "head.weight"),
        ("table", "inner.again"),
    )


def test_equal_values_are_not_ties() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].load_state_dict(model[0].state_dict())
    assert tied_groups(model) == ()


def test_a_module_shared_under_two_paths_is_tied() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleList([shared, nn.ModuleList([shared])])
    assert canonical_names(model)["1.0.weight"] == "0.weight"
