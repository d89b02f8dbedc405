"""Which plan is the fastest for a profile and a cluster, and why.

``space`` lists the layouts and bounds them, ``search`` looks at the promising ones more closely with ``borders`` and
the simulator, and here the few best are predicted as whole plans: that decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from varuna.errors import PlanError
from varuna.plan.cluster import Cluster
from varuna.plan.considered import Candidate, candidates_of
from varuna.plan.evaluate import Evaluator, Laid, Outcome
from varuna.plan.layout import PlanChoice
from varuna.plan.predict import Prediction, predict
from varuna.plan.profile import Profile
from varuna.plan.refusal import check_wish, refuse
from varuna.plan.search import Search
from varuna.plan.space import Wish, make_space
from varuna.spec import PipelineSpec, Plan, StageSpec

FINALISTS, FINALISTS_OF_MANY, SMALL = 8, 2, 400
"""Best simulated layouts that are predicted as whole plans, up to ``SMALL`` workers and beyond."""

NUM_RUNS = 5
"""Steps with drawn delays that a finalist's prediction is the mean of, where links have jitter."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The plan, what it will take, and what else was considered.

    Attributes:
        plan: the fastest plan found.
        prediction: of that plan.
        candidates: all that were considered, the choice first, then by ``step_s``; see ``Candidate``.
        reason: one or two sentences for a person.
    """

    plan: Plan
    prediction: Prediction
    candidates: tuple[Candidate, ...]
    reason: str

    def to_plan_choice(self) -> PlanChoice:
        """What workers are sent."""
        return PlanChoice(plan=self.plan, reason=self.reason)


def choose_plan(
    profile: Profile,
    cluster: Cluster,
    *,
    batch_size: int,
    num_stages: int | None = None,
    micro_batch_size: int | None = None,
    schedule: str | None = None,
    recompute: bool | Sequence[bool] | None = None,
) -> Choice:
    """The plan with the least simulated step time.

    Args:
        profile: of the model on one device.
        cluster: the machines present; worker i is the i-th device.
        batch_size: samples of a global batch.
        num_stages: P, if the user fixed it.
        micro_batch_size: m, likewise.
        schedule: likewise; else the best of all.
        recompute: whether stages recompute, for all or one flag for each; None decides for each stage.

    Raises:
        PlanError: nothing fits, or what was fixed cannot be laid out; with values and what would help.
    """
    wish = check_wish(profile, cluster, batch_size, num_stages, micro_batch_size, schedule, recompute)
    search = search_plans(profile, cluster, wish)
    finalists: list[tuple[Prediction, Plan, Outcome]] = []
    best_s = float("inf")
    most = FINALISTS if cluster.num_workers <= SMALL else FINALISTS_OF_MANY
    for outcome in sorted(search.outcomes, key=lambda outcome: outcome.step_s):
        if outcome.step_s >= best_s or len(finalists) == most:
            break
        plan = plan_of(outcome.laid, search.evaluator)
        prediction = predict(plan, profile, cluster, num_runs=NUM_RUNS)
        if _fits(plan, prediction, search.evaluator):
            finalists.append((prediction, plan, outcome))
            best_s = min(best_s, prediction.step_s)
    if not finalists:
        raise PlanError(
            refuse(search, profile, cluster, wish, lambda other: _is_possible(profile, cluster, other))
        )
    prediction, plan, outcome = min(finalists, key=lambda finalist: finalist[0].step_s)
    candidates = candidates_of(search, outcome, {id(o): p for p, _, o in finalists})
    return Choice(
        plan=plan,
        prediction=prediction,
        candidates=candidates,
        reason=_reason(plan, prediction, candidates, wish),
    )


def search_plans(profile: Profile, cluster: Cluster, wish: Wish) -> Search:
    """Everything simulated and ruled out for a wish."""
    evaluator = Evaluator(profile, cluster, wish)
    space = make_space(profile, evaluator.sections, evaluator.residents, evaluator.devices, wish)
    search = Search(evaluator=evaluator, space=space)
    search.run()
    return search


def plan_of(laid: Laid, evaluator: Evaluator) -> Plan:
    """The plan of a layout: pipelines in the order of their first workers, shares contiguous."""
    rows: list[tuple[list[int], int, int]] = []
    fewer = laid.num_fewer
    for index, plan in sorted(enumerate(laid.kinds), key=lambda item: -item[1].finish_s):
        for workers in plan.kind.workers.tolist():
            share = plan.num_micro_batches
            if fewer and share > 1:
                share, fewer = share - 1, fewer - 1
            rows.append((workers, index, share))
    rows.sort(
        key=lambda row: (-row[2], row[0])
    )  # larger shares first: the short micro-batch goes to a small one
    pipelines = []
    first = 0
    for workers, index, share in rows:
        borders = laid.kinds[index].borders
        stages = tuple(
            StageSpec(
                worker_index=worker,
                first_section=borders.borders[stage],
                end_section=borders.borders[stage + 1],
                recompute=borders.recompute[stage],
                max_in_flight=borders.max_in_flight[stage],
            )
            for stage, worker in enumerate(workers)
        )
        pipelines.append(PipelineSpec(stages=stages, first_micro_batch=first, end_micro_batch=first + share))
        first += share
    return Plan(
        pipelines=tuple(pipelines),
        num_workers=evaluator.devices.num_workers,
        num_sections=len(evaluator.profile.sections),
        batch_size=evaluator.wish.batch_size,
        micro_batch_size=laid.point.micro_batch_size,
        schedule=laid.schedule,
    )


def _fits(plan: Plan, prediction: Prediction, evaluator: Evaluator) -> bool:
    """Whether every device has the memory that was predicted."""
    memory = evaluator.devices.memory_bytes
    return all(
        stage.peak_memory_bytes <= memory[stage.worker_index]
        for pipeline in prediction.pipelines
        for stage in pipeline.stages
    )


def _is_possible(profile: Profile, cluster: Cluster, wish: Wish) -> bool:
    return bool(search_plans(profile, cluster, wish).outcomes)


def _reason(plan: Plan, prediction: Prediction, candidates: Sequence[Candidate], wish: Wish) -> str:
    """What was chosen, what it comes to, and the next best that differs in more than its schedule's limits."""
    best = candidates[0]
    fixed = [
        name
        for name, value in (
            ("stages", wish.num_stages),
            ("micro-batch size", wish.micro_batch_size),
            ("schedule", wish.schedules[0] if len(wish.schedules) == 1 else None),
            ("recompute", wish.recompute),
        )
        if value is not None
    ]
    text = (
        f"{_layout(best)}: {_seconds(prediction.step_s)} a step ({prediction.samples_per_s:.3g} samples/s), "
        f"{prediction.bubble:.0%} idle"
    )
    if best.num_recompute:
        text += f", {best.num_recompute} of {best.num_stages} stages recompute"
    used = sum(len(pipeline.stages) for pipeline in plan.pipelines)
    if used < plan.num_workers:
        text += f", {plan.num_workers - used} of {plan.num_workers} workers spare"
    if fixed:
        text += f" (with {' and '.join(fixed)} as asked for)"
    second = next((row for row in candidates[1:] if row.simulated), None)
    if second is None:
        return f"{text}. No other layout came close enough to be simulated."
    return (
        f"{text}. Next best: {_layout(second)}, {max(0.0, second.step_s / prediction.step_s - 1):.1%} slower."
    )


def _layout(row: Candidate) -> str:
    deeper = f" ({row.num_deeper} of them {row.num_stages + 1})" if row.num_deeper else ""
    return (
        f"{row.num_pipelines} x {row.num_stages} stages{deeper}, micro-batches of {row.micro_batch_size}, "
        f"{row.schedule}"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
