"""As many as allowed, and one more: sessions, turns, connections, and what one request may hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from session_server.core.errors import (
    InvalidRequest,
    QuotaExceeded,
    ServerBusy,
    SessionBusy,
    SessionServerError,
)
from session_server.core.owner import ANONYMOUS, Owner
from session_server.core.session_events import (
    ChatInput,
    Message,
    TextInput,
    TextOptions,
    TokenInput,
    TurnCompleted,
    TurnFailedEntry,
)
from session_server.sessions.quotas import QuotaLimits, SessionLimits
from session_server.sessions.views import OpenRequest
from session_server.web.key_file import digest_of
from session_server.web.keys import KeyRing
from session_server.web.sockets import UNAUTHENTICATED_SHARE
from tests.faults.points import Points, injects
from tests.rig.moments import OWNER, Rig, turn
from tests.rig.raw_peer import upgrade
from tests.rig.wired import wired
from tests.sim.echo import EchoModel
from tests.sim.hand_engine import Sizes


def refused(error: type[SessionServerError], call: Callable[..., Any], *args: Any) -> None:
    """The call is refused, and again."""
    for _ in range(2):
        with pytest.raises(error):
            call(*args)


@injects("too many sessions, connections, turns", "open sessions, of the server, of one", points=40)
def test_one_session_too_many_is_refused_until_one_has_closed(points: Points) -> None:
    for most in range(1, 12):
        for quotas, error in (
            (QuotaLimits(sessions=most), ServerBusy),
            (QuotaLimits(owner_sessions=most), QuotaExceeded),
        ):
            with Rig(quotas=quotas) as rig:
                names = [rig.open() for _ in range(most)]
                refused(error, rig.open)
                points.strike()
                rig.run(names[0], turn("t", 1, 2))
                rig.manager.close(OWNER, names[-1])
                rig.forget_closed()
                rig.open()
                refused(error, rig.open)
                points.strike()
                rig.assert_recovered()


@injects(
    "too many sessions, connections, turns", "turns, of the server, of one, in line", points=40
)
def test_one_turn_too_many_is_refused_until_one_has_ended(points: Points) -> None:
    for most in range(1, 9):
        for quotas, error in (
            (QuotaLimits(turns=most), ServerBusy),
            (QuotaLimits(owner_turns=most), QuotaExceeded),
        ):
            with Rig(quotas=quotas) as rig:
                names = [rig.open() for _ in range(most + 1)]
                for name in names[:most]:
                    rig.submit(name, turn("t", 1, 2))
                refused(error, rig.submit, names[-1], turn("t", 1))
                points.strike()
                rig.rest()
                rig.run(names[-1], turn("t", 1))
                points.strike()
                rig.assert_recovered()
        with Rig(limits=SessionLimits(max_queued_turns=most)) as rig:
            name = rig.open()
            for number in range(most + 1):
                rig.submit(name, turn(f"t{number}", 1, 2))
            refused(SessionBusy, rig.submit, name, turn("more", 1))
            points.strike()
            rig.assert_recovered()


@injects("too many sessions, connections, turns", "turns in the engine", points=60)
def test_turns_the_engine_has_no_place_for_fail_at_once_and_may_be_tried_again(
    points: Points,
) -> None:
    for most in range(1, 9):
        sizes = Sizes(max_running=1, max_waiting=most, num_rows=16)
        with Rig(sizes) as rig:
            names = [rig.open() for _ in range(most + 6)]
            for name in names:
                rig.submit(name, turn("t", 1, 2))
            rig.rest()
            ends = [rig.manager.turn(OWNER, name, "t").end for name in names]
            assert all(isinstance(end, TurnCompleted) for end in ends[: most + 1])
            for end in ends[most + 1 :]:
                assert isinstance(end, TurnFailedEntry)
                assert (end.code, end.retryable) == ("server_busy", True)
                points.strike()
            points.strike(3)
            rig.assert_recovered()


@injects("too many sessions, connections, turns", "sockets and readers", points=20)
async def test_one_connection_too_many_is_refused_until_one_has_gone(points: Points) -> None:
    for most in range(1, 11):
        async with wired(max_connections=most) as server:
            for number in range(most + 1):
                server.open(f"s{number}")
            peers = []
            for number in range(most + 1):
                peer = await server.peer()
                await peer.send(upgrade(f"s{number}"))
                assert await peer.read_until(b"\r\n\r\n")
                peers.append(peer)
            assert b" 503 " in peers[-1].received
            assert all(b" 101 " in peer.received for peer in peers[:-1])
            points.strike()
            peers.pop(0).vanish(hard=False)
            sockets = server.this.sockets
            await server.this.until(lambda s=sockets, n=most: s.num_attached == n - 1)
            late = await server.peer()
            await late.send(upgrade(f"s{most}"))
            assert await late.read_until(b"session.opened")
            points.strike()
            for peer in (*peers, late):
                peer.vanish(hard=False)
            for number in range(most + 1):
                server.sessions.close(ANONYMOUS, f"s{number}")
            await server.assert_empty()


@injects("slow handshake, slow body", "strangers that say nothing, as many as may", points=20)
async def test_strangers_who_say_nothing_keep_nobody_out(points: Points) -> None:
    most = UNAUTHENTICATED_SHARE * 20
    async with wired(max_connections=most, keys=KeyRing.of("secret")) as server:
        server.sessions.open(Owner(digest_of("secret")), OpenRequest(session_id="s"))
        peers = []
        for _ in range(20):
            peer = await server.peer()
            await peer.send(upgrade("new"))
            assert await peer.read_until(b" 101 ")
            peers.append(peer)
            points.strike()
        late = await server.peer()
        await late.send(upgrade("new"))
        assert await late.read_until(b" 503 ")
        known = await server.peer()
        header = b"Authorization: Bearer secret\r\n\r\n"
        await known.send(upgrade("s")[:-2] + header)
        assert await known.read_until(b"session.opened")
        for peer in (*peers, late, known):
            peer.vanish(hard=False)
        server.sessions.close(Owner(digest_of("secret")), "s")
        await server.assert_empty()
        await server.this.until(lambda: not any(server.this.sockets._num_open.values()))


LIMITS = SessionLimits(
    max_input_chars=40, max_messages=5, max_metadata=3, max_stop_strings=4, max_stop_chars=6
)
REQUEST = turn("t", 1, 2)
WORDS = EchoModel(vocab_size=402)


def message(content: str) -> Message:
    return Message("user", content)


BOUNDED: tuple[tuple[int, Callable[[int], Any]], ...] = (
    (40, lambda n: replace(REQUEST, input=TextInput("0" * n))),
    (40, lambda n: replace(REQUEST, input=ChatInput((message("0" * n),)))),
    (10, lambda n: replace(REQUEST, input=TokenInput((3,) * n))),
    (5, lambda n: replace(REQUEST, input=ChatInput((message("0"),) * n))),
    (4, lambda n: replace(REQUEST, text=TextOptions(stop=("x",) * n))),
    (6, lambda n: replace(REQUEST, text=TextOptions(stop=("x" * n,)))),
    (64, lambda n: replace(REQUEST, turn_id="t" * n)),
)
"""The most of something, and a turn with so much of it."""


@injects("too many sessions, connections, turns", "what one turn may hold", points=20)
def test_a_turn_that_holds_too_much_is_refused_before_anything_is_touched(points: Points) -> None:
    for most, request_with in BOUNDED:
        for num in (most - 1, most, most + 1):
            with Rig(limits=LIMITS, model=WORDS) as rig:
                name = rig.open()
                if num > most:
                    refused(InvalidRequest, rig.submit, name, request_with(num))
                    assert rig.entries(name) == []
                else:
                    rig.run(name, request_with(num))
                rig.assert_recovered()
            points.strike()
