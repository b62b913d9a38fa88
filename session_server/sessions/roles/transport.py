"""How a prompt gets to another replica and the news of it back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final, Protocol

import httpx
import msgspec

from session_server.sessions.roles.messages import PATH, News, PrefillRefused, news_of

SILENT_S: Final = 5.0
"""For how long a replica may say nothing: one that works says so every second."""

CONNECT_S: Final = 2.0
"""How long a connection to a replica may take."""

MAX_LINE_BYTES: Final = 1 << 22
"""Of an answer. A file takes some 70 bytes of it."""

_OF_ADDRESSES: Final = (ExceptionGroup, OSError, OverflowError, ValueError)
"""What connecting raises besides, by addresses that are none: as of a port above 65,535."""

_SEALED: Final = "application/octet-stream"


class Unreachable(Exception):
    """Report a replica that cannot be reached, says nothing, or not what it should."""


class PrefillTransport(Protocol):
    """Bring a sealed request to a replica."""

    def ask(
        self, url: str, sealed: bytes
    ) -> contextlib.AbstractAsyncContextManager[AsyncIterator[News]]:
        """Ask the replica of a URL, and yield its news until the last; to leave the block earlier
        tells it that nobody waits any more. Raises Unreachable, there and while it is read."""

    async def close(self) -> None:
        """Close all connections."""


class HttpTransport:
    """Ask by HTTP: one POST, whose answer is a line for each piece of news."""

    def __init__(self) -> None:
        timeout = httpx.Timeout(SILENT_S, connect=CONNECT_S)
        self._client = httpx.AsyncClient(timeout=timeout, trust_env=False)

    @contextlib.asynccontextmanager
    async def ask(self, url: str, sealed: bytes) -> AsyncGenerator[AsyncIterator[News], None]:
        """Ask the replica of a URL; see `PrefillTransport`."""
        target, headers = url.rstrip("/") + PATH, {"content-type": _SEALED}
        try:
            async with self._client.stream(
                "POST", target, content=sealed, headers=headers
            ) as answer:
                yield _news(answer)
        except (httpx.HTTPError, httpx.InvalidURL, *_OF_ADDRESSES) as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()


async def _news(answer: httpx.Response) -> AsyncIterator[News]:
    if answer.status_code != httpx.codes.OK:
        yield PrefillRefused("failed", f"HTTP {answer.status_code}")
        return
    line = bytearray()
    async for piece in answer.aiter_raw():
        first, *others = piece.split(b"\n")
        line += first
        if len(line) > MAX_LINE_BYTES:
            raise Unreachable("an answer without an end")
        for other in others:
            try:
                yield news_of(bytes(line))
            except msgspec.MsgspecError as error:
                raise Unreachable(f"no news of ours: {error}") from error
            line = bytearray(other)
        await asyncio.sleep(0)  # thousands of pieces may have come at once
