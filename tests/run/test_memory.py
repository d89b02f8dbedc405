"""Peak and available memory: what the kernel says, under limits of every kind."""

import resource
import subprocess
import sys

import psutil

from varuna.run.memory import available_bytes, group_left, machine_left, peak_memory_bytes

MIB = 2**20


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_the_peak_stays_after_memory_is_given_back():
    now = psutil.Process().memory_info().rss
    before = peak_memory_bytes()
    assert 0 < now <= before + MIB  # the kernel counts in batches
    size = before + 64 * MIB
    block = bytearray(b"x") * size
    del block
    assert size <= peak_memory_bytes() < size + before + 64 * MIB


def test_the_machine_s_memory(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 2000 kB\nMemFree: 5 kB\nMemAvailable:    1000 kB\n")
    assert machine_left(tmp_path / "meminfo") == 1000 * 1024
    assert 0 < available_bytes() <= psutil.virtual_memory().total


def test_a_v2_group_and_its_parents_count(tmp_path):
    (tmp_path / "membership").write_text("0::/job/worker\n")
    root = tmp_path / "cgroup"
    write(root, memory__stat="inactive_file 7")
    write(
        root / "job", memory__max=900 * MIB, memory__current=800 * MIB, memory__stat="anon 1\ninactive_file 0"
    )
    write(
        root / "job/worker",
        memory__max=500 * MIB,
        memory__current=300 * MIB,
        memory__stat=f"anon 5\ninactive_file {50 * MIB}",
    )
    assert group_left(tmp_path / "membership", root) == [250 * MIB, 100 * MIB]
    write(root / "job/worker", memory__max="max")
    assert group_left(tmp_path / "membership", root) == [100 * MIB]


def test_a_v1_group_counts_and_no_limit_is_none(tmp_path):
    (tmp_path / "membership").write_text("5:pids:/x\n4:cpu,memory:/job\n1:name=systemd:/a:b\n0::/\n")
    root = tmp_path / "cgroup"
    write(root / "memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=5)
    write(
        root / "memory/job",
        memory__limit_in_bytes=100 * MIB,
        memory__usage_in_bytes=90 * MIB,
        memory__stat=f"inactive_file 1\ntotal_inactive_file {20 * MIB}",
    )
    assert group_left(tmp_path / "membership", root) == [30 * MIB]


def test_a_container_that_sees_only_its_own_group(tmp_path):
    """The path is the host's; the container's own group is mounted at the top."""
    (tmp_path / "membership").write_text("0::/kubepods/pod1/abc\n")
    root = tmp_path / "cgroup"
    write(root, memory__max=10 * MIB, memory__current=4 * MIB)
    assert group_left(tmp_path / "membership", root) == [6 * MIB]


def test_an_address_space_limit_counts():
    """In a process of its own, since a limit stays."""
    code = (
        "import resource; from varuna.run.memory import available_bytes\n"
        "import psutil; used = psutil.Process().memory_info().vms\n"
        f"resource.setrlimit(resource.RLIMIT_AS, (used + {100 * MIB}, resource.RLIM_INFINITY))\n"
        "print(available_bytes(num_sharing=4))"  # the limit is this process's own, not to be shared
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert 90 * MIB < int(done.stdout) <= 100 * MIB
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
