"""Gradient sums over holders: equal to plain sums, bit-equal everywhere, once a step, never a deadlock."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.run.processes import Context, run_workers
from varuna.errors import OptimizerError, PeerLost, ProtocolError, RunError
from varuna.run.buckets import BucketSpec, GradientSpec, plan_buckets
from varuna.run.parameters import ParameterHolding
from varuna.run.reduce import GradientReducer


def spec(name: str, holders: tuple[int, ...], num_elements: int, kind: str = "f4") -> GradientSpec:
    return GradientSpec(name=name, holders=holders, num_elements=num_elements, element_bytes=4, kind=kind)


def digest(tensors: dict[str, torch.Tensor | None]) -> str:
    text = hashlib.blake2b()
    for name, tensor in tensors.items():
        text.update(name.encode())
        text.update(b"none" if tensor is None else tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return text.hexdigest()


# --- buckets --------------------------------------------------------------------------------


def test_buckets_go_backwards_and_keep_holders_and_kinds_apart() -> None:
    gradients = [
        spec("a", (0, 1), 100),
        spec("b", (0, 1), 100),
        spec("c", (0, 1, 2), 10),
        spec("d", (0, 1), 10, kind="f8"),
        spec("e", (1,), 1000),
        spec("f", (0, 1), 1000),
    ]
    buckets = plan_buckets(gradients, bucket_bytes=900)
    assert [bucket.names for bucket in buckets] == [("f",), ("d",), ("c",), ("b", "a")]
    assert buckets[-1] == BucketSpec(holders=(0, 1), names=("b", "a"), starts=(0, 112), first_flag=212)
    assert buckets[-1].num_elements == 214


def test_buckets_of_one_group_do_not_depend_on_what_else_is_held() -> None:
    shared = [spec("a", (0, 1), 3), spec("b", (0, 1), 4)]
    alone = plan_buckets(shared, 100)
    among_others = plan_buckets([spec("x", (0, 2), 5), shared[0], spec("y", (0,), 5), shared[1]], 100)
    assert alone == tuple(bucket for bucket in among_others if bucket.holders == (0, 1))


# --- sums -----------------------------------------------------------------------------------

HOLDERS = {"all": (0, 1, 2), "pair": (0, 1), "tied": (0, 2), "own": (2,), "unused": (0, 1, 2), "some": (0, 1)}


def parameters_of(rank: int, dtype: torch.dtype) -> dict[str, nn.Parameter]:
    shapes = {"all": (5, 3), "pair": (7,), "tied": (2, 2), "own": (3,), "unused": (4,), "some": (6,)}
    return {
        name: nn.Parameter(torch.zeros(shapes[name], dtype=dtype))
        for name, holders in HOLDERS.items()
        if rank in holders
    }


def gradient_of(name: str, rank: int, step: int, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + len(name))
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)


def forward(parameters: dict[str, nn.Parameter], rank: int, step: int) -> torch.Tensor:
    """Its backward adds ``gradient_of`` to every parameter but 'unused', and 'some' on rank 0 only."""
    used = [name for name in parameters if name != "unused" and not (name == "some" and rank == 1)]
    return sum((parameters[n] * gradient_of(n, rank, step, parameters[n])).sum().double() for n in used)


def sums(context: Context, dtype_name: str, bucket_bytes: int, overlap: bool) -> dict[str, Any]:
    dtype = getattr(torch, dtype_name)
    rank = context.rank
    parameters = parameters_of(rank, dtype)
    groups = context.groups()
    reducer = GradientReducer(parameters, HOLDERS, groups, bucket_bytes=bucket_bytes, overlap=overlap)
    early, launched, digests, worst = [], [], [], 0.0
    for step in range(3):
        before = reducer.num_reductions
        reducer.begin_step()
        losses = [forward(parameters, rank, step) for _ in range(2)]  # two micro-batches accumulate
        losses[0].backward()
        reducer.begin_final_backward()
        losses[1].backward()
        early.append(reducer.num_reductions - before)
        own = parameters["own"].grad.data_ptr() if "own" in parameters else 0
        reducer.finish()
        launched.append(reducer.num_reductions - before)
        if own:
            assert parameters["own"].grad.data_ptr() == own, "a single holder's gradient was copied"
        assert parameters["unused"].grad is None
        for name, parameter in parameters.items():
            if name == "unused":
                continue
            users = (0,) if name == "some" else HOLDERS[name]
            expected = 2 * sum(gradient_of(name, r, step, parameter).double() for r in users)
            worst = max(worst, float((parameter.grad.double() - expected).abs().max()))
        digests.append({name: digest({name: parameter.grad}) for name, parameter in parameters.items()})
        reducer.drop_gradients()
    groups.close()
    return {"early": early, "launched": launched, "digests": digests, "worst": worst}


@pytest.mark.parametrize(
    ("dtype", "bucket_bytes", "overlap", "bound"),
    [
        ("float64", 1 << 20, True, 1e-14),
        ("float64", 1, True, 1e-14),
        ("float32", 100, False, 1e-5),
        ("bfloat16", 1 << 20, True, 0.2),
    ],
)
def test_sums_over_uneven_holders(dtype: str, bucket_bytes: int, overlap: bool, bound: float) -> None:
    results = run_workers(3, sums, dtype, bucket_bytes, overlap)
    for rank, result in enumerate(results):
        assert result["worst"] <= bound
        for step, digests in enumerate(result["digests"]):
            for name, value in digests.items():
                first = results[HOLDERS[name][0]]["digests"][step][name]
                assert value == first, f"{name} differs on worker {rank}"
        assert result["early"][0] == 0  # the first step counts
    if bucket_bytes == 1:  # a bucket each: those whose gradients all came left during backward
        assert results[2]["early"][1:] == [1, 1]  # "unused" is next in line among (0, 1, 2), so "all" waits
    if not overlap:
        assert all(result["early"] == [0, 0, 0] for result in results)


def test_g18_one_reduction_per_step_however_many_micro_batches() -> None:
    for result in run_workers(3, sums, "float64", 1 << 20, True):
        assert len(set(result["launched"])) == 1
    counts = [result["launched"][0] for result in run_workers(3, sums, "float64", 1, True)]
    assert counts == [5, 4, 3]  # a bucket per shared parameter


# --- order, overlap, nested backwards ---------------------------------------------------------


def opposite_orders(context: Context) -> int:
    """Two groups whose gradients come in opposite order on every pair of workers."""
    rank = context.rank
    holders = {"a": (0, 1), "b": (1, 2), "c": (0, 2)}
    held = {name: nn.Parameter(torch.ones(50_000)) for name, ranks in holders.items() if rank in ranks}
    groups = context.groups()
    reducer = GradientReducer(held, holders, groups, bucket_bytes=1)
    names = sorted(held, reverse=rank % 2 == 0)
    early = 0
    for _ in range(10):
        before = reducer.num_reductions
        reducer.begin_final_backward()
        for name in names:
            held[name].sum().backward()
        early = reducer.num_reductions - before
        reducer.finish()
        assert all(torch.equal(p.grad, torch.full_like(p, 2.0)) for p in held.values())
        reducer.drop_gradients()
    groups.close()
    return early


def test_s25_no_deadlock_when_groups_finish_in_opposite_order() -> None:
    assert run_workers(3, opposite_orders) == [2, 2, 2]


def foretold(context: Context) -> list[Any]:
    """The last task adds to ``last`` twice and to nothing else, in the first step too."""
    names = ("early", "last", "late")
    held = {name: nn.Parameter(torch.zeros(4, dtype=torch.float64)) for name in names}
    groups = context.groups()
    reducer = GradientReducer(held, dict.fromkeys(names, (0, 1)), groups, bucket_bytes=1)  # in turn: late first
    found: list[Any] = []
    for _ in range(2):
        before = reducer.num_reductions
        reducer.begin_step()
        for name in names:
            (held[name] * (context.rank + 1)).sum().backward()
        counts = [0]
        reducer.begin_final_backward({held["last"]: 2})
        for _ in range(2):
            counts.append(reducer.num_reductions - before)
            torch.autograd.backward(held["last"], torch.ones(4, dtype=torch.float64))
        counts.append(reducer.num_reductions - before)
        reducer.finish()
        found.append([counts, *[held[name].grad.tolist() for name in names]])
        reducer.drop_gradients()
    reducer.begin_step()
    reducer.begin_final_backward({})
    held["early"].sum().backward()
    with pytest.raises(RunError, match="'early' was added to more often"):
        reducer.finish()
    reducer.cancel()
    groups.close()
    return found


def test_foretold_additions_are_waited_for_and_no_others() -> None:
    for found in run_workers(2, foretold):
        assert found == [[[0, 1, 1, 3], [3.0] * 4, [7.0] * 4, [3.0] * 4]] * 2


def nested(context: Context) -> list[Any]:
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    other = nn.Parameter(torch.ones(3, dtype=torch.float64))
    groups = context.groups()
    holders = {"other": (0, 1), "weight": (0, 1)}
    reducer = GradientReducer({"weight": weight, "other": other}, holders, groups, bucket_bytes=1)

    def run(uses: int) -> None:
        value = other * 2
        for _ in range(uses):
            value = checkpoint(lambda x: x * weight, value, use_reentrant=True)
        value.sum().backward()

    found: list[Any] = []
    for _ in range(3):
        reducer.begin_final_backward()
        run(uses=2)
        reducer.finish()
        found.append([weight.grad.tolist(), other.grad.tolist()])
        reducer.drop_gradients()
    reducer.begin_final_backward()
    run(uses=3)
    with pytest.raises(RunError, match="'weight' was added to more often"):
        reducer.finish()
    reducer.cancel()
    groups.close()
    return found


def test_nested_backwards_are_counted() -> None:
    for found in run_workers(2, nested):
        assert found == [[[8.0] * 3, [4.0] * 3]] * 3


# --- what can be wrong ------------------------------------------------------------------------


def sparse(context: Context) -> None:
    groups = context.groups()
    embedding = nn.Embedding(5, 2, sparse=True)
    reducer = GradientReducer({"e.weight": embedding.weight}, {"e.weight": (0, 1)}, groups)
    for _ in range(2):
        embedding(torch.tensor([1])).sum().backward()
        with pytest.raises(OptimizerError, match=r"'e.weight' is sparse.*sparse=False"):
            reducer.finish()
        reducer.cancel()
    groups.close()


def test_sparse_gradients_are_refused() -> None:
    run_workers(2, sparse)


def differing(context: Context) -> None:
    groups = context.groups()
    held = {"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(2))}
    held["b"].requires_grad_(context.rank != 0)
    reducer = GradientReducer(held, {"a": (0, 1, 2), "b": (0, 1, 2)}, groups)
    with pytest.raises(ProtocolError, match="requires_grad"):
        reducer.begin_step()
    groups.close()


def test_workers_that_froze_different_parameters_are_told() -> None:
    run_workers(3, differing)


def unfreezes(context: Context) -> list[Any]:
    groups = context.groups()
    held = {"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(2), requires_grad=False)}
    reducer = GradientReducer(held, {"a": (0, 1), "b": (0, 1)}, groups)
    found = []
    for _ in range(2):
        reducer.begin_step()
        reducer.begin_final_backward()
        (held["a"] * held["b"]).sum().backward()
        reducer.finish()
        found.append([None if p.grad is None else p.grad.tolist() for p in held.values()])
        reducer.drop_gradients()
        held["b"].requires_grad_(True)
    groups.close()
    return found


def test_parameters_may_be_unfrozen_between_steps() -> None:
    assert run_workers(2, unfreezes) == [[[[2.0, 2.0], None], [[2.0, 2.0], [2.0, 2.0]]]] * 2


def is_lost_in_backward(context: Context) -> None:
    """The groups are gone when the last backward begins to reduce."""
    groups = context.groups()
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    held = dict(model.named_parameters())
    reducer = GradientReducer(held, dict.fromkeys(held, (0, 1)), groups, bucket_bytes=1)
    for is_last in (False, True):
        reducer.begin_step()
        output = model(torch.ones(2, 3))
        reducer.begin_final_backward()
        if is_last:
            groups.close(in_order=False)
        output.sum().backward()
        if not is_last:
            reducer.finish()
    with pytest.raises(PeerLost):
        reducer.finish()
    reducer.cancel()
    del output
    ParameterHolding(model).release(held)


def test_a_worker_lost_in_backward_leaves_parameters_free() -> None:
    run_workers(2, is_lost_in_backward)


def freezes_beside_a_tie(context: Context) -> list[Any]:
    """Workers 0 and 1 freeze what they alone hold; worker 2 shares another parameter with them."""
    groups = context.groups()
    holders = {"own": (0, 1), "tied": (0, 1, 2)}
    held = {name: nn.Parameter(torch.ones(2)) for name in holders if context.rank in holders[name]}
    reducer = GradientReducer(held, holders, groups)
    found = []
    for is_trained in (True, False, True):
        if "own" in held:
            held["own"].requires_grad_(is_trained)
        reducer.begin_step()
        reducer.begin_final_backward()
        sum(parameter.sum() for parameter in held.values()).backward()
        reducer.finish()
        found.append({name: None if p.grad is None else p.grad.tolist() for name, p in held.items()})
        reducer.drop_gradients()
    groups.close()
    return found


def test_only_holders_of_what_was_frozen_compare() -> None:
    """The others' own list is as it was: they do not come to compare anything."""
    tied = [3.0, 3.0]
    first, second, third = run_workers(3, freezes_beside_a_tie)
    assert first == second == [{"own": own, "tied": tied} for own in ([2.0, 2.0], None, [2.0, 2.0])]
    assert third == [{"tied": tied}] * 3


# --- the norm ---------------------------------------------------------------------------------


def norms(context: Context) -> list[float]:
    parameters = parameters_of(context.rank, torch.float64)
    groups = context.groups()
    reducer = GradientReducer(parameters, HOLDERS, groups)
    forward(parameters, context.rank, 0).backward()
    reducer.finish()
    total = torch.tensor(reducer.squared_norm(), dtype=torch.float64)
    groups.all_reduce_sum(total)
    parameters["all"].grad[0, 0] = torch.inf
    groups.close()
    return [float(total), reducer.squared_norm()]


def test_g8_a_tied_weight_counts_once_in_the_norm() -> None:
    expected = 0.0
    for name in ("all", "pair", "tied", "own", "some"):
        like = parameters_of(HOLDERS[name][0], torch.float64)[name]
        users = (0,) if name == "some" else HOLDERS[name]
        expected += float(sum(gradient_of(name, r, 0, like) for r in users).square().sum())
    for rank, (total, with_inf) in enumerate(run_workers(3, norms)):
        assert total == pytest.approx(expected, rel=1e-13)
        assert math.isnan(with_inf) == (rank == 0)  # nan where the first holder is


def channels_last(context: Context) -> bool:
    weight = nn.Parameter(torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last))
    groups = context.groups()
    reducer = GradientReducer({"w": weight}, {"w": (0, 1)}, groups)
    values = torch.arange(48.0).view(4, 3, 2, 2)
    (weight * values).sum().backward()
    reducer.finish()
    groups.close()
    return torch.equal(weight.grad, 2 * values) and weight.grad.stride() == weight.stride()


def test_channels_last_gradients_keep_their_layout() -> None:
    assert run_workers(2, channels_last) == [True, True]
