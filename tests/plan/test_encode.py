"""A plan survives JSON, and what is no plan is refused."""

from __future__ import annotations

import pytest

from varuna.errors import PlanError
from varuna.plan import decode_choice, encode_choice, simple_plan
from varuna.spec import SectionSpec


def test_a_plan_survives_json() -> None:
    sections = [
        SectionSpec(
            index=i, name=f"s{i}", parameter_names=(), parameter_bytes=8, forward_flops=1.0, output_bytes=4
        )
        for i in range(5)
    ]
    choice = simple_plan(sections=sections, num_workers=5, batch_size=17, num_stages=2, recompute=[True, False])
    assert decode_choice(encode_choice(choice)) == choice


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(PlanError, match="Not a plan"):
        decode_choice(b'{"plan": 3, "reason": ""}')


def test_a_plan_that_cannot_be_is_refused() -> None:
    data = (
        b'{"plan":{"pipelines":[],"num_workers":1,"num_sections":1,"batch_size":1,"micro_batch_size":1,'
        b'"schedule":"varuna"},"reason":""}'
    )
    with pytest.raises(PlanError, match="at least one pipeline"):
        decode_choice(data)
