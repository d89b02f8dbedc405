"""How long does training stand still when workers go and come? A GPT of 10 M parameters on 4 workers, 2 x 2.

In each round one worker is killed, one is asked to leave, one is frozen; after each a new one joins. Times are
those of the run's own events. What training loses is the time from a generation's last step to the second
one of the next, less two usual steps with so many workers; so it includes what first steps of a generation
take longer. Parts are what the members told (``varuna/morph/times.py``). Seconds: lower is better.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from benchmarks import report
from benchmarks.managed import ManagedRun, first
from varuna.morph.times import PARTS
from varuna.morph.views import LoggedEvent
from varuna.testing.replay_account import seconds_of

WORKERS = 4
HEARTBEAT_S = 2.0
SETTLED, QUIET = 2, 3  # steps that a generation needs to be warm, and then steps that show the usual pace

HEADER = ("what", "target", "median", "worst", "n", "detect", "abort", *PARTS.values(), "first steps")
TARGETS = {
    "training lost at a notice": 0.5,
    "SIGKILL to the next step, less a step": 2.0,
    "training lost at a join": 0.5,
    "SIGSTOP to fenced": HEARTBEAT_S + 1.0,
}


@dataclass
class Figures:
    """Of one kind of event, one entry for each time that it happened."""

    seconds: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)

    def part(self, name: str) -> float | str:
        """The median of one part, of those that have it."""
        values = [parts[name] for parts in self.parts if name in parts]
        return median(values) if values else ""


class Rounds:
    """Takes workers away and adds them, and writes down what that took."""

    def __init__(self, run: ManagedRun, seed: int) -> None:
        self.run = run
        self.figures = {name: Figures() for name in TARGETS}
        self.usual_s: dict[int, list[float]] = {}
        self._events: dict[str, list[tuple[float, list[LoggedEvent]]]] = {name: [] for name in TARGETS}
        self._random = random.Random(seed)

    def one(self) -> None:
        """One round."""
        self._lose("SIGKILL to the next step, less a step", lambda pid: os.kill(pid, signal.SIGKILL))
        self._join()
        self._lose("training lost at a notice", None)
        self._join()
        self._lose("SIGSTOP to fenced", lambda pid: os.kill(pid, signal.SIGSTOP))
        self._join()

    def start(self) -> None:
        """Wait until the job trains."""
        self.run.wait("the first steps", lambda events: num_steps(events) > SETTLED, 0, 120)
        self._pace(WORKERS)

    def _lose(self, name: str, strike: object) -> None:
        victim = self._random.choice(self.run.members())
        since, began_s = len(self.run.events), time.time()
        if callable(strike):
            strike(victim.pid)
        else:
            self.run.client.preempt(victim.incarnation)
        self._after(name, since, began_s, WORKERS - 1)

    def _join(self) -> None:
        since = len(self.run.events)
        self.run.client.add_workers(1)
        self.run.wait("a newcomer is ready", lambda events: any(one.kind == "ready" for one in events), since)
        at = next(at for at in range(since, len(self.run.events)) if self.run.events[at].kind == "ready")
        self._after("training lost at a join", at, seconds_of(self.run.events[at]), WORKERS)

    def _after(self, name: str, since: int, began_s: float, members: int) -> None:
        """Wait until the next generation is warm; keep what happened, with the last step before it."""
        self.run.wait(name, lambda events: num_steps(since_running(events, members)) >= SETTLED, since)
        while since > 0 and self.run.events[since].kind != "step":
            since -= 1
        self._events[name].append((began_s, self.run.events[since:]))
        self._pace(members)

    def _pace(self, members: int) -> None:
        since = len(self.run.events)
        events = self.run.wait("steps", lambda events: num_steps(events) > QUIET, since)
        at_s = [seconds_of(event) for event in events if event.kind == "step"]
        self.usual_s.setdefault(members, []).extend(b - a for a, b in pairwise(at_s))

    def evaluate(self) -> None:
        """What it all took, now that the usual pace is known."""
        usual = {members: median(seconds) for members, seconds in self.usual_s.items()}
        for name, figures in self.figures.items():
            for began_s, events in self._events[name]:
                figures.parts.append(parts_of(events, began_s))
                figures.seconds.append(_seconds(name, events, began_s, usual))
                figures.parts[-1]["first steps"] = _excess(events, usual)


def _seconds(name: str, events: Sequence[LoggedEvent], began_s: float, usual: dict[int, float]) -> float:
    members = next(int(one.figures["members"]) for one in events if one.kind == "running")
    if name == "SIGSTOP to fenced":
        return first(events, "fenced") - began_s
    after = [seconds_of(one) for one in since_running(events, members) if one.kind == "step"]
    if name == "SIGKILL to the next step, less a step":
        return after[0] - began_s - usual[members]
    running_s = first(events, "running")
    before = [seconds_of(one) for one in events if one.kind == "step" and seconds_of(one) <= running_s]
    return after[SETTLED - 1] - before[-1] - SETTLED * usual[members]


def _excess(events: Sequence[LoggedEvent], usual: dict[int, float]) -> float:
    """What the first steps of the generation took longer than usual ones."""
    running = next(one for one in events if one.kind == "running")
    members = int(running.figures["members"])
    after = [seconds_of(one) for one in since_running(events, members) if one.kind == "step"]
    return after[SETTLED - 1] - seconds_of(running) - SETTLED * usual[members]


def parts_of(events: Sequence[LoggedEvent], began_s: float) -> dict[str, float]:
    """Seconds by part, from the events after something happened at ``began_s``."""
    running = next(one for one in events if one.kind == "running")
    parts = {word: running.figures[name] for name, word in PARTS.items()}
    told = [one for one in events if one.kind in ("lost", "notice", "fenced") and seconds_of(one) >= began_s]
    if told:
        parts["detect"] = seconds_of(told[0]) - began_s
    if any(one.kind == "ending" for one in events):
        parts["abort"] = seconds_of(running) - running.figures["stood_s"] - first(events, "ending")
    return parts


def num_steps(events: Sequence[LoggedEvent]) -> int:
    """Steps among events."""
    return sum(event.kind == "step" for event in events)


def since_running(events: Sequence[LoggedEvent], members: int) -> Sequence[LoggedEvent]:
    """Events after a generation of so many members has opened; none if it has not."""
    for at, event in enumerate(events):
        if event.kind == "running" and event.figures["members"] == members:
            return events[at + 1 :]
    return []


def main() -> None:
    options = report.arguments(__doc__ or "", repeats=20, seed=0, batch=8, micro_batch=2)
    arguments = [
        "--stages", "2", "--micro-batch-size", str(options.micro_batch), "-m", "benchmarks.morph_job",
        "--batch-size", str(options.batch),
    ]  # fmt: skip
    started_s = time.monotonic()
    with ManagedRun(WORKERS, arguments, heartbeat_s=HEARTBEAT_S) as run:
        rounds = Rounds(run, options.seed)
        rounds.start()
        for number in range(options.repeats):
            rounds.one()
            print(f"round {number + 1} of {options.repeats}, {time.monotonic() - started_s:.0f} s", flush=True)
        events = list(run.events)
    rounds.evaluate()
    steps = [event.step_index for event in events if event.kind == "step"]
    num_lost = sum(event.kind == "undone" for event in events)
    assert steps == list(range(len(steps))), "a step is missing, or happened twice"
    rows = []
    for name, figures in rounds.figures.items():
        parts = [figures.part(word) for word in HEADER[5:]]
        rows.append(
            [name, TARGETS[name], median(figures.seconds), max(figures.seconds), len(figures.seconds), *parts]
        )
    usual = ", ".join(f"{median(seconds):.3f} s with {members}" for members, seconds in rounds.usual_s.items())
    notes = (
        f"Usual step: {usual}. {len(steps)} steps, each once; {num_lost} times steps were lost. "
        f"Heartbeat limit {HEARTBEAT_S:g} s."
    )
    report.report("Morphs: what training loses", report.table(HEADER, rows), options.log, notes)


if __name__ == "__main__":
    main()
