"""One compute thread, as workers have."""

import torch

torch.set_num_threads(1)
