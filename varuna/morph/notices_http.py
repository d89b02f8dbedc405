"""One question to a metadata service: no proxy, no redirect, no cookie, a small answer, no exception."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import aiohttp

from varuna.morph.waiting import Waiting

MOST_BYTES = 1 << 20
"""Longer answers are cut: no metadata service sends that much."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the service said. Header names are in lower case."""

    status: int
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def date(self) -> str:
        """The service's own clock, "" if it did not say."""
        return self.headers.get("date", "")


@dataclass(frozen=True, kw_only=True)
class Silence:
    """There was no answer: refused, no route, too slow, or cut off."""

    reason: str


class MetadataHttp:
    """Asks one service; keeps one connection while entered.

    Args:
        base_url: scheme, host and port.
        waiting: whose time limits count.
    """

    def __init__(self, base_url: str, waiting: Waiting) -> None:
        self._base_url = base_url.rstrip("/")
        self._waiting = waiting
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            trust_env=False,  # a proxy must never see or answer these
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
            connector=aiohttp.TCPConnector(limit=2),
        )
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def ask(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        json: object = None,
    ) -> Answer | Silence:
        """One request; ``timeout_s`` covers it from connecting to the last byte."""
        try:
            return await self._waiting.within(timeout_s, self._ask(method, path, headers, json))
        except TimeoutError:
            return Silence(reason=f"no answer within {timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return Silence(reason=f"{type(error).__name__}: {error}")

    async def _ask(self, method: str, path: str, headers: Mapping[str, str] | None, json: object) -> Answer:
        assert self._session is not None
        async with self._session.request(
            method, self._base_url + path, headers=headers, json=json, allow_redirects=False
        ) as response:
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > MOST_BYTES:
                    break
            return Answer(
                status=response.status,
                body=bytes(body[:MOST_BYTES]).decode("utf-8", errors="replace"),
                headers={name.lower(): value for name, value in response.headers.items()},
            )
