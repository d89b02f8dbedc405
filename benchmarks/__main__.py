"""``python -m benchmarks [name ...] [option ...]``: run those named (``single``, ``jitter``, ...), or all.

Options (``--repeats 9``) are passed on to each of them.
"""

from __future__ import annotations

import os
import subprocess
import sys

NAMES = (
    "single",
    "gradients",
    "pipelining",
    "emulated",
    "schedules",
    "jitter",
    "start",
    "simulator",
    "real_steps",
    "best_plan",
    "reference",
    "choose",
    "borders",
    "checkpoint",
    "morph",
    "goodput",
)


def main() -> int:
    given = sys.argv[1:]
    first_option = next((index for index, text in enumerate(given) if text.startswith("-")), len(given))
    names, options = given[:first_option] or list(NAMES), given[first_option:]
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        print(f"Unknown benchmarks: {', '.join(unknown)}. Known: {', '.join(NAMES)}.", file=sys.stderr)
        return 2
    failed = []
    for name in names:
        if name == "jitter" and os.geteuid() != 0:
            print("jitter: left out, it needs root for network namespaces.\n", flush=True)
            continue
        if name == "goodput" and not (os.environ.get("VARUNA_TRACES") or "--traces" in options):
            print(
                "goodput: left out, neither VARUNA_TRACES nor --traces names its traces' folder.\n", flush=True
            )
            continue
        command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.bench_{name}", *options]
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}  # it warns of names it cannot look up
        if subprocess.run(command, check=False, env=quiet).returncode != 0:
            failed.append(name)
    if failed:
        print(f"Failed: {', '.join(failed)}.", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
