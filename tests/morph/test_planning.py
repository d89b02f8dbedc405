"""The manager's planner: from the profile if there is one; what the user fixed is kept while it can be."""

from __future__ import annotations

import msgspec
import pytest

from tests.morph.world_parts import BATCH_SIZE, DESCRIBED
from tests.plan.profiles import make_profile
from varuna.errors import PlanError
from varuna.morph.messages import Described, decode_from_worker, encode
from varuna.morph.planning import plan_for


def described(**changes: object) -> Described:
    return msgspec.structs.replace(DESCRIBED, **changes)


def num_stages(planned_for: int, job: Described) -> set[int]:
    return {len(pipeline.stages) for pipeline in plan_for(planned_for, job).plan.pipelines}


def test_what_was_fixed_is_kept() -> None:
    job = described(num_stages=2, micro_batch_size=2, schedule="1f1b", recompute=(True, False))
    planned = plan_for(4, job)
    assert planned.note == ""
    assert planned.plan.micro_batch_size == 2
    assert planned.plan.schedule == "1f1b"
    assert [stage.recompute for stage in planned.plan.pipelines[0].stages] == [True, False]
    assert num_stages(4, job) == {2}


def test_stages_are_given_up_when_workers_are_too_few() -> None:
    job = described(num_stages=3, micro_batch_size=2, recompute=(True, True, False))
    planned = plan_for(2, job)
    assert planned.note == "3 stages were asked for, but there are 2 workers: 1 now"
    assert planned.plan.batch_size == BATCH_SIZE
    assert planned.plan.micro_batch_size == 2
    assert plan_for(3, job).note == ""


@pytest.mark.parametrize("changes", [{"micro_batch_size": 9}, {"num_stages": 5}])
def test_what_can_never_be_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(PlanError):
        plan_for(6, described(**changes))


def test_a_profile_is_used() -> None:
    job = described(profile=make_profile(4))
    planned = plan_for(3, job)
    assert planned.step_s is not None
    assert planned.step_s > 0
    assert [len(row) for row in planned.micro_batch_s] == [
        len(pipeline.stages) for pipeline in planned.plan.pipelines
    ]
    assert all(seconds > 0 for row in planned.micro_batch_s for seconds in row)
    assert planned == plan_for(3, job), "it must always answer the same"
    assert plan_for(3, DESCRIBED).step_s is None, "without a profile nothing is predicted"


def test_a_profile_travels() -> None:
    job = described(profile=make_profile(4))
    assert decode_from_worker(encode(job)) == job
