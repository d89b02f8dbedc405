"""Several jobs in one script, and modules that watch their weights, on several workers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import varuna
from tests.cases.jobs import run_workers


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.lstm, self.last = nn.Linear(4, width), nn.LSTM(width, width), nn.Linear(width, 1)
        self.cut = varuna.CutPoint()

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(self.cut(self.first(x)))
        return self.last(h).pow(2).mean()


def body(num_stages: int) -> list[list[float]]:
    losses = []
    data = torch.randn(20, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for width, batch_size in ((4, 8), (6, 12), (4, 8)):
        torch.manual_seed(0)
        model = Recurrent(width).double()
        job = varuna.Varuna(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            data,
            batch_size=batch_size,
            progress=False,
            device="cpu",
            layout=varuna.Layout(num_stages=num_stages, micro_batch_size=2),
        )
        losses.append([step.loss for step in job.train(2)])
        assert job.full_state_dict().keys() == (model.state_dict().keys() if job.rank == 0 else set())
    return losses


def test_jobs_in_turn_give_what_each_gives_alone() -> None:
    alone = run_workers(1, body, 1)[0]
    assert alone[0] == alone[2] != alone[1]
    for num_stages in (1, 2):
        for found in run_workers(2, body, num_stages):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(alone), rtol=1e-12, atol=0)
