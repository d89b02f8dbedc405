"""Measured sections: bytes counted by hand, sizes that stop where they should, nothing left behind."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varuna
from varuna.errors import WorkerFailed
from varuna.partition import flatten_batch, signature_of
from varuna.partition.materialise import return_memory
from varuna.run.fingerprint import kinds_of
from varuna.run.measure import KindCosts, MeasureRequest, measure_sections
from varuna.run.measure_bytes import Peak
from varuna.run.measure_size import SizeRun
from varuna.run.measure_update import UpdateMeasure, options_text
from varuna.run.memory import peak_memory_bytes, reset_peak_memory
from varuna.run.overhead import task_overhead_s
from varuna.run.partitions import PartitionOptions, Partitions
from varuna.run.precision import AutocastSpec

CPU = torch.device("cpu")
WIDTH, TIME, VOCAB = 32, 16, 50


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Tagger(nn.Module):
    """Embedding, blocks, head tied to the embedding; a mark after each part."""

    def __init__(self, num_blocks: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.cuts = nn.ModuleList(varuna.CutPoint() for _ in range(num_blocks))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block, cut in zip(self.blocks, self.cuts, strict=True):
            x = cut(block(x))
        return F.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), labels.flatten())


class Norms(nn.Module):
    """A convolution with running statistics, and a layer that one sample alone breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.cut, self.flat_norm, self.head = varuna.CutPoint(), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.cut(F.relu(self.norm(self.conv(images))))
        return self.head(self.flat_norm(x.mean((2, 3)))).mean()


def text(num_samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randint(VOCAB, (num_samples, TIME), generator=generator) for name in ("tokens", "labels")
    }


def images(num_samples: int) -> dict[str, Tensor]:
    return {"images": torch.randn(num_samples, 3, 8, 8, generator=torch.Generator().manual_seed(1))}


def request_for(model: nn.Module, batch: dict[str, Tensor], **changes: Any) -> MeasureRequest:
    autocast = changes.pop("autocast", AutocastSpec(device_type="cpu"))
    partitions = Partitions(model, signature_of(batch, 2), PartitionOptions(autocast=autocast), CPU)
    plain = MeasureRequest(
        model=model,
        partitions=partitions,
        autocast=autocast,
        seed=0,
        device=CPU,
        init_weights=None,
        example=flatten_batch(batch).tensors,
        batch_size=8,
        memory_bytes=2**30,
        budget_s=2.0,
    )
    return replace(plain, **changes)


def test_sections_that_do_the_same_are_of_one_kind() -> None:
    request = request_for(Tagger(), text(2))
    assert kinds_of(request.partitions.reference) == (0, 1, 1, 2)  # embedding and block, blocks, head
    wider = Tagger()
    wider.blocks[1] = Block()
    wider.blocks[1].up.bias.requires_grad_(False)
    assert kinds_of(request_for(wider, text(2)).partitions.reference) == (0, 1, 2, 3)


@pytest.fixture(scope="module")
def measured() -> list[KindCosts]:
    torch.manual_seed(0)
    return measure_sections(request_for(Tagger(), text(2), micro_batch_sizes=(1, 2, 4, 8)))


def test_every_size_and_kind_has_costs(measured: list[KindCosts]) -> None:
    assert [found.kind for found in measured] == [0, 1, 2]
    for found in measured:
        assert [costs.micro_batch_size for costs in found.costs] == [1, 2, 4, 8]
        for costs in found.costs:
            assert costs.forward_s > 0
            assert costs.backward_s > costs.weight_s > 0
            assert costs.recompute_s == costs.forward_s  # no buffers: the same work


def test_where_there_is_time_all_sizes_are_timed_again_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []
    time_once = SizeRun.time_once

    def noted(run: SizeRun, *, split: bool) -> None:
        timed.append(run.batch.num_samples)
        time_once(run, split=split)

    monkeypatch.setattr(SizeRun, "time_once", noted)
    measure_sections(request_for(Tagger(), text(2), micro_batch_sizes=(1, 4), again=0.0))
    assert timed == sorted(timed)
    timed.clear()
    measure_sections(request_for(Tagger(), text(2), micro_batch_sizes=(1, 4), again=3.0))
    assert timed[-4:] == [1, 4, 1, 4]


def test_bytes_of_a_block_are_those_that_its_backward_needs(measured: list[KindCosts]) -> None:
    for costs in measured[1].costs:
        tokens = costs.micro_batch_size * TIME
        # the hidden layer before and after gelu, dropout's factors, the output; not the block's input
        hidden, row = 4 * 4 * WIDTH, 4 * WIDTH
        assert costs.activation_bytes == tokens * (2 * hidden + 2 * row)
        assert costs.output_bytes == costs.gradient_bytes == tokens * row


def test_twice_the_samples_keep_twice_the_bytes(measured: list[KindCosts]) -> None:
    for found in measured:
        for smaller, larger in zip(found.costs, found.costs[1:], strict=False):
            assert larger.activation_bytes == pytest.approx(2 * smaller.activation_bytes, rel=0.05)
            assert larger.output_bytes == 2 * smaller.output_bytes
            assert larger.weight_bytes == pytest.approx(2 * smaller.weight_bytes, rel=0.05)


def test_nothing_crosses_a_cut_after_the_last_section(measured: list[KindCosts]) -> None:
    assert {costs.output_bytes for costs in measured[2].costs} == {0}
    assert {costs.gradient_bytes for costs in measured[2].costs} == {0}


def test_half_precision_sends_half_the_bytes() -> None:
    half = AutocastSpec(device_type="cpu", dtype=torch.bfloat16)
    sizes = {
        name: measure_sections(request_for(Head(), floats(2), micro_batch_sizes=(2,), autocast=autocast))
        for name, autocast in (("fp32", AutocastSpec(device_type="cpu")), ("bf16", half))
    }
    assert sizes["fp32"][0].costs[0].output_bytes == 2 * sizes["bf16"][0].costs[0].output_bytes


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.cut, self.second = nn.Linear(WIDTH, WIDTH), varuna.CutPoint(), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.cut(self.first(x))).mean()


def floats(num_samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(num_samples, WIDTH)}


def test_sections_are_measured_one_by_one_where_the_whole_does_not_fit() -> None:
    whole = measure_sections(request_for(Tagger(), text(2), micro_batch_sizes=(2,)))
    parts = [
        measure_sections(
            request_for(
                Tagger(), text(2), micro_batch_sizes=(2,), memory_bytes=1000, share_index=index, num_shares=2
            )
        )
        for index in range(2)
    ]
    assert [[found.kind for found in part] for part in parts] == [[0, 2], [1]]
    for alone, among in zip(sorted([*parts[0], *parts[1]], key=lambda found: found.kind), whole, strict=True):
        assert alone.costs[0].activation_bytes == among.costs[0].activation_bytes
        assert alone.costs[0].output_bytes == among.costs[0].output_bytes


def test_a_model_without_storage_is_measured_and_has_none_afterwards() -> None:
    with torch.device("meta"):
        model = Tagger()
    found = measure_sections(request_for(model, text(2), micro_batch_sizes=(2,)))
    assert [len(kind.costs) for kind in found] == [1, 1, 1]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_more_workers_than_kinds_measure_some_kinds_twice() -> None:
    shares = [
        [
            found.kind
            for found in measure_sections(
                request_for(
                    Tagger(), text(2), micro_batch_sizes=(1,), memory_bytes=1, share_index=index, num_shares=5
                )
            )
        ]
        for index in range(5)
    ]
    assert shares == [[0], [1], [2], [0], [1]]


def test_sizes_stop_at_the_global_batch_and_at_the_memory() -> None:
    found = measure_sections(request_for(Tagger(), text(2), batch_size=3))
    assert {costs.micro_batch_size for kind in found for costs in kind.costs} == {1, 2}
    little = measure_sections(request_for(Tagger(num_blocks=1), text(2), batch_size=64, memory_bytes=150_000))
    sizes = {costs.micro_batch_size for kind in little for costs in kind.costs}
    assert 1 in sizes
    assert max(sizes) < 64


def test_one_sample_that_is_too_few_is_left_out() -> None:
    found = measure_sections(opaque_request(Norms(), images(2), "flat_norm", (1, 2, 4)))
    assert [[costs.micro_batch_size for costs in kind.costs] for kind in found] == [[2, 4], [2, 4]]
    assert all(costs.recompute_s > 0 for kind in found for costs in kind.costs)


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ValueError("no gradient today")


class Opaque(nn.Module):
    """State of its own in Python, random numbers, a buffer; in backward it may break."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks
        self.num_calls = 0
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        with torch.no_grad():
            self.total += x.sum()
        x = x * self.scale * torch.rand_like(x)
        return Breaks.apply(x) if self.breaks else x  # type: ignore[no-untyped-call, no-any-return]


class Stateful(nn.Module):
    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.first, self.odd, self.cut = nn.Linear(WIDTH, WIDTH), Opaque(breaks), varuna.CutPoint()
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.cut(self.odd(self.first(x))))).mean()


def opaque_request(
    model: nn.Module, batch: dict[str, Tensor], opaque: str, sizes: tuple[int, ...], **changes: Any
) -> MeasureRequest:
    request = request_for(model, batch, micro_batch_sizes=sizes, **changes)
    options = PartitionOptions(autocast=request.autocast, opaque=(opaque,))
    return replace(request, partitions=Partitions(model, request.partitions.signature, options, CPU))


def everything_of(model: nn.Module) -> dict[str, Any]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state: dict[str, Any] = {name: value.detach().clone() for name, value in named.items()}
    state |= {f"{name}.grad": p.grad for name, p in model.named_parameters()}
    state |= {f"{name} is": id(value) for name, value in named.items()}
    return state


@pytest.mark.parametrize("memory_bytes", [2**30, 1], ids=["whole", "section by section"])
def test_nothing_is_left_behind(memory_bytes: int) -> None:
    model = Stateful()
    request = opaque_request(model, floats(2), "odd", (2, 4), memory_bytes=memory_bytes)
    assert request.partitions.reference.sections
    model.first.weight.grad = torch.full_like(model.first.weight, 3.0)
    model.odd.num_calls = 7
    before, calls = everything_of(model), model.odd.num_calls
    generators = (torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False))
    found = measure_sections(request)
    assert [len(kind.costs) for kind in found] == [2, 2]
    after = everything_of(model)
    assert after.keys() == before.keys()
    for name, value in before.items():
        same = torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name]
        assert same, name
    assert model.odd.num_calls == calls
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert np.array_equal(np.random.get_state(legacy=False)["state"]["key"], generators[2]["state"]["key"])


def test_what_the_model_raises_is_told_and_leaves_nothing_behind() -> None:
    model = Stateful(breaks=True)
    request = opaque_request(model, floats(2), "odd", (2, 4))
    before = everything_of(model)
    with pytest.raises(WorkerFailed, match=r"ValueError .*micro-batches of 2: no gradient today"):
        measure_sections(request)
    after = everything_of(model)
    assert all(
        torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name]
        for name, value in before.items()
    )


# --- update, memory, engine -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (lambda parameters: torch.optim.SGD(parameters, lr=1.0), 0),
        (lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.9), 1),
        (torch.optim.AdamW, 2),
        (lambda parameters: torch.optim.Adam(parameters, amsgrad=True), 3),
    ],
    ids=["sgd", "momentum", "adamw", "amsgrad"],
)
def test_optimizer_state_in_copies_of_the_parameters(make: Any, copies: int) -> None:
    model = Tagger()
    model.blocks[0].up.bias.requires_grad_(False)
    optimizer = make(model.parameters())
    section = request_for(model, text(2)).partitions.reference.sections[0]
    trained = sum(p.nbytes for p in section.parameters.values() if p.requires_grad)
    seconds, state_bytes = UpdateMeasure(optimizer, CPU).section(section)
    assert seconds > 0
    assert state_bytes == pytest.approx(copies * trained, rel=0.01)
    assert not optimizer.state


class Wants(torch.optim.SGD):
    def __init__(self, parameters: Any, *, secret: str) -> None:
        super().__init__(parameters, lr=1.0)


def test_an_optimizer_that_cannot_be_made_again_is_guessed_and_noted() -> None:
    model = Tagger()
    measure = UpdateMeasure(Wants(model.parameters(), secret="x"), CPU)
    section = request_for(model, text(2)).partitions.reference.sections[0]
    _, state_bytes = measure.section(section)
    assert state_bytes == 2 * section.spec.parameter_bytes
    assert ["Wants" in note and "secret" in note for note in measure.notes] == [True]


def test_options_that_change_costs_change_the_text() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    plain = options_text(torch.optim.SGD(parameters, lr=1.0))
    assert options_text(torch.optim.SGD(parameters, lr=0.5)) == plain
    assert options_text(torch.optim.SGD(parameters, lr=1.0, momentum=0.9)) != plain
    assert options_text(torch.optim.AdamW(parameters)) != plain


def test_the_peak_counts_from_its_reset() -> None:
    large = torch.ones(96 << 20, dtype=torch.uint8)
    del large
    return_memory()  # what was freed, and is still resident, would hide what comes
    assert reset_peak_memory(CPU)
    before = peak_memory_bytes(CPU)
    held = torch.ones(48 << 20, dtype=torch.uint8)
    assert 46 << 20 < peak_memory_bytes(CPU) - before < 56 << 20
    del held
    peak = Peak(CPU)
    held = torch.ones(48 << 20, dtype=torch.uint8)
    del held
    assert 46 << 20 < peak.beyond_start() < 56 << 20


def test_the_engine_takes_some_time_per_task() -> None:
    assert 0 < task_overhead_s() < 0.1
