"""Ready profiles: sizes and speeds against what others have published, and names on the command line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest

from varuna.errors import ConfigError
from varuna.plan.estimate import MICRO_BATCH_SIZES, estimated_profile, load_profile
from varuna.plan.estimate_costs import head_costs, head_flops, layer_costs, layer_flops
from varuna.plan.estimate_devices import ALIASES, DEVICES, NETWORKS
from varuna.plan.estimate_models import MODELS, ModelShape
from varuna.plan.memory import resident_bytes, stage_memory_bytes
from varuna.plan.profile_file import decode_profile, encode_profile, write_profile

# Shapes that were measured by others but have no ready profile.
MEGATRON_1_2B = replace(
    MODELS["gpt2-2.5b"], hidden=1536, num_layers=40, num_heads=16, published_parameters=1.2e9
)
MEGATRON_1_7B = replace(
    MODELS["gpt2-2.5b"], hidden=2304, num_layers=24, num_heads=24, sequence=2048, published_parameters=1.7e9
)


def tflops(shape: ModelShape, device: str, micro_batch_size: int, *, recompute: bool, fused: bool) -> float:
    """Operations per second of training, recomputation counted as work where it is done."""
    sheet = replace(DEVICES[device], fused_attention=fused)
    layer, head = layer_costs(shape, sheet, micro_batch_size), head_costs(shape, sheet, micro_batch_size)
    passes = 4 if recompute else 3
    again_s = layer.recompute_s if recompute else 0.0
    total_s = (
        shape.num_layers * (layer.forward_s + layer.backward_s + again_s) + head.forward_s + head.backward_s
    )
    flops = micro_batch_size * (passes * shape.num_layers * layer_flops(shape) + 3 * head_flops(shape))
    return flops / total_s / 1e12


@pytest.mark.parametrize("shape", MODELS.values(), ids=lambda shape: shape.name)
def test_parameters_are_those_published(shape: ModelShape) -> None:
    assert shape.num_parameters == pytest.approx(shape.published_parameters, rel=0.01)


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("bert-large", 336_226_108),  # BertForPreTraining of transformers, bert-large-uncased
        ("gpt2-355m", 354_823_168),  # GPT2LMHeadModel, gpt2-medium
        ("gpt2-1.5b", 1_557_611_200),  # GPT2LMHeadModel, gpt2-xl
        ("gpt2-20b", 20_753_384_400 - 50304 * 4200),  # Varuna's script, the tied table once
    ],
)
def test_parameters_to_the_last_one(name: str, exact: int) -> None:
    assert MODELS[name].num_parameters == exact


@dataclass(frozen=True, kw_only=True)
class Published:
    """TFLOP/s of one device that others have measured."""

    shape: ModelShape
    device: str
    micro_batch_size: int
    recompute: bool
    fused: bool
    tflops: float


@pytest.mark.parametrize(
    "published",
    [
        pytest.param(
            Published(
                shape=MEGATRON_1_2B,
                device="v100-32",
                micro_batch_size=8,
                recompute=True,
                fused=False,
                tflops=39,
            ),
            id="Megatron-LM, abstract: a strong single-GPU baseline of 39, 30 % of a V100's peak",
        ),
        pytest.param(
            Published(
                shape=MEGATRON_1_7B,
                device="a100-80",
                micro_batch_size=16,
                recompute=True,
                fused=False,
                tflops=137,
            ),
            id="Narayanan et al. 2021, table 1: 137 per A100",
        ),
        pytest.param(
            Published(
                shape=MODELS["gpt2-1.5b"],
                device="h100",
                micro_batch_size=16,
                recompute=False,
                fused=True,
                tflops=454,
            ),
            id="llm.c: 32,000 steps of 2^20 tokens on 8 H100 in 24 hours, kernels fused by hand",
        ),
    ],
)
def test_speeds_are_near_those_published(published: Published) -> None:
    estimated = tflops(
        published.shape,
        published.device,
        published.micro_batch_size,
        recompute=published.recompute,
        fused=published.fused,
    )
    assert estimated == pytest.approx(published.tflops, rel=0.15)


def test_seconds_are_near_those_logged_by_varuna_on_v100() -> None:
    # Logs of its 20 B run (two layers a stage, micro-batches of 2): forward 40.5 ms, backward 72 to 91 ms.
    costs = layer_costs(MODELS["gpt2-20b"], DEVICES["v100-16"], 2)
    assert 2 * costs.forward_s == pytest.approx(40.5e-3, rel=0.15)
    assert 70e-3 < 2 * costs.backward_s < 95e-3


@pytest.mark.parametrize("device", DEVICES)
def test_efficiency_rises_with_the_micro_batch_and_levels_off(device: str) -> None:
    fused = DEVICES[device].fused_attention
    reached = [
        tflops(MODELS["gpt2-2.5b"], device, size, recompute=False, fused=fused) for size in MICRO_BATCH_SIZES
    ]
    assert reached == sorted(reached)
    gains = [after / before for before, after in pairwise(reached)]
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] < 1.03
    assert reached[-1] * 1e12 < DEVICES[device].peak_flops_per_s * DEVICES[device].matmul_efficiency


def test_flops_are_two_per_weight_and_token_and_the_attention() -> None:
    shape = MODELS["gpt2-8.3b"]
    s, h = shape.sequence, shape.hidden
    assert layer_flops(shape) == pytest.approx(2 * s * 12 * h * h + 4 * s * s * h)
    assert head_flops(shape) == 2 * s * h * shape.vocabulary


def test_bytes_are_korthikantis_and_autocasts_copies() -> None:
    shape = MODELS["gpt2-8.3b"]
    s, h, a = shape.sequence, shape.hidden, shape.num_heads
    stored = layer_costs(shape, DEVICES["v100-16"], 4).activation_bytes - 2 * 12 * h * h
    assert stored == pytest.approx(4 * s * h * (34 + 5 * a * s / h))
    fused = layer_costs(shape, DEVICES["h100"], 4).activation_bytes - 2 * 12 * h * h
    assert fused == 4 * s * h * 34


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_profile_is_complete_and_survives_a_file(name: str, device: str) -> None:
    profile = estimated_profile(name, device, "25gbit")
    shape = MODELS[name]
    assert profile.estimated
    assert profile.notes
    assert not profile.torch_version
    assert [section.index for section in profile.sections] == list(range(shape.num_layers + 2))
    assert decode_profile(encode_profile(profile)) == profile
    every = resident_bytes(profile, 0, len(profile.sections)) - profile.runtime_bytes
    assert every == pytest.approx(16 * shape.num_parameters, rel=1e-6)
    for section in profile.sections:
        assert [costs.micro_batch_size for costs in section.costs] == list(MICRO_BATCH_SIZES)
        for costs in section.costs:
            assert 0 < costs.forward_s < costs.backward_s
            assert 0 <= costs.weight_s < costs.backward_s
            assert (costs.output_bytes == 0) == (section.index == shape.num_layers + 1)


def fits(profile_name: str, num_stages: int, *, recompute: bool) -> bool:
    """Equal runs of layers, micro-batches of 1, the first stage's in-flight limit of 1f1b."""
    profile = load_profile(profile_name)
    borders = [index * len(profile.sections) // num_stages for index in range(num_stages + 1)]
    return all(
        stage_memory_bytes(
            profile, borders[i], borders[i + 1], 1, recompute=recompute, peak_in_flight=num_stages - i
        )
        <= profile.device_memory_bytes
        for i in range(num_stages)
    )


def test_what_fits_where() -> None:
    assert not fits("gpt2-8.3b@v100", 1, recompute=True)
    assert not fits("gpt2-8.3b@h100", 1, recompute=True)  # 133 GB of state alone
    assert fits("gpt2-8.3b@v100", 18, recompute=True)
    assert not fits("gpt2-1.5b@v100", 1, recompute=True)
    assert fits("gpt2-1.5b@v100", 4, recompute=True)
    assert fits("gpt2-1.5b@a100-80", 1, recompute=True)
    assert fits("gpt2-355m@v100", 1, recompute=False)
    assert fits("gpt2-20b@v100", 49, recompute=True)  # as its training script had it
    assert not fits("gpt2-200b@v100", 102, recompute=True)  # 31 GB of state a layer
    assert fits("gpt2-200b@h200", 51, recompute=True)


def test_names(tmp_path: Path) -> None:
    assert load_profile("gpt2-2.5b@v100").key == "estimated:gpt2-2.5b@v100-16@10gbit"
    assert load_profile("GPT2-2.5B@A100@100Gbit") == estimated_profile("gpt2-2.5b", "a100-40", "100gbit")
    path = tmp_path / "odd@name.json"
    write_profile(estimated_profile("bert-large", "h200"), path)
    assert load_profile(str(path)).model == "bert-large"
    assert set(ALIASES.values()) <= set(DEVICES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpt9@v100", "no ready model 'gpt9'. Known: bert-large"),
        ("gpt2-2.5b@v900", "no ready device 'v900'. Known: v100-16"),
        ("gpt2-2.5b@v100@1gbit", "no ready network '1gbit'. Known: 10gbit"),
        ("gpt2-2.5b@v100@10gbit@x", "has 4 parts"),
        ("gpt2-2.5b", "gpt2-2.5b@v100"),
        ("missing.json", "missing.json"),
    ],
)
def test_wrong_names(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_profile(text)
    assert message in str(caught.value)


def test_a_faster_network_is_all_that_changes() -> None:
    slow, fast = (estimated_profile("gpt2-2.5b", "v100", name) for name in ("10gbit", "100gbit"))
    assert fast.across_machines.bytes_per_s == pytest.approx(10 * slow.across_machines.bytes_per_s)
    assert replace(fast, across_machines=slow.across_machines, key=slow.key, notes=slow.notes) == slow
    assert set(NETWORKS) == {"10gbit", "25gbit", "100gbit"}
