"""The rule: what a stage runs next, from counts of what is done and what has arrived.

One function over whole numbers and flags, in plain Python for the engine (``varuna.plan.next_task``) and
compiled by numba for simulations (``kernel.py``): what is simulated is what runs. No clock, no effects,
constant time.

Why no stage waits for ever, whatever arrives when. A strict order is one in which a pipeline runs through. For
the others: let k be the earliest micro-batch whose backward is not done on every stage. No stage has an earlier
one in flight, so ``max_in_flight`` leaves room for k's forward everywhere, and a recomputed set that waits for
its gradient is k's or nobody's. If ``max_held`` keeps a set of k from being made, all held sets have had their
backward, so that a weight task is there to run. Hence whenever k's next task has its input on a stage, some
task runs there, and there are finitely many others before k's is the only one left: k's forward reaches the
last stage, and its backward the first. Weight tasks left over after that wait for nothing.
"""

from __future__ import annotations

WAIT, FORWARD, RECOMPUTE, BACKWARD, WEIGHT = range(5)
"""What ``decide`` returns; the micro-batch is the next one of that kind."""


def decide(  # noqa: PLR0917
    forwards: int,
    recomputes: int,
    backwards: int,
    weights: int,
    activations: int,
    gradients: int,
    num_micro_batches: int,
    warm_up: int,
    low_in_flight: int,
    max_in_flight: int,
    max_held: int,
    recompute: bool,
    split: bool,
) -> int:
    """The task to run now, or ``WAIT`` (also when all is done).

    A strict order (``warm_up`` > 0) is ``warm_up`` forwards, then a backward and a forward in turn; it waits
    for whatever comes next. Otherwise the first of these that can run:

    1. A forward, while fewer than ``low_in_flight`` are in flight: later stages must not starve.
    2. The next backward if its gradient is here, its recompute first.
    3. A forward, up to ``max_in_flight``.
    4. The next backward's recompute, ahead of its gradient; one set at a time.
    5. Weight gradients of the earliest micro-batch that lacks them.

    With ``split``, activations are held from forward (or recompute) until the weight gradients are done, at
    most ``max_held`` sets; what would need one more comes after a weight task.

    Args:
        forwards: done. Each kind of task runs in ascending order.
        recomputes: done.
        backwards: done.
        weights: weight tasks done.
        activations: inputs that have arrived; on the first stage all of them.
        gradients: that have arrived; on the last stage as many as forwards are done.
        num_micro_batches: of this step.
        warm_up: forwards before the first backward of a strict order; 0 for no such order.
        low_in_flight: see above; in flight is between forward and backward.
        max_in_flight: see above.
        max_held: most sets of activations, counted where ``split``.
        recompute: activations are dropped after forward.
        split: backward is the gradients of inputs only; weight tasks do the rest.
    """
    needs_recompute = recompute and recomputes == backwards
    if warm_up > 0:
        if forwards < min(num_micro_batches, warm_up + backwards):
            return FORWARD if forwards < activations else WAIT
        if backwards == num_micro_batches:
            return WAIT
        if needs_recompute:
            return RECOMPUTE
        return BACKWARD if gradients > backwards else WAIT
    in_flight = forwards - backwards
    has_room = not split or (recomputes if recompute else forwards) - weights < max_held
    can_forward = forwards < activations and in_flight < max_in_flight and (has_room or recompute)
    if can_forward and in_flight < low_in_flight:
        return FORWARD
    can_recompute = needs_recompute and in_flight > 0 and has_room
    if in_flight > 0 and gradients > backwards:
        if not needs_recompute:
            return BACKWARD
        return RECOMPUTE if can_recompute else WEIGHT
    if can_forward:
        return FORWARD
    if can_recompute:
        return RECOMPUTE
    return WEIGHT if split and weights < backwards else WAIT
