"""Limits by which the manager decides. Seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What may be set for a job.

    Attributes:
        halt_limit_s: a member that was told to give up and has not reported for so long is fenced. A frozen one
            is found by its heartbeat; this is for a training thread that does not come back. No limit while its
            script is in code of its own, which nothing can break off.
        pause_grace_s: members that were asked to pause halt together; the first waits so long for the last.
        forming_limit_s: how long a generation may take to open.
        founding_grace_s: after the loss of a founder, how long to wait for the first generation to be known.
        leave_margin_s: a step that would end later than this before a member has to be gone is given up.
        replace_lost: ask for a new worker wherever one was lost.
        max_same_failures: newcomers that may end with the same failure while the job waits for one; and that
            may be lost one after the other, before they have joined, until they are not replaced any more.
        finds_slow: give less work to workers that are slower than their peers.
        rest_s: how long a worker that is much slower than its peers gets no work; twice as long each time.
        min_workers: the job is founded when agents have offered so many; 0: whoever started the manager starts
            the founders.
        settle_s: and no agent has come for so long.
    """

    halt_limit_s: float = 60.0
    pause_grace_s: float = 1.0
    forming_limit_s: float = 300.0
    founding_grace_s: float = 5.0
    leave_margin_s: float = 1.0
    replace_lost: bool = False
    max_same_failures: int = 3
    finds_slow: bool = True
    rest_s: float = 300.0
    min_workers: int = 0
    settle_s: float = 5.0
