"""A TCP line that somebody else pulls: cut, delayed, held or dead, all connections of it at once.

`ChaosProxy` decides by itself what happens to each connection; a `Cable` does what it is told, as a
network does between two machines. Its far end may be a Unix socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Self

import psycopg

CHUNK_BYTES = 16_384

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class State(enum.Enum):
    """What a line does."""

    WORKS = "works"
    CUT = "cut"  # every connection is reset, and none can be made
    SLOW = "slow"  # everything takes `delay_s` longer
    HELD = "held"  # nothing arrives, and all of it does once the line works again
    DEAD = "dead"  # what was sent is lost, and connections of now are dead for good, unheard


class Cable:
    """Context manager: listens on a port of this machine and carries connections to where `dial`
    leads. `did` counts connections and what befell the line."""

    def __init__(self, dial: Callable[[], Awaitable[Streams]], *, delay_s: float = 0.3) -> None:
        self._dial, self._delay_s = dial, delay_s
        self.state = State.WORKS
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.Task[None]] = set()
        self._num_deaths = 0
        self.did: Counter[str] = Counter()
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=CHUNK_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        await self._cut()

    async def pull(self, state: State) -> None:
        """Have the line do something else from now on."""
        self.did[state.value] += 1
        self.state = state
        self._num_deaths += state is State.DEAD
        self._changed.set()
        self._changed = asyncio.Event()
        if state is State.CUT:
            await self._cut()

    async def _cut(self) -> None:
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.current_task()
        assert link is not None
        self._links.add(link)
        ends = [writer]
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._carry((reader, writer), ends)
        finally:
            for end in ends:
                end.transport.abort()
            self._links.discard(link)

    async def _carry(self, client: Streams, ends: list[asyncio.StreamWriter]) -> None:
        if self.state is State.CUT:
            return
        self.did["connections"] += 1
        born = self._num_deaths
        await self._passes(born)
        server = await self._dial()
        ends.append(server[1])
        flows = (self._flow(client[0], server[1], born), self._flow(server[0], client[1], born))
        tasks = [asyncio.create_task(flow) for flow in flows]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _flow(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, born: int
    ) -> None:
        """Carry one direction until its end."""
        while data := await source.read(CHUNK_BYTES):
            if self.state is State.SLOW:
                await asyncio.sleep(self._delay_s)
            await self._passes(born)
            sink.write(data)
            await sink.drain()
        await self._passes(born)
        sink.write_eof()

    async def _passes(self, born: int) -> None:
        """Wait until what comes over a connection may pass: never once it has died."""
        while self.state in (State.HELD, State.DEAD) or born != self._num_deaths:
            await self._changed.wait()


def dial_postgres(url: str) -> Callable[[], Awaitable[Streams]]:
    """Return what connects to a server of PostgreSQL on a Unix socket."""
    directory = psycopg.conninfo.conninfo_to_dict(url)["host"]
    return partial(asyncio.open_unix_connection, f"{directory}/.s.PGSQL.5432")
