"""The machines a plan is for: values, and how to read them from a command line."""

from __future__ import annotations

import re
from dataclasses import dataclass

from varuna.errors import PlanError

_GROUP = re.compile(r"(\d+)x(\d+)")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine.

    Attributes:
        name: for people.
        num_workers: devices, one worker each.
        memory_bytes: of each device; 0 takes the profile's.
        speed: how fast its devices are, as a multiple of the profile's device.
    """

    name: str
    num_workers: int
    memory_bytes: int = 0
    speed: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All machines; workers count through them in order."""

    machines: tuple[Machine, ...]

    @property
    def num_workers(self) -> int:
        """Workers on all machines."""
        return sum(machine.num_workers for machine in self.machines)

    def machine_indices(self) -> tuple[int, ...]:
        """Per worker, the index of its machine."""
        return tuple(index for index, machine in enumerate(self.machines) for _ in range(machine.num_workers))

    @staticmethod
    def parse(text: str) -> Cluster:
        """``25x4`` is 25 machines of 4 devices; ``25x4,3x8`` adds 3 of 8; ``7`` is 7 machines of one.

        Raises:
            PlanError: it cannot be read.
        """
        machines: list[Machine] = []
        for part in text.split(","):
            match = _GROUP.fullmatch(part.strip() if "x" in part else f"{part.strip()}x1")
            if match is None or not int(match[1]) or not int(match[2]):
                raise PlanError(
                    f"Machines {text!r} cannot be read at {part!r}. Write 25x4 for 25 machines of 4 devices "
                    f"each, 25x4,3x8 for two kinds, or 7 for 7 machines of one device."
                )
            first = len(machines)
            machines += [
                Machine(name=f"machine-{first + index}", num_workers=int(match[2]))
                for index in range(int(match[1]))
            ]
        return Cluster(machines=tuple(machines))
