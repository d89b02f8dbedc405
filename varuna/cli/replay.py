"""``varuna replay``: a fleet's history, replayed against a real job on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import click

_SECONDS = click.FloatRange(min=0)


@click.command()
@click.option("--speed", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True,
              help="Seconds of the trace in a second of the job.")  # fmt: skip
@click.option("--max-workers", type=click.IntRange(min=2), default=6, show_default=True,
              help="Workers where the trace has most machines; elsewhere in proportion.")  # fmt: skip
@click.option("--min-workers", type=click.IntRange(min=1), default=1, show_default=True, help="Never fewer.")
@click.option("--from", "from_s", type=_SECONDS, default=0.0, show_default=True,
              help="Where to begin, in seconds of the trace.")  # fmt: skip
@click.option("--until", "until_s", type=_SECONDS, help="Where to end. Default: its end.")
@click.option("--notice", "notice_s", type=_SECONDS, default=0.0, show_default=True,
              help="Seconds of the job from telling a worker to killing it. 0: not told.")  # fmt: skip
@click.option("--sudden-share", type=click.FloatRange(0, 1), default=0.0, show_default=True,
              help="Share of workers that are killed without notice.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Of who that is.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures.")
@click.argument("trace", type=click.Path(dir_okay=False, path_type=Path))
@click.argument(
    "arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- [RUN OPTIONS] SCRIPT ..."
)
def replay(
    *,
    speed: float,
    max_workers: int,
    min_workers: int,
    from_s: float,
    until_s: float | None,
    notice_s: float,
    sudden_share: float,
    seed: int,
    json_path: Path | None,
    trace: Path,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT with workers that come and go as the machines of TRACE did.

    varuna replay fleet.csv --speed 60 --until 3600 -- --stages 2 train.py

    What follows -- is as for `varuna run`, but for --workers. The job is ended with the trace; a table tells
    what was trained, and what of it is missing to a job for which changes cost nothing.
    """
    import msgspec

    from varuna.plan.fleet import FleetOptions
    from varuna.plan.fleet_trace import read_trace
    from varuna.testing.replay import replay as replay_trace
    from varuna.testing.replay_report import render_replay, replay_values
    from varuna.testing.replay_schedule import scaled

    part = scaled(
        read_trace(trace),
        max_workers=max_workers,
        min_workers=min_workers,
        from_s=from_s,
        until_s=until_s,
        speed=speed,
    )
    options = FleetOptions(notice_s=notice_s, sudden_share=sudden_share, seed=seed)
    result = replay_trace(part, arguments, options, say=_say)
    click.echo()
    click.echo(render_replay(result), nl=False)
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(replay_values(result)), indent=2))


def _say(text: str) -> None:
    sys.stderr.write(f"varuna replay: {text}\n")
    sys.stderr.flush()
