from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch.jobs import Command, wait_until, write_script
from varuna.morph.runs import living_runs

Launch = Callable[..., Command]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Runs `varuna run` on a script text; after the test, nothing of it may be left."""
    commands: list[Command] = []

    def start(
        script: str,
        *arguments: str,
        workers: int = 3,
        options: tuple[str, ...] = (),
        environ: dict[str, str] | None = None,
        stderr: int | None = None,
    ) -> Command:
        path = write_script(tmp_path, script)
        flags = ["run", "--workers", str(workers), "--log-dir", str(tmp_path / "logs"), *options]
        cache = {"VARUNA_CACHE_DIR": str(tmp_path / "cache")}
        command = Command([*flags, path.name, *arguments], tmp_path, {**cache, **(environ or {})}, stderr)
        commands.append(command)
        return command

    yield start
    try:
        for command in commands:
            assert command.process.returncode is not None, "the test left its command running"
            wait_until(lambda command=command: not command.processes(), 60, "processes of the job end")
        assert not living_runs(tmp_path / "cache"), "the run is still announced"
    finally:
        for command in commands:
            command.kill_all()
