"""Chains of modules that cannot be captured, lists of modules, and loss functions beside the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.partition.split_support import assert_same_step
from varuna.errors import CaptureError, CutPointError, LossError, UserError
from varuna.partition import CutPoint, partition, signature_of
from varuna.partition.modules import ModulesProgram
from varuna.partition.sequential import as_module


class Unreadable(nn.Module):
    """Cannot be captured, not even as a leaf: it passes an object of its own class on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, value: Any) -> Any:
        x = value["x"] if isinstance(value, dict) else value
        if float(x.detach().sum()) > 1e9:
            return {"x": x, "scale": 1.0, "step": torch.ones((), dtype=torch.int64)}
        return {"x": 1.0 * torch.tanh(self.linear(x)), "scale": 2.0, "step": torch.ones((), dtype=torch.int64)}


class Last(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.relu, self.linear, self.norm = (
            nn.ReLU(inplace=True),
            nn.Linear(width, classes),
            nn.BatchNorm1d(width),
        )

    def forward(self, value: dict[str, Any]) -> Tensor:
        if float(value["x"].detach().sum()) > 1e9:
            raise ValueError("too large")
        return self.linear(self.norm(self.relu(value["x"]))) * value["scale"] * value["step"]


def _chain(**options: Any) -> Any:
    """A chain's partition, made without capture."""
    from varuna.partition.sequential import partition_chain

    torch.manual_seed(0)
    model = nn.Sequential(Unreadable(4), Unreadable(4), Last(4, 3)).double()
    signature = signature_of((torch.randn(2, 4).double(), torch.tensor([0, 1])))
    return model, partition_chain(model, signature, training=True, loss_fn=F.cross_entropy, **options)


def _batch(num_samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(num_samples, 4).double(), torch.randint(0, 3, (num_samples,))


@pytest.mark.parametrize("num_samples", [3, 2, 4])
def test_every_module_is_a_section(num_samples: int) -> None:
    model, divided = _chain()
    assert [section.spec.name for section in divided.sections] == ["0", "1", "2"]
    assert [section.input_keys for section in divided.sections] == [("0",), (), ("1",)]
    first = divided.sections[0]
    assert first.sent == divided.sections[1].received
    kinds = {(spec.dtype, spec.differentiable, spec.batch_dim) for spec in first.sent}
    assert kinds == {(torch.float64, True, 0), (torch.int64, False, None)}
    assert divided.sections[2].mutated_buffers["2.norm.running_mean"].kind == "affine"
    assert_same_step(model, divided, _batch(num_samples), loss_fn=F.cross_entropy)


def test_buffers_are_preserved_on_request() -> None:
    model, divided = _chain()
    x, labels = _batch(3)
    values: tuple[Tensor, ...] = ()
    before = model[2].norm.running_mean.clone()
    for section in divided.sections:
        with section.preserve_buffers():
            values = section.run({"0": x, "1": labels}, values)
    assert torch.equal(model[2].norm.running_mean, before)


def test_named_children_and_marks_group_a_chain() -> None:
    _, divided = _chain(cut_points=["1"])
    assert [section.program.paths for section in divided.sections] == [("0", "1"), ("2",)]
    with pytest.raises(CutPointError, match=r"'1\.linear'.*0, 1, 2"):
        _chain(cut_points=["1.linear"])


def test_evaluation_holds_the_same_parameters_and_runs_in_eval_mode() -> None:
    from varuna.partition.sequential import partition_chain

    model, divided = _chain()
    evaluated = partition_chain(model, divided.signature, training=False, loss_fn=F.cross_entropy, like=divided)
    x, labels = _batch(3)
    values: tuple[Tensor, ...] = ()
    before = model[2].norm.running_mean.clone()
    for one, other in zip(evaluated.sections, divided.sections, strict=True):
        assert list(one.parameters) == list(other.parameters)
        values = one.run({"0": x, "1": labels}, values)
    assert torch.equal(model[2].norm.running_mean, before)
    assert model[2].training
    model.eval()
    torch.testing.assert_close(values[0], F.cross_entropy(model(x), labels))


def test_a_chain_on_the_meta_device_is_divided_without_its_weights() -> None:
    from varuna.partition.sequential import partition_chain

    _, divided = _chain()
    with torch.device("meta"):
        empty = nn.Sequential(Unreadable(4), Unreadable(4), Last(4, 3)).double()
    again = partition_chain(empty, divided.signature, training=True, loss_fn=F.cross_entropy)
    assert again.digest == divided.digest
    assert [section.sent for section in again.sections] == [section.sent for section in divided.sections]
    assert all(parameter.is_meta for parameter in empty.parameters())


class Turns(nn.Module):
    """Changes what it is given in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().sum()) > 1e9:
            return x
        return self.linear(x.mul_(2.0))


def test_a_module_that_changes_its_input_gets_a_copy() -> None:
    from varuna.partition.sequential import partition_chain

    model = nn.Sequential(nn.Linear(4, 4), Turns()).double()
    signature = signature_of((torch.randn(2, 4).double(), torch.randn(2, 4).double()))
    divided = partition_chain(model, signature, training=True, loss_fn=F.mse_loss)
    batch = (torch.randn(3, 4).double(), torch.randn(3, 4).double())
    assert_same_step(model, divided, batch, loss_fn=F.mse_loss)


def test_capture_is_tried_first() -> None:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 3)
    ).double()
    batch = (torch.randn(2, 8).double(), torch.tensor([0, 1]))
    divided = partition(model, batch, loss_fn=F.cross_entropy)
    assert not any(isinstance(section.program, ModulesProgram) for section in divided.sections)
    assert len(divided.sections) > 2
    assert "forward" not in model.__dict__
    assert_same_step(
        model, divided, (torch.randn(3, 8).double(), torch.tensor([0, 1, 2])), loss_fn=F.cross_entropy
    )


def test_what_cannot_be_captured_falls_back_to_its_modules() -> None:
    class Odd:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    class Wraps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            found = Odd(self.linear(x))
            return found.x if float(found.x.detach().sum()) < 1e9 else self.linear.weight[: int(found.x.sum())]

    model = nn.Sequential(Wraps(), nn.Linear(4, 3)).double()
    batch = (torch.randn(2, 4).double(), torch.tensor([0, 1]))
    divided = partition(model, batch, loss_fn=F.cross_entropy)
    assert_same_step(model, divided, batch, loss_fn=F.cross_entropy)


@pytest.mark.parametrize("names", [("input", "labels"), ("labels", "input")])
def test_a_dict_batch_goes_by_the_names_in_forward(names: tuple[str, str]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double()
    whole = {"input": torch.randn(2, 4).double(), "labels": torch.tensor([0, 1])}
    batch = {name: whole[name] for name in names}
    divided = partition(model, batch, loss_fn=F.cross_entropy, cut_points=["0"])
    assert [section.input_keys for section in divided.sections] == [("input",), ("labels",)]
    assert_same_step(model, divided, batch, loss_fn=F.cross_entropy)


def test_lists_of_modules_become_a_chain_and_nothing_else_does() -> None:
    parts = [nn.Linear(4, 4), nn.Linear(4, 4)]
    model = as_module(parts)
    assert isinstance(model, nn.Sequential)
    assert model[0] is parts[0]
    assert as_module(parts[0]) is parts[0]
    for wrong in ([], [1], "model", None):
        with pytest.raises(UserError, match=r"nn\.Module"):
            as_module(wrong)  # type: ignore[arg-type]


def test_marks_in_a_chain() -> None:
    model = nn.Sequential(nn.Linear(4, 4), CutPoint(), nn.Tanh(), nn.Linear(4, 4), CutPoint(), nn.Linear(4, 3))
    divided = partition(model, (torch.randn(2, 4), torch.tensor([0, 1])), loss_fn=F.cross_entropy)
    assert [next(iter(section.parameters)) for section in divided.sections] == [
        "0.weight",
        "3.weight",
        "5.weight",
    ]


def test_errors_of_loss_functions_and_batches() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(LossError, match="parameters of its own"):
        partition(model, (torch.randn(2, 4), torch.tensor([0, 1])), loss_fn=nn.Linear(3, 1))
    from varuna.partition.sequential import partition_chain

    with pytest.raises(UserError, match="loss_fn"):
        partition_chain(model, signature_of((torch.randn(2, 4), torch.tensor([0, 1]))), training=True)
    broken = nn.Sequential(nn.Linear(5, 3))
    with pytest.raises(CaptureError, match="Module '0'"):
        partition_chain(broken, signature_of(torch.randn(2, 4)), training=True, loss_fn=torch.sum)


def test_kept_captures_of_different_loss_functions_are_kept_apart(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    batch = (torch.randn(2, 4), torch.randn(2, 3))
    losses = [lambda output, target: (output - target).sum(), lambda output, target: (output + target).sum()]
    for loss_fn in [*losses, *losses]:
        divided = partition(model, batch, loss_fn=loss_fn, cache_dir=tmp_path)
        found = divided.sections[0].run({"0": batch[0], "1": batch[1]}, ())[0]
        torch.testing.assert_close(found, loss_fn(model(batch[0]), batch[1]))
    assert divided.from_cache
