"""A machine whose cable is pulled: a network namespace, and the link to it goes down."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import Start
from tests.e2e.morphing import NUM_STEPS
from tests.e2e.namespace import Namespace, namespace


@pytest.fixture
def apart() -> Iterator[Namespace]:
    with namespace() as made:
        yield made


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.parametrize("worker", [2, 0])
def test_a_machine_is_cut_off(start: Start, apart: Namespace, worker: int) -> None:
    """In the middle of training; its processes live on, until the launcher is told to kill them."""
    run = start(
        script="apart.py", arguments=(str(worker), apart.name), environ={"VARUNA_HEARTBEAT_S": "3"}, limit=20
    )
    run.steps_done(8)
    apart.unplug()
    assert run.worker(worker).is_running()
    run.limit(NUM_STEPS)
    run.event("fenced", "no sign of life for ")
    run.ends_well()
    assert len(run.steps(worker)) < NUM_STEPS
    assert len(run.steps(1)) == NUM_STEPS
    run.is_exact()
