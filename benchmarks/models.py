"""Profiles of models whose sections are unlike each other, for benchmarks of borders; and a deep one for speed.

Times are those of emulated sections: a stage sleeps as long. They are made up, in the proportions of real
models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from varuna.plan.costs import section_costs
from varuna.plan.estimate import estimated_profile
from varuna.plan.profile import LinkProfile, Profile, SectionProfile, TaskCosts

LOOPBACK = LinkProfile(latency_s=100e-6, bytes_per_s=2e9)


def heavy_ends(num_blocks: int = 14, block_s: float = 0.004, link: LinkProfile = LOOPBACK) -> Profile:
    """A language model with a large vocabulary: the head takes as long as 3.5 blocks, the embedding half a one.

    With equal counts of sections, the last stage is the slowest by far. ``block_s`` is forward at m = 1.
    """
    forward_s = [0.5 * block_s, *[block_s] * num_blocks, 3.5 * block_s]
    kept = [64 << 10, *[512 << 10] * num_blocks, 1 << 20]
    return _profile("heavy ends", forward_s, kept, [64 << 10] * (num_blocks + 1), link)


def pyramid(block_s: float = 0.004, link: LinkProfile = LOOPBACK) -> Profile:
    """A convolutional network, stem, blocks of four sizes (3, 4, 6, 3), head: each size has half the bytes of
    the one before and takes a little less time.
    """
    forward_s, kept, output = [1.6 * block_s], [4 << 20], [512 << 10]
    for size, count in enumerate((3, 4, 6, 3)):
        forward_s += [block_s * 0.8**size] * count
        kept += [(4 << 20) >> size] * count
        output += [(512 << 10) >> size] * count
    return _profile("pyramid", [*forward_s, 0.1 * block_s], [*kept, 64 << 10], output, link)


def deep_gpt(num_sections: int = 96, sizes: Sequence[int] = (1, 2, 3, 4, 6, 8, 16, 32)) -> Profile:
    """Layers of GPT-2 2.5B on V100s with 10 Gbit/s, as many as are asked for, at eight micro-batch sizes."""
    known = estimated_profile("gpt2-2.5b", "v100", "10gbit")
    layers = known.sections[1:-1]
    sections = [known.sections[0], *(layers[index % len(layers)] for index in range(num_sections - 2))]
    return replace(
        known,
        model=f"gpt of {num_sections} sections",
        sections=tuple(
            replace(section, index=index, costs=tuple(section_costs(section, size) for size in sizes))
            for index, section in enumerate([*sections, known.sections[-1]])
        ),
        ties=(),
    )


def _profile(
    model: str, forward_s: Sequence[float], kept: Sequence[int], output: Sequence[int], link: LinkProfile
) -> Profile:
    """Backward takes twice as long as forward, half of it for weights; costs are in proportion to m."""
    sections = tuple(
        SectionProfile(
            index=index,
            name=f"{model} {index}",
            parameter_bytes=0,
            gradient_bytes=0,
            optimizer_bytes=0,
            update_s=0.0,
            costs=tuple(
                TaskCosts(
                    micro_batch_size=size,
                    forward_s=seconds * size,
                    recompute_s=seconds * size,
                    backward_s=2 * seconds * size,
                    weight_s=seconds * size,
                    activation_bytes=kept[index] * size,
                    weight_bytes=kept[index] * size,
                    output_bytes=(output[index] if index < len(output) else 0) * size,
                    gradient_bytes=(output[index] if index < len(output) else 0) * size,
                )
                for size in (1, 2, 4)
            ),
        )
        for index, seconds in enumerate(forward_s)
    )
    return Profile(
        model=model, key=model, device="cpu", precision="fp32", device_memory_bytes=1 << 40, sections=sections,
        within_machine=link, across_machines=link,
    )  # fmt: skip
