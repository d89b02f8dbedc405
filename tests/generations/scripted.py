"""Members without a manager: who is in which generation is written down beforehand.

``ScriptedControl`` is what a manager is to a member. Members tell where they stand through the store; each then
works out the same verdict from all reports, with the rule of the commit. No section may be lost.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import Store

from varuna.generations import Formation, HaltReport, SectionTransfer, StepReport, Verdict
from varuna.morph.messages import Described
from varuna.run.generation import Generation
from varuna.run.meeting import Meeting
from varuna.spec import Plan


@dataclass(frozen=True, kw_only=True)
class Membership:
    """One generation: worker ids in the order of their ranks, and its plan."""

    workers: tuple[int, ...]
    plan: Plan


class ScriptedControl:
    """Follows a script of memberships; ``pause_after`` maps a generation to the step after which it pauses."""

    def __init__(
        self,
        store: Store,
        worker: int,
        script: Sequence[Membership],
        *,
        pause_after: dict[int, int] | None = None,
        on_formed: Callable[[Generation], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._worker = worker
        self.script = script
        self._pause_after = pause_after or {}
        self._on_formed = on_formed
        self.generation: Generation | None = None

    def ready(self, digest: str, store_address: str) -> Formation:
        assert digest
        assert store_address
        first = next(index for index, one in enumerate(self.script) if self._worker in one.workers)
        return self._verdict(first).formation

    def halted(self, report: HaltReport) -> Verdict:
        following = report.generation + 1
        if following >= len(self.script) or self._worker not in self.script[following].workers:
            raise SystemExit(0)
        self._store.set(f"halted/{following}/{self._worker}", json.dumps(asdict(report)))
        return self._verdict(following)

    def forming(self, generation: Generation | Meeting) -> None:
        if generation.index > 0 and isinstance(generation, Generation):
            threading.Thread(target=self._watch, args=(generation,), daemon=True).start()

    def _watch(self, generation: Generation) -> None:
        """What a manager does: tell members that one of them is gone. The key never comes if all live."""
        workers = self.script[generation.index].workers
        while self.generation is not generation:
            if any(self._store.check([f"dying/{worker}"]) for worker in workers):
                generation.abort("a member is known to be gone")
                return
            time.sleep(0.01)

    def dying(self) -> None:
        """Told just before this worker is killed while a generation forms: nobody would miss it at once."""
        self._store.set(f"dying/{self._worker}", "1")

    def formed(self, generation: Generation) -> None:
        self.generation = generation
        self._on_formed(generation)

    def in_script(self, value: bool) -> None:
        """See ``varuna.work.JobControl``."""

    def describe(self, description: Described, *, at_once: bool) -> None:
        assert description.sections

    def step_done(self, report: StepReport) -> None:
        assert self.generation is not None
        assert report.generation <= self.generation.index
        assert report.committed

    @property
    def is_there(self) -> bool:
        return True

    def finished(self, report: HaltReport, check: Callable[[], None]) -> None:
        assert report.is_finished
        check()

    def close(self) -> None:
        """There is nothing to close."""

    def before_step(self, step_index: int) -> None:
        """Pause where the script says so; only one worker asks, the others find out."""
        assert self.generation is not None
        if self._pause_after.get(self.generation.index) == step_index and self.generation.world.rank == 0:
            self.generation.pause = True

    def _verdict(self, following: int) -> Verdict:
        before, now = self.script[following - 1], self.script[following]
        stayed = set(before.workers) & set(now.workers)
        reports = {worker: self._read(following, worker) for worker in stayed}
        committed = self._outcome(reports)
        next_step = min(report["num_applied"] for report in reports.values()) + bool(committed)
        holders: dict[int, list[int]] = {}
        for worker in sorted(stayed):
            for section in reports[worker]["held_sections"]:
                holders.setdefault(section, []).append(worker)
        formation = Formation(
            generation=following,
            rank=now.workers.index(self._worker),
            size=len(now.workers),
            plan=now.plan,
            transfers=self._transfers(now, holders),
            state_rank=now.workers.index(min(stayed)),
            next_step=next_step,
            store_address=reports[now.workers[0]]["store_address"],
        )
        return Verdict(formation=formation, committed=committed)

    def _read(self, following: int, worker: int) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self._store.get(f"halted/{following}/{worker}"))
        return value

    @staticmethod
    def _outcome(reports: dict[int, dict[str, Any]]) -> str:
        """The commit that some have seen and others have not."""
        least = min(report["num_applied"] for report in reports.values())
        for report in reports.values():
            if report["committed_step"] is not None and report["committed_step"] >= least:
                assert report["committed_step"] == least
                for other in reports.values():
                    assert other["num_applied"] == least + 1 or other["reduced_step"] == least
                return str(report["committed"])
        return ""

    @staticmethod
    def _transfers(now: Membership, holders: dict[int, list[int]]) -> tuple[SectionTransfer, ...]:
        transfers = []
        for pipeline in now.plan.pipelines:
            for stage in pipeline.stages:
                worker = now.workers[stage.worker_index]
                for section in range(stage.first_section, stage.end_section):
                    assert holders.get(section), f"nobody holds section {section}"
                    if worker not in holders[section]:
                        source = now.workers.index(holders[section][0])
                        transfers.append(
                            SectionTransfer(
                                section_index=section, source=source, destination=stage.worker_index
                            )
                        )
        return tuple(transfers)
