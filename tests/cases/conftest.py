"""One compute thread per process: workers share the cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
