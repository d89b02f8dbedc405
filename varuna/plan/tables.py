"""A profile as arrays: every section at many micro-batch sizes, and sums over any run of sections.

The same numbers as ``costs`` and ``memory`` give one stage at a time, for a search that asks for thousands.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from varuna.plan.costs import all_reduce_s, section_costs
from varuna.plan.memory import BUCKET_BYTES
from varuna.plan.profile import Profile, TaskCosts

Floats = NDArray[np.float64]

_FIELDS = tuple(field.name for field in fields(TaskCosts) if field.name != "micro_batch_size")
_VALUES = attrgetter(*_FIELDS)


@dataclass(frozen=True, kw_only=True)
class RunTable:
    """Sections at one micro-batch size: sums over all sections before an index (``[S + 1]``), or per section.

    Attributes:
        forward_s, recompute_s, backward_s, weight_s, activation_bytes, weight_bytes: sums before each index.
        workspace_bytes: per section ``[S]``.
        forward_bytes, backward_bytes: what crosses the cut before each section, ``[S + 1]``, 0 at both ends.
    """

    forward_s: Floats
    recompute_s: Floats
    backward_s: Floats
    weight_s: Floats
    activation_bytes: Floats
    weight_bytes: Floats
    workspace_bytes: Floats
    forward_bytes: Floats
    backward_bytes: Floats

    @cached_property
    def sums(self) -> Floats:
        """``[6, S + 1]``: the sums, in the order of the attributes."""
        return np.stack(
            [
                self.forward_s,
                self.recompute_s,
                self.backward_s,
                self.weight_s,
                self.activation_bytes,
                self.weight_bytes,
            ]
        )

    @cached_property
    def cuts(self) -> Floats:
        """``[2, S + 1]``: bytes forward and backward at each cut."""
        return np.stack([self.forward_bytes, self.backward_bytes])


class SectionTable:
    """All sections at any micro-batch size; interpolates as ``costs.section_costs`` does, all at once.

    Attributes:
        sizes: measured micro-batch sizes of any section, ascending.
        values: per field of ``TaskCosts``: ``[len(sizes), S]``.
    """

    def __init__(self, profile: Profile) -> None:
        sizes = sorted({cost.micro_batch_size for section in profile.sections for cost in section.costs})
        costs = [[_VALUES(section_costs(section, size)) for section in profile.sections] for size in sizes]
        values = np.asarray(costs, dtype=np.float64)
        self.sizes = np.asarray(sizes, dtype=np.float64)
        self.values = {name: np.ascontiguousarray(values[:, :, i]) for i, name in enumerate(_FIELDS)}
        self._runs: dict[tuple[int, bool], RunTable] = {}

    @cached_property
    def least_forward_share(self) -> float:
        """The least share that forward has in a section's forward and backward."""
        forward_s, both_s = self.values["forward_s"], self.values["forward_s"] + self.values["backward_s"]
        return float(np.min(np.divide(forward_s, both_s, out=np.ones_like(both_s), where=both_s > 0)))

    def totals(self, name: str, micro_batch_sizes: Floats) -> Floats:
        """One field summed over all sections, at each of many sizes."""
        return _interpolate(self.sizes, self.values[name].sum(axis=1)[:, None], micro_batch_sizes)[:, 0]

    def each(self, name: str, micro_batch_sizes: NDArray[np.int64]) -> Floats:
        """``[sizes, S]``: one field of every section at each of many sizes."""
        return _interpolate(self.sizes, self.values[name], micro_batch_sizes.astype(np.float64))

    def runs(self, micro_batch_size: int, *, split: bool = False) -> RunTable:
        """Sums over runs of sections at one size; ``split``: ``backward_s`` is that of both parts."""
        key = (micro_batch_size, split)
        if key not in self._runs:
            wanted = np.asarray([micro_batch_size], dtype=np.float64)
            values = {name: _interpolate(self.sizes, known, wanted)[0] for name, known in self.values.items()}
            self._runs[key] = RunTable(
                forward_s=_sums(values["forward_s"]),
                recompute_s=_sums(values["recompute_s"]),
                backward_s=_sums(values["backward_s"] + split * values["split_s"]),
                weight_s=_sums(values["weight_s"]),
                activation_bytes=_sums(values["activation_bytes"]),
                weight_bytes=_sums(values["weight_bytes"]),
                workspace_bytes=values["workspace_bytes"],
                forward_bytes=_cuts(values["output_bytes"]),
                backward_bytes=_cuts(values["gradient_bytes"]),
            )
        return self._runs[key]


@dataclass(frozen=True)
class Residents:
    """What runs of sections keep and reduce, whatever the micro-batch size; arrays are ``[S + 1, S + 1]``."""

    profile: Profile

    @cached_property
    def gradient_bytes(self) -> Floats:
        """Gradients of sections ``[a, b)``, a tied one once."""
        return np.round(self._runs("gradient_bytes") * self._share)

    @cached_property
    def update_s(self) -> Floats:
        """Seconds of the optimizer for sections ``[a, b)``."""
        return self._runs("update_s")

    @cached_property
    def alone_bytes(self) -> Floats:
        """``memory.resident_bytes`` of a stage that no other worker holds too."""
        parameters = self._runs("parameter_bytes") - self._twice
        optimizer = np.round(self._runs("optimizer_bytes") * self._share)
        return self.profile.runtime_bytes + parameters + self.gradient_bytes + optimizer

    @cached_property
    def shared_bytes(self) -> Floats:
        """``memory.resident_bytes`` of a stage that has replicas."""
        return self.alone_bytes + np.minimum(self.gradient_bytes, BUCKET_BYTES)

    def reduce_s(self, num_workers: int, across_machines: bool) -> Floats:
        """Seconds to sum the gradients of sections ``[a, b)``, bucket by bucket, without tied parameters."""
        tied = np.zeros(len(self.profile.sections))
        for tie in self.profile.ties:
            tied[list(tie.section_indices)] += tie.num_bytes
        own = np.maximum(0.0, [section.gradient_bytes for section in self.profile.sections] - tied)
        before = _sums(own)
        return self.buckets_s(np.maximum(0.0, before[None, :] - before[:, None]), num_workers, across_machines)

    def ties_s(self, num_workers: int, across_machines: bool) -> Floats:
        """Seconds to sum the tied parameters whose first user is in ``[a, b)``, over all stages that use them.

        ``num_workers`` hold each stage. A parameter used in several stages is summed over the workers of all.
        """
        count = len(self.profile.sections)
        seconds = np.zeros((count + 1, count + 1))
        for tie in self.profile.ties:
            first, last = min(tie.section_indices), max(tie.section_indices)
            apart, together = (
                float(self.buckets_s(np.array([tie.num_bytes], dtype=np.float64), num, across_machines)[0])
                for num in (num_workers * len(tie.section_indices), num_workers)
            )
            seconds[: first + 1, first + 1 :] += apart
            seconds[: first + 1, last + 1 :] += together - apart
        return seconds

    def buckets_s(self, num_bytes: Floats, num_workers: int, across_machines: bool) -> Floats:
        """Seconds of all-reduces of buckets, one after the other, alone on the network."""
        if num_workers < 2:
            return np.zeros_like(num_bytes)
        sizes, seconds = self._bucket_s(num_workers, across_machines)
        buckets = np.maximum(1.0, num_bytes / BUCKET_BYTES)
        return np.asarray(buckets * np.interp(num_bytes / buckets, sizes, seconds))

    def _bucket_s(self, num_workers: int, across_machines: bool) -> tuple[list[float], list[float]]:
        """Bytes of a bucket and the seconds that its all-reduce takes; linear in between."""
        key = (num_workers, across_machines)
        if key not in self._buckets:
            knots = {0.0, 1.0, float(BUCKET_BYTES)} | {
                float(point.num_bytes)
                for point in self.profile.all_reduce
                if point.across_machines == across_machines and point.num_bytes < BUCKET_BYTES
            }
            sizes = sorted(knots)
            seconds = [all_reduce_s(self.profile, num_workers, size, across_machines) for size in sizes]
            self._buckets[key] = (sizes, seconds)
        return self._buckets[key]

    @cached_property
    def _buckets(self) -> dict[tuple[int, bool], tuple[list[float], list[float]]]:
        """See ``_bucket_s``."""
        return {}

    @cached_property
    def _twice(self) -> Floats:
        """Bytes of parameters that sections ``[a, b)`` count more than once."""
        num_sections = len(self.profile.sections)
        twice = np.zeros((num_sections + 1, num_sections + 1))
        for tie in self.profile.ties:
            used = np.zeros(num_sections)
            used[list(tie.section_indices)] = 1
            before = _sums(used)
            twice += np.maximum(0, before[None, :] - before[:, None] - 1) * tie.num_bytes
        return twice

    @cached_property
    def _share(self) -> Floats:
        parameters = self._runs("parameter_bytes")
        return 1 - np.divide(self._twice, parameters, out=np.zeros_like(parameters), where=parameters > 0)

    def _runs(self, name: str) -> Floats:
        before = _sums(np.asarray([getattr(section, name) for section in self.profile.sections], dtype=float))
        return np.maximum(0.0, before[None, :] - before[:, None])


def _sums(values: Floats) -> Floats:
    return np.concatenate(([0.0], np.cumsum(values)))


def _cuts(after: Floats) -> Floats:
    """Bytes after each section as bytes before each, with nothing before the first and after the last."""
    return np.concatenate(([0.0], after[:-1], [0.0]))


def _interpolate(known: Floats, values: Floats, wanted: Floats) -> Floats:
    """``costs._at`` for arrays: ``values[known, S]`` at ``wanted``."""
    if len(known) == 1:
        return np.asarray(values * (wanted / known[0])[:, None])
    left = np.clip(np.searchsorted(known, wanted, side="right") - 1, 0, len(known) - 2)
    share = ((wanted - known[left]) / (known[left + 1] - known[left]))[:, None]
    step = values[left + 1] - values[left]
    result = values[left] + share * step
    below, above = wanted < known[0], wanted > known[-1]
    if below.any():
        line = values[0] + share[below] * np.maximum(0.0, step[below])
        result[below] = np.maximum(values[0] * (wanted[below] / known[0])[:, None], line)
    if above.any():
        result[above] = values[-1] + (share[above] - 1) * np.maximum(0.0, step[above])
    return result
