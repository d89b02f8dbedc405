"""A trace of seconds, replayed with a real job through the real command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.jobs import Command, Finished, wait_until, write_script

TRAIN = """
    import time
    import torch
    import varuna

    class Points(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            return {"x": torch.full((4,), float(index % 5))}

    def collate(samples):
        time.sleep(0.05)  # a step takes about as long
        return torch.utils.data.default_collate(samples)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x).square().mean()

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    job = varuna.Varuna(model, optimizer, Points(), 12, collate_fn=collate, num_data_workers=0, progress=False)
    for step in job.train(100_000):
        pass
"""
TRACE = "0,add,a\n0,add,b\n0,add,c\n60000,remove,a\n150000,add,d\n450000,remove,b\n600000,add,e\n"


@pytest.fixture
def replayed(tmp_path: Path) -> Iterator[Finished]:
    write_script(tmp_path, TRAIN)
    (tmp_path / "fleet.csv").write_text(TRACE)
    run = ["--stages", "1", "--micro-batch-size", "2", "--log-dir", "logs", "train.py"]
    options = [
        "--speed",
        "60",
        "--notice",
        "1.5",
        "--sudden-share",
        "0.5",
        "--seed",
        "1",
        "--json",
        "figures.json",
    ]
    environ = {"VARUNA_CACHE_DIR": str(tmp_path / "cache")}
    command = Command(["replay", "fleet.csv", *options, "--", *run], tmp_path, environ)
    try:
        yield command.wait(120)
        wait_until(lambda: not command.processes(), 60, "nothing of the job is left")
    finally:
        command.kill_all()


def test_a_trace_is_replayed(replayed: Finished, tmp_path: Path) -> None:
    assert replayed.code == 0, replayed.stderr
    told = [
        line.partition(": ")[2] for line in replayed.stderr.splitlines() if line.startswith("varuna replay: ")
    ]
    acts = [line.split(" s: ")[1] for line in told]
    assert acts[:3] == ["worker 0 is killed", "1 more", "worker 1 has 1.5 s left"]
    assert acts[3:] in ([], ["worker 1 is killed"])  # if it has not left by then
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["counts"] == [[0.0, 3], [1.0, 2], [2.5, 3], [7.5, 2]]
    assert figures["duration_s"] == pytest.approx(10.0)
    assert figures["num_steps"] > 5
    assert len(figures["morphs"]) >= 2
    assert len(figures["starts_s"]) == 1
    assert 0 < figures["goodput"] <= 1.05
    assert f"goodput {figures['goodput']:.1%} of" in replayed.stdout
