"""A model whose weights, gradients and optimizer state do not fit one worker trains on four."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import Ended, Warm

LIMIT_MB = 600
WHOLE_MB = 4 * 256  # weights, gradients and two moments of 67 million fp32 parameters


def figures(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob("memory-*.json"))]


def megabytes(num_bytes: int) -> float:
    return num_bytes / 2**20


def report(capsys: pytest.CaptureFixture[str], title: str, workers: list[dict[str, Any]]) -> None:
    """One line per worker, past pytest's capture: the figures are the point."""
    with capsys.disabled():
        print(f"\n{title}")
        for rank, found in enumerate(workers):
            beyond = {name: megabytes(found[name] - found["at_start"]) for name in ("built", "started", "peak")}
            print(
                f"  worker {rank}: holds {megabytes(found['parameter_bytes']):.0f} of "
                f"{megabytes(found['whole_bytes']):.0f} MB of weights; beyond Python and torch: model built "
                f"{beyond['built']:.0f} MB, started {beyond['started']:.0f} MB, peak {beyond['peak']:.0f} MB "
                f"(resident peak {megabytes(found['peak']):.0f} MB)"
            )


def run(jobs: Warm, directory: Path, *arguments: str, workers: int) -> Ended:
    directory.mkdir()
    return jobs.run(directory, "memory.py", *arguments, workers=workers, stages=workers).wait()


def test_four_workers_train_what_does_not_fit_one(
    jobs: Warm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run(jobs, tmp_path / "four", "meta", str(LIMIT_MB), "1", workers=4)
    assert ended.codes == [0], ended.stderr
    workers = figures(tmp_path / "four")
    report(capsys, f"four workers, {LIMIT_MB} MB each; the whole takes {WHOLE_MB} MB and more", workers)
    assert LIMIT_MB < WHOLE_MB
    assert len(workers) == 4
    for found in workers:
        assert found["parameter_bytes"] * 4 == pytest.approx(found["whole_bytes"], rel=0.01)
        assert megabytes(found["peak"] - found["at_start"]) < LIMIT_MB
        assert found["losses"] == workers[0]["losses"]

    alone = run(jobs, tmp_path / "one", "meta", str(LIMIT_MB), "1", workers=1)
    assert alone.codes == [1]
    # whoever asks last is refused: a tensor, or the stack of a thread
    assert any(words in alone.told for words in ("can't allocate memory", "can't start new thread")), alone.told
    assert figures(tmp_path / "one") == []


def test_a_model_built_on_the_cpu_keeps_only_its_sections(
    jobs: Warm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run(jobs, tmp_path / "four", "cpu", "0", "0", workers=4)
    assert ended.codes == [0], ended.stderr
    workers = figures(tmp_path / "four")
    report(capsys, "four workers, model built on the CPU", workers)
    for found in workers:
        given_up = found["whole_bytes"] - found["parameter_bytes"]
        assert given_up > 0.7 * found["whole_bytes"]
        assert found["built"] - found["started"] > 0.7 * given_up  # a capture adds a few tens of megabytes
