"""A TCP proxy that treats its connections badly, by decision.

It splits what it carries (down to single bytes), stalls it, cuts it, resets it, closes one of its
directions, swallows it without a word, and says a whole connection's words again on a connection
of its own, as a retrying middlebox would. What happens to connection n, and at which byte, is a
hash of (seed, n, counter) alone; `did` counts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import struct
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from tests.rig.decisions import Decisions

Direction = Literal["up", "down"]
"""Up is what clients say, down what the server answers."""

CHUNK_BYTES = 16_384
MAX_OFFSET = 8192
MAX_REPEATED_BYTES = 65_536
SINGLE_BYTES = 48

CLOSE_S = 1.0

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Fault(enum.Enum):
    """How a connection ends before its time."""

    CUT = "cut"  # both ends see it closed in order
    RESET = "reset"  # both ends see it reset
    HALF_CLOSE = "half_close"  # one direction is closed, the other goes on
    BLACKHOLE = "blackhole"  # nothing arrives any more, and nobody is told


@dataclass(frozen=True)
class Weather:
    """How bad it is: shares of connections (of chunks, for `split`), seconds."""

    fault: float = 0.5
    stall: float = 0.2
    split: float = 0.3
    repeat: float = 0.1
    faults: tuple[Fault, ...] = tuple(Fault)
    max_offset: int = MAX_OFFSET
    longest_stall_s: float = 0.3
    blackhole_s: float = 1.0


CALM = Weather(fault=0.0, stall=0.0, split=0.0, repeat=0.0)


@dataclass(frozen=True)
class Fate:
    """What happens to one connection: the fault and the stall at a byte of a direction."""

    fault: tuple[Fault, Direction, int] | None
    stall: tuple[Direction, int, float] | None
    is_repeated: bool
    repeat_after_s: float

    @classmethod
    def of(cls, weather: Weather, seed: int, connection: int) -> Fate:
        """The fate of connection number `connection`."""
        chance = Decisions(seed, connection)
        directions: tuple[Direction, ...] = ("up", "down")
        fault = stall = None
        if chance.happens(weather.fault):
            kind, direction = chance.pick(weather.faults), chance.pick(directions)
            fault = kind, direction, chance.magnitude(weather.max_offset)
        if chance.happens(weather.stall):
            length_s = chance.share() * weather.longest_stall_s
            stall = chance.pick(directions), chance.magnitude(weather.max_offset), length_s
        return cls(fault, stall, chance.happens(weather.repeat), chance.share() / 2)


class ChaosProxy:
    """Context manager: listens on `url` and carries connections to `target_url`, more or less.

    `did` counts connections, bytes per direction, and every kind of trouble made. Leaving drops
    what is still open.
    """

    def __init__(self, target_url: str, weather: Weather, *, seed: int = 0) -> None:
        host, _, port = target_url.removeprefix("http://").rpartition(":")
        self.target = (host, int(port))
        self.weather = weather
        self.seed = seed
        self.did: Counter[str] = Counter()
        self.url = ""
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", 0, limit=CHUNK_BYTES, backlog=4096
        )
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    def fate(self, number: int) -> Fate:
        """What is going to happen to connection `number`."""
        return Fate.of(self.weather, self.seed, number)

    @property
    def num_open(self) -> int:
        """Connections that are carried, swallowed or said again now."""
        return len(self._links)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.current_task()
        assert link is not None
        self._links.add(link)
        try:
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await self._carry(_End(reader, writer))
        finally:
            writer.transport.abort()
            self._links.discard(link)

    async def _carry(self, client: _End) -> None:
        self.did["connections"] += 1
        number = self.did["connections"]
        fate = self.fate(number)
        server = await self._dial()
        up = _Flow(self, "up", fate, Decisions(self.seed, number, "up"))
        down = _Flow(self, "down", fate, Decisions(self.seed, number, "down"))
        try:
            how = await _run(up.carry(client, server), down.carry(server, client))
            if how is Fault.BLACKHOLE:
                await asyncio.sleep(self.weather.blackhole_s)
            for end in (client, server):
                await (end.close() if how in (None, Fault.CUT) else end.reset())
        finally:
            server.writer.transport.abort()
        if up.said:
            await asyncio.sleep(fate.repeat_after_s)
            await self._repeat(bytes(up.said))

    async def _repeat(self, said: bytes) -> None:
        """Say the same again on a connection of its own, and care for no answer."""
        self.did["repeated"] += 1
        server = await self._dial()
        try:
            server.writer.write(said)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.weather.blackhole_s):
                    while await server.reader.read(CHUNK_BYTES):
                        pass
        finally:
            server.writer.transport.abort()

    async def _dial(self) -> _End:
        return _End(*await asyncio.open_connection(*self.target, limit=CHUNK_BYTES))


class _Struck(Exception):
    """The connection ends here, by decision."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.value)
        self.fault = fault


async def _run(*flows: Coroutine[None, None, None]) -> Fault | None:
    """Carry both directions; how they ended, None for both in order."""
    how: Fault | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for flow in flows:
                group.create_task(flow)
    except* OSError:
        how = Fault.RESET  # one end is gone; the other is told the same
    except* _Struck as struck:
        error = struck.exceptions[0]
        assert isinstance(error, _Struck)
        how = error.fault
    return how


@dataclass(frozen=True)
class _End:
    """One of the two sockets of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def close(self) -> None:
        """Close in order, if the peer takes what it is owed soon."""
        self.writer.close()
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(CLOSE_S):
                await self.writer.wait_closed()

    async def reset(self) -> None:
        """Close with RST: what was sent and not yet read is lost as well."""
        if not self.writer.transport.is_closing():
            own = self.writer.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.writer.transport.abort()


class _Flow:
    """One direction of a connection. `said`: what went up, where it is to be said again."""

    def __init__(
        self, proxy: ChaosProxy, direction: Direction, fate: Fate, chance: Decisions
    ) -> None:
        self._did = proxy.did
        self._split = proxy.weather.split
        self._direction = direction
        self._chance = chance
        self._position = 0
        self._is_deaf = False
        self._keeps = fate.is_repeated and direction == "up"
        self._fault = fate.fault if fate.fault and fate.fault[1] == direction else None
        self._stall = fate.stall if fate.stall and fate.stall[0] == direction else None
        self.said = bytearray()

    async def carry(self, source: _End, sink: _End) -> None:
        """Until the source has said everything, or the fault strikes."""
        while data := await source.reader.read(CHUNK_BYTES):
            if self._keeps and len(self.said) < MAX_REPEATED_BYTES:
                self.said += data
            if self._stall is not None and (before := self._before(data, self._stall[1])) >= 0:
                await self._deliver(data[:before], sink)
                data = data[before:]
                self._did["stall"] += 1
                await asyncio.sleep(self._stall[2])
                self._stall = None
            if self._fault is not None and (before := self._before(data, self._fault[2])) >= 0:
                await self._deliver(data[:before], sink)
                self._strike(self._fault[0], sink)
                self._fault = None
            elif not self._is_deaf:
                await self._deliver(data, sink)
        if not self._is_deaf:
            sink.writer.write_eof()

    def _before(self, data: bytes, offset: int) -> int:
        """Bytes of `data` before that offset of the direction; -1 when it is not reached."""
        return offset - self._position if offset <= self._position + len(data) else -1

    def _strike(self, fault: Fault, sink: _End) -> None:
        self._did[fault.value] += 1
        if fault is not Fault.HALF_CLOSE:
            raise _Struck(fault)
        sink.writer.write_eof()
        self._is_deaf = True

    async def _deliver(self, data: bytes, sink: _End) -> None:
        self._position += len(data)
        self._did[f"bytes_{self._direction}"] += len(data)
        for piece in self._pieces(data):
            sink.writer.write(piece)
            await sink.writer.drain()
            await asyncio.sleep(0)

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        """All of it, or in pieces: down to single bytes for the first, to any size after them."""
        chance = self._chance
        if len(data) < 2 or not chance.happens(self._split):
            yield data
            return
        self._did["split"] += 1
        start = 0
        while start < len(data):
            size = 1 if start < SINGLE_BYTES else 1 + chance.magnitude(len(data))
            yield data[start : start + size]
            start += size
