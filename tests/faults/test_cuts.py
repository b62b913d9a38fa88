"""A connection is cut at every byte of an exchange, in both directions; the next turn follows."""

from __future__ import annotations

import itertools
from typing import Any

from session_server.core.session_events import TurnCancelled, TurnCompleted
from tests.faults.points import Points, injects
from tests.rig.moments import SEED, turn
from tests.rig.raw_peer import post, text_frame, upgrade
from tests.rig.wired import Wired, wired

IDS = (5, 6, 7, 8, 9, 10)
CUT = turn("cut", *IDS, max_tokens=3)
BODY: dict[str, Any] = {
    "turn_id": "cut",
    "input_ids": IDS,
    "sampling": {"max_tokens": 3, "seed": SEED, "ignore_eos": True},
}
HEAD_BYTES = len(upgrade("s0000"))
ON_DISCONNECT = ("detach", "cancel")
ACCEPTS = ("application/json", "text/event-stream")


def frame(on_disconnect: str) -> bytes:
    """The turn as a frame."""
    return text_frame({"type": "turn.create", "on_disconnect": on_disconnect, **BODY})


def new_session(server: Wired, cut: int) -> str:
    """A session for this cut alone; all names are of one length, and so all exchanges."""
    name = f"s{cut:04}"
    server.open(name)
    return name


async def check(server: Wired, cut: int, on_disconnect: str) -> bool:
    """What became of the turn is what was asked for; gives whether the server had taken it."""
    if cut % 3:
        await server.rounds()  # else the next turn comes before the server has noticed
    end = (await server.assert_recovered(f"s{cut:04}", {"cut": CUT})).get("cut")
    if end is not None and on_disconnect == "detach":
        assert isinstance(end, TurnCompleted)
    if end is not None and not isinstance(end, TurnCompleted):
        assert isinstance(end, TurnCancelled)
        assert (end.reason, end.kept_partial) == ("disconnected", True)
    return end is not None


@injects("disconnect mid-turn", "every byte a WebSocket client sends", points=370)
async def test_a_client_may_go_at_any_byte_it_sends(points: Points) -> None:
    num_taken = 0
    async with wired() as server:
        for cut in range(HEAD_BYTES + len(frame("detach")) + 1):
            head = upgrade(new_session(server, cut))
            on_disconnect = ON_DISCONNECT[cut % 2]
            peer = await server.peer()
            await peer.send(head[:cut])
            if cut > len(head):
                assert await peer.read_until(b"session.opened")
                await peer.send(frame(on_disconnect)[: cut - len(head)])
            await server.rounds(cut % 5)
            peer.vanish(hard=cut % 4 > 1)
            num_taken += await check(server, cut, on_disconnect)
            points.strike()
    assert num_taken, "the exchange was never whole"


@injects("disconnect mid-turn", "every byte a WebSocket client reads", points=1300)
async def test_a_client_may_go_at_any_byte_it_reads(points: Points) -> None:
    async with wired() as server:
        for cut in itertools.count():
            head = upgrade(new_session(server, cut))
            on_disconnect = ON_DISCONNECT[cut % 2]
            peer = await server.peer()
            await peer.send(head)
            is_greeted = await peer.read_until(b"session.opened", at_most=cut)
            if is_greeted:
                await peer.send(frame(on_disconnect))
            is_cut = await peer.read_to(cut)
            peer.vanish(hard=cut % 4 > 1)
            is_taken = await check(server, cut, on_disconnect)
            if not is_cut:
                break
            points.strike()
    assert is_taken, "the exchange was never whole"


@injects("disconnect mid-turn", "every third byte of a request for JSON or events", points=160)
async def test_a_client_of_plain_http_may_go_at_any_byte_it_sends(points: Points) -> None:
    num_taken = 0
    async with wired() as server:
        for accept in ACCEPTS:
            num_bytes = len(turn_request("s0000", accept))
            for cut in (*range(0, num_bytes, 3), num_bytes):
                name = new_session(server, cut)
                peer = await server.peer()
                await peer.send(turn_request(name, accept)[:cut])
                await server.rounds(cut % 5)
                if cut == num_bytes:
                    await server.this.until(lambda name=name: server.find(name, "cut") is not None)
                peer.vanish(hard=cut % 4 > 1)
                num_taken += await check(server, cut, "cancel")
                points.strike()
    assert num_taken == len(ACCEPTS), "a request counts when it is whole"


@injects("disconnect mid-turn", "every seventh byte of an answer in JSON or events", points=250)
async def test_a_client_of_plain_http_may_go_at_any_byte_it_reads(points: Points) -> None:
    async with wired() as server:
        for accept in ACCEPTS:
            for cut in itertools.count(1, 7):
                peer = await server.peer()
                await peer.send(turn_request(new_session(server, cut), accept))
                is_cut = await peer.read_to(cut)
                peer.vanish(hard=cut % 4 > 1)
                assert await check(server, cut, "cancel")
                if not is_cut:
                    break
                points.strike()


def turn_request(session_id: str, accept: str) -> bytes:
    """The turn over plain HTTP."""
    return post(f"/v1/sessions/{session_id}/turns", BODY, accept=accept)


@injects("disconnect mid-turn", "every seventh byte of an answer of `/generate`", points=150)
async def test_a_client_of_sglangs_interface_may_go_at_any_byte_and_leaves_no_trace(
    points: Points,
) -> None:
    sampling = {"max_new_tokens": 3, "sampling_seed": SEED, "ignore_eos": True}
    async with wired() as server:
        for is_stream in (False, True):
            for cut in itertools.count(1, 7):
                name = new_session(server, cut)
                body = {"input_ids": IDS, "sampling_params": sampling, "stream": is_stream}
                peer = await server.peer()
                await peer.send(post("/generate", body | {"session_params": {"id": name}}))
                is_cut = await peer.read_to(cut)
                peer.vanish(hard=cut % 4 > 1)
                ends = await server.assert_recovered(name, {}, unnamed=CUT)
                (end,) = (end for turn_id, end in ends.items() if turn_id != "next")
                if isinstance(end, TurnCancelled):
                    assert (end.reason, end.kept_partial) == ("disconnected", False)
                if not is_cut:
                    assert isinstance(end, TurnCompleted)
                    break
                points.strike()
