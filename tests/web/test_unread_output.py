"""What peers do not read: counted, and given up if they take nothing of it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest

from session_server.core.owner import ANONYMOUS
from session_server.core.session_events import Message, Outcome, TokenUsage, TurnCompleted
from session_server.protocol import frame_queue
from session_server.protocol.frames import frame_of
from session_server.sessions.views import OpenRequest
from session_server.web import listener
from session_server.web.connection_table import ConnectionLimits, ConnectionTable
from session_server.web.unread_output import UnreadOutput
from session_server.web.websocket_guard import GuardedWebSocket
from tests.web.serving import Served, served
from tests.web.test_connection_table import Peer
from tests.web.wire_client import narrow_socket


class Buffer:
    """A transport's write buffer; `sizes` says how many bytes it holds at each look."""

    def __init__(self, *sizes: int) -> None:
        self._sizes = iter(sizes)

    def set_write_buffer_limits(self, *, high: int) -> None:
        assert high == 0, "what the kernel does not take at once is heard of at once"

    def get_write_buffer_size(self) -> int:
        return next(self._sizes)


@pytest.mark.parametrize(
    "sizes", [(9, 9), (9, 8, 8), (9, 8, 7, 1, 1), (9, 10)], ids=lambda sizes: f"{len(sizes)} looks"
)
def test_a_peer_is_given_up_at_the_first_look_at_which_it_has_taken_nothing(
    sizes: tuple[int, ...],
) -> None:
    async def play() -> None:
        table, peer, stalled = ConnectionTable(ConnectionLimits()), Peer(), asyncio.Event()
        table.add(peer)
        buffer = Buffer(*sizes)
        unread = UnreadOutput(
            peer, cast(Any, buffer), table=table, stall_s=0.0, on_stall=stalled.set
        )
        unread.begin()
        assert table.num_unread_bytes == sizes[0]
        await stalled.wait()
        with pytest.raises(StopIteration):
            buffer.get_write_buffer_size()
        unread.end()
        assert table.num_unread_bytes == 0

    asyncio.run(asyncio.wait_for(play(), 10))


def test_a_peer_that_has_read_everything_is_not_looked_at_again() -> None:
    async def play() -> None:
        table, peer = ConnectionTable(ConnectionLimits()), Peer()
        table.add(peer)
        unread = UnreadOutput(
            peer, cast(Any, Buffer(9)), table=table, stall_s=0.0, on_stall=pytest.fail
        )
        unread.begin()
        unread.end()
        for _ in range(3):
            await asyncio.sleep(0)
        assert table.num_unread_bytes == 0

    asyncio.run(asyncio.wait_for(play(), 10))


def test_what_waits_behind_unread_bytes_counts_with_them() -> None:
    async def play() -> None:
        table, peer, buffer = ConnectionTable(ConnectionLimits()), Peer(), Buffer(9, 8)
        table.add(peer)
        unread = UnreadOutput(
            peer, cast(Any, buffer), table=table, stall_s=60.0, on_stall=pytest.fail
        )
        unread.begin()
        unread.set_behind(100)
        assert table.num_unread_bytes == 8 + 100
        unread.end()
        assert table.num_unread_bytes == 0
        unread.set_behind(100)
        assert table.num_unread_bytes == 0, "it is written now"

    asyncio.run(play())


@served()
async def test_an_event_that_is_not_read_counts_whole(this: Served) -> None:
    session_id = await this.open()
    peer, loop = await narrow_socket(this.port), asyncio.get_running_loop()
    request = f"GET /v1/sessions/{session_id}/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
    await loop.sock_sendall(peer, request.encode())
    await loop.sock_recv(peer, 4096)
    outcome = Outcome("i", "x" * 2_000_000, (), TokenUsage(), None)
    this.sessions.journal(ANONYMOUS, session_id).append(TurnCompleted("t", "stop", None, outcome))
    table = this.app.state.connections
    await this.until(lambda: table.num_unread_bytes > 0)
    assert table.num_unread_bytes > 2_000_000 - 4 * listener.UNSENT_BYTES
    peer.close()


@served()
async def test_a_request_behind_an_answer_that_is_not_read_waits(this: Served) -> None:
    begun = OpenRequest(messages=(Message("system", "x" * 900_000),))
    session_id = this.sessions.open(ANONYMOUS, begun).session_id
    asked: list[str] = []
    snapshot = this.sessions.snapshot
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            this.sessions, "snapshot", lambda *which: [asked.append("one"), snapshot(*which)][1]
        )
        peer, loop = await narrow_socket(this.port), asyncio.get_running_loop()
        request = f"GET /v1/sessions/{session_id}/items HTTP/1.1\r\nHost: localhost\r\n\r\n"
        await loop.sock_sendall(peer, request.encode() * 2)
        await this.until(lambda: this.app.state.connections.num_unread_bytes > 0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(asked) == 1
        while len(asked) == 1:
            await loop.sock_recv(peer, 1 << 20)
    peer.close()


@served()
async def test_what_is_behind_the_unread_frames_of_a_socket_counts_too(this: Served) -> None:
    session_id, narrow = await this.open(), await narrow_socket(this.port)
    async with this.bare_socket(session_id, sock=narrow, max_queue=1) as wire:
        (unread,) = (
            connection._unread
            for connection in this.server.server_state.connections
            if isinstance(connection, GuardedWebSocket)
        )
        journal = this.sessions.journal(ANONYMOUS, session_id)
        entry = TurnCompleted(
            "t", "stop", None, Outcome("i", "x" * 160_000, (), TokenUsage(), None)
        )
        for _ in range(6):
            journal.append(entry)
        size = len(msgspec.json.encode(frame_of(journal.last_seq, entry)))
        await this.until(lambda: unread._num_behind > 0)
        assert unread._num_behind % size == 0
        assert this.app.state.connections.num_unread_bytes > unread._num_behind
        await wire.socket.send("{")
        await this.until(lambda: unread._num_behind % size > 0)  # the refusal waits behind them
        await wire.until("error")
    await this.until(lambda: this.app.state.connections.num_unread_bytes == 0)


@served()
async def test_a_whole_message_that_waits_counts_as_input(this: Served) -> None:
    session_id = await this.open()
    table = this.app.state.connections
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame_queue, "MAX_OUTBOX_BYTES", 0)  # full from the first frame on
        async with this.bare_socket(session_id) as wire:
            await wire.socket.send(" " * 50_000)
            await this.until(lambda: table.num_input_bytes >= 50_000)
            patch.undo()
            this.sessions.journal(ANONYMOUS, session_id).append(
                TurnCompleted("t", "stop", None, Outcome("i", "", (), TokenUsage(), None))
            )
    await this.until(lambda: table.num_input_bytes == 0)


@served()
async def test_what_a_peer_takes_is_seen_though_the_kernel_queues_for_it(this: Served) -> None:
    """The kernel would queue megabytes, and take nothing for as long as a slow peer reads those."""
    begun = OpenRequest(messages=(Message("system", "x" * 900_000),))
    session_id = this.sessions.open(ANONYMOUS, begun).session_id
    peer, loop = await narrow_socket(this.port), asyncio.get_running_loop()
    request = f"GET /v1/sessions/{session_id}/items HTTP/1.1\r\nHost: localhost\r\n\r\n"
    await loop.sock_sendall(peer, request.encode())
    table = this.app.state.connections
    await this.until(lambda: table.num_unread_bytes > 0)
    assert table.num_unread_bytes > 900_000 - 3 * listener.UNSENT_BYTES
    (connection,) = (
        c for c in this.server.server_state.connections if c.client == peer.getsockname()
    )
    before, num_read = connection.transport.get_write_buffer_size(), 0
    while connection.transport.get_write_buffer_size() == before:
        num_read += len(await loop.sock_recv(peer, 4096))
    peer.close()
    assert num_read < 3 * listener.UNSENT_BYTES


@served(connections=ConnectionLimits(output_bytes_per_address=8 << 20))
async def test_answers_that_nobody_reads_are_bounded_in_all(this: Served) -> None:
    """Ten slow readers held ten answers of fifty megabytes."""
    begun = OpenRequest(messages=(Message("system", "x" * 900_000),))
    session_id = this.sessions.open(ANONYMOUS, begun).session_id
    await this.http.aclose()
    path = f"/v1/sessions/{session_id}/items"
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * 8
    peers = [await narrow_socket(this.port) for _ in range(16)]
    connections, table = this.server.server_state.connections, this.app.state.connections
    await this.until(lambda: len(connections) == len(peers))
    for peer in peers:
        await asyncio.get_running_loop().sock_sendall(peer, request)
    await this.until(lambda: len(connections) < len(peers))
    num_bytes = table.num_unread_bytes
    for peer in peers:
        peer.close()
    assert 7_000_000 < num_bytes <= 8 << 20
