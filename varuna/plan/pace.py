"""How fast a device computes differs from step to step: other tenants, other processes, heat.

A device keeps a pace for a while, on its own: ``Profile.compute_jitter`` says how far paces lie apart and
``compute_jitter_s`` for how long one lasts. What takes longer than that sees several, which average out. So two
replicas wait for the slower of them in every step, and a pipeline for its slowest stage.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from varuna.plan.kernel import Floats
from varuna.plan.profile import Profile


class Draw(NamedTuple):
    """Which of the possible steps: the same numbers draw the same.

    Attributes:
        seed: of all that is drawn.
        run, num_runs: this step among those that a prediction is the mean of.
        pipeline: which, so that pipelines that are alike have each their own.
    """

    seed: int
    run: int
    num_runs: int
    pipeline: int


def drawn_paces(profile: Profile, busy_s: Floats, draw: Draw) -> Floats:
    """How long each of some devices computes in a step, as a multiple of what it does on average.

    Over the ``num_runs`` every device has one pace out of each of as many equally likely ranges, in an order of
    its own: few runs have the right mean.

    Args:
        profile: of the devices.
        busy_s: seconds of a step in which each computes, on average.
        draw: which step.
    """
    if not profile.compute_jitter:
        return np.ones_like(busy_s)
    ranges = np.tile(np.arange(draw.num_runs), (len(busy_s), 1))
    orders = np.random.default_rng([draw.seed, draw.pipeline]).permuted(ranges, axis=1)
    positions = np.linspace(0.0, 1.0, len(profile.compute_jitter))
    drawn = np.interp((orders[:, draw.run] + 0.5) / draw.num_runs, positions, profile.compute_jitter)
    shares = np.array([share_that_lasts(seconds, profile.compute_jitter_s) for seconds in busy_s.tolist()])
    paces: Floats = 1.0 + (drawn - 1.0) * shares
    return paces


def share_that_lasts(seconds: float, lasts_s: float) -> float:
    """What is left of the spread in the mean over so many seconds, if correlation falls to 1/e in ``lasts_s``.

    The square root of ``2 / x · (1 - (1 - exp(-x)) / x)`` with ``x = seconds / lasts_s``: the mean of a process
    with exponential correlation (Ornstein and Uhlenbeck's).
    """
    if lasts_s <= 0.0:
        return 0.0
    ratio = seconds / lasts_s
    if ratio < 1e-3:
        return 1.0
    return math.sqrt(2.0 / ratio * (1.0 + math.expm1(-ratio) / ratio))
