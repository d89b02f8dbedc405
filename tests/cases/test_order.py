"""R32, R33, R34, R36, R37: which samples are used, and learning rates, over interruptions and new layouts.

``models.Counts`` learns how often each sample was used: its weights are the count.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

import varuna
from tests.cases import jobs, models, plain
from tests.cases.jobs import Training
from varuna.plan import simple_plan
from varuna.run.generation import Generation

LENGTH = 10


def counting(batch_size: int, num_steps: int) -> Training:
    """SGD with learning rate = batch size: every use of a sample adds 1 to its weight."""
    return Training(
        model=functools.partial(models.Counts, LENGTH),
        dataset=models.Indices(LENGTH),
        batch_size=batch_size,
        num_steps=num_steps,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=float(batch_size)),
    )


def uses(state: dict[str, torch.Tensor]) -> list[int]:
    """How often each sample was used."""
    counts = state["uses.weight"].flatten()
    assert (counts - counts.round()).abs().max() < 1e-9
    return [int(count) for count in counts.round()]


def expected_uses(training: Training, steps: Sequence[int]) -> list[int]:
    counted = Counter(index for step in steps for index in plain.ids_of(training, step))
    return [counted[index] for index in range(LENGTH)]


# --- new layouts in a running job -----------------------------------------------------------


def next_generation(job: varuna.Varuna, num_pipelines: int | None = None) -> None:
    """Close the generation at work and open the next one in the same processes.

    Without ``num_pipelines`` it has the same plan; else so many of one stage, and other workers are spares.
    """
    assert job._member is not None
    old = job._member.generation
    plan = old.plan
    if num_pipelines is not None:
        chosen = simple_plan(
            sections=job.sections,
            num_workers=num_pipelines,
            batch_size=plan.batch_size,
            num_stages=1,
            micro_batch_size=plan.micro_batch_size,
        ).plan
        plan = replace(chosen, num_workers=old.world.size)
    old.close()
    job._member._generation = Generation(
        index=old.index + 1,
        world=old.world,
        plan=plan,
        job=old.job,
        partitions=old.partitions,
        parameters=old.parameters,
    )
    job._member.generation.open(job.step_index)


def interrupted(training: Training, parts: Sequence[int], how: str, pipelines: Sequence[int] = ()) -> Any:
    """Trains in parts; gives the steps and the state after each part.

    Args:
        training: what to train.
        parts: steps of each part.
        how: "again": ``train`` is called anew; "break": its loop is left before it ends; "generation": besides,
            all groups and channels are made anew.
        pipelines: of each part's plan, for "generation".
    """
    job, _ = training.job()
    steps, states = [], []
    with job:
        for part, num_steps in enumerate(parts):
            if how == "generation" and part > 0:
                next_generation(job, pipelines[part] if pipelines else None)
            for done, step in enumerate(job.train(num_steps if how == "again" else 1000), start=1):
                steps.append(asdict(step))
                if done == num_steps:
                    break
            states.append(job.full_state_dict())
    return {"steps": steps, "states": states}


# --- cases ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["again", "break", "generation"])
def test_r32_r33_the_rest_of_an_interrupted_epoch_is_what_was_not_used(how: str) -> None:
    """Ten samples in batches of four, interrupted in the second epoch, then on through the fourth."""
    training = counting(batch_size=4, num_steps=10)
    after_16, after_20, after_40 = [
        uses(state) for state in jobs.run_workers(2, interrupted, training, [4, 1, 5], how)[0]["states"]
    ]
    assert sorted(after_16) == [1] * 4 + [2] * 6
    assert after_16 == expected_uses(training, range(4))
    assert after_20 == [2] * LENGTH, "exactly those of the epoch that were not used before"
    assert after_40 == [4] * LENGTH, "later epochs are whole: nothing is skipped in them again"


def test_r34_one_data_position_while_the_number_of_pipelines_changes() -> None:
    """4, then 2, then 4 pipelines, three steps each: together they use what an undisturbed run uses."""
    training = counting(batch_size=7, num_steps=9)
    result = jobs.run_workers(4, interrupted, training, [3, 3, 3], "generation", [4, 2, 4])[0]
    for part, state in enumerate(result["states"], start=1):
        assert uses(state) == expected_uses(training, range(3 * part))
    assert [step["index"] for step in result["steps"]] == list(range(9))
    undisturbed = jobs.train(training)
    assert uses(undisturbed.state) == uses(result["states"][-1])


@pytest.mark.parametrize("num_pipelines", [1, 2, 3])
def test_r36_no_padding_or_dropping_by_the_number_of_workers(num_pipelines: int) -> None:
    """Seven epochs of ten in batches of seven; then a mean over ten in batches of three."""
    results = jobs.run_workers(num_pipelines, train_then_evaluate, counting(batch_size=7, num_steps=10))
    assert uses(results[0]["state"]) == [7] * LENGTH
    assert results[0]["num_samples"] == [7] * 10
    values = results[0]["before"]["uses.weight"].flatten()
    assert len(set(values.tolist())) > 1
    for result in results:
        assert result["evaluated"] == pytest.approx(-values.mean().item(), abs=1e-12)


def train_then_evaluate(training: Training) -> dict[str, Any]:
    job, _ = training.job()
    with job:
        num_samples = [step.num_samples for step in job.train(1)]
        before, evaluated = job.full_state_dict(), job.evaluate(models.Indices(LENGTH), batch_size=3)
        num_samples += [step.num_samples for step in job.train(training.num_steps - 1)]
        return {
            "num_samples": num_samples,
            "before": before,
            "evaluated": evaluated,
            "state": job.full_state_dict(),
        }


SCHEDULED = Training(
    model=functools.partial(models.Tagger, states_weight=True, dropout=0.2),
    dataset=models.text(),
    num_stages=2,
    num_steps=6,
    optimizer=lambda model: torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.dim() > 1]},
         {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 1e-3}], lr=1e-2,
    ),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 1e-3], total_steps=8),
)  # fmt: skip


@functools.cache
def undisturbed() -> jobs.Ran:
    return jobs.train(SCHEDULED, num_workers=2)


@pytest.mark.parametrize("how", ["again", "break", "generation"])
def test_r37_the_learning_rate_goes_on_where_it_was(how: str) -> None:
    """And so do loss, dropout, optimizer state and weights, to the last bit."""
    results = jobs.run_workers(2, interrupted, SCHEDULED, [2, 1, 3], how)
    whole = undisturbed()
    assert len(set(whole.lr)) == 6
    for result in results:
        for name in ("index", "learning_rates", "loss", "grad_norm"):
            assert [step[name] for step in result["steps"]] == getattr(whole, name), name
    final = results[0]["states"][-1]
    assert all(torch.equal(final[name], whole.state[name]) for name in whole.state)
