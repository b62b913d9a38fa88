"""Peers that take their time: to say hello, to send a body, to read, to answer a ping.

Many at once, each slow at a point of its own, with limits of a fraction of a second. Nothing here
depends on being fast: a busy machine only lets a limit pass later.
"""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

from session_server.core.owner import ANONYMOUS
from session_server.core.session_events import TurnCancelled, TurnCompleted
from session_server.protocol.session_protocol import CloseCode
from session_server.web import http_guard, websocket_guard
from session_server.web.keys import KeyRing
from tests.faults.points import Points, injects
from tests.rig.moments import SEED, turn
from tests.rig.raw_peer import RawPeer, frames_in, post, text_frame, upgrade
from tests.rig.wired import Wired, wired
from tests.sim.hand_engine import Sizes

SOON_S = 0.25
CROWD = 100
SIZES = Sizes(num_pages=3000, num_rows=2 * CROWD, max_running=CROWD, max_context_len=128)


def turn_fields(on_disconnect: str) -> dict[str, Any]:
    """A turn that outlives its peer's patience."""
    sampling = {"max_tokens": 60, "seed": SEED, "ignore_eos": True}
    return {
        "turn_id": "long",
        "input_ids": [5, 6],
        "sampling": sampling,
        "on_disconnect": on_disconnect,
    }


async def ended(peer: RawPeer) -> bytes:
    """What the server said until it closed the connection."""
    await peer.read_until(bytes(32))
    return bytes(peer.received)


@injects("slow handshake, slow body", "a head that stops at any byte", points=60)
async def test_a_head_that_stops_is_not_waited_for(points: Points) -> None:
    head = upgrade("s")
    with mock.patch.object(http_guard, "HEADER_TIMEOUT_S", SOON_S):
        async with wired() as server:
            peers = [await server.peer() for _ in range(0, len(head), 3)]
            for peer, end in zip(peers, range(0, len(head), 3), strict=True):
                await peer.send(head[:end])
            for peer in peers:
                assert (await ended(peer)).startswith(b"HTTP/1.1 408 ")
                peer.vanish(hard=False)
                points.strike()
            await server.assert_empty()


@injects("slow handshake, slow body", "a head, or a body, in drops of any size", points=20)
async def test_who_trickles_gets_no_more_time_than_who_stops(points: Points) -> None:
    head = b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def trickle(server: Wired, size: int, *, is_body: bool) -> None:
        peer = await server.peer()
        if is_body:
            await peer.send(head)
        drops = b"1\r\n \r\n" * 4000 if is_body else b"GET / HTTP/1.1\r\nX: ".ljust(20_000, b"a")
        assert await peer.drip(drops, size, pause_s=SOON_S / 8)
        assert peer.received.startswith(b"HTTP/1.1 408 ") or not peer.received
        peer.vanish(hard=False)
        points.strike()

    with mock.patch.object(http_guard, "HEADER_TIMEOUT_S", SOON_S):
        async with wired(message_timeout_s=SOON_S) as server:
            await asyncio.gather(
                *(trickle(server, size, is_body=False) for size in range(1, 11)),
                *(trickle(server, 6 * size, is_body=True) for size in range(1, 11)),
            )
            await server.assert_empty()


@injects("slow handshake, slow body", "a body that stops at any byte", points=30)
async def test_a_body_that_stops_is_not_waited_for(points: Points) -> None:
    async with wired(message_timeout_s=SOON_S) as server:
        server.open("s")
        request = post("/v1/sessions/s/turns", turn_fields("cancel"))
        start = request.index(b"\r\n\r\n") + 4
        ends = range(start, len(request) - 1, 4)
        peers = [await server.peer() for _ in ends]
        for peer, end in zip(peers, ends, strict=True):
            await peer.send(request[:end])
        for peer in peers:
            assert (await peer.response())[0] == 408
            peer.vanish(hard=False)
            points.strike()
        assert await server.assert_recovered("s", {}) != {}


@injects("slow handshake, slow body", "a first message that stops at any byte", points=48)
async def test_a_first_message_that_stops_is_not_waited_for(points: Points) -> None:
    lingering = mock.patch.object(websocket_guard, "LINGER_S", SOON_S)
    keys = KeyRing.of("secret")
    async with wired(keys=keys, auth_timeout_s=SOON_S) as server:
        first = text_frame({"type": "session.auth", "token": "secret"})
        ends = range(len(first))
        peers = [await server.peer() for _ in ends]
        for peer, end in zip(peers, ends, strict=True):
            await peer.send(upgrade("new"))
            assert await peer.read_until(b"\r\n\r\n")
            await peer.send(first[:end])
        with lingering:
            for peer in peers:
                assert frames_in(await ended(peer))[-1]["code"] == CloseCode.UNAUTHORIZED
                peer.vanish(hard=False)
                points.strike()
        await server.assert_empty()


@injects("half-open TCP", "peers that fall silent after every step of their turn", points=CROWD)
async def test_a_peer_that_answers_no_ping_is_let_go_and_its_turn_does_as_it_was_told(
    points: Points,
) -> None:
    async with wired(SIZES, heartbeat_s=SOON_S, ping_timeout_s=SOON_S) as server:
        peers = []
        for number in range(CROWD):
            server.open(f"s{number}")
            peer = await server.peer(steps=False)
            await peer.send(upgrade(f"s{number}"))
            assert await peer.read_until(b"session.opened")
            fields = turn_fields("cancel" if number % 2 else "detach")
            await peer.send(text_frame({"type": "turn.create", **fields}))
            assert await peer.read_until(b"turn.created")
            if number % 2 == 0:
                server.step()
            peers.append(peer)
        await server.until_alone()
        for peer in peers:
            close = frames_in(await ended(peer))[-1]
            assert close == {"type": "close", "code": CloseCode.INTERNAL}
            peer.vanish(hard=False)
            points.strike()
        await server.rest()
        for number in range(CROWD):
            found = server.find(f"s{number}", "long")
            assert found is not None
            assert isinstance(found.end, TurnCancelled if number % 2 else TurnCompleted)
        long = turn("long", 5, 6, max_tokens=60)
        for number in range(CROWD - 1):
            server.sessions.close(ANONYMOUS, f"s{number}")
        await server.assert_recovered(f"s{CROWD - 1}", {"long": long})


@injects("half-open TCP", "peers that fall silent while bytes are still owed to them", points=10)
async def test_a_peer_that_answers_no_ping_is_let_go_though_it_was_not_done_reading(
    points: Points,
) -> None:
    """A polite close waits until everything was written, which here is never."""
    with mock.patch.object(websocket_guard, "LINGER_S", SOON_S):
        async with wired(heartbeat_s=SOON_S, ping_timeout_s=SOON_S) as server:
            server.narrow(4096)
            peers = []
            for number in range(10):
                server.open(f"s{number}")
                peer = await server.peer(receive_buffer=4096)
                await peer.send(upgrade(f"s{number}"))
                assert await peer.read_until(b"session.opened")
                before = server.num_bytes_owed()
                while server.num_bytes_owed() == before:
                    # One frame at a time: nobody waits to write the next one.
                    metadata = {"much": "x" * 512}
                    server.sessions.update(ANONYMOUS, f"s{number}", metadata=metadata)
                    await asyncio.sleep(0.01)  # the kernel may take it a moment later
                peers.append(peer)
            await server.until_alone()
            for number, peer in enumerate(peers):
                peer.vanish(hard=True)
                server.sessions.close(ANONYMOUS, f"s{number}")
                points.strike()
            await server.assert_empty()


@injects("slow reader", "readers that stop at every fortieth byte of a stream", points=100)
async def test_a_reader_that_stops_is_let_go_and_nobody_waits_for_it(points: Points) -> None:
    """Whoever reads nothing more is cut; its turn runs on, and it may come back for the rest."""
    with mock.patch.object(websocket_guard, "LINGER_S", SOON_S):
        async with wired(SIZES, send_timeout_s=SOON_S) as server:
            server.narrow(2048)
            peers = []
            for number in range(CROWD):
                server.open(f"s{number}")
                peer = await server.peer(steps=False, receive_buffer=2048)
                await peer.send(upgrade(f"s{number}"))
                assert await peer.read_until(b"session.opened")
                fields = turn_fields("detach")
                await peer.send(text_frame({"type": "turn.create", **fields}))
                assert await peer.read_until(b"turn.created")
                peers.append(peer)
            # Each reads a little more than the one before; the engine waits for none of them.
            for number, peer in enumerate(peers):
                await peer.read_to(len(peer.received) + 40 * number)
            await server.rest()
            much = {str(key): "x" * 512 for key in range(16)}
            for _ in range(8):  # more than the kernel holds for who does not read
                for number in range(CROWD):
                    server.sessions.update(ANONYMOUS, f"s{number}", metadata=much)
            await server.until_alone()
            for number, peer in enumerate(peers):
                frames = frames_in(peer.received)
                seq = max(frame.get("seq", 0) for frame in frames)
                peer.vanish(hard=True)
                again = await server.peer()
                await again.send(upgrade(f"s{number}", f"?after={seq}"))
                assert await again.read_until(b"turn.completed")
                told = frames + frames_in(again.received)[1:]
                text = "".join(frame["text"] for frame in told if frame["type"] == "turn.delta")
                end = server.find(f"s{number}", "long")
                assert end is not None
                assert text == end.text
                again.vanish(hard=False)
                server.sessions.close(ANONYMOUS, f"s{number}")
                points.strike()
            await server.assert_empty()
