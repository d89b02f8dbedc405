"""A predicted step as the trace that its workers would leave."""

from __future__ import annotations

from varuna.plan.predict import Prediction, StagePrediction
from varuna.plan.profile import Profile
from varuna.plan.spans import COMMIT, REDUCE, UPDATE, Span, StepSpans, WorkerTrace
from varuna.spec import Plan


def predicted_traces(prediction: Prediction, plan: Plan, profile: Profile) -> tuple[WorkerTrace, ...]:
    """One step, a trace for each worker of the plan, spares included.

    The commit waits for the last reduction of all and takes the profile's ``step_overhead_s``; then each worker
    updates the parameters of its own sections.

    Args:
        prediction: made with ``record=True``.
        plan: what was predicted.
        profile: from which.
    """
    stages = {stage.worker_index: stage for pipeline in prediction.pipelines for stage in pipeline.stages}
    reduced_s = max(_reduced_s(stage) for stage in stages.values())
    committed_s = reduced_s + profile.step_overhead_s
    traces = []
    for worker_index in range(plan.num_workers):
        spec, stage = plan.stage_of(worker_index), stages.get(worker_index)
        others = []
        own_s = update_s = 0.0
        if spec is not None and stage is not None:
            last_s, own_s = _last_task_s(stage), _reduced_s(stage)
            others.append(Span(name=REDUCE, start_s=last_s, end_s=own_s))
            held = profile.sections[spec.first_section : spec.end_section]
            update_s = sum(section.update_s for section in held)
        others.append(Span(name=COMMIT, start_s=own_s, end_s=committed_s))
        others.append(Span(name=UPDATE, start_s=committed_s, end_s=committed_s + update_s))
        tasks = stage.spans if stage is not None else ()
        step = StepSpans(step_index=0, started_s=0.0, tasks=tasks, others=tuple(others))
        position = plan.position_of(worker_index)
        traces.append(WorkerTrace(worker_index=worker_index, position=position, steps=(step,)))
    return tuple(traces)


def _last_task_s(stage: StagePrediction) -> float:
    return stage.spans[-1].end_s


def _reduced_s(stage: StagePrediction) -> float:
    return _last_task_s(stage) + stage.reduce_s
