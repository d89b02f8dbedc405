"""``varuna timeline``: a trace file, real or simulated, as text or picture. Starts without torch."""

from __future__ import annotations

from pathlib import Path

import click

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("trace", type=_FILE)
@click.option("--step", type=click.IntRange(min=0), help="Which step. Default: the first in the file.")
@click.option("--width", type=int, default=100, show_default=True, help="Columns of the timeline.")
@click.option("--picture", type=_FILE, help="Write it as a picture: .png, .svg or .pdf.")
def timeline(*, trace: Path, step: int | None, width: int, picture: Path | None) -> None:
    """Show TRACE, a file from `varuna run --trace` or `varuna simulate --chrome-trace`."""
    from varuna.observe.picture import write_picture
    from varuna.observe.timeline import render_timeline
    from varuna.observe.trace import read_trace

    workers = read_trace(trace)
    click.echo(render_timeline(workers, width=width, step_index=step), nl=False)
    if picture is not None:
        write_picture(picture, workers, title=str(trace), step_index=step)
