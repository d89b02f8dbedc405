"""Train a GPT on real text while workers are killed, join and leave; then compare it with an undisturbed run.

    python examples/demo.py                       # a few minutes on two cores
    python examples/demo.py --steps 40 -- --layers 2 --width 128    # what follows -- is for gpt.py

``gpt.py`` is the training script; nothing in it knows of any of this. What happens to its workers is done from
outside: one is killed as by ``kill -9``, one more is asked for with ``varuna workers add``, one is told to go
with ``varuna preempt``, and ``varuna events --follow`` tells how the job takes it. Needs Linux: it looks for
the process to kill in ``/proc``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VARUNA = str(Path(sys.executable).with_name("varuna"))
SCRIPT = str(Path(__file__).with_name("gpt.py"))
TOLD = ("lost", "fenced", "ready", "notice", "decision", "running")
"""Kinds of events that are shown."""

KILLED, LEAVES = 3, 1
MOST_DIFFERENCE = 0.02
"""Relative; sums in another order, in bf16, differ by much less."""


@dataclass
class Story:
    """What is done to a run that is at work.

    Attributes:
        num_steps: of the training.
        launcher_pid: of ``varuna run``.
        environ: in which commands find the run.
        done: what was done, and after how many steps.
    """

    num_steps: int
    launcher_pid: int
    environ: Mapping[str, str]
    done: dict[str, int] = field(default_factory=dict)

    def take(self, event: Mapping[str, Any]) -> None:
        """One event of the run."""
        if event["kind"] in TOLD:
            say(f"  {event['kind']}: {event['text']}")
        if event["kind"] == "step":
            num_done = event["step_index"] + 1
            self._once(num_done, 1, f"worker {KILLED} is killed", self._kill)
            self._once(num_done, 2, "a new worker is asked for", lambda: self._command("workers", "add", "1"))
            self._once(num_done, 3, f"worker {LEAVES} has to go", lambda: self._command("preempt", str(LEAVES)))

    def _once(self, num_done: int, quarter: int, what: str, act: Callable[[], str]) -> None:
        if what not in self.done and num_done >= quarter * self.num_steps // 4:
            self.done[what] = num_done
            say(f"after step {num_done}: {what} ({act()})")

    def _kill(self) -> str:
        process_id = worker_process(self.launcher_pid, KILLED)
        os.kill(process_id, signal.SIGKILL)
        return f"kill -9 {process_id}"

    def _command(self, *words: str) -> str:
        subprocess.run([VARUNA, *words], env=self.environ, check=True, stdout=subprocess.DEVNULL)
        return f"varuna {' '.join(words)}"


def main() -> int:
    args = parse_arguments()
    directory: Path = args.save_dir.absolute()
    environ = {**os.environ, "VARUNA_CACHE_DIR": str(directory / "varuna")}
    arguments = ["--steps", str(args.steps), *args.script_arguments]

    say("training with 4 workers on this machine, 2 stages x 2 pipelines")
    logs = directory / "logs"
    command = training(4, 2, directory / "disturbed", arguments, "--log-dir", str(logs))
    launcher = subprocess.Popen(command, env=environ)
    story = Story(num_steps=args.steps, launcher_pid=launcher.pid, environ=environ)
    for event in events(launcher, environ):
        story.take(event)
    if launcher.wait() != 0:
        return launcher.returncode

    say("the same training again, by 2 workers that nobody disturbs")
    command = training(2, 1, directory / "undisturbed", [*arguments, "--sample-tokens", "1"])
    subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL)
    is_same = compare(story, losses_of(directory / "disturbed"), losses_of(directory / "undisturbed"))
    say(f"which samples it trained on (varuna audit {logs}):")
    audit = subprocess.run([VARUNA, "audit", str(logs), "--steps", str(args.steps)], check=False)
    return 0 if is_same and audit.returncode == 0 else 1


def training(
    num_workers: int, num_stages: int, save_dir: Path, arguments: list[str], *options: str
) -> list[str]:
    """The command; micro-batches are the same in both runs."""
    layout = ["--workers", str(num_workers), "--stages", str(num_stages), "--micro-batch-size", "4"]
    return [VARUNA, "run", *layout, *options, SCRIPT, "--save-dir", str(save_dir), *arguments]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train while workers come and go.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=72, help="optimizer updates")
    parser.add_argument("--save-dir", type=Path, default=Path("runs/demo"))
    parser.add_argument("script_arguments", nargs="*", metavar="-- ARGUMENTS", help="for gpt.py")
    return parser.parse_args()


def events(launcher: subprocess.Popen[bytes], environ: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """What happens in a run, as it happens, until it has ended."""
    num_told = 0
    while not num_told and launcher.poll() is None:  # until the run is announced there is nothing to follow
        command = [VARUNA, "events", "--follow"]
        with subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as following:
            assert following.stdout is not None
            for line in following.stdout:
                num_told += 1
                yield json.loads(line)


def worker_process(launcher_pid: int, worker: int) -> int:
    """The process of a worker of a launcher."""
    for path in Path("/proc").glob("[0-9]*/comm"):
        if path.read_text().strip() == f"varuna-worker-{worker}":
            ancestors = list(ancestors_of(int(path.parent.name)))
            if launcher_pid in ancestors:
                return ancestors[0]
    raise SystemExit(f"Worker {worker} of process {launcher_pid} is not there.")


def ancestors_of(process_id: int) -> Iterator[int]:
    """The process itself, its parent, and so on."""
    while process_id > 0:
        yield process_id
        status = Path(f"/proc/{process_id}/status").read_text()
        process_id = int(status.split("PPid:")[1].split()[0])


def losses_of(directory: Path) -> list[float]:
    """Of every step."""
    return list(json.loads((directory / "summary.json").read_text())["train_losses"])


def compare(story: Story, disturbed: list[float], undisturbed: list[float]) -> bool:
    """Print both losses around what happened, and say whether they are the same."""
    notes = {num_done: what for what, num_done in story.done.items()}
    shown = sorted({1, *(num_done + offset for num_done in notes for offset in (-1, 0, 1)), story.num_steps})
    say("the loss, beside that of the undisturbed run:")
    print("\n     step   disturbed   undisturbed")
    for number in shown:
        mine, other = disturbed[number - 1], undisturbed[number - 1]
        print(f"    {number:5}   {mine:9.4f}   {other:11.4f}   {notes.get(number, '')}".rstrip())
    worst = max(abs(mine - other) / other for mine, other in zip(disturbed, undisturbed, strict=True))
    is_same = worst <= MOST_DIFFERENCE and len(notes) == 3
    print(
        f"\nLargest difference over {story.num_steps} steps: {worst:.2%}. "
        + ("The loss goes on as if nothing had happened." if is_same else "That is not as it should be.")
    )
    return is_same


def say(text: str) -> None:
    """A line of the demo's own, above the live line of the training if there is one."""
    clear = "\r\x1b[2K" if sys.stdout.isatty() else ""
    print(f"{clear}demo: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
