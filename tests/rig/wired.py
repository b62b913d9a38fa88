"""The whole server over an engine stepped by hand: real sockets, one event loop, exact checks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial

from session_server.core.errors import SessionServerError
from session_server.core.owner import ANONYMOUS
from session_server.core.session_events import TurnCreated, TurnEnd, TurnRequest
from session_server.engine.config import MemoryCheck
from session_server.sessions.manager import SessionManager
from session_server.sessions.quotas import QuotaLimits, SessionLimits
from session_server.sessions.salts import TenantSalts
from session_server.sessions.views import OpenRequest, TurnView
from tests.rig.moments import turn
from tests.rig.raw_peer import RawPeer
from tests.rig.recovery import all_is_back, folded
from tests.sessions.world import model_text
from tests.sim.hand_engine import HandEngine, Sizes
from tests.sim.hosted_engine import HostedEngine
from tests.web.serving import Served, serving_over

SIZES = Sizes(num_pages=24, page_size=4, chunk_tokens=8, num_rows=4, memory_check=MemoryCheck.WARN)
"""What the checker would repair fails `assert_empty`, which recounts everything."""

MAX_STEPS = 2000
ROUNDS = 6
"""Rounds of the event loop in which a peer's bytes reach the code behind the sockets."""

NEXT = turn("next", 3, 4, max_tokens=2)


@dataclass
class Wired:
    """A server whose engine takes a step when a peer has nothing left to read."""

    this: Served[HostedEngine[HandEngine]]

    @property
    def sessions(self) -> SessionManager:
        """The sessions."""
        return self.this.sessions

    def step(self) -> bool:
        """A step of the engine, heard at once; whether there was one to take."""
        engine = self.this.engine
        was_busy = not engine.is_resting
        engine.step()
        engine.deliver()
        return was_busy

    async def peer(self, *, steps: bool = True, receive_buffer: int | None = None) -> RawPeer:
        """A new connection; without `steps` the engine does not move while it waits."""
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.this.port))
        return RawPeer(connection, self.step if steps else lambda: False)

    def narrow(self, send_buffer: int) -> None:
        """From now on the kernel holds little of what peers do not read."""
        for listener in self.this.server.servers[0].sockets:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)

    def num_bytes_owed(self) -> int:
        """What connections have written and the kernel has not taken."""
        connections = self.this.server.server_state.connections
        return sum(one.transport.get_write_buffer_size() for one in connections)

    def open(self, session_id: str) -> None:
        """A session without a socket."""
        self.sessions.open(ANONYMOUS, OpenRequest(session_id=session_id))

    async def submit(self, session_id: str, request: TurnRequest) -> TurnView:
        """A turn without a socket."""
        return await self.sessions.submit(ANONYMOUS, session_id, request)

    def find(self, session_id: str, turn_id: str) -> TurnView | None:
        """A turn, if the server took it."""
        try:
            return self.sessions.turn(ANONYMOUS, session_id, turn_id)
        except SessionServerError:
            return None

    async def rounds(self, num: int = ROUNDS) -> None:
        """Let the event loop run, and the engine not."""
        for _ in range(num):
            await asyncio.sleep(0)

    async def rest(self) -> None:
        """Go on until nothing happens any more."""
        num_still = 0
        for _ in range(MAX_STEPS):
            num_still = 0 if self.step() else num_still + 1
            if num_still > ROUNDS:
                return
            await asyncio.sleep(0)
        raise AssertionError("the server did not come to rest")

    async def assert_recovered(
        self,
        session_id: str,
        requests: Mapping[str, TurnRequest],
        *,
        unnamed: TurnRequest | None = None,
    ) -> dict[str, TurnEnd]:
        """The session has an exact history, goes on at once, and leaves nothing behind.

        `requests`: turns that peers may have brought; `unnamed`: what they asked for where the
        server gives names. Afterwards the session is closed. Gives the ends of the turns that the
        server took.
        """
        await self.submit(session_id, NEXT)
        await self.rest()
        journal = self.sessions.journal(ANONYMOUS, session_id)
        history = self.sessions.history(ANONYMOUS, session_id)
        salt = self.sessions._salts.salt_of(ANONYMOUS, session_id)
        entries = [found.entry for found in journal.read(0)]
        known = {**requests, NEXT.turn_id: NEXT}
        for entry in entries:
            if isinstance(entry, TurnCreated) and unnamed is not None:
                known.setdefault(entry.turn_id, unnamed)
        assert history == folded(entries, known, salt)
        assert len(history) >= 2 + 2, "the next turn did not run"
        self.sessions.close(ANONYMOUS, session_id)
        await self.assert_empty()
        return {entry.turn_id: entry for entry in entries if isinstance(entry, TurnEnd)}

    async def assert_empty(self) -> None:
        """With every session closed nothing is left: no turn, no quota, no page, no connection."""
        await self.rest()
        flush = asyncio.create_task(self.sessions.flush())
        await self.rest()
        assert await flush
        all_is_back(self.sessions, self.this.engine.hand)
        await self.until_alone()

    async def until_alone(self) -> None:
        """Wait until the server knows of no connection that serves a session."""
        async with asyncio.timeout(60):
            while self.this.sockets.num_attached or self.this.app.state.readers.num_connections:
                await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def wired(
    sizes: Sizes = SIZES,
    *,
    limits: SessionLimits | None = None,
    quotas: QuotaLimits | None = None,
    **settings: object,
) -> AsyncIterator[Wired]:
    """A server inside the block; `settings` are those of `WebSettings`."""
    engine = HostedEngine(partial(HandEngine.of, sizes))
    manager = SessionManager(
        engine, model_text(), salts=TenantSalts(bytes(16)), limits=limits, quotas=quotas
    )
    async with serving_over(engine, manager, **settings) as this:
        this.is_held = True
        yield Wired(this)
