"""Precision names, autocast as a value, and the loss scale as a pure state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from varuna.errors import ConfigError, NonFiniteLoss
from varuna.run.precision import AutocastSpec, LossScaler, Precision, convert_model


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "fp64"])
def test_names(name: str) -> None:
    precision = Precision.parse(name)
    assert precision.value == name
    assert Precision.parse(precision) is precision


def test_an_unknown_name_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"'float16'.*'fp32', 'bf16', 'fp16', 'fp64'"):
        Precision.parse("float16")


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (Precision.FP32, torch.float32),
        (Precision.BF16, torch.bfloat16),
        (Precision.FP16, torch.float16),
    ],
)
def test_autocast_computes_in_its_dtype_and_keeps_the_weights(
    precision: Precision, expected: torch.dtype
) -> None:
    layer = nn.Linear(3, 3)
    with AutocastSpec.of(precision, torch.device("cpu")).context():
        output = layer(torch.ones(2, 3))
    assert output.dtype == expected
    assert layer.weight.dtype == torch.float32
    output.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def test_fp64_converts_the_model_in_place() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    convert_model(model, Precision.BF16)
    assert weight.dtype == torch.float32
    convert_model(model, Precision.FP64)
    assert model[0].weight is weight is optimizer.param_groups[0]["params"][0]
    assert weight.dtype == model[1].running_mean.dtype == torch.float64
    assert model[1].num_batches_tracked.dtype == torch.int64
    on_meta = nn.Linear(3, 3, device="meta")
    convert_model(on_meta, Precision.FP64)
    assert on_meta.weight.dtype == torch.float64


def test_the_first_scale_of_fp16() -> None:
    assert LossScaler.initial(Precision.FP16).scale == 2.0**16


def test_other_precisions_have_scale_one() -> None:
    scaler = LossScaler.initial(Precision.BF16)
    assert (scaler.scale, scaler.enabled) == (1.0, False)
    assert scaler.update(overflow=True) is scaler


def test_the_scale_halves_on_overflow_and_doubles_after_a_while() -> None:
    scaler = LossScaler(scale=8.0, growth_interval=3)
    scales = []
    for overflow in (False, False, True, False, False, False, False):
        scaler = scaler.update(overflow)
        scales.append(scaler.scale)
    assert scales == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0]


def test_overflow_at_the_smallest_scale_is_an_error() -> None:
    scaler = LossScaler(scale=2.0, minimum=1.0).update(overflow=True)
    with pytest.raises(NonFiniteLoss, match=r"loss scale 1\.0"):
        scaler.update(overflow=True)


def test_state_goes_into_a_checkpoint_and_back() -> None:
    scaler = LossScaler(scale=64.0).update(overflow=False)
    assert LossScaler().with_state(scaler.state_dict()) == scaler
