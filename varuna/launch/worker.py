"""What a freshly forked worker does: take its place in the world, then be the user's script.

The script runs as ``__main__`` with its own ``sys.argv`` and ``sys.path[0]``, as under ``python train.py``. Its
exception, if it ends in one, becomes a failure record for the launcher, which shows the one that matters first;
it is printed here only when no record can be left and it is too long to be told without.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import importlib.util
import io
import os
import select
import signal
import sys
import time
import traceback
import types
from collections.abc import Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Literal

import msgspec

from varuna.errors import ConfigError, WantedEnd
from varuna.failure import FailureRecord, record_of, shortened, write_record
from varuna.launch.protocol import StartProcess, WorkerNotice
from varuna.morph.script_end import script_end
from varuna.morph.terminal import offer_terminal

_INTERRUPTED = 128 + signal.SIGINT
_MOST_RECORD_BYTES = 3800  # with its notice around it no more than a pipe takes in one piece


def run_worker(request: StartProcess, fds: Sequence[int]) -> int:
    """Run the user's script in this process; returns the exit code it should end with."""
    stdin, stdout, stderr, notice_fd, ending_fd, *terminal = fds
    os.environ.update(request.environ)
    _take_streams(stdin, stdout, stderr)
    if terminal:
        offer_terminal(os.environ, terminal)
    os.set_inheritable(notice_fd, False)
    os.set_inheritable(ending_fd, False)
    faulthandler.enable()
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _hear_sigterm(request, notice_fd, ending_fd)
        _notify(notice_fd, request, "begins")
        code, module = _load_main(request)
        _run_script(code, module)
    except SystemExit as error:
        return _exit_code(error, request, notice_fd)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BaseException as error:
        error.__traceback__ = _without_own_frames(error.__traceback__)
        _leave_record(record_of(error, request.worker_index), request, notice_fd, error)
        return 1
    return 0


def _run_script(code: types.CodeType, module: types.ModuleType) -> None:
    try:
        exec(code, module.__dict__)
    except SystemExit as error:
        if error.code or isinstance(error, WantedEnd):
            raise
    script_end().came()


def _hear_sigterm(request: StartProcess, notice_fd: int, ending_fd: int) -> None:
    """Where workers come and go, a first SIGTERM (of a batch system, say) only asks this one to leave.

    The launcher's own SIGTERM, and any later one, ends the process as usual. A script may set its own handler.
    """
    owner_pid = os.getpid()

    def handle(signum: int, _: types.FrameType | None) -> None:
        signal.signal(signum, signal.SIG_DFL)
        if os.getpid() != owner_pid or select.select([ending_fd], [], [], 0)[0]:
            os.kill(os.getpid(), signum)
        else:
            _notify(notice_fd, request, "terminate")

    is_managed = bool(request.environ.get("VARUNA_MANAGER"))
    signal.signal(signal.SIGTERM, handle if is_managed else signal.SIG_DFL)


def _take_streams(stdin: int, stdout: int, stderr: int) -> None:
    for fd, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
        os.dup2(fd, target)
        os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _load_main(request: StartProcess) -> tuple[types.CodeType, types.ModuleType]:
    """Compile the script or module and make the ``__main__`` it will run in."""
    script_dir = str(Path.cwd()) if request.is_module else str(Path(request.target).absolute().parent)
    sys.path.insert(0, script_dir)
    main = types.ModuleType("__main__")
    if request.is_module:
        spec = _module_spec(request.target)
        assert isinstance(spec.loader, SourceFileLoader)
        code = spec.loader.get_code(spec.name)
        path, loader = spec.origin, spec.loader
        main.__spec__, main.__package__ = spec, spec.parent
    else:
        path = str(Path(request.target).absolute())
        loader = SourceFileLoader("__main__", path)
        code = loader.source_to_code(Path(path).read_bytes(), path)
        main.__package__ = None
    assert code is not None
    assert path is not None
    main.__file__, main.__loader__ = path, loader
    main.__dict__["__builtins__"] = builtins
    sys.argv = [path if request.is_module else request.target, *request.arguments]
    sys.modules["__main__"] = main
    return code, main


def _module_spec(name: str) -> ModuleSpec:
    """Where ``-m name`` leads: the module, or ``__main__`` of a package."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError:
        spec = None
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
        raise ConfigError(
            f"No module {name!r} with Python source that can be run. Looked in {Path.cwd()} and the installed "
            f"packages; give the name as for `python -m`."
        )
    return spec


# --- how it ended ---------------------------------------------------------------------------


def _exit_code(error: SystemExit, request: StartProcess, notice_fd: int) -> int:
    """The code of ``sys.exit``; one that is not 0 is a failure, told without a traceback."""
    if error.code is None or error.code == 0:
        return 0
    is_number = isinstance(error.code, int)
    code = error.code & 0xFF if isinstance(error.code, int) else 1
    if not is_number:
        sys.stderr.write(f"{error.code}\n")
    where = _last_line(error)
    record = record_of(error, request.worker_index, exit_code=code)
    text = f"exit code {code}{where}" if is_number else f"{error.code}{where}"
    _leave_record(replace(record, error_text=text, traceback_text=""), request, notice_fd, None)
    return code


def _leave_record(
    record: FailureRecord, request: StartProcess, notice_fd: int, error: BaseException | None
) -> None:
    told = None
    try:
        write_record(record, Path(request.failure_dir))
    except OSError as problem:  # a full disk, a folder that was removed
        told = shortened(record, _MOST_RECORD_BYTES)
        with contextlib.suppress(OSError):
            too_long = "" if told is record else record.traceback_text
            sys.stderr.write(f"{too_long}varuna: no failure record: {problem}\n")
    _notify(notice_fd, request, "failed", told)
    hook = sys.excepthook
    is_users = hook is not sys.__excepthook__ and not getattr(hook, "__module__", "").startswith("torch.")
    if error is not None and record.is_root_cause and is_users:  # an error tracker's, say
        hook(type(error), error, error.__traceback__)


def _notify(
    notice_fd: int,
    request: StartProcess,
    what: Literal["begins", "failed", "terminate"],
    record: FailureRecord | None = None,
) -> None:
    notice = WorkerNotice(worker_index=request.worker_index, what=what, at_s=time.monotonic(), record=record)
    os.write(notice_fd, msgspec.json.encode(notice) + b"\n")


def _without_own_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Cut the frames of this file and the import system before the user's first line."""
    while trace is not None and (
        trace.tb_frame.f_code.co_filename == __file__
        or trace.tb_frame.f_code.co_filename.startswith("<frozen ")
    ):
        trace = trace.tb_next
    return trace


def _last_line(error: BaseException) -> str:
    frames = traceback.extract_tb(_without_own_frames(error.__traceback__))
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
