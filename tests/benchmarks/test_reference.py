from __future__ import annotations

import pytest

from benchmarks.bench_reference import CASES, REFERENCE, bubble, our_bubble, reference_makespan_s


@pytest.mark.parametrize(("index", "case"), list(enumerate(CASES)))
def test_the_reference_is_reproduced_and_not_exceeded(index, case):
    num_stages, num_micro_batches = case
    assert our_bubble("gpipe", *case) == pytest.approx(REFERENCE["gpipe"][index], abs=0.06)
    its_rule = bubble(reference_makespan_s(num_stages, num_micro_batches), num_micro_batches)
    assert its_rule == pytest.approx(REFERENCE["varuna"][index], abs=0.06)
    assert our_bubble("zero-bubble", *case) < our_bubble("varuna", *case) < its_rule
    assert our_bubble("varuna", *case) < our_bubble("1f1b", *case)
