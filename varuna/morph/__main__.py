"""The manager's process: ``python -m varuna.morph --listen-fd N --journal FILE [...]``.

A launcher starts it. It serves on a listening socket that it is given, so that a manager that is started again
answers at the same place, and writes a journal from which it then knows what it knew. The job's token comes in
``VARUNA_TOKEN``, whom to ask for machines in ``VARUNA_SCALE_*``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from varuna.clock import Clock, MonotonicClock
from varuna.config_scale import ScaleConfig
from varuna.morph.hub import HEARTBEAT_LIMIT_S, Hub
from varuna.morph.journal import Journal, ResumedClock
from varuna.morph.messages import Welcome
from varuna.morph.planning import plan_for, warm_up
from varuna.morph.policy import Policy
from varuna.morph.scale_hook import ScaleHook
from varuna.morph.scaling import ScalePolicy, Scaling
from varuna.morph.server import Server, request_log
from varuna.versions import installed_versions

_TICKS_PER_LIMIT = 20
_MOST_TICK_S = 0.25
_SHUTDOWN_S = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to end; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m varuna.morph", description=__doc__)
    parser.add_argument("--listen-fd", type=int, required=True)
    parser.add_argument("--journal", type=Path, required=True, metavar="FILE")
    parser.add_argument("--heartbeat-limit", type=float, default=HEARTBEAT_LIMIT_S, metavar="SECONDS")
    parser.add_argument("--run-id", default="", help="told to agents, with --store-port")
    parser.add_argument("--run-name", default="", help="told to whom it asks for machines")
    parser.add_argument("--store-port", type=int, default=0)
    parser.add_argument("--min-workers", type=int, default=0, help="0: the launcher founds the job by itself")
    parser.add_argument("--settle", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument(
        "--rest", type=float, default=Policy().rest_s, metavar="SECONDS", help="of slow workers"
    )
    parser.add_argument("--replace-lost", action="store_true", help="ask for a worker for each that is lost")
    parser.add_argument("--ignore-slow", action="store_true", help="slow workers get as much work as others")
    given = parser.parse_args(arguments)
    token = os.environ.pop("VARUNA_TOKEN", "")
    if not token:
        sys.stderr.write("varuna manager: VARUNA_TOKEN is not set. `varuna run` sets it.\n")
        return 2
    with socket.socket(fileno=given.listen_fd) as listener:
        journal = Journal(given.journal)
        try:
            policy = Policy(
                min_workers=given.min_workers,
                settle_s=given.settle,
                replace_lost=given.replace_lost,
                finds_slow=not given.ignore_slow,
                rest_s=given.rest,
            )
            restored = journal.restore(plan_for, policy)
            clock = ResumedClock(MonotonicClock(), restored.now_s)
            welcome = Welcome(run_id=given.run_id, store_port=given.store_port) if given.run_id else None
            hub = Hub(
                restored.manager,
                clock,
                books=journal,
                heartbeat_limit_s=given.heartbeat_limit,
                welcome=welcome,
                described=lambda job: job.profile and warm_up(job),
            )
            server = Server(hub, token, run_id=given.run_id, versions=installed_versions())
            hook = _scale_hook(ScaleConfig.from_env(os.environ), given.run_name, policy, hub, clock)
            try:
                asyncio.run(_serve(hub, hook, server, listener, given.heartbeat_limit / _TICKS_PER_LIMIT))
            finally:
                if hook is not None:
                    hook.close()
        finally:
            journal.close()
    return 0


def _scale_hook(
    config: ScaleConfig | None, run_id: str, policy: Policy, hub: Hub, clock: Clock
) -> ScaleHook | None:
    if config is None:
        return None
    scale = ScalePolicy(workers=config.workers, every_s=config.every_s)
    return ScaleHook(config, Scaling(run_id, policy, scale), hub, clock)


async def _serve(
    hub: Hub, hook: ScaleHook | None, server: Server, listener: socket.socket, tick_s: float
) -> None:
    runner = web.AppRunner(
        server.application(),
        access_log=None,
        logger=request_log(),
        shutdown_timeout=_SHUTDOWN_S,
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        ticking = asyncio.ensure_future(_tick(hub, hook, min(tick_s, _MOST_TICK_S)))
        ending = asyncio.ensure_future(_asked_to_end())
        try:
            done, _ = await asyncio.wait((ticking, ending), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (ticking, ending):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
    finally:
        await runner.cleanup()


async def _tick(hub: Hub, hook: ScaleHook | None, every_s: float) -> None:
    while True:
        hub.tick()
        if hook is not None:
            hook.tick()
        await asyncio.sleep(every_s)


async def _asked_to_end() -> None:
    """Until a signal asks this process to end."""
    asked = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, asked.set)
    await asked.wait()


if __name__ == "__main__":
    sys.exit(main())
