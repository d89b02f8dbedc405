"""``varuna simulate``: one step of a plan, predicted, without training anything. Starts without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from varuna.cli.fleet import fleet_options, refuse_fleet_options, replay
from varuna.errors import ConfigError

if TYPE_CHECKING:
    from varuna.plan.cluster import Cluster
    from varuna.plan.predict import Prediction
    from varuna.plan.profile import Profile
    from varuna.spec import Plan

_FILE = click.Path(dir_okay=False, path_type=Path)
_NUM_RUNS_WITH_JITTER = 10
_WIDTH = 100


@click.command()
@click.argument("profile")
@click.option("--plan", "plan_path", type=_FILE, help="Plan to simulate, from `varuna plan -o`.")
@click.option("--machines", help="Such as 25x4: 25 machines of 4 workers. Default: a machine for each worker.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the delays drawn for messages.")
@click.option("--runs", type=click.IntRange(min=1), help="Steps to average. Default: 10 if times jitter.")
@click.option("--timeline", is_flag=True, help="Print what each worker does when.")
@click.option("--width", type=int, default=_WIDTH, show_default=True, help="Columns of the timeline.")
@click.option("--picture", type=_FILE, help="Write the timeline as a picture: .png, .svg or .pdf.")
@click.option("--chrome-trace", type=_FILE, help="Write the timeline as a trace for https://ui.perfetto.dev.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
@fleet_options
def simulate(
    *,
    profile: str,
    plan_path: Path | None,
    machines: str | None,
    seed: int,
    runs: int | None,
    timeline: bool,
    width: int,
    picture: Path | None,
    chrome_trace: Path | None,
    as_json: bool,
    trace: Path | None,
    **fleet: Any,
) -> None:
    """Predict a step of a plan: time, bubble, communication and memory of each stage.

    With --trace instead of --plan: replay a fleet, and tell what would have been trained at which cost.

    PROFILE is a file from `varuna profile`, or a ready one such as gpt2-2.5b@v100@10gbit.
    """
    from varuna.observe.picture import write_picture
    from varuna.observe.predicted import predicted_traces
    from varuna.observe.timeline import render_timeline
    from varuna.observe.trace import write_trace
    from varuna.plan.estimate import load_profile
    from varuna.plan.predict import predict
    from varuna.plan.profile_file import read_plan

    if trace is not None:
        if plan_path or machines or runs or timeline or chrome_trace:
            raise ConfigError(
                "--trace chooses its own plans: of the other options it takes --seed, --picture, --json."
            )
        replay(profile, trace, fleet, seed=seed, picture=picture, as_json=as_json)
        return
    refuse_fleet_options(fleet)
    if plan_path is None:
        raise ConfigError(
            "What should be simulated? Give --plan PLAN.json (`varuna plan PROFILE -o PLAN.json`), or --trace "
            "FLEET.csv."
        )
    if as_json and timeline:
        raise ConfigError("--json and --timeline both print to standard output. Give one of them.")
    numbers, plan = load_profile(profile), read_plan(plan_path)
    cluster = _cluster(machines, plan)
    prediction = predict(
        plan,
        numbers,
        cluster,
        seed=seed,
        num_runs=runs or (_NUM_RUNS_WITH_JITTER if numbers.has_jitter else 1),
        record=bool(timeline or picture or chrome_trace),
    )
    click.echo(_json(prediction) if as_json else _report(prediction, plan, numbers), nl=as_json)
    if not (timeline or picture or chrome_trace):
        return
    traces = predicted_traces(prediction, plan, numbers)
    title = f"{numbers.model} on {numbers.device}, simulated: {plan_path}"
    if timeline:
        click.echo(render_timeline(traces, width=width), nl=False)
    if picture is not None:
        write_picture(picture, traces, title=title)
    if chrome_trace is not None:
        write_trace(chrome_trace, traces, {"source": title})


def _cluster(machines: str | None, plan: Plan) -> Cluster:
    from varuna.plan.cluster import Cluster

    cluster = Cluster.parse(str(plan.num_workers) if machines is None else machines)
    if cluster.num_workers != plan.num_workers:
        raise ConfigError(
            f"The plan is for {plan.num_workers} workers, and --machines {machines} has {cluster.num_workers}. "
            f"Make a plan for these machines with `varuna plan`."
        )
    return cluster


def _json(prediction: Prediction) -> str:
    """The prediction without spans: those are what ``--chrome-trace`` is for."""
    import msgspec

    numbers = msgspec.to_builtins(prediction)
    for pipeline in numbers["pipelines"]:
        for stage in pipeline["stages"]:
            del stage["spans"]
    return msgspec.json.format(msgspec.json.encode(numbers), indent=2).decode()


def _report(prediction: Prediction, plan: Plan, profile: Profile) -> str:
    from varuna.observe.prediction_table import render_prediction

    return render_prediction(prediction, plan, profile)
