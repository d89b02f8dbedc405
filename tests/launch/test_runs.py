"""`varuna run` on scripts that end well."""

from __future__ import annotations

import json
import os
import pty
from pathlib import Path

from tests.launch.conftest import Launch
from tests.launch.jobs import Command, write_script
from varuna.failure import record_of, write_record

SHOW_WORLD = """
    import json, os, sys
    if __name__ == "__main__":
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
        words = {name: os.environ.get(name) for name in names}
        layout = {name: value for name, value in os.environ.items() if name.startswith("VARUNA_")}
        print(json.dumps({**words, **layout, "argv": sys.argv, "file": __file__, "path0": sys.path[0],
                          "main": sys.modules["__main__"].__file__, "marker": MARKER}))
    MARKER = 1
"""


def test_a_script_finds_its_world_arguments_and_layout(launch: Launch, tmp_path: Path) -> None:
    script = SHOW_WORLD.replace("import json", "MARKER = 0\n    import json", 1)
    options = ("--stages", "2", "--micro-batch-size", "8", "--schedule", "1f1b", "--no-recompute", "--no-check")
    arguments = ("--workers", "9", "two words", 'a "quote"', "--", "$HOME", "line\nbreak", "-m", "")
    done = launch(script, *arguments, workers=2, options=options).wait()
    assert done.code == 0, done.stderr
    world = json.loads(done.stdout)  # worker 0 alone is shown
    assert world["argv"] == ["train.py", *arguments]
    assert (world["RANK"], world["WORLD_SIZE"], world["LOCAL_RANK"], world["LOCAL_WORLD_SIZE"]) == (
        "0",
        "2",
        "0",
        "2",
    )
    assert world["MASTER_ADDR"] == "127.0.0.1"
    assert world["OMP_NUM_THREADS"] == "1"
    assert world["file"] == world["main"] == str(tmp_path / "train.py")
    assert world["path0"] == str(tmp_path)
    assert world["VARUNA_STAGES"] == "2"
    assert world["VARUNA_MICRO_BATCH_SIZE"] == "8"
    assert world["VARUNA_SCHEDULE"] == "1f1b"
    assert world["VARUNA_RECOMPUTE"] == "0"
    assert world["VARUNA_CHECK"] == "0"
    assert len(world["VARUNA_TOKEN"]) == 32
    other = json.loads((tmp_path / "logs" / "worker-1.log").read_text())
    assert (other["RANK"], other["VARUNA_TOKEN"]) == ("1", world["VARUNA_TOKEN"])


def test_a_module_runs_with_m_and_leaves_no_empty_log_directory(tmp_path: Path) -> None:
    package, temporary = tmp_path / "pack", tmp_path / "temporary"
    package.mkdir()
    temporary.mkdir()
    write_script(package, "WORD = 'relative import works'", "__init__.py")
    write_script(package, "import sys\nfrom . import WORD\nprint(WORD, __name__, sys.argv[1:])", "__main__.py")
    command = Command(["run", "-w", "1", "-m", "pack", "--lr", "3"], tmp_path, {"TMPDIR": str(temporary)})
    done = command.wait()
    command.kill_all()
    assert (done.code, done.stdout) == (0, "relative import works __main__ ['--lr', '3']\n"), done.stderr
    assert not list(temporary.iterdir())


def test_workers_join_the_store_of_the_launcher(launch: Launch) -> None:
    script = """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([float(os.environ["RANK"]) + 1])
        dist.all_reduce(total)
        print("sum", total.item())
        dist.destroy_process_group()
    """
    done = launch(script, workers=3).wait()
    assert (done.code, done.stdout) == (0, "sum 6.0\n"), done.stderr


def test_the_users_own_thread_count_stays(launch: Launch) -> None:
    script = "import torch\nprint(torch.get_num_threads(), torch.ones(1 << 20).exp().mean().item() > 2)"
    done = launch(script, workers=2, environ={"OMP_NUM_THREADS": "2"}).wait()
    assert (done.code, done.stdout) == (0, "2 True\n"), done.stderr


def test_show_all_puts_the_worker_before_each_line(launch: Launch, tmp_path: Path) -> None:
    script = """
        import os, sys
        print("first")
        sys.stderr.write("to error\\n")
        sys.stdout.write("no newline")
    """
    done = launch(script, workers=2, options=("--show", "all")).wait()
    assert done.code == 0
    assert "[worker 1] first\n" in done.stdout
    assert "[worker 1] no newline\n" in done.stdout
    assert (
        done.stdout.replace("[worker 1] first\n", "").replace("[worker 1] no newline\n", "")
        == "first\nno newline"
    )
    assert "[worker 1] to error\n" in done.stderr
    assert sorted((tmp_path / "logs" / "worker-1.log").read_text().splitlines()) == [
        "first",
        "no newline",
        "to error",
    ]


def test_worker_0_gets_the_terminal_itself(launch: Launch) -> None:
    controller, terminal = pty.openpty()
    script = "import os, sys\nprint(sys.stderr.isatty(), os.environ['RANK'] != '0' or os.ttyname(2))"
    done = launch(script, workers=2, stderr=terminal).wait()
    assert (done.code, done.stdout) == (0, f"True {os.ttyname(terminal)}\n")
    os.close(terminal)
    os.close(controller)


def test_a_worker_that_ends_early_and_well_ends_nothing(launch: Launch, tmp_path: Path) -> None:
    """Nor does a failure record that an earlier run left in the same log directory."""
    (tmp_path / "logs").mkdir()
    write_record(record_of(ValueError("of an earlier run"), 0), tmp_path / "logs")
    script = """
        import os, sys, time
        from pathlib import Path
        if os.environ["RANK"] == "1":
            Path("early.part").write_text(str(os.getpid()))
            Path("early.part").rename("early")
            sys.exit()
        while not Path("early").exists() or Path("/proc", Path("early").read_text()).exists():
            time.sleep(0.01)
        print("finished")
    """
    done = launch(script, workers=2).wait()
    assert (done.code, done.stdout) == (0, "finished\n"), done.stderr


def test_exit_handlers_and_threads_finish(launch: Launch) -> None:
    script = """
        import atexit, threading, time
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread", done))).start()
        done = "saw main"
    """
    done = launch(script, workers=1).wait()
    assert (done.code, done.stdout) == (0, "thread saw main\nat exit\n"), done.stderr


def test_global_generators_differ_between_workers_and_timing_is_told(launch: Launch, tmp_path: Path) -> None:
    script = "import numpy, random\nprint(numpy.random.rand(), random.random())"
    done = launch(script, workers=2, environ={"VARUNA_TIMING": "1"}).wait()
    assert "varuna: 2 workers run user code" in done.stderr
    first, second = done.stdout.split(), (tmp_path / "logs" / "worker-1.log").read_text().split()
    assert first[0] != second[0]
    assert first[1] != second[1]
