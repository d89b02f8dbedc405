"""When nothing fits: why, and what would help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from varuna.plan.points import Points
from varuna.plan.render import format_bytes
from varuna.plan.schedule import SCHEDULES
from varuna.plan.setting import Setting
from varuna.plan.tightest import least_memory
from varuna.plan.wish import Wish


def refusal(setting: Setting, points: Points, is_possible: Callable[[Wish], bool]) -> str:
    """The tightest stage of the layout that needs least, and what would help.

    Args:
        setting: what there is.
        points: all that was considered.
        is_possible: whether something fits another wish.
    """
    tight, wish = least_memory(setting, points), setting.wish
    num_sections, point = len(setting.profile.sections), tight.point
    held = (
        f"section {tight.first_section}"
        if tight.end_section == tight.first_section + 1
        else f"sections {tight.first_section} to {tight.end_section - 1}"
    )
    stages = "1 stage" if point.num_stages == 1 else f"{point.num_stages} stages"
    what = (
        f"No plan fits the memory of the {setting.devices.num_workers} workers. What needs least, {stages} "
        f"with micro-batches of {point.micro_batch_size}, still needs {format_bytes(tight.needed_bytes)} for "
        f"stage {tight.stage_index} ({held}), and a device has {format_bytes(tight.limit_bytes)}."
    )
    relaxed = (
        (wish.micro_batch_size, replace(wish, micro_batch_size=None), "another micro-batch size"),
        (wish.recompute, replace(wish, recompute=None), "recompute where memory needs it"),
        (wish.num_stages, replace(wish, num_stages=None, recompute=None), "another number of stages"),
        (wish.schedules != SCHEDULES or None, replace(wish, schedules=SCHEDULES), "another schedule"),
    )
    helps = [text for fixed, other, text in relaxed if fixed is not None and is_possible(other)]
    if helps:
        return f"{what} It would fit with {' or '.join(helps)}."
    if point.num_stages < num_sections:
        return (
            f"{what} More workers would help (the {num_sections} sections can be as many stages), or devices "
            f"with more memory."
        )
    return f"{what} Devices with more memory would help, or more cut points: each stage holds one section."
