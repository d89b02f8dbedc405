"""C44, C46: what one layout wrote, any other reads, bit for bit, with all that belongs to it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.checkpoint.state import (
    NUM_SECTIONS,
    SECTION_NAMES,
    Trained,
    job_parts,
    layout,
    save,
    train,
    trained,
)
from varuna.checkpoint.errors import CheckpointError, StateError
from varuna.checkpoint.find import Checkpoint, find_checkpoint
from varuna.checkpoint.load import read_state, read_tensors
from varuna.checkpoint.options import restore_options
from varuna.checkpoint.restore import Restored, check_fits, restore
from varuna.checkpoint.store import open_store
from varuna.checkpoint.tree import tensor_names

LAYOUTS = [(1, 4), (2, 2), (4, 1), (3, 1), (1, 1)]


def newest(path) -> Checkpoint:
    found = find_checkpoint(open_store(str(path)), publish=lambda event: pytest.fail(str(event)))
    assert found is not None
    return found


def restore_all(checkpoint: Checkpoint, into: Trained, num_stages: int, num_pipelines: int) -> None:
    """Every worker of a layout reads what it holds; together they fill the model."""
    holders = layout(num_stages, num_pipelines)
    check_fits(checkpoint, into.parameters, into.buffers)
    for worker in range(num_stages * num_pipelines):
        names = {
            name for index in range(NUM_SECTIONS) if worker in holders[index] for name in SECTION_NAMES[index]
        }
        parameters = {name: p for name, p in into.parameters.items() if name in names}
        buffers = [name for name in into.buffers if name in names]
        fill(into, restore(checkpoint, parameters, buffers, optimizer=into.optimizer))
    job = checkpoint.manifest.job
    tensors = read_tensors(checkpoint, tensor_names(job.param_groups))
    restore_options(into.optimizer, into.parameters, job.param_groups, tensors)
    into.scheduler.load_state_dict(read_state(checkpoint, job.lr_scheduler, "scheduler"))
    into.num_steps = job.step


def fill(into: Trained, read: Restored) -> None:
    with torch.no_grad():
        for name, value in read.parameters.items():
            into.parameters[name].copy_(value)
            into.optimizer.state[into.parameters[name]] = read.states[name]
        for name, value in read.buffers.items():
            into.buffers[name].copy_(value)


def assert_same(left: Trained, right: Trained) -> None:
    for name, value in left.model.state_dict().items():
        assert torch.equal(value, right.model.state_dict()[name]), name
    for name, parameter in left.parameters.items():
        ours, theirs = left.optimizer.state[parameter], right.optimizer.state[right.parameters[name]]
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert torch.equal(value, theirs[key]), (name, key)
            assert value.dtype == theirs[key].dtype


@pytest.mark.parametrize("written_by", LAYOUTS)
@pytest.mark.parametrize("read_by", LAYOUTS)
def test_c44_any_layout_reads_any_other(tmp_path, written_by, read_by):
    state = trained(num_steps=3)
    save(open_store(str(tmp_path)), state, *written_by)
    other = trained(num_steps=1, seed=9)
    checkpoint = newest(tmp_path)
    restore_all(checkpoint, other, *read_by)
    assert_same(state, other)
    job = checkpoint.manifest.job
    assert (job.step, job.num_samples, job.seed, job.dataset_length) == (3, 48, 7, 1000)
    assert job.loss_scale == {"scale": 1024.0, "good_steps": 5}
    train(state, 3)
    train(other, 3)
    assert_same(state, other)  # and it goes on as if nothing had happened, learning rates included
    assert state.scheduler.get_last_lr() == other.scheduler.get_last_lr()


def test_c44_one_by_four_to_two_by_two_to_four_by_one_to_three_by_one(tmp_path):
    state, undisturbed = trained(2), trained(2)
    store = open_store(str(tmp_path))
    for num_stages, num_pipelines in [(1, 4), (2, 2), (4, 1), (3, 1)]:
        save(store, state, num_stages, num_pipelines)
        state = trained(0, seed=num_stages + 20)
        restore_all(newest(tmp_path), state, num_stages, num_pipelines)
        train(state, 2)
        train(undisturbed, 2)
    assert_same(state, undisturbed)


def test_a_tied_parameter_is_stored_once_and_every_tensor_by_one_worker(tmp_path):
    manifest = save(open_store(str(tmp_path)), trained(), 2, 2)
    names = [tensor.name for part in manifest.parts for tensor in part.tensors]
    assert len(names) == len(set(names))
    assert "parameters/first.weight" in names
    assert not any(name.startswith("parameters/fourth.weight") for name in names)
    assert len({part.file.split("-w")[1] for part in manifest.parts}) == 4, "all four workers share the work"


def test_c46_options_go_by_parameter_name_whatever_the_order_of_groups(tmp_path):
    state = trained()
    save(open_store(str(tmp_path)), state, 2, 1)
    other = trained(0, seed=4)
    groups = other.optimizer.param_groups
    for group in groups:
        group.update(lr=123.0, weight_decay=45.0)
    groups.reverse()  # another script, same parameters
    checkpoint = newest(tmp_path)
    restore_options(other.optimizer, other.parameters, checkpoint.manifest.job.param_groups, {})

    def options(trained: Trained) -> dict[str, dict[str, object]]:
        name_of = {id(p): name for name, p in trained.parameters.items()}
        return {
            name_of[id(p)]: {key: value for key, value in group.items() if key != "params"}
            for group in trained.optimizer.param_groups
            for p in group["params"]
        }

    assert options(other) == options(state)
    assert options(other)["first.weight"]["weight_decay"] == 0.1
    assert options(other)["first.bias"]["weight_decay"] == 0.0


def test_c46_groups_that_were_joined_or_grown_are_refused_and_nothing_changes():
    state = trained()
    stored = job_parts(state)[0].param_groups
    parameters = state.parameters
    joined = torch.optim.AdamW(list(parameters.values()), lr=7.0)
    with pytest.raises(StateError, match=r"'first.weight' and '\S+bias' are in one param group"):
        restore_options(joined, parameters, stored, {})
    more = {**parameters, "extra": nn.Parameter(torch.zeros(1))}
    grown = torch.optim.AdamW([{"params": [more["extra"]]}, {"params": [parameters["first.weight"]]}], lr=7.0)
    with pytest.raises(StateError, match="no options for 1 parameters of the optimizer's group 0: extra"):
        restore_options(grown, more, stored, {})
    assert [group["lr"] for group in (*joined.param_groups, *grown.param_groups)] == [7.0, 7.0, 7.0]


def test_c46_a_learning_rate_that_is_a_tensor_stays_the_same_object():
    parameter = nn.Parameter(torch.zeros(2))
    saved = torch.optim.Adam([parameter], lr=torch.tensor(0.25), capturable=True)
    from varuna.checkpoint.options import encode_options

    encoded = encode_options(saved, {"p": parameter})
    other = torch.optim.Adam([parameter], lr=torch.tensor(9.0), capturable=True)
    rate = other.param_groups[0]["lr"]
    restore_options(other, {"p": parameter}, encoded.json, encoded.tensors)
    assert other.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


class CountingOptimizer(torch.optim.Optimizer):
    """Optimizer state that is not flat: numbers, text, lists of tensors."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "betas": (0.9, 0.99), "mode": "fast"})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("count", 0)
                state["count"] += 1
                state["history"] = [p.grad.clone(), {"norm": float(p.grad.norm()), "big": 2**80}]
                p.sub_(p.grad, alpha=group["lr"])


def test_optimizer_state_that_is_no_tensor_survives(tmp_path):
    state = trained(0)
    state.optimizer = CountingOptimizer(state.model.parameters())
    state.scheduler = torch.optim.lr_scheduler.LambdaLR(state.optimizer, lambda step: 1.0)
    train(state, 2)
    before = copy.deepcopy([state.optimizer.state[p] for p in state.model.parameters()])
    save(open_store(str(tmp_path)), state, 2, 2)
    checkpoint = newest(tmp_path)
    read = restore(checkpoint, state.parameters, [], optimizer=state.optimizer)
    for (name, _), expected in zip(state.model.named_parameters(), before, strict=True):
        found = read.states[name]
        assert found["count"] == expected["count"] == 2
        assert type(found["count"]) is int
        assert torch.equal(found["history"][0], expected["history"][0])
        assert found["history"][1] == expected["history"][1]


def test_another_model_is_refused_with_every_difference(tmp_path):
    save(open_store(str(tmp_path)), trained())
    checkpoint = newest(tmp_path)
    other = trained(0, width=6)
    parameters = {**other.parameters, "new.weight": nn.Parameter(torch.zeros(3))}
    del parameters["second.bias"]
    with pytest.raises(StateError) as raised:
        check_fits(checkpoint, parameters, other.buffers)
    message = str(raised.value)
    assert "the model has parameters/new.weight, the checkpoint does not" in message
    assert "the checkpoint has parameters/second.bias, the model does not" in message
    assert (
        "parameters/first.weight is float32[6, 6] in the model and float32[8, 8] in the checkpoint" in message
    )
    with pytest.raises(CheckpointError, match=r"has no parameters/new\.weight"):
        read_tensors(checkpoint, ["parameters/new.weight"])


def test_only_what_is_asked_for_is_read(tmp_path):
    """Every other part may be gone."""
    manifest = save(open_store(str(tmp_path)), trained())
    checkpoint = newest(tmp_path)
    for part in manifest.parts:
        if part.section_index != 1:
            (tmp_path / manifest.order.directory / part.file).unlink()
    state = trained()
    read = restore(
        checkpoint, {"second.weight": state.parameters["second.weight"]}, [], optimizer=state.optimizer
    )
    assert torch.equal(read.parameters["second.weight"], state.parameters["second.weight"])
    read.parameters["second.weight"].add_(1)  # memory of its own
