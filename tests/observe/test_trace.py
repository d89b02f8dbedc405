"""Trace files: what is in them, and that simulated and real ones speak of the same things."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import varuna
from tests.cases.jobs import run_workers
from tests.observe.support import step, two_sections, two_stages, worker
from varuna.cli import main
from varuna.errors import ConfigError
from varuna.events import Event, Notice
from varuna.observe.predicted import predicted_traces
from varuna.observe.timeline import render_timeline
from varuna.observe.trace import encode_trace, read_trace, save_trace, write_trace
from varuna.plan.cluster import Cluster
from varuna.plan.predict import predict
from varuna.plan.spans import WorkerTrace

TWO = (
    worker(3, 0, step([("F12", 0.0, 0.1), ("R12", 0.2, 0.3), ("B12", 0.3, 0.5)], started_s=7.0, end_s=0.8)),
    worker(4, None, step([], started_s=7.25, end_s=0.55)),
)


def events_of(data: bytes) -> list[dict[str, Any]]:
    return list(json.loads(data)["traceEvents"])


def test_events_have_what_viewers_need() -> None:
    events = events_of(encode_trace(TWO))
    named = {event["args"]["name"] for event in events if event["name"] in ("process_name", "thread_name")}
    assert named == {"worker 3 · pipeline 0 stage 0", "worker 4 · spare", "compute", "communication"}
    spans = [event for event in events if event["ph"] == "X"]
    assert spans[1] == {
        "name": "R12", "cat": "recompute", "ph": "X", "ts": 200_000.0, "dur": 100_000.0, "pid": 4, "tid": 41,
        "args": {"step": 0},
    }  # fmt: skip
    assert [(event["name"], event["tid"]) for event in spans[3:6]] == [
        ("reduce", 42),
        ("commit", 42),
        ("update", 41),
    ]
    assert min(event["ts"] for event in spans if event["pid"] == 5) == 250_000.0
    assert len({(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}) == 4
    assert len({event["tid"] for event in events if event["name"] == "thread_name"}) == 4


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    write_trace(path, TWO, {"source": "a test"})
    assert json.loads(path.read_text())["otherData"] == {"source": "a test"}
    read = read_trace(path)
    assert [trace.position for trace in read] == [trace.position for trace in TWO]
    assert render_timeline(read, width=99) == render_timeline(TWO, width=99)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", r"line 1, column 2 .* cut short"),
        ("[]", "its values are of other kinds"),
        ("{}", "there is no 'traceEvents' where a trace has one"),
        ('{"traceEvents": [{"ph": "X", "name": "F0"}]}', "there is no 'pid'"),
    ],
    ids=["cut", "list", "empty", "odd"],
)
def test_other_files_are_no_traces(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"other\.json is not a trace of Varuna's: .*{why}"):
        read_trace(path)


def test_a_file_that_cannot_be_written_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    told = save_trace(str(tmp_path / "missing" / "trace.json"), TWO, clock_accuracy_s=0.0)
    assert told.startswith("Cannot write the trace")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="Is a directory"):
        write_trace(tmp_path / "folder", TWO)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    with pytest.raises(ConfigError, match="Cannot read the trace"):
        read_trace(tmp_path / "missing.json")


# --- simulated ------------------------------------------------------------------------------


def test_a_predicted_step_ends_when_the_prediction_says() -> None:
    plan, profile = two_stages(num_workers=3), two_sections()
    prediction = predict(plan, profile, Cluster.parse("1x3"), record=True)
    traces = predicted_traces(prediction, plan, profile)
    assert [trace.worker_index for trace in traces] == [0, 1, 2]
    ends = [max(span.end_s for span in trace.steps[0].all_spans()) for trace in traces]
    assert max(ends) == pytest.approx(prediction.step_s)
    check_workers(traces[:2], num_micro_batches=4)
    assert names_of(traces[2:]) == {"commit", "update"}


# --- real -----------------------------------------------------------------------------------


class Two(nn.Module):
    """Two linear layers with a cut between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cut, self.last = nn.Linear(8, 8), varuna.CutPoint(), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cut(self.first(x))).pow(2).mean()


def train(path: str, steps: str, calls: tuple[int, ...]) -> list[str]:
    """Trains on this worker, 4 micro-batches of 2; returns what worker 0 had to say of traces."""
    os.environ.update(VARUNA_TRACE=path, VARUNA_TRACE_STEPS=steps)
    told: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Notice):
            told.append(event.text)

    torch.manual_seed(0)
    model = Two()
    job = varuna.Varuna(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.randn(32, 8, generator=torch.Generator().manual_seed(1)),
        batch_size=8,
        progress=listen,
        device="cpu",
        layout=varuna.Layout(num_stages=2, micro_batch_size=2, recompute=True),
    )
    for num_steps in calls:
        for _ in job.train(num_steps):
            pass
    job.close()
    return [text for text in told if path in text]


def test_a_real_run_leaves_one_trace_of_all_workers_with_the_names_of_a_simulated_one(tmp_path: Path) -> None:
    path = tmp_path / "real.json"
    told, silent = run_workers(2, train, str(path), "1:3", (2, 3))
    assert len(told) == 2  # after the first call with one step, after step 2 with both
    assert "2 workers did in step 1:" in told[0]
    assert "2 workers did in steps 1 to 2:" in told[1]
    assert not silent
    traces = read_trace(path)
    assert [[step.step_index for step in trace.steps] for trace in traces] == [[1, 2], [1, 2]]
    check_workers(traces, num_micro_batches=4)

    plan, profile = two_stages(), two_sections()
    prediction = predict(plan, profile, Cluster.parse("1x2"), record=True)
    simulated = predicted_traces(prediction, plan, profile)
    check_workers(simulated, num_micro_batches=4)
    assert names_of(simulated) == names_of(traces)
    assert labels(encode_trace(simulated)) == labels(path.read_bytes())
    result = CliRunner().invoke(main, ["timeline", str(path), "--step", "2"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("step 2: ")


def test_a_run_too_short_for_its_trace_says_so(tmp_path: Path) -> None:
    path = tmp_path / "real.json"
    told, _ = run_workers(2, train, str(path), "5:8", (2,))
    assert told == [f"{path} is not written: no step to trace was run."]
    assert not path.exists()


def names_of(traces: Iterable[WorkerTrace]) -> set[str]:
    return {span.name for trace in traces for step in trace.steps for span in step.all_spans()}


def labels(data: bytes) -> set[tuple[str, str, str]]:
    """What a viewer shows: process, name and category of every span, names of threads."""
    events = events_of(data)
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    spans = {(processes[e["pid"]], e["name"], e["cat"]) for e in events if e["ph"] == "X"}
    return spans | {(processes[e["pid"]], e["args"]["name"], "") for e in events if e["name"] == "thread_name"}


def check_workers(traces: Iterable[WorkerTrace], num_micro_batches: int) -> None:
    """Two stages, of which the first recomputes: all tasks there, in an order that can be."""
    by_stage = {}
    for trace in traces:
        assert trace.position is not None
        for done in trace.steps:
            start_of = {span.name: span.start_s + done.started_s for span in done.all_spans()}
            end_of = {span.name: span.end_s + done.started_s for span in done.all_spans()}
            kinds = "FRB" if trace.position.stage_index == 0 else "FB"
            tasks = {f"{kind}{index}" for kind in kinds for index in range(num_micro_batches)}
            assert set(end_of) == tasks | {"reduce", "commit", "update"}
            assert all(start_of[name] <= end_of[name] for name in end_of)
            order = [span.task for span in done.tasks]
            for before, after in zip(done.tasks, done.tasks[1:], strict=False):
                assert before.end_s <= after.start_s, f"{before} and {after} overlap"
            for index in range(num_micro_batches):
                chain = [f"{kind}{index}" for kind in kinds]
                assert [str(task) for task in order if task.micro_batch_index == index] == chain
            last = str(order[-1])
            for earlier, later in ((last, "reduce"), ("reduce", "commit"), ("commit", "update")):
                assert end_of[earlier] <= start_of[later], f"{earlier} before {later}"
            by_stage[trace.position.stage_index, done.step_index] = start_of
    for (stage_index, step_index), start_of in by_stage.items():
        if stage_index > 0:
            before = by_stage[stage_index - 1, step_index]
            for index in range(num_micro_batches):
                assert before[f"F{index}"] < start_of[f"F{index}"]  # a span ends after its message has left
                assert start_of[f"B{index}"] < before[f"B{index}"]
