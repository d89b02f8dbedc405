"""The event loop of one pipeline, compiled by numba: 60 to 80 ns per task. ``pipeline.py`` calls it.

It runs ``decide`` itself, compiled; for the rest see ``pipeline.py``. Stages wake at the end of their task or
when something arrives that they may wait for; a tournament finds the one that wakes first. A task's end and its
message's arrival are known when it starts, so that is when they are written down; the stage that receives looks
at its clock.

The first call on a machine compiles (three seconds); later processes load the result in a tenth of one, from a
cache next to this file, or in the user's cache directory where that is not writable.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from varuna.plan.decide import BACKWARD, FORWARD, RECOMPUTE, WAIT, decide
from varuna.plan.simulate import SIMULTANEOUS_S

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

ACTIVATION, GRADIENT = 0, 1
"""Directions of messages."""

NUM_KINDS = 5
"""``WAIT`` to ``WEIGHT``: axes over kinds of task are as long as that; what is at ``WAIT`` is not used."""

WARM_UP, LOW_IN_FLIGHT, MAX_IN_FLIGHT, MAX_HELD, RECOMPUTES, SPLIT = range(6)
"""Columns of ``rules``."""

_F = TypeVar("_F", bound=Callable[..., object])


def _compiled(function: _F) -> _F:
    return cast(_F, njit(forceinline=True)(function))


_decide = _compiled(decide)


@_compiled
def _next_code(  # noqa: PLR0917
    rules: Ints, done: Ints, arrived: Ints, stage: int, num_stages: int, num_micro_batches: int
) -> int:
    """What the rule says for a stage."""
    return _decide(
        done[stage, 1],
        done[stage, 2],
        done[stage, 3],
        done[stage, 4],
        arrived[stage, ACTIVATION],
        done[stage, FORWARD] if stage == num_stages - 1 else arrived[stage, GRADIENT],
        num_micro_batches,
        rules[stage, WARM_UP],
        rules[stage, LOW_IN_FLIGHT],
        rules[stage, MAX_IN_FLIGHT],
        rules[stage, MAX_HELD],
        rules[stage, RECOMPUTES] == 1,
        rules[stage, SPLIT] == 1,
    )


@_compiled
def _look(arrivals_s: Floats, sent: Ints, arrived: Ints, stage: int, now_s: float) -> None:
    """Count what has arrived at a stage by now: a message counts once all before it have arrived."""
    for direction in range(2):
        count = arrived[stage, direction]
        while count < sent[stage, direction] and arrivals_s[stage, direction, count] <= now_s + SIMULTANEOUS_S:
            count += 1
        arrived[stage, direction] = count


@_compiled
def _next_arrival_s(arrivals_s: Floats, sent: Ints, arrived: Ints, stage: int) -> float:
    """When the next message on its way to a stage arrives; inf if there is none."""
    first_s = np.inf
    for direction in range(2):
        count = arrived[stage, direction]
        if count < sent[stage, direction]:
            first_s = min(first_s, arrivals_s[stage, direction, count])
    return first_s


@_compiled
def _note_peaks(  # noqa: PLR0917
    rules: Ints, done: Ints, arrived: Ints, kept_bytes: Floats, peaks: Ints, peak_bytes: Floats, stage: int,
    code: int, is_last: bool,
) -> None:  # fmt: skip
    """What is in memory while a task runs that is about to start."""
    forwards, recomputes, backwards = done[stage, 1], done[stage, 2], done[stage, 3]
    split = rules[stage, SPLIT] == 1
    finished = done[stage, 4] if split else backwards
    in_flight = forwards - backwards + (code == FORWARD)
    recomputed = max(0, recomputes - backwards) + (code == RECOMPUTE)
    if rules[stage, RECOMPUTES] == 1:
        held = recomputes - finished + (code == RECOMPUTE)
    else:
        held = forwards - finished + (code == FORWARD)
    peaks[stage, 0] = max(peaks[stage, 0], in_flight)
    peaks[stage, 1] = max(peaks[stage, 1], recomputed)
    peaks[stage, 2] = max(peaks[stage, 2], held)
    if stage > 0:
        peaks[stage, 3] = max(peaks[stage, 3], arrived[stage, ACTIVATION] - forwards - (code == FORWARD))
    if not is_last:
        peaks[stage, 4] = max(peaks[stage, 4], arrived[stage, GRADIENT] - backwards)
    kept = in_flight * kept_bytes[stage, 0] + recomputed * kept_bytes[stage, 1]
    kept += (backwards - finished) * kept_bytes[stage, 2]
    peak_bytes[stage] = max(peak_bytes[stage], kept)


@_compiled
def _make_tournament(start_s: Floats) -> tuple[Floats, Ints]:
    """Times (inf to fill up to a power of two) and the winner of each match; 1 is the final."""
    num_leaves = 1
    while num_leaves < len(start_s):
        num_leaves *= 2
    wake_s = np.full(num_leaves, np.inf)
    wake_s[: len(start_s)] = start_s
    winner = np.zeros(2 * num_leaves, np.int64)
    for leaf in range(num_leaves):
        winner[num_leaves + leaf] = leaf
    for node in range(num_leaves - 1, 0, -1):
        left, right = winner[2 * node], winner[2 * node + 1]
        winner[node] = left if wake_s[left] <= wake_s[right] else right
    return wake_s, winner


@_compiled
def _replay(wake_s: Floats, winner: Ints, stage: int) -> None:
    """Play a stage's matches again after its time changed."""
    node = (len(wake_s) + stage) // 2
    while node > 0:
        left, right = winner[2 * node], winner[2 * node + 1]
        winner[node] = left if wake_s[left] <= wake_s[right] else right
        node //= 2


def _make_run(digest: int) -> Callable[..., float]:  # noqa: PLR0915
    """The loop. ``digest`` of the rule is part of what the cache on disk is keyed by.

    numba's cache follows changes of this file and of what a function closes over, but not of other files.
    """

    def run(  # noqa: PLR0915, PLR0917
        num_micro_batches: int,
        rules: Ints,
        durations_s: Floats,
        transmit_s: Floats,
        latency_s: Floats,
        send_s: Floats,
        delays_s: Floats,
        start_s: Floats,
        kept_bytes: Floats,
        times_s: Floats,
        peaks: Ints,
        peak_bytes: Floats,
        spans_s: Floats,
        codes: Ints,
    ) -> float:
        """Run one step. Arguments as in ``pipeline.py``; those from ``times_s`` on are filled, starting from 0.

        Returns the makespan, or -1 if the stages wait for each other.
        """
        num_stages = len(rules)
        done = np.zeros((num_stages, NUM_KINDS), np.int64)
        arrivals_s = np.zeros((num_stages, 2, num_micro_batches))  # at the receiver
        sent = np.zeros((num_stages, 2), np.int64)
        sent[0, ACTIVATION] = num_micro_batches  # the batch itself, at 0
        arrived = np.zeros((num_stages, 2), np.int64)
        free_s = np.zeros((num_stages, 2))  # when a channel has transmitted all that it was given
        idle = np.zeros(num_stages, np.bool_)
        wake_s, winner = _make_tournament(start_s)
        num_left = 0
        for stage in range(num_stages):
            num_left += num_micro_batches * (2 + rules[stage, RECOMPUTES] + rules[stage, SPLIT])
        now_s = 0.0 * digest
        while num_left > 0:
            stage = winner[1]
            if wake_s[stage] > now_s + SIMULTANEOUS_S:
                now_s = wake_s[stage]
                if now_s == np.inf:
                    return -1.0
            _look(arrivals_s, sent, arrived, stage, now_s)
            code = _next_code(rules, done, arrived, stage, num_stages, num_micro_batches)
            idle[stage] = code == WAIT
            if code == WAIT:
                wake_s[stage] = _next_arrival_s(arrivals_s, sent, arrived, stage)
                _replay(wake_s, winner, stage)
                continue
            num_left -= 1
            is_last_stage = stage == num_stages - 1
            _note_peaks(rules, done, arrived, kept_bytes, peaks, peak_bytes, stage, code, is_last_stage)
            index = done[stage, code]
            is_final = 1 if index == num_micro_batches - 1 else 0
            end_s = now_s + durations_s[stage, is_final, code]
            times_s[stage, 0] = end_s
            times_s[stage, 1] += end_s - now_s
            if spans_s.shape[1] > 0:
                position = done[stage].sum()
                spans_s[stage, position, 0] = now_s
                spans_s[stage, position, 1] = end_s
                codes[stage, position] = code
            done[stage, code] = index + 1
            wake_s[stage] = end_s
            is_forward = code == FORWARD
            if (is_forward and not is_last_stage) or (code == BACKWARD and stage > 0):
                direction = ACTIVATION if is_forward else GRADIENT
                receiver = stage + 1 if is_forward else stage - 1
                wake_s[stage] += send_s[stage, direction]
                free_s[stage, direction] = (
                    max(end_s, free_s[stage, direction]) + transmit_s[stage, direction, is_final]
                )
                arrival_s = free_s[stage, direction] + latency_s[stage, direction]
                if len(delays_s) > 0:
                    arrival_s += delays_s[stage, direction, index]
                arrivals_s[receiver, direction, index] = arrival_s
                sent[receiver, direction] = index + 1
                if idle[receiver] and arrival_s < wake_s[receiver]:
                    wake_s[receiver] = arrival_s
                    _replay(wake_s, winner, receiver)
            _replay(wake_s, winner, stage)
        return float(times_s[:, 0].max())

    return cast(Callable[..., float], njit(cache=True)(run))


run_compiled = _make_run(zlib.crc32(decide.__code__.co_code + repr(decide.__code__.co_consts).encode()))
