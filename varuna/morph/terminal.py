"""The terminal goes to whichever worker is worker 0: every worker is given its descriptors and takes them then.

The launcher names them in ``VARUNA_TERMINAL_FDS``: standard input, output and error, with commas between.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence

VARIABLE = "VARUNA_TERMINAL_FDS"


def offer_terminal(environ: MutableMapping[str, str], fds: Sequence[int]) -> None:
    """Remember descriptors for ``take_terminal``; programs that this process starts do not get them."""
    for fd in fds:
        os.set_inheritable(fd, False)
    environ[VARIABLE] = ",".join(map(str, fds))


def take_terminal(environ: MutableMapping[str, str]) -> bool:
    """From now on this process's standard streams are the terminal's; False if it has none to take."""
    text = environ.pop(VARIABLE, "")
    if not text:
        return False
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for target, fd in enumerate(map(int, text.split(","))):
        os.dup2(fd, target)
        os.close(fd)
    return True
