"""What a user may get wrong, and what they are told: the error's class, the values, and what to do.

Everything runs in this process, on one worker, but for workers that differ.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import Store
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset

import varuna
from varuna.testing.forked import run_forked

BATCH_SIZE = 4
SAMPLES = [(torch.full((4,), index / 16), torch.tensor(index / 16)) for index in range(16)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No captures of other tests, no world around this process."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VARUNA_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


class Net(nn.Module):
    """Two layers with a cut between them; the mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.cut = nn.Linear(4, 4), nn.Linear(4, 1), varuna.CutPoint()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.b(self.cut(torch.tanh(self.a(x))))[:, 0] - y).square().mean()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.loss(x, y)


def make_job(model: Any = None, dataset: Any = SAMPLES, **arguments: Any) -> varuna.Varuna:
    """A job of one worker on ``Net``; ``optimizer`` may be a function of the model."""
    model = Net() if model is None else model
    optimizer = arguments.pop("optimizer", None)
    if optimizer is None:
        optimizer = torch.optim.SGD((model if isinstance(model, nn.Module) else Net()).parameters(), lr=0.1)
    elif callable(optimizer) and not isinstance(optimizer, type):
        optimizer = optimizer(model)
    batch_size = arguments.pop("batch_size", BATCH_SIZE)
    return varuna.Varuna(model, optimizer, dataset, batch_size, progress=False, **arguments)


def run_job(model: Any = None, dataset: Any = SAMPLES, **arguments: Any) -> None:
    """One step of such a job."""
    with make_job(model, dataset, **arguments) as job:
        list(job.train(1))


def refused(kind: type[Exception], *told: str) -> Any:
    """That exactly this class is raised, with these pieces in its message, in order."""
    pattern = ".*".join(re.escape(part) for part in told)
    return pytest.raises(kind, match=f"(?s){pattern}", check=lambda error: type(error) is kind)


# --- arguments ------------------------------------------------------------------------------

ARGUMENTS = [
    ({"precision": "fp8"}, varuna.ConfigError, ("precision='fp8'", "Choose one of 'fp32', 'bf16', 'fp16'")),
    ({"clip_grad_norm": 0}, varuna.ConfigError, ("clip_grad_norm=0;", "above 0, or None")),
    ({"clip_grad_norm": "1"}, varuna.ConfigError, ("clip_grad_norm='1';", "must be a number above 0")),
    ({"clip_grad_norm": float("nan")}, varuna.ConfigError, ("clip_grad_norm=nan;",)),
    ({"batch_size": 0}, varuna.ConfigError, ("batch_size=0;", "a whole number of samples, at least 1")),
    ({"batch_size": True}, varuna.ConfigError, ("batch_size=True;",)),
    ({"batch_size": 2.5}, varuna.ConfigError, ("batch_size=2.5;",)),
    ({"batch_size": None}, varuna.ConfigError, ("batch_size=None;",)),
    ({"seed": "a"}, varuna.ConfigError, ("seed='a'; it must be a whole number",)),
    ({"device": "gpu"}, varuna.ConfigError, ("device='gpu' is no device. Give 'cpu'",)),
    ({"device": "cuda:99"}, varuna.ConfigError, ("device='cuda:99', but this process sees", "CUDA_VISIBLE")),
    ({"device": "meta"}, varuna.ConfigError, ("device='meta'; workers compute on 'cpu' or 'cuda'",)),
    ({"collate_fn": 3}, varuna.ConfigError, ("collate_fn=3; it must be a function",)),
    ({"loss_fn": "mse"}, varuna.ConfigError, ("loss_fn='mse'; it must be a function",)),
    ({"layout": {"num_stages": 2}}, varuna.ConfigError, ("layout={'num_stages': 2};", "varuna.Layout(num_st")),
    ({"cut_points": "a"}, varuna.ConfigError, ("cut_points='a';", "a list of module names")),
    ({"opaque": "a"}, varuna.ConfigError, ("opaque='a';", "a list of module names")),
    ({"lr_scheduler": 3}, varuna.ConfigError, ("lr_scheduler=3 has no step()",)),
    ({"model": "net"}, varuna.UserError, ("The model is a str; it must be an nn.Module",)),
    ({"model": [1, 2]}, varuna.UserError, ("The model is a list; it must be an nn.Module, or a list of",)),
]


@pytest.mark.parametrize(("arguments", "kind", "told"), ARGUMENTS, ids=[str(case[0]) for case in ARGUMENTS])
def test_an_argument(arguments: dict[str, Any], kind: type[Exception], told: tuple[str, ...]) -> None:
    with refused(kind, *told):
        make_job(**arguments)


def test_no_such_layout() -> None:
    known = "Known schedules: varuna, 1f1b, gpipe, zero-bubble."
    with refused(varuna.ConfigError, "Unknown schedule 'zb'.", known):
        varuna.Layout(schedule="zb")
    with refused(varuna.ConfigError, "The number of stages is 0; it must be at least 1."):
        varuna.Layout(num_stages=0)


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK"])
def test_a_rank_without_a_world(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "0")
    with refused(varuna.ConfigError, f"{name}=0", "not", "WORLD_SIZE", "varuna run --workers"):
        make_job()


def test_numbers_given_later() -> None:
    with make_job() as job:
        for num_steps in (-1, 2.5, "3", True):
            with refused(varuna.ConfigError, f"num_steps={num_steps!r}; it must be a whole number of steps"):
                job.train(num_steps)  # type: ignore[arg-type]
        for batch_size in (0, -1, True):
            with refused(varuna.ConfigError, f"batch_size={batch_size!r};"):
                job.evaluate(SAMPLES, batch_size)
        with refused(varuna.DataError, "The dataset (list) is empty."):
            job.evaluate([])
        assert [step.index for step in job.train(1)] == [0]  # nothing of that broke the job


# --- optimizers -----------------------------------------------------------------------------


def without_parameters(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["params"] = []
    return optimizer


OPTIMIZERS: list[tuple[str, Callable[[nn.Module], Any], tuple[str, ...]]] = [
    ("lbfgs", lambda model: torch.optim.LBFGS(model.parameters()), ("LBFGS.step needs a closure", "AdamW")),
    (
        "foreign",
        lambda model: torch.optim.SGD(Net().parameters(), lr=0.1),
        (
            "Parameter 0 (shape [4, 4]) of the optimizer's group 0 is not a parameter of the model.",
            "from model",
        ),
    ),
    ("empty", without_parameters, ("The optimizer (SGD) has no parameters.", "model.parameters()")),
    ("list", lambda model: [model], ("optimizer is a list, not a torch.optim.Optimizer",)),
]


@pytest.mark.parametrize(
    ("optimizer", "told"), [case[1:] for case in OPTIMIZERS], ids=[c[0] for c in OPTIMIZERS]
)
def test_an_optimizer(optimizer: Callable[[nn.Module], Any], told: tuple[str, ...]) -> None:
    with refused(varuna.OptimizerError, *told):
        make_job(optimizer=optimizer)


def test_a_scheduler_of_another_optimizer() -> None:
    other = StepLR(torch.optim.SGD(Net().parameters(), lr=0.1), 1)
    with refused(varuna.OptimizerError, "scheduler (StepLR) was made for another optimizer"):
        make_job(lr_scheduler=other)


# --- layouts and cut points -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        (
            {"num_stages": 3},
            ("3 stages need at least 3 sections, but the model has 2.", "mark more cut points"),
        ),
        ({"num_stages": 2}, ("2 stages need at least 2 workers, but there are 1.", "start more workers")),
        ({"micro_batch_size": 8}, ("batch of 4 samples cannot be cut into micro-batches of 8.", "from 1 to 4")),
    ],
    ids=["stages over sections", "stages over workers", "micro-batch over batch"],
)
def test_a_layout_that_does_not_fit(layout: dict[str, int], told: tuple[str, ...]) -> None:
    with refused(varuna.PlanError, *told):
        run_job(layout=varuna.Layout(**layout))


class Twice(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.cut(x), y)


@pytest.mark.parametrize(
    ("arguments", "kind", "told"),
    [
        ({"model": Twice}, varuna.CutPointError, ("The CutPoint 'cut' is called twice in one", "of its own")),
        ({"cut_points": ["c.0"]}, varuna.CutPointError, ("cut_points names 'c.0', which is no module",)),
        ({"cut_points": ["cut"]}, varuna.CutPointError, ("cut_points names 'cut', but forward computes not",)),
        ({"opaque": ["c.0"]}, varuna.CaptureError, ("opaque='c.0': the model has no such module",)),
    ],
    ids=["twice", "unknown", "nothing there", "unknown opaque"],
)
def test_a_cut_point(arguments: dict[str, Any], kind: type[Exception], told: tuple[str, ...]) -> None:
    model = arguments.get("model", Net)()
    with refused(kind, *told):
        run_job(**{**arguments, "model": model})


# --- data -----------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(SAMPLES)


class Half(list[Any]):
    def __len__(self) -> int:
        return 3.5  # type: ignore[return-value]  # noqa: PLE0303


@pytest.mark.parametrize(
    ("dataset", "told"),
    [
        ([], ("The dataset (list) is empty.", "Check the path")),
        (SAMPLES[:3], ("has 3 samples, fewer than one global batch of 4.", "Use batch_size=3 or less")),
        (Stream(), ("The dataset (Stream) is an IterableDataset.", "Give a map-style dataset")),
        (iter(SAMPLES), ("The dataset (list_iterator) has no __len__.", "Give a map-style dataset")),
        (DataLoader(SAMPLES), ("A DataLoader was given", "Give its .dataset")),
        (Half(), ("len() of the dataset (Half) raised TypeError:", "a whole number")),
    ],
    ids=["empty", "short", "iterable", "iterator", "DataLoader", "half"],
)
def test_a_dataset(dataset: Any, told: tuple[str, ...]) -> None:
    with refused(varuna.DataError, *told):
        make_job(dataset=dataset)


def test_ragged_samples() -> None:
    ragged = [(torch.ones(4 + index), torch.tensor(1.0)) for index in range(16)]
    with refused(varuna.DataError, "The collate function raised RuntimeError:", "collate_fn=..."):
        run_job(dataset=ragged)


def of_the_same_size(samples: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.ones(3, 4), torch.ones(3)


@pytest.mark.parametrize(
    ("collate", "told"),
    [
        (of_the_same_size, ("no tensor with one row per sample: from 2 samples it made", "(3, 4)")),
        (
            lambda samples: (torch.ones(len(samples) + 1, 4), torch.ones(len(samples) + 1)),
            ("Tensor '0' has shape (3, 4), 3 rows for 2 samples.", "one row per sample"),
        ),
        (lambda samples: "text", ("The batch (str) has no tensor in it.", "must return tensors")),
        (lambda samples: None, ("The batch (NoneType) has no tensor in it.",)),
        (
            lambda samples: (torch.ones(len(samples), 4),),
            ("does not fit the model, whose forward takes (x", "'y'", "1 value, given by position. Let"),
        ),
        (
            lambda samples: {"x": torch.ones(len(samples), 4), "labels": torch.ones(len(samples))},
            ("does not fit the model, whose forward takes (x", "The batch has the keys x, labels. Let"),
        ),
    ],
    ids=["fixed rows", "a row too many", "text", "nothing", "a value missing", "another name"],
)
def test_a_collate_function(collate: Any, told: tuple[str, ...]) -> None:
    with refused(varuna.DataError, *told):
        run_job(collate_fn=collate)


def test_a_sample_that_raises() -> None:
    class Broken(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise OSError("disk on fire")

    with refused(varuna.DataError, "raised OSError: disk on fire for step 0", "repair that sample") as caught:
        run_job(dataset=Broken(SAMPLES))
    assert isinstance(caught.value.__cause__, OSError)


# --- losses ---------------------------------------------------------------------------------


class ReturnsRows(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.a(x).mean(1)


class ReturnsNone(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        self.loss(x, y)


class ReturnsTuple(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.loss(x, y), x


class ReturnsText(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return "loss"


class ReturnsNoLoss(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return {"logits": self.a(x)}


class ReturnsNumber(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return 3


class ReturnsDetached(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.loss(x, y).detach()


class ReturnsWeights(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return varuna.Loss(sum=self.loss(x, y), weight=x[:, 0])


class ReturnsTextWeight(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return varuna.Loss(sum=self.loss(x, y), weight="4")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (ReturnsRows, ("The loss that the model's forward returned has shape (batch,);", "with .mean()")),
        (ReturnsNone, ("forward returned None, in which no loss can be found.", "Return a scalar")),
        (ReturnsTuple, ("returned tuple(Tensor() of float32, Tensor(batch, 4) of float32), in which no loss",)),
        (ReturnsText, ("returned an object of type str, in which no loss can be found.",)),
        (ReturnsNoLoss, ("returned dict(logits: Tensor(batch, 4) of float32)", "a dict with 'loss'")),
        (ReturnsNumber, ("returned a number, in which no loss can be found.",)),
        (ReturnsDetached, ("does not depend on any trainable parameter: it was detached", "Return the loss")),
        (ReturnsWeights, ("The weight that the model's forward returned has shape (batch,);",)),
        (ReturnsTextWeight, ("varuna.Loss.weight must be a number or a tensor",)),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_forward_returns(model: type[nn.Module], told: tuple[str, ...]) -> None:
    with refused(varuna.LossError, *told):
        run_job(model())


@pytest.mark.parametrize(
    ("weight", "told"),
    [
        (None, "loss_weight returned None; it must return a number"),
        (torch.ones(4), "loss_weight returned a tensor of shape (4,); it must return a number"),
        (float("nan"), "the global batch's weight is nan."),
        (-1, "the global batch's weight is -4.0."),
    ],
    ids=["none", "many", "nan", "negative"],
)
def test_a_loss_weight(weight: Any, told: str) -> None:
    with refused(varuna.LossError, told):
        run_job(loss_weight=lambda batch: weight, layout=varuna.Layout(micro_batch_size=1))


def test_a_loss_that_is_not_finite_changes_no_weight() -> None:
    broken = [(torch.full((4,), float("nan")), torch.tensor(1.0))] * 16
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    job = make_job(model, broken)
    with refused(
        varuna.NonFiniteLoss,
        "Step 0: the loss is not finite (loss sum nan",
        "micro-batch 0",
        "Look for a division",
    ):
        list(job.train(1))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with refused(
        varuna.RunError, "This job cannot go on because an error ended it (NonFiniteLoss", "Make a new"
    ):
        job.train(1)


# --- forward that cannot be captured --------------------------------------------------------


class DecidesByValue(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        if x.sum() > 0:
            return self.loss(x, y)
        return self.loss(-x, y)


class CountsByValue(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        count = int(x.sum().item())
        return self.loss(x[:count], y[:count])


class LeavesTorch(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        values = y.numpy()
        return self.loss(x, torch.from_numpy(values))


class Misspells(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.loss(x.taah(), y)


@pytest.mark.parametrize(
    ("model", "why", "line"),
    [
        (DecidesByValue, "decides by the values of tensors", "if x.sum() > 0:"),
        (CountsByValue, "decides by the values of tensors", "count = int(x.sum().item())"),
        (LeavesTorch, "cannot be captured: RuntimeError: .numpy() is not supp", "values = y.numpy()"),
        (Misspells, "has no attribute 'taah'", "return self.loss(x.taah(), y)"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_the_line_that_stops_capture_is_named(model: type[nn.Module], why: str, line: str) -> None:
    number = next(
        n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.strip() == line
    )
    with refused(varuna.CaptureError, why, f", at {__file__}:{number}: `{line}`. Three ways out: (1)", "(3)"):
        run_job(model())


# --- workers that differ --------------------------------------------------------------------


def errors_of_two(make: Callable[[int], varuna.Varuna]) -> list[str]:
    """What each of two workers raised when it started the job that ``make(rank)`` gives."""

    def work(rank: int, store: Store) -> str:
        world = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
        served = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
        os.environ.update({name: str(value) for name, value in {**world, **served}.items()})
        with pytest.raises(varuna.VarunaError) as caught:
            make(rank).train(1)
        return f"{caught.type.__name__}: {caught.value}"

    outcomes = run_forked(2, work)
    assert not any(outcome.error for outcome in outcomes), outcomes
    return [str(outcome.value) for outcome in outcomes]


def test_workers_with_different_weights() -> None:
    def make(rank: int) -> varuna.Varuna:
        torch.manual_seed(rank)
        return make_job()

    first, second = errors_of_two(make)
    assert (
        "WeightsDiffer: Workers built different initial weights: worker 1 differs from worker 0 in " in second
    )
    assert "section 0 (a), section 1 (b). Seed the generators before you build the model" in second
    assert "PeerLost: " in first
    assert "Because worker 1 failed (" in first


def test_workers_with_different_models() -> None:
    class Other(Net):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return self.loss(torch.relu(x), y)

    def make(rank: int) -> varuna.Varuna:
        torch.manual_seed(0)
        return make_job(Net() if rank == 0 else Other())

    first, second = errors_of_two(make)
    assert "WeightsDiffer: The models that workers built have different graphs: worker 1 differs from" in second
    assert "Because worker 1 failed (" in first


def test_workers_with_different_data() -> None:
    def make(rank: int) -> varuna.Varuna:
        torch.manual_seed(0)
        return make_job(dataset=SAMPLES[rank:])

    first, second = errors_of_two(make)
    assert second.startswith(
        "ConfigError: Workers were given different settings: the dataset's length is 15 on wor"
    )
    assert "16 on worker 0. Every worker must run the same script on the same data." in second
    assert "Because worker 1 failed (" in first
