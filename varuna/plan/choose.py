"""Which plan is the fastest for a profile and a cluster, and why.

``points`` lists the layouts and bounds them, ``search`` looks at the promising ones more closely with
``borders`` and the simulator, and here the few best are predicted as whole plans: that decides.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from varuna.errors import PlanError
from varuna.plan.cluster import Cluster
from varuna.plan.considered import Candidate, candidates_of, simulated_candidates
from varuna.plan.lay import Laid
from varuna.plan.layout import PlanChoice
from varuna.plan.outcome import Outcome, simulate
from varuna.plan.points import PointMaker
from varuna.plan.predict import Prediction, predict
from varuna.plan.profile import Profile
from varuna.plan.refusal import refusal
from varuna.plan.schedule import SCHEDULES
from varuna.plan.search import Search
from varuna.plan.setting import Setting
from varuna.plan.wish import Wish, check_wish
from varuna.spec import PipelineSpec, Plan, StageSpec

FINALISTS = 16
"""Layouts that are predicted as whole plans; two where that takes long, patience is short, and they agree."""

SMALL_WORKERS, SMALL_TASKS = 100, 5_000
"""It does not take long with so few workers and simulated tasks."""

CLOSE = 1.03
"""Outcomes within this of the fastest are simulated to their end before one is predicted."""

SURE = 0.999
"""A layout whose simulated step is not below this share of the best prediction is not predicted."""

NUM_RUNS = 5
"""Steps with drawn delays that a finalist's prediction is the mean of, where links have jitter."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The plan, what it will take, and what else was considered.

    Attributes:
        plan: the fastest plan found.
        prediction: of that plan.
        reason: one or two sentences for a person.
        list_candidates: makes ``candidates``, for which a running job need not wait.
    """

    plan: Plan
    prediction: Prediction
    reason: str
    list_candidates: Callable[[], tuple[Candidate, ...]] = field(compare=False, repr=False)

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """All that were considered, the choice first, then by ``step_s``; see ``Candidate``."""
        return self.list_candidates()

    def to_plan_choice(self) -> PlanChoice:
        """What workers are sent."""
        micro_batch_s = tuple(
            tuple(stage.busy_s / pipeline.num_micro_batches for stage in predicted.stages)
            for pipeline, predicted in zip(self.plan.pipelines, self.prediction.pipelines, strict=True)
        )
        return PlanChoice(
            plan=self.plan, reason=self.reason, step_s=self.prediction.step_s, micro_batch_s=micro_batch_s
        )


def choose_plan(
    profile: Profile,
    cluster: Cluster,
    *,
    batch_size: int,
    num_stages: int | None = None,
    micro_batch_size: int | None = None,
    schedule: str | None = None,
    recompute: bool | Sequence[bool] | None = None,
    patience: float = 1.0,
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
        patience: how many times the effort may be spent that a running job can wait for (some hundredths of a
            second for 100 devices).

    Raises:
        PlanError: nothing fits, or what was fixed cannot be laid out; with values and what would help.
    """
    wish = check_wish(
        profile,
        cluster,
        batch_size=batch_size,
        num_stages=num_stages,
        micro_batch_size=micro_batch_size,
        schedule=schedule,
        recompute=recompute,
    )
    search = search_plans(profile, cluster, wish, patience=patience)
    finalists = _finalists(search, profile, cluster)
    if not finalists:
        assert search.points is not None, "the search was run"

        def is_possible(other: Wish) -> bool:
            return bool(search_plans(profile, cluster, other).outcomes)

        raise PlanError(refusal(search.setting, search.points, is_possible))
    best = min(finalists, key=lambda finalist: _rank(finalist.prediction.step_s, finalist.outcome.laid))
    predictions = {id(finalist.outcome): finalist.prediction for finalist in finalists}
    everything = partial(candidates_of, search, best.outcome, predictions)
    simulated = simulated_candidates(search, best.outcome, predictions)
    rows = simulated if len(simulated) > 1 else everything()
    return Choice(
        plan=best.plan,
        prediction=best.prediction,
        reason=_reason(best.plan, best.prediction, rows, wish),
        list_candidates=everything,
    )


def search_plans(profile: Profile, cluster: Cluster, wish: Wish, *, patience: float = 1.0) -> Search:
    """Everything simulated and ruled out for a wish."""
    setting = Setting(profile, cluster, wish)
    search = Search(setting=setting, maker=PointMaker(setting), patience=patience)
    search.run()
    return search


@dataclass(frozen=True, eq=False)
class _Finalist:
    outcome: Outcome
    plan: Plan
    prediction: Prediction


def _finalists(search: Search, profile: Profile, cluster: Cluster) -> list[_Finalist]:
    """The fastest outcomes as whole plans, until the next outcome is no faster than the best prediction."""
    finalists: list[_Finalist] = []
    most = FINALISTS if search.patience > 1 or _is_small(search, cluster) else 2
    best_s = float("inf")
    search.outcomes = _in_order(search, most, whole=most == FINALISTS)
    waiting, off = list(search.outcomes), dict[Hashable, float]()

    def is_hopeful(outcome: Outcome) -> bool:
        return outcome.step_s * off.get(_family(outcome), 1.0) < best_s * SURE

    while waiting and len(finalists) < FINALISTS and waiting[0].step_s < best_s * SURE:
        outcome = next(filter(is_hopeful, waiting), waiting[0])
        if len(finalists) >= most and best_s <= waiting[0].step_s * CLOSE:
            break  # predictions agree with what was simulated
        waiting.remove(outcome)
        plan = plan_of(outcome.laid, search.setting)
        variants = dict.fromkeys((plan, _unlimited(plan)) if most == FINALISTS else (plan,))
        predicted = [(predict(variant, profile, cluster, num_runs=NUM_RUNS), variant) for variant in variants]
        off[_family(outcome)] = min(found.step_s for found, _ in predicted) / outcome.step_s
        fitting = [found for found in predicted if _fits(found[0], search.setting)]
        if fitting:
            prediction, plan = min(fitting, key=lambda found: found[0].step_s)
            finalists.append(_Finalist(outcome, plan, prediction))
            best_s = min(best_s, prediction.step_s)
    return finalists


def _family(outcome: Outcome) -> Hashable:
    """Whole plans are off alike from what was simulated of one pipeline."""
    laid = outcome.laid
    return (laid.point.num_stages, laid.point.num_pipelines, laid.point.num_deeper, laid.placement.layout)


def _unlimited(plan: Plan) -> Plan:
    """Without limits of its own: they may turn out not to be needed, and hold back a stage's last tasks."""
    return replace(
        plan,
        pipelines=tuple(
            replace(pipeline, stages=tuple(replace(stage, max_in_flight=0) for stage in pipeline.stages))
            for pipeline in plan.pipelines
        ),
    )


def _is_small(search: Search, cluster: Cluster) -> bool:
    """Whether whole plans are predicted in no time."""
    return cluster.num_workers <= SMALL_WORKERS and all(
        outcome.num_tasks <= SMALL_TASKS for outcome in search.outcomes
    )


def _in_order(search: Search, most: int, *, whole: bool) -> list[Outcome]:
    """Outcomes, fastest first; those that are close to the fastest are simulated to their end if asked for."""
    outcomes = sorted(search.outcomes, key=lambda outcome: _rank(outcome.step_s, outcome.laid))
    close = [outcome for outcome in outcomes[:most] if outcome.step_s <= outcomes[0].step_s * CLOSE]
    if len(close) < 2 or not whole:
        return outcomes
    ended = [simulate(search.setting, outcome.laid, whole=True) for outcome in close]
    return sorted([*ended, *outcomes[len(close) :]], key=lambda outcome: _rank(outcome.step_s, outcome.laid))


def _rank(step_s: float, laid: Laid) -> tuple[float, int]:
    """Fastest first; among equals, the schedule that stands late messages best, as ``SCHEDULES`` has them."""
    return float(f"{step_s:.9g}"), SCHEDULES.index(laid.schedule)


def plan_of(laid: Laid, setting: Setting) -> Plan:
    """The plan of a layout: larger shares first, then by first worker; the last has the short micro-batch."""
    rows: list[tuple[int, list[int], int]] = []
    fewer = laid.num_fewer
    for index, plan in sorted(enumerate(laid.kinds), key=lambda item: -item[1].borders.value_s):
        for workers in reversed(plan.kind.workers.tolist()):
            share = plan.num_micro_batches
            if fewer and share > 1:
                share, fewer = share - 1, fewer - 1
            rows.append((-share, workers, index))
    rows.sort()
    pipelines = []
    first = 0
    for negative_share, workers, index in rows:
        borders, end = laid.kinds[index].borders, first - negative_share
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
        pipelines.append(PipelineSpec(stages=stages, first_micro_batch=first, end_micro_batch=end))
        first = end
    return Plan(
        pipelines=tuple(pipelines),
        num_workers=setting.devices.num_workers,
        num_sections=len(setting.profile.sections),
        batch_size=setting.wish.batch_size,
        micro_batch_size=laid.point.micro_batch_size,
        schedule=laid.schedule,
    )


def _fits(prediction: Prediction, setting: Setting) -> bool:
    """Whether every device has the memory that was predicted."""
    memory = setting.devices.memory_bytes
    return all(
        stage.peak_memory_bytes <= memory[stage.worker_index]
        for pipeline in prediction.pipelines
        for stage in pipeline.stages
    )


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
    second = second or next((row for row in candidates[1:] if row.step_s < float("inf")), None)
    if second is None:
        return f"{text}. Nothing else fits."
    return f"{text}. Next best: {_layout(second)}, {second.rejected}."


def _layout(row: Candidate) -> str:
    """``4 stages x 2 pipelines, micro-batches of 8, varuna``: P before D, as in the table of candidates."""
    stages, pipelines = ("" if count == 1 else "s" for count in (row.num_stages, row.num_pipelines))
    deeper = f" ({row.num_deeper} of them of {row.num_stages + 1})" if row.num_deeper else ""
    return (
        f"{row.num_stages} stage{stages} x {row.num_pipelines} pipeline{pipelines}{deeper}, "
        f"micro-batches of {row.micro_batch_size}, "
        f"{row.schedule.replace(', ', ' or ')}"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
