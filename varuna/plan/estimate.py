"""Ready profiles: models and machines that can be planned for before one has them.

``gpt2-2.5b@v100@10gbit`` works wherever a profile file is asked for. Nothing in it was measured: see
``estimate_costs`` for the formulas, ``estimate_models`` and ``estimate_devices`` for the numbers and their
sources, and ``docs/what-if.md`` for how far they are from published figures.
"""

from __future__ import annotations

import os
from typing import TypeVar

from varuna.errors import ConfigError
from varuna.plan.estimate_costs import (
    GRADIENT_BYTES,
    OPTIMIZER_BYTES,
    PARAMETER_BYTES,
    embedding_costs,
    head_costs,
    layer_costs,
    update_s,
)
from varuna.plan.estimate_devices import (
    ALIASES,
    DEVICES,
    LOOPBACK_BYTES_PER_S,
    LOOPBACK_LATENCY_S,
    NETWORK_LATENCY_S,
    NETWORKS,
    NVLINK_EFFICIENCY,
    RUNTIME_BYTES,
    USABLE_MEMORY,
    DeviceSheet,
    NetworkSheet,
)
from varuna.plan.estimate_models import MODELS, ModelShape
from varuna.plan.profile import AllReducePoint, LinkProfile, Profile, SectionProfile, Tie
from varuna.plan.profile_file import read_profile

MICRO_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
"""Sizes that a ready profile has costs for; others are interpolated."""

DEFAULT_NETWORK = "10gbit"
"""What a name without a network means: what commodity machines have."""

TASK_OVERHEAD_S = 200e-6
"""From the end of a task to the start of the next, as measured in docs/adr/0005-transport.md."""

STEP_OVERHEAD_S = 10e-3
"""The commit (one small all-reduce) and the report of a step."""

_REDUCE_BYTES = (1 << 20, 1 << 30)

_T = TypeVar("_T")


def estimated_profile(model: str, device: str, network: str = DEFAULT_NETWORK) -> Profile:
    """A profile computed from architecture and data sheets.

    Args:
        model: a name in ``MODELS``.
        device: a name in ``DEVICES`` or ``ALIASES``.
        network: a name in ``NETWORKS``.

    Raises:
        ConfigError: there is no such name; the message lists them.
    """
    shape = _look_up(MODELS, model, "model")
    sheet = _look_up(DEVICES | {short: DEVICES[full] for short, full in ALIASES.items()}, device, "device")
    net = _look_up(NETWORKS, network, "network")
    return Profile(
        model=shape.name,
        key=f"estimated:{shape.name}@{sheet.name}@{net.name}",
        device=sheet.title,
        precision=sheet.precision,
        estimated=True,
        notes=_notes(shape, sheet, net),
        device_memory_bytes=int(sheet.memory_bytes * USABLE_MEMORY),
        runtime_bytes=RUNTIME_BYTES,
        sections=_sections(shape, sheet),
        ties=(
            Tie(
                name="embedding.weight",
                num_bytes=PARAMETER_BYTES * shape.table_parameters,
                section_indices=(0, shape.num_layers + 1),
            ),
        ),
        within_machine=LinkProfile(latency_s=LOOPBACK_LATENCY_S, bytes_per_s=LOOPBACK_BYTES_PER_S),
        across_machines=LinkProfile(
            latency_s=NETWORK_LATENCY_S, bytes_per_s=net.bytes_per_s, shared_bytes_per_s=net.bytes_per_s
        ),
        all_reduce=_within_machine_reductions(sheet),
        task_overhead_s=TASK_OVERHEAD_S,
        step_overhead_s=STEP_OVERHEAD_S,
    )


def load_profile(text: str) -> Profile:
    """The profile that a command line names: a file, or ``model@device[@network]``.

    Raises:
        ConfigError: it is neither; the message says what there is.
    """
    if os.path.exists(text) or "@" not in text:
        if not os.path.exists(text) and text in MODELS:
            raise ConfigError(
                f"{text} is a model; a ready profile also needs a device: {text}@v100 or {text}@h100@100gbit. "
                f"`varuna profiles` lists all."
            )
        return read_profile(text)
    parts = text.split("@")
    if len(parts) > 3:
        raise ConfigError(f"{text!r} has {len(parts)} parts; write MODEL@DEVICE or MODEL@DEVICE@NETWORK.")
    return estimated_profile(*parts)


def _look_up(known: dict[str, _T], name: str, what: str) -> _T:
    found = known.get(name.strip().lower())
    if found is None:
        raise ConfigError(
            f"There is no ready {what} {name!r}. Known: {', '.join(known)}. For another, measure one with "
            f"`varuna profile train.py -o FILE`; `varuna profiles` lists all ready ones."
        )
    return found


def _sections(shape: ModelShape, device: DeviceSheet) -> tuple[SectionProfile, ...]:
    """Embedding, each layer, head; the tied table is in the first and the last."""
    layer = tuple(layer_costs(shape, device, m) for m in MICRO_BATCH_SIZES)
    embedding = tuple(embedding_costs(shape, device, m) for m in MICRO_BATCH_SIZES)
    head = tuple(head_costs(shape, device, m) for m in MICRO_BATCH_SIZES)
    parts = [("embedding", shape.embedding_parameters, embedding)]
    parts += [(f"layers.{index}", shape.layer_parameters, layer) for index in range(shape.num_layers)]
    parts += [("head", shape.head_parameters + shape.table_parameters, head)]
    return tuple(
        SectionProfile(
            index=index,
            name=name,
            parameter_bytes=PARAMETER_BYTES * count,
            gradient_bytes=GRADIENT_BYTES * count,
            optimizer_bytes=OPTIMIZER_BYTES * count,
            update_s=update_s(device, count),
            costs=costs,
        )
        for index, (name, count, costs) in enumerate(parts)
    )


def _within_machine_reductions(device: DeviceSheet) -> tuple[AllReducePoint, ...]:
    """A ring over NVLink among 2, 4 and 8 devices: 2 (n - 1) / n of the bytes pass each device."""
    rate = device.nvlink_bytes_per_s * NVLINK_EFFICIENCY
    return tuple(
        AllReducePoint(
            num_workers=n,
            num_bytes=size,
            across_machines=False,
            seconds=2 * (n - 1) * (20e-6 + size / n / rate),
        )
        for n in (2, 4, 8)
        for size in _REDUCE_BYTES
    )


def _notes(shape: ModelShape, device: DeviceSheet, network: NetworkSheet) -> tuple[str, ...]:
    attention = (
        "fused attention keeps no s x s matrices" if device.fused_attention else "attention keeps its matrices"
    )
    return (
        f"estimated, nothing was measured: {shape.num_parameters / 1e6:,.0f} M parameters; h={shape.hidden}, "
        f"{shape.num_layers} layers, {shape.num_heads} heads, {shape.sequence} tokens, vocabulary "
        f"{shape.vocabulary}",
        f"shape: {shape.source}",
        f"device: {device.peak_flops_per_s / 1e12:.0f} TFLOP/s and {device.memory_bytes_per_s / 1e9:.0f} GB/s "
        f"by data sheet; large matrix products reach {device.matmul_efficiency:.0%}; {attention}",
        f"network: {network.bits_per_s / 1e9:.0f} Gbit/s per machine, shared by its devices, "
        f"{NETWORK_LATENCY_S * 1e6:.0f} µs, no jitter; within a machine {LOOPBACK_BYTES_PER_S / 1e9:.0f} GB/s",
        "Adam under autocast: fp32 weight, fp32 gradient, two fp32 moments, 16 bytes per parameter",
        "formulas: varuna/plan/estimate_costs.py; comparison with published figures: docs/what-if.md",
    )
