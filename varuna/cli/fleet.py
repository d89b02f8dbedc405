"""``varuna profiles``, and what ``varuna simulate --trace`` does. Starts without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from varuna.errors import ConfigError, PlanError

_FILE = click.Path(dir_okay=False, path_type=Path)
_SECONDS = click.FloatRange(min=0)
_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--trace", type=_FILE, help="Replay a fleet: machines that come and go."),
    click.option("--batch-size", type=click.IntRange(min=1), help="With --trace: global batch, in samples."),
    click.option("--devices-per-machine", type=click.IntRange(min=1), help="With --trace. Default: 1."),
    click.option("--price-spot", type=_SECONDS, help="With --trace: of one machine for one hour."),
    click.option("--price-on-demand", type=_SECONDS, help="With --trace: the same, never taken away."),
    click.option("--morph-seconds", type=_SECONDS, help="With --trace: per re-plan. Default: 30, to be safe."),
    click.option("--start-seconds", type=_SECONDS, help="With --trace: of a newcomer. Default: 0."),
    click.option("--notice-seconds", type=_SECONDS, help="With --trace: before a preemption. Default: 30."),
    click.option(
        "--sudden-share",
        type=click.FloatRange(0, 1),
        help="With --trace: of preemptions without notice. Default: 0.1.",
    ),
    click.option("--checkpoint-seconds", type=_SECONDS, help="With --trace: between two. Default: 600."),
    click.option("--restore-seconds", type=_SECONDS, help="With --trace: to read one. Default: 60."),
)

_ASSUMPTIONS = {
    "morph_seconds": "morph_s",
    "start_seconds": "start_s",
    "notice_seconds": "notice_s",
    "sudden_share": "sudden_share",
    "checkpoint_seconds": "checkpoint_interval_s",
    "restore_seconds": "restore_s",
}


def fleet_options(command: _Command) -> _Command:
    """Add ``--trace`` and what belongs to it; ``refuse_fleet_options`` and ``replay`` take the values."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def refuse_fleet_options(fleet: Mapping[str, Any]) -> None:
    """Without --trace, its options mean nothing."""
    given = [f"--{name.replace('_', '-')}" for name, value in fleet.items() if value is not None]
    if given:
        raise ConfigError(f"{', '.join(given)} belong to --trace FILE, which is missing.")


def replay(
    profile_name: str,
    trace_path: Path,
    fleet: Mapping[str, Any],
    *,
    seed: int,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Replay a trace and print what came of it.

    Args:
        profile_name: file or ready profile.
        trace_path: the trace.
        fleet: values of ``fleet_options``, without the trace.
        seed: of the draw which preemptions are sudden.
        picture: where to draw it, if anywhere.
        as_json: numbers for programs.
    """
    import msgspec

    from varuna.observe.fleet_report import FleetReport, fleet_values, render_fleet
    from varuna.plan.estimate import load_profile
    from varuna.plan.fleet import FleetOptions, replay_fleet
    from varuna.plan.fleet_cost import on_demand_bill, spot_bill
    from varuna.plan.fleet_plans import FleetPlanner
    from varuna.plan.fleet_trace import read_trace

    batch_size = fleet["batch_size"]
    if batch_size is None:
        raise ConfigError("--trace needs --batch-size: samples of a global batch.")
    assumed = {field: fleet[name] for name, field in _ASSUMPTIONS.items() if fleet[name] is not None}
    options = FleetOptions(**assumed, seed=seed)
    profile = load_profile(profile_name)
    planner = FleetPlanner(profile, batch_size, fleet["devices_per_machine"] or 1)
    trace = read_trace(trace_path)
    try:
        result = replay_fleet(trace, planner, options)
    except PlanError as error:
        most = max(planner.refusals, default=None)
        raise PlanError(str(error) if most is None else f"{error} {planner.refusals[most]}") from error
    spot, on_demand = fleet["price_spot"], fleet["price_on_demand"]
    report = FleetReport(
        profile=profile,
        batch_size=batch_size,
        devices_per_machine=planner.devices_per_machine,
        options=options,
        result=result,
        spot=None if spot is None else spot_bill(result, spot),
        on_demand=None if on_demand is None else on_demand_bill(result, planner, on_demand),
    )
    if picture is not None:
        from varuna.observe.fleet_picture import write_fleet_picture

        write_fleet_picture(picture, result, title=f"{profile.model} on {profile.device}, {result.trace}")
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(fleet_values(report)), indent=2).decode())
    else:
        click.echo(render_fleet(report), nl=False)


@click.command()
def profiles() -> None:
    """List the ready profiles: models, devices and networks that can be planned for without measuring."""
    from varuna.plan.estimate_devices import ALIASES, DEVICES, NETWORKS
    from varuna.plan.estimate_models import MODELS

    click.echo(
        "Write MODEL@DEVICE or MODEL@DEVICE@NETWORK, such as gpt2-2.5b@v100@10gbit, where a profile is asked"
    )
    click.echo("for. These are estimates from architecture and data sheets: nothing was measured.\n")
    short = {full: f" (or {name})" for name, full in ALIASES.items()}
    for shape in MODELS.values():
        click.echo(
            f"  {shape.name:<12} {shape.num_parameters / 1e6:>9,.0f} M parameters, hidden {shape.hidden}, "
            f"{shape.num_layers} layers, {shape.num_heads} heads, {shape.sequence} tokens"
        )
    click.echo()
    for device in DEVICES.values():
        click.echo(f"  {device.name:<12} {device.title}{short.get(device.name, '')}")
    click.echo()
    click.echo(f"  {', '.join(NETWORKS)} (of one machine; without a network: 10gbit)")
