"""What is flat and what grows, and processes as the kernel tells of them."""

from __future__ import annotations

import os
import subprocess

from varuna.testing.soak_measure import Use, Uses, processes_of, use_of


def uses(threads: list[int], *, mebibytes: int = 100) -> Uses:
    found = Uses()
    for generation, number in enumerate(threads):
        found.add(
            "worker 1",
            Use(
                generation=generation,
                num_members=4,
                num_threads=number,
                num_fds=30,
                resident_bytes=mebibytes << 20,
            ),
        )
    return found


def test_what_stays_within_its_first_range_is_flat() -> None:
    assert uses([1] + [9, 11, 10, 12] * 10 + [20]).growth() == []
    assert uses([1] + [9, 11, 10, 12] * 8 + [12, 13] * 8).growth() != []


def test_more_members_may_have_more_descriptors() -> None:
    def steps(later: int) -> Uses:
        found = Uses()
        for generation in range(40):
            num_members = 4 if generation < 20 or generation % 2 else 6
            num_fds = 10 * num_members + (later if generation > 27 else 0)
            use = Use(
                generation=generation,
                num_members=num_members,
                num_threads=9,
                num_fds=num_fds,
                resident_bytes=1,
            )
            found.add("worker 1", use)
        return found

    assert steps(0).growth() == []
    assert steps(5).growth() == ["worker 1: 40 descriptors at first, 45 later (4 members)"]


def test_what_grows_is_told() -> None:
    assert uses(list(range(30))).growth() == ["worker 1: 11 threads at first, 25 later (4 members)"]
    growing = Uses()
    for generation in range(40):
        use = Use(
            generation=generation,
            num_members=5,
            num_threads=9,
            num_fds=20 + generation,
            resident_bytes=(100 + 3 * generation) << 20,
        )
        growing.add("launcher", use)
    assert growing.growth() == [
        "launcher: 35 descriptors at first, 53 later (5 members)",
        "launcher: 181 MiB at first, 217 MiB later",
    ]


def test_a_short_life_is_not_judged_and_a_table_shows_all() -> None:
    short = uses([1, 2, 3, 9, 10])
    short.add("gone", None)
    assert short.growth() == []
    assert short.table().splitlines() == [
        "process   generations  threads     descriptors     MiB",
        "worker 1  0..4         1 2 3 9 10  30 30 30 30 30  100 100 100 100 100",
    ]


def test_processes_are_found_by_name_below_another() -> None:
    named = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'varuna-tested', 0, 0, 0)"
    script = f"{named}; print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen(["python3", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert processes_of(os.getpid())["varuna-tested"] == process.pid
        use = use_of(process.pid, 4, 2)
        assert use is not None
        assert (use.generation, use.num_threads) == (4, 1)
        assert use.num_fds >= 3
        assert 1 << 20 < use.resident_bytes < 1 << 30
        process.communicate()
    assert use_of(process.pid, 4, 2) is None
