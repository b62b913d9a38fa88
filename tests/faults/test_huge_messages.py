"""Messages of the size that is allowed, one byte less and one more, however they are cut up."""

from __future__ import annotations

import itertools
import json

from session_server.core.owner import ANONYMOUS
from tests.faults.points import Points, injects
from tests.rig.moments import SEED, turn
from tests.rig.raw_peer import frames_in, raw_frame, request, upgrade
from tests.rig.wired import wired

BOUND = 2048
SIZES = {BOUND - 1: True, BOUND: True, BOUND + 1: False, 5 * BOUND: False}
BIG = turn("big", 5, max_tokens=1)


def message(size: int, *, kind: bool) -> bytes:
    """A turn as JSON of exactly so many bytes, some of them of letters that need three."""
    body = {"turn_id": "big", "input_ids": [5], "sampling": {"max_tokens": 1, "seed": SEED}}
    body["sampling"] |= {"ignore_eos": True}  # type: ignore[operator]
    text = json.dumps({"type": "turn.create", **body} if kind else body)
    return text.encode() + b" " * (size - len(text))


def pieces(payload: bytes, num: int) -> list[bytes]:
    """The payload in so many parts of about equal size."""
    cuts = [len(payload) * index // num for index in range(num + 1)]
    return [payload[start:end] for start, end in itertools.pairwise(cuts)]


@injects("huge message", "a WebSocket message around the bound, whole and in parts", points=100)
async def test_a_message_beyond_the_bound_closes_its_connection_and_no_other_does(
    points: Points,
) -> None:
    async with wired(max_message_bytes=BOUND) as server:
        for size, is_taken in SIZES.items():
            for num in range(1, 27):
                server.open("s")
                peer = await server.peer()
                await peer.send(upgrade("s"))
                assert await peer.read_until(b"session.opened")
                parts = pieces(message(size, kind=True), num)
                for index, part in enumerate(parts):
                    is_last = index == num - 1
                    await peer.send(raw_frame(part, opcode=0 if index else 1, final=is_last))
                if is_taken:
                    assert await peer.read_until(b"turn.completed")
                else:
                    await peer.read_to(1 << 30)
                    assert frames_in(peer.received)[-1] == {"type": "close", "code": 1009}
                peer.vanish(hard=False)
                ends = await server.assert_recovered("s", {"big": BIG})
                assert ("big" in ends) == is_taken
                points.strike()


@injects("huge message", "a body around the bound: announced, in chunks", points=100)
async def test_a_body_beyond_the_bound_is_refused_by_its_length_or_as_it_grows(
    points: Points,
) -> None:
    async with wired(max_message_bytes=BOUND) as server:
        for size, is_taken in SIZES.items():
            for num in range(27):
                server.open("s")
                peer = await server.peer()
                whole = request("POST", "/v1/sessions/s/turns", message(size, kind=False))
                if num:
                    head, _, body = whole.partition(b"\r\n\r\n")
                    head = head.rpartition(b"Content-Length")[0] + b"Transfer-Encoding: chunked"
                    chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in pieces(body, num)]
                    whole = b"".join([head, b"\r\n\r\n", *chunks, b"0\r\n\r\n"])
                await peer.send(whole)
                status, answer = await peer.response()
                assert status == (200 if is_taken else 413), answer
                peer.vanish(hard=False)
                ends = await server.assert_recovered("s", {"big": BIG})
                assert ("big" in ends) == is_taken
                points.strike()


@injects("huge message", "compression, offered and used without having been agreed", points=2)
async def test_nothing_is_ever_decompressed(points: Points) -> None:
    """A bomb cannot go off that nobody opens: the extension is declined, gzip is no JSON."""
    offer = b"Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits\r\n\r\n"
    async with wired() as server:
        server.open("s")
        peer = await server.peer()
        await peer.send(upgrade("s")[:-2] + offer)
        assert await peer.read_until(b"session.opened")
        assert b"permessage-deflate" not in peer.received
        await peer.send(raw_frame(b"\xaa\x56\x4a" * 10, reserved=4))
        await peer.read_to(1 << 30)
        assert frames_in(peer.received)[-1] == {"type": "close", "code": 1002}
        peer.vanish(hard=False)
        points.strike()
        peer = await server.peer()
        bomb = b"\x1f\x8b\x08\x00" + bytes(1000)
        head = request("POST", "/v1/sessions/s/turns", bomb)
        await peer.send(head.replace(b"Accept:", b"Content-Encoding: gzip\r\nAccept:", 1))
        assert (await peer.response())[0] == 400
        peer.vanish(hard=False)
        points.strike()
        server.sessions.close(ANONYMOUS, "s")
        await server.assert_empty()
