"""Asks a run's manager, here or on another machine: plain HTTP with the job's token."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from varuna.errors import ConfigError
from varuna.morph.runs import RunInfo, living_runs
from varuna.morph.views import About, AddRequest, LoggedEvent, PreemptRequest, Status

_TIMEOUT_S = 10.0
_RETRY_S = 0.1


class RunClient:
    """One run.

    Args:
        run: from ``find_run``, or ``run_at``.
        cache_dir: where it was found; None for one whose manager is on another machine.
    """

    def __init__(self, run: RunInfo, cache_dir: Path | None = None) -> None:
        self.run = run
        self._cache_dir = cache_dir
        self._address = urlsplit(run.url)

    def about(self) -> About:
        """What the manager says of itself. Raises ``ConfigError`` if it does not answer."""
        return msgspec.json.decode(self._ask("GET", "/about"), type=About)

    def is_alive(self) -> bool:
        """Whether the run is still there: its launcher lives or, elsewhere, its manager answers."""
        if self._cache_dir is not None:
            return self.run in living_runs(self._cache_dir)
        try:
            self.about()
        except ConfigError:
            return False
        return True

    def status(self) -> Status:
        """How the job stands. Raises ``ConfigError`` if the manager does not answer."""
        return msgspec.json.decode(self._ask("GET", "/status"), type=Status)

    def preempt(self, target: str, deadline_s: float = 0.0) -> tuple[str, ...]:
        """Have a worker or all workers of a machine leave; which ones that are.

        Args:
            target: see ``resolve``.
            deadline_s: seconds until they will be gone, 0 if they have all the time they need.

        Raises:
            ConfigError: no such worker, or the manager does not answer.
        """
        worker, machine = resolve(target, self.status())
        request = PreemptRequest(worker=worker, machine=machine, deadline_s=deadline_s)
        answer = self._ask("POST", "/preempt", msgspec.json.encode(request))
        return tuple(msgspec.json.decode(answer, type=dict[str, list[str]])["workers"])

    def add_workers(self, count: int, machine: str = "") -> str:
        """Have more workers started; on which machine. Raises ``ConfigError`` as above."""
        answer = self._ask("POST", "/workers", msgspec.json.encode(AddRequest(count=count, machine=machine)))
        return msgspec.json.decode(answer, type=dict[str, str])["machine"]

    def events(self, *, after: int = 0, follow: bool = False) -> Iterator[LoggedEvent]:
        """What has happened since event ``after``; with ``follow`` also what comes, until the run ends.

        A manager that is started again counts from 1 again; following goes on with its events.
        """
        while True:
            try:
                yield from self._events(after, follow)
                after = 0
            except (OSError, http.client.HTTPException) as error:
                if not follow:
                    raise ConfigError(self._silent(error)) from error
            if not follow or not self.is_alive():
                return
            time.sleep(_RETRY_S)

    def _events(self, after: int, follow: bool) -> Iterator[LoggedEvent]:
        connection = self._connection(None if follow else _TIMEOUT_S)
        try:
            connection.request("GET", f"/events?after={after}&follow={int(follow)}", headers=self._headers)
            response = connection.getresponse()
            self._check(response)
            while line := response.readline():
                yield msgspec.json.decode(line, type=LoggedEvent)
        finally:
            connection.close()

    def _ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        connection = self._connection(_TIMEOUT_S)
        try:
            connection.request(method, path, body=body or None, headers=self._headers)
            response = connection.getresponse()
            self._check(response)
            return response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(self._silent(error)) from error
        finally:
            connection.close()

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.run.token}"}

    def _connection(self, timeout_s: float | None) -> http.client.HTTPConnection:
        assert self._address.hostname is not None
        return http.client.HTTPConnection(self._address.hostname, self._address.port, timeout=timeout_s)

    def _silent(self, error: Exception) -> str:
        run = f"of run {self.run.run_id} " if self.run.run_id else ""
        return f"The manager {run}at {self.run.url} does not answer: {error}."

    @staticmethod
    def _check(response: http.client.HTTPResponse) -> None:
        if response.status == http.client.OK:
            return
        try:
            reason = msgspec.json.decode(response.read(), type=dict[str, str])["error"]
        except (msgspec.DecodeError, KeyError):
            reason = f"HTTP status {response.status}"
        raise ConfigError(reason)


def run_at(url: str, token: str) -> RunInfo:
    """The run of a manager on another machine, as its manager names it.

    Raises:
        ConfigError: the URL cannot be, the manager does not answer, or it has another token.
    """
    check_url(url)
    run = RunInfo(run_id="", url=url.rstrip("/"), token=token, pid=0, started_s=0.0)
    return msgspec.structs.replace(run, run_id=RunClient(run).about().run_id or url)


def check_url(url: str) -> str:
    """The host in a manager's URL.

    Raises:
        ConfigError: it is none.
    """
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "http" or not parts.hostname or not port or parts.path.strip("/") or parts.username:
        raise ConfigError(f"{url!r} is no URL of a manager. Give what `varuna manager` says: http://HOST:PORT")
    return parts.hostname


def resolve(target: str, status: Status) -> tuple[str, str]:
    """Worker and machine that a person means, one of them empty: an incarnation, a worker's number, a machine.

    Raises:
        ConfigError: nothing fits, or several workers do.
    """
    names = [worker.incarnation for worker in status.workers if worker.status not in ("gone", "leaving")]
    if target in names:
        return target, ""
    number = target.removeprefix("worker").strip(" -")
    fitting = [name for name in names if name.rsplit(".", 2)[1:2] == [number]]
    if len(fitting) == 1:
        return fitting[0], ""
    if len(fitting) > 1:
        raise ConfigError(f"{target!r} may be any of {', '.join(fitting)}. Give the whole name.")
    if any(worker.machine == target for worker in status.workers if worker.incarnation in names):
        return "", target
    machines = sorted({worker.machine for worker in status.workers if worker.incarnation in names})
    raise ConfigError(
        f"{target!r} is no living worker and no machine. Workers: {', '.join(names) or 'none'}; machines: "
        f"{', '.join(machines) or 'none'}."
    )
