"""One compute thread per process, since workers share the cores; the full product only when it is asked for."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked ``product`` unless ``-m`` is given."""
    if config.getoption("markexpr"):
        return
    left_out = [item for item in items if item.get_closest_marker("product")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("product")]
