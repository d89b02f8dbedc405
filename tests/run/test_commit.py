"""The commit: equal to a plain loop (clipping, groups, scheduler, uneven weights); decided together."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.run.processes import Context, run_workers
from varuna.errors import LossError, NonFiniteLoss, ProtocolError
from varuna.run.commit import (
    CommitPart,
    Committed,
    apply_update,
    commit,
    decide,
    nominal_weight_of,
    pack,
    unpack,
)
from varuna.run.optimizer import learning_rates
from varuna.run.precision import LossScaler, Precision
from varuna.run.reduce import GradientReducer

VOCABULARY, WIDTH, LENGTH, BATCH, STEPS, CLIP = 11, 6, 5, 7, 5, 0.05


class Tiny(nn.Module):
    """Embedding, two layers, a head tied to the embedding, one parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(3))


def build() -> tuple[Tiny, torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    torch.manual_seed(3)
    model = Tiny().double()
    decayed = [model.embedding.weight, model.first.weight, model.second.weight, model.unused]
    others = [model.first.bias, model.second.bias]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels; each sample ignores a different number of labels."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    for sample in range(BATCH):
        labels[sample, : (sample + step) % LENGTH] = -100
    return tokens, labels


def loss_sum(model: Tiny, tokens: torch.Tensor, labels: torch.Tensor, stage: int | None) -> torch.Tensor:
    """Cross-entropy sum; with a stage, gradients flow only through that stage's use of the parameters."""
    weights = {name: p if stage in (None, 0) else p.detach() for name, p in model.named_parameters()}
    head = {name: p if stage in (None, 1) else p.detach() for name, p in model.named_parameters()}
    hidden = F.embedding(tokens, weights["embedding.weight"])
    hidden = torch.tanh(F.linear(hidden, weights["first.weight"], weights["first.bias"]))
    hidden = torch.tanh(F.linear(hidden, head["second.weight"], head["second.bias"]))
    logits = F.linear(hidden, head["embedding.weight"])
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)


def plain_loop() -> dict[str, Any]:
    model, optimizer, scheduler = build()
    norms, losses, rates = [], [], []
    for step in range(STEPS):
        tokens, labels = batch_of(step)
        loss = loss_sum(model, tokens, labels, None) / (labels != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        losses.append(float(loss.detach()))
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return {"norms": norms, "losses": losses, "rates": rates, "model": dict(model.named_parameters())}


STAGES = (
    ("embedding.weight", "first.weight", "first.bias"),
    ("second.weight", "second.bias", "embedding.weight", "unused"),
)


def train(context: Context, num_pipelines: int, micro_batch_size: int) -> dict[str, Any]:
    """Two stages times ``num_pipelines``; workers left over are spares."""
    rank = context.rank
    model, optimizer, scheduler = build()
    names = list(dict(model.named_parameters()))
    stages = {2 * d + s: STAGES[s] for d in range(num_pipelines) for s in range(2)}
    holders = {n: tuple(w for w, stage in stages.items() if n in stage) for n in names}
    held = {n: p for n, p in model.named_parameters() if n in stages.get(rank, ())}
    groups = context.groups()
    reducer = GradientReducer(held, holders, groups)
    num_micro_batches = math.ceil(BATCH / micro_batch_size)
    shares = [
        range(d * num_micro_batches // num_pipelines, (d + 1) * num_micro_batches // num_pipelines)
        for d in range(num_pipelines)
    ]
    scaler = LossScaler.initial(Precision.FP64)
    norms, losses, rates = [], [], []
    for step in range(STEPS):
        part = CommitPart(generation=0, step_index=step)
        for k in shares[rank // 2] if rank in stages else ():
            if k == shares[rank // 2][-1]:
                reducer.begin_final_backward()
            samples = slice(k * micro_batch_size, (k + 1) * micro_batch_size)
            tokens, labels = (tensor[samples] for tensor in batch_of(step))
            loss = loss_sum(model, tokens, labels, rank % 2)
            loss.backward()
            if rank % 2 == 1:
                part = replace(
                    part,
                    loss_sum=part.loss_sum + float(loss.detach()),
                    weight=part.weight + float((labels != -100).sum()),
                    num_samples=part.num_samples + len(tokens),
                )
        reducer.finish()
        committed = commit(groups, replace(part, squared_norm=reducer.squared_norm()))
        update = decide(committed, clip_grad_norm=CLIP, scaler=scaler)
        rates.append(list(learning_rates(optimizer)))
        apply_update(update, held.values(), optimizer, scheduler)
        for name, parameter in model.named_parameters():  # the forward of this test reads the other stage's too
            value = parameter.detach().clone()
            groups.all.broadcast(value, holders[name][0])
            if name not in held:
                parameter.data.copy_(value)
        norms.append(update.grad_norm)
        losses.append(update.loss)
        assert update.num_samples == BATCH
        assert all(parameter.grad is None for parameter in held.values())
    groups.close()
    values = {name: parameter.flatten().tolist() for name, parameter in held.items()}
    return {"norms": norms, "losses": losses, "rates": rates, "values": values}


@pytest.mark.parametrize(
    ("size", "num_pipelines", "micro_batch_size"), [(2, 1, 7), (2, 1, 2), (3, 1, 3), (4, 2, 2)]
)
def test_g1_g2_g3_g7_g10_r37_equals_the_plain_loop(
    size: int, num_pipelines: int, micro_batch_size: int
) -> None:
    expected = plain_loop()
    assert min(expected["norms"]) > CLIP  # clipping bites
    results = run_workers(size, train, num_pipelines, micro_batch_size)
    for result in results:
        assert result["norms"] == results[0]["norms"]
        assert result["losses"] == results[0]["losses"]
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-12)
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-12)
        assert result["rates"] == expected["rates"]
        for name, values in result["values"].items():
            reference = expected["model"][name].detach().flatten()
            found = torch.tensor(values, dtype=torch.float64)
            assert float((found - reference).abs().max() / reference.abs().max()) <= 1e-12, name
    for name in expected["model"]:
        copies = [result["values"][name] for result in results if name in result["values"]]
        assert copies
        assert all(copy == copies[0] for copy in copies), f"copies of {name} differ"


# --- decided together -------------------------------------------------------------------------


def overflowing(context: Context) -> list[Any]:
    """fp16 scaling on three workers with a parameter each; worker 1's gradient is infinite in steps 1 and 2."""
    groups = context.groups()
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    holders = {f"w{rank}": (rank,) for rank in range(3)}
    reducer = GradientReducer({f"w{context.rank}": weight}, holders, groups)
    scaler = LossScaler.initial(Precision.FP16)
    history = []
    for step in range(4):
        (weight.sum() * scaler.scale).backward()
        if context.rank == 1 and step in (1, 2):
            weight.grad[0] = torch.inf
        reducer.finish()
        part = CommitPart(
            generation=0, step_index=step, weight=float(context.rank == 0), squared_norm=reducer.squared_norm()
        )
        update = decide(commit(groups, part), clip_grad_norm=None, scaler=scaler)
        apply_update(update, [weight], optimizer, scheduler)
        scaler = update.scaler
        history.append(
            [update.skipped, update.loss_scale, scaler.scale, weight.tolist(), learning_rates(optimizer)]
        )
    groups.close()
    return history


def test_g14_overflow_on_one_worker_makes_all_skip_together() -> None:
    results = run_workers(3, overflowing)
    assert results[0] == results[1] == results[2]
    scale = 2.0**16
    assert results[0] == [
        [False, scale, scale, [0.5, 0.5], [0.25]],
        [True, scale, scale / 2, [0.5, 0.5], [0.25]],
        [True, scale / 2, scale / 4, [0.5, 0.5], [0.25]],
        [False, scale / 4, scale / 4, [0.25, 0.25], [0.125]],
    ]


def test_a_nominal_weight_that_is_the_weight_needs_no_pass_over_gradients() -> None:
    committed = Committed(step_index=0, loss_sum=12.0, weight=8.0, num_samples=8, squared_norm=4.0)
    update = decide(committed, clip_grad_norm=None, scaler=OFF, nominal_weight=8.0)
    assert (update.factor, update.loss, update.grad_norm) == (1.0, 1.5, 2.0)
    other = decide(committed, clip_grad_norm=None, scaler=OFF, nominal_weight=4.0)
    assert (other.factor, other.loss, other.grad_norm) == (0.5, 1.5, 1.0)


def test_the_nominal_weight_is_a_power_of_two_near_the_batch_size() -> None:
    assert [nominal_weight_of(size) for size in (1, 2, 3, 15, 16, 300)] == [1, 2, 4, 16, 16, 256]


def non_finite(context: Context) -> str:
    groups = context.groups()
    bad = {0: 5, 2: 3}.get(context.rank)
    value = math.nan if bad is not None else 1.0
    part = CommitPart(generation=0, step_index=7, loss_sum=value, weight=2.0, non_finite_micro_batch=bad)
    committed = commit(groups, part)
    groups.close()
    with pytest.raises(NonFiniteLoss) as caught:
        decide(committed, clip_grad_norm=None, scaler=LossScaler.initial(Precision.BF16))
    return str(caught.value)


def test_non_finite_loss_is_the_same_error_everywhere_and_names_the_first() -> None:
    messages = run_workers(3, non_finite)
    assert len(set(messages)) == 1
    assert "Step 7: the loss is not finite" in messages[0]
    assert "micro-batch 3 on worker 2" in messages[0]
    assert "No weight was changed" in messages[0]


def out_of_step(context: Context) -> None:
    groups = context.groups()
    with pytest.raises(ProtocolError, match="not at the same step"):
        commit(groups, CommitPart(generation=0, step_index=4 + (context.rank == 1)))
    groups.close()


def test_workers_at_different_steps_are_told() -> None:
    run_workers(3, out_of_step)


# --- the decision alone -----------------------------------------------------------------------


def committed(**changes: Any) -> Committed:
    values = {"step_index": 0, "loss_sum": 8.0, "weight": 4.0, "num_samples": 4, "squared_norm": 144.0}
    return Committed(**{**values, **changes})


OFF = LossScaler.initial(Precision.FP32)


def test_the_gradient_is_divided_once() -> None:
    update = decide(committed(), clip_grad_norm=None, scaler=OFF)
    assert (update.loss, update.grad_norm, update.factor, update.skipped) == (2.0, 3.0, 0.25, False)
    scaled = decide(committed(squared_norm=144.0 * 64), clip_grad_norm=None, scaler=LossScaler(scale=8.0))
    assert (scaled.grad_norm, scaled.factor) == (3.0, 1 / 32)


def test_clipping_is_that_of_torch() -> None:
    update = decide(committed(), clip_grad_norm=1.5, scaler=OFF)
    assert update.factor == 0.25 * (1.5 / (3.0 + 1e-6))
    assert decide(committed(), clip_grad_norm=10.0, scaler=OFF).factor == 0.25


def test_weight_zero_skips_without_nan() -> None:
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([weight], lr=1.0, weight_decay=0.5)
    zero = committed(loss_sum=0.0, weight=0.0, squared_norm=0.0)
    for scaler in (OFF, LossScaler(scale=8.0)):
        update = decide(zero, clip_grad_norm=1.0, scaler=scaler)
        assert (update.loss, update.grad_norm, update.skipped) == (0.0, 0.0, True)
        assert update.scaler == scaler
        apply_update(update, [weight], optimizer)
        assert weight.item() == 1.0
        assert weight.grad is None


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_that_cannot_be(weight: float) -> None:
    with pytest.raises(LossError, match="weight"):
        decide(committed(weight=weight), clip_grad_norm=None, scaler=OFF)


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite(norm: float) -> None:
    with pytest.raises(NonFiniteLoss, match="gradient norm is not finite"):
        decide(committed(squared_norm=norm), clip_grad_norm=None, scaler=OFF)
    update = decide(committed(squared_norm=norm), clip_grad_norm=1.0, scaler=LossScaler(scale=8.0))
    assert update.skipped
    assert update.scaler.scale == 4.0


def test_tags_tell_neighbouring_steps_and_generations_apart() -> None:
    own = CommitPart(generation=3, step_index=100)
    for other in (CommitPart(generation=3, step_index=101), CommitPart(generation=4, step_index=100)):
        for count in (1, 2, 511):
            rows = [pack(own, 0, 512)] * (512 - count) + [pack(other, 0, 512)] * count
            with pytest.raises(ProtocolError):
                unpack([sum(column) for column in zip(*rows, strict=True)], own, 512)


def test_reduce_on_plateau_sees_the_committed_loss() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for _ in range(3):
        apply_update(decide(committed(), clip_grad_norm=None, scaler=OFF), [weight], optimizer, scheduler)
    assert learning_rates(optimizer) == (0.25,)
