"""Starts the zygote: the interpreter that has torch imported and forks workers."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import varuna
from varuna.launch.protocol import Channel

_CODE = "import sys; sys.path.append(sys.argv.pop(1)); from varuna.launch.zygote import main; main()"
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # MKL follows OMP
_ONE_THREAD_ALONE = ("OPENBLAS_NUM_THREADS",)  # numpy would start its threads before the fork


def start_zygote(environ: Mapping[str, str], num_workers: int) -> tuple[subprocess.Popen[bytes], Channel]:
    """Start it in a session of its own, so that the terminal's signals reach the launcher alone."""
    ours, its = socket.socketpair()
    package_root = str(Path(varuna.__file__).parent.parent)
    threads = _ONE_THREAD if num_workers > 1 else _ONE_THREAD_ALONE
    with its:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CODE, package_root, str(its.fileno())],
            env={**dict.fromkeys(threads, "1"), **environ},
            pass_fds=(its.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return process, Channel(ours)
