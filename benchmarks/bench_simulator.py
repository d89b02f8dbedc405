"""How good is the simulator? Steps that really ran, against what was predicted from a profile taken beforehand.

Stages sleep instead of computing; everything else is real. 44 configurations: P = 2 to 16, equal and unequal
stages, N = P/2 to 8 P, all schedules, recompute off and on, on three networks: loopback, one with 5 ± 5 ms per
message, and a slow one of 25 MB/s and 5 ms. Before anything else a pair of workers measures the link and one
worker the engine's own time per task; the times of the sleeps are known. Needs root for the two last networks.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks import report
from benchmarks.emulated_plans import calibrate, emulated_profile, measure_step_s, plan_of
from benchmarks.sleeping import Network
from varuna.plan import SCHEDULES
from varuna.plan.cluster import Cluster
from varuna.plan.predict import predict
from varuna.plan.profile import LinkProfile, Profile, TaskCosts
from varuna.spec import Plan

LOOPBACK, JITTERED, SLOW = "loopback", "5 ± 5 ms", "25 MB/s, 5 ms"
NETWORKS = {
    LOOPBACK: Network(),
    JITTERED: Network(low_s=0.0, high_s=0.010),
    SLOW: Network(low_s=0.005, high_s=0.005, bytes_per_s=25e6),
}
FORWARD_S, BACKWARD_S, WEIGHT_S = 0.010, 0.020, 0.010
SHAPES = ("equal", "one 1.5x slower", "1 to 1.5 rising")
MEDIAN_TARGET, P95_TARGET = 0.02, 0.05
MESSAGE_BYTES = {LOOPBACK: (4 << 10, 1 << 20), JITTERED: (4 << 10, 4 << 10), SLOW: (16 << 10, 128 << 10)}
_NUM_PREDICTED_RUNS = 50
_LAUNCH_S, _MOST_ROUNDS = 1.5, 20
STATED_LINK = LinkProfile(latency_s=1e-4, bytes_per_s=1e9)


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What runs: P, N, sizes of messages, and how stages differ."""

    network: str
    num_stages: int
    shape: str
    num_micro_batches: int
    schedule: str
    recompute: bool
    message_bytes: int

    def profile(self) -> Profile:
        """As the sleeps are, on a link that nobody has measured yet."""
        return emulated_profile([[self._costs(index)] for index in range(self.num_stages)], STATED_LINK)

    def plan(self) -> Plan:
        """One pipeline of P workers."""
        return plan_of(
            self.profile(), num_workers=self.num_stages, num_stages=self.num_stages,
            batch_size=self.num_micro_batches, micro_batch_size=1, schedule=self.schedule,
            recompute=self.recompute,
        )  # fmt: skip

    def _costs(self, stage_index: int) -> TaskCosts:
        factor = {
            "equal": 1.0,
            "one 1.5x slower": 1.5 if stage_index == self.num_stages // 2 else 1.0,
            "1 to 1.5 rising": 1.0 + 0.5 * stage_index / (self.num_stages - 1),
        }[self.shape]
        crossing = self.message_bytes if stage_index < self.num_stages - 1 else 0
        return TaskCosts(
            micro_batch_size=1, forward_s=FORWARD_S * factor, recompute_s=FORWARD_S * factor,
            backward_s=BACKWARD_S * factor, weight_s=WEIGHT_S * factor,
            output_bytes=crossing, gradient_bytes=crossing,
        )  # fmt: skip


def configurations() -> Iterator[Configuration]:
    """Every P on every network (but 16 on the slow one) with every schedule; the rest taken in turn."""
    cells = [(network, size) for size in (2, 4, 8, 16) for network in NETWORKS if (size, network) != (16, SLOW)]
    count = 0
    for network, num_stages in cells:
        for schedule in SCHEDULES:
            multiple = (0.5, 1, 2, 4, 8)[count % 5]
            yield Configuration(
                network=network, num_stages=num_stages, shape=SHAPES[count % 3],
                num_micro_batches=max(1, int(num_stages * multiple)), schedule=schedule,
                recompute=(count + count // 4) % 2 == 1, message_bytes=MESSAGE_BYTES[network][count % 2],
            )  # fmt: skip
            count += 1


def predicted_s(configuration: Configuration, calibrated: Profile) -> float:
    """Step time from the stated sleeps and the measured link and engine."""
    profile = emulated_profile(
        [section.costs for section in configuration.profile().sections],
        calibrated.within_machine,
        task_overhead_s=calibrated.task_overhead_s,
    )
    plan = configuration.plan()
    cluster = Cluster.parse(f"1x{plan.num_workers}")
    return predict(plan, profile, cluster, num_runs=_NUM_PREDICTED_RUNS).step_s


def measure(
    wanted: Sequence[Configuration], repeats: int, rounds: int
) -> tuple[list[list[object]], list[float], list[str]]:
    """Rows of the table, relative errors, and what was measured beforehand.

    A launch runs ``rounds`` steps, more where a step is short: on a jittered network each takes another time.
    """
    used = [name for name in NETWORKS if any(one.network == name for one in wanted)]
    profiles = {name: calibrate(wanted[0].profile(), NETWORKS[name]) for name in used}
    expected_s = [predicted_s(one, profiles[one.network]) for one in wanted]
    runs = {
        str(index): partial(
            measure_step_s, one.plan(), one.profile(), NETWORKS[one.network],
            rounds=max(rounds, min(_MOST_ROUNDS, math.ceil(_LAUNCH_S / expected_s[index]))),
        )
        for index, one in enumerate(wanted)
    }  # fmt: skip
    figures = report.interleaved(repeats, runs)
    measured_s = [statistics.median(figures[str(index)]) for index in range(len(wanted))]
    errors = [expected / measured - 1 for expected, measured in zip(expected_s, measured_s, strict=True)]
    rows: list[list[object]] = [
        [
            one.network, one.num_stages, one.shape, one.num_micro_batches, one.schedule,
            "yes" if one.recompute else "no", f"{one.message_bytes >> 10} KB", expected_s[index],
            measured_s[index], f"{errors[index]:+.1%}",
        ]
        for index, one in enumerate(wanted)
    ]  # fmt: skip
    return rows, errors, [f"{name}: {_describe(profiles[name])}" for name in used]


def _describe(profile: Profile) -> str:
    link = profile.within_machine
    jitter = f", up to {1e3 * link.jitter_s[-1]:.1f} ms later" if link.jitter_s else ""
    return (
        f"{1e3 * link.latency_s:.2f} ms, {link.bytes_per_s / 1e6:.0f} MB/s{jitter}, "
        f"{1e6 * link.send_s:.0f} µs to send, {1e6 * profile.task_overhead_s:.0f} µs per task"
    )


def arguments() -> argparse.Namespace:
    """The shared command line and ``--quick``."""
    parser = report.parser(__doc__ or "", repeats=2, rounds=2)
    parser.add_argument("--quick", action="store_true", help="P up to 4, few micro-batches, once")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    wanted = list(configurations())
    if os.geteuid() != 0:
        print("Without root: loopback only.", file=sys.stderr)
        wanted = [one for one in wanted if one.network == LOOPBACK]
    if options.quick:
        options.repeats = 1
        wanted = [one for one in wanted if one.num_stages <= 4 and one.num_micro_batches <= 8]
    rows, errors, notes = measure(wanted, options.repeats, options.rounds)
    sizes = sorted(abs(error) for error in errors)
    p95 = sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))]
    summary = (
        f"{len(sizes)} configurations: error median {statistics.median(sizes):.1%} (target at most "
        f"{MEDIAN_TARGET:.0%}), 95th percentile {p95:.1%} (at most {P95_TARGET:.0%}), largest {sizes[-1]:.1%}, "
        f"mean with sign {statistics.mean(errors):+.1%}."
    )
    header = [
        "network", "P", "stages", "N", "schedule", "recompute", "message", "predicted s", "measured s", "error",
    ]  # fmt: skip
    text = "\n".join([summary, "Measured beforehand:", *(f"- {note}" for note in notes)])
    report.report("Simulator: predicted against measured", report.table(header, rows), options.log, text)


if __name__ == "__main__":
    main()
