"""Devices and networks that there are ready profiles for: data sheets, and how much of them is reached.

Data sheets: NVIDIA V100 (SXM2), A100 (SXM4), H100 (SXM5), H200 (SXM): dense 16-bit tensor operations per
second, memory bandwidth, NVLink bandwidth (they add up both directions). Memory is what the driver reports.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class DeviceSheet:
    """One device.

    Attributes:
        name: as on the command line.
        title: for people.
        peak_flops_per_s: dense, 16 bit, of the tensor cores.
        memory_bytes_per_s: of device memory.
        memory_bytes: as reported by the driver.
        nvlink_bytes_per_s: one direction, all links of one device.
        matmul_efficiency: share of the peak that large matrix products reach in training; chosen so that
            published figures are met (tests/plan/test_estimate.py, docs/what-if.md).
        fused_attention: attention does not store its s x s matrices: torch's FlashAttention kernels, from
            compute capability 8.0 on.
        precision: of autocast.
    """

    name: str
    title: str
    peak_flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int
    nvlink_bytes_per_s: float
    matmul_efficiency: float
    fused_attention: bool
    precision: str


def _volta(name: str, memory_mib: int) -> DeviceSheet:
    return DeviceSheet(
        name=name,
        title=f"NVIDIA V100 SXM2 {memory_mib // 1000} GB",
        peak_flops_per_s=125e12,
        memory_bytes_per_s=900e9,
        memory_bytes=memory_mib << 20,
        nvlink_bytes_per_s=150e9,
        matmul_efficiency=0.45,
        fused_attention=False,
        precision="fp16",
    )


def _ampere(name: str, memory_gib: float, memory_bytes_per_s: float) -> DeviceSheet:
    return DeviceSheet(
        name=name,
        title=f"NVIDIA A100 SXM4 {name[-2:]} GB",
        peak_flops_per_s=312e12,
        memory_bytes_per_s=memory_bytes_per_s,
        memory_bytes=int(memory_gib * GIB),
        nvlink_bytes_per_s=300e9,
        matmul_efficiency=0.65,
        fused_attention=True,
        precision="bf16",
    )


def _hopper(name: str, title: str, memory_gib: float, memory_bytes_per_s: float) -> DeviceSheet:
    return DeviceSheet(
        name=name,
        title=f"NVIDIA {title}",
        peak_flops_per_s=989e12,
        memory_bytes_per_s=memory_bytes_per_s,
        memory_bytes=int(memory_gib * GIB),
        nvlink_bytes_per_s=450e9,
        matmul_efficiency=0.60,
        fused_attention=True,
        precision="bf16",
    )


DEVICES = {
    sheet.name: sheet
    for sheet in (
        _volta("v100-16", 16160),
        _volta("v100-32", 32510),
        _ampere("a100-40", 39.5, 1555e9),
        _ampere("a100-80", 79.2, 2039e9),
        _hopper("h100", "H100 SXM5 80 GB", 79.2, 3350e9),
        _hopper("h200", "H200 SXM 141 GB", 139.8, 4800e9),
    )
}

ALIASES = {"v100": "v100-16", "a100": "a100-40"}
"""Short names: the memory that most rented machines have."""


@dataclass(frozen=True, kw_only=True)
class NetworkSheet:
    """What machines are connected with.

    Attributes:
        name: as on the command line.
        bits_per_s: of one machine, each direction.
    """

    name: str
    bits_per_s: float

    @property
    def bytes_per_s(self) -> float:
        """What TCP carries of it."""
        return self.bits_per_s / 8 * NETWORK_EFFICIENCY


NETWORKS = {
    sheet.name: sheet
    for sheet in (
        NetworkSheet(name="10gbit", bits_per_s=10e9),
        NetworkSheet(name="25gbit", bits_per_s=25e9),
        NetworkSheet(name="100gbit", bits_per_s=100e9),
    )
}

NETWORK_EFFICIENCY = 0.9
"""Payload over line rate: headers take 6 % at 1500-byte packets; the rest is slow moments."""

NETWORK_LATENCY_S = 250e-6
"""One way between two machines of a zone, device to device: 0.2 ms from a task's end to its neighbour's start
was measured on loopback (docs/adr/0005-transport.md); the network adds some 50 µs."""

LOOPBACK_LATENCY_S = 200e-6
"""The same without the network."""

LOOPBACK_BYTES_PER_S = 4e9
"""Activations between two devices of one machine go through pinned host memory and a local TCP stream, not
through NVLink (docs/adr/0005-transport.md); an assumption for a server, the copies over PCIe included."""

NVLINK_EFFICIENCY = 0.8
"""Share of NVLink's bandwidth that all-reduce reaches at large sizes."""

MEMORY_EFFICIENCY = 0.8
"""Share of memory bandwidth that element-wise kernels reach."""

USABLE_MEMORY = 0.95
"""Share of a device's memory that a plan may fill: the allocator's fragments take the rest."""

RUNTIME_BYTES = 1 * GIB
"""CUDA context, libraries, communication buffers."""
