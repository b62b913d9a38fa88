"""Connections come back at every point, take each other over, and come all at once."""

from __future__ import annotations

import asyncio
from typing import Any

from session_server.core.owner import ANONYMOUS
from session_server.core.session_events import SessionEntry, TurnDelta
from session_server.protocol.session_protocol import CloseCode
from session_server.sessions.journal import JournalLimits
from session_server.sessions.quotas import SessionLimits
from tests.faults.points import Points, injects
from tests.rig.moments import turn
from tests.rig.raw_peer import RawPeer, frames_in, upgrade
from tests.rig.wired import Wired, wired

LONG = turn("long", *range(9, 20), max_tokens=10)
STORM = 120


async def attach(
    server: Wired, after: int | None = None, *, epoch: str = "", steps: bool = True
) -> RawPeer:
    """A WebSocket to the session, resuming behind `after`; its hello is read."""
    query = "" if after is None else f"?after={after}"
    peer = await server.peer(steps=steps)
    await peer.send(upgrade("s", f"{query}&epoch={epoch}" if epoch else query))
    assert await peer.read_until(b"session.opened")
    return peer


def entries_of(server: Wired) -> list[tuple[int, SessionEntry]]:
    """The session's journal."""
    journal = server.sessions.journal(ANONYMOUS, "s")
    return [(found.seq, found.entry) for found in journal.read(journal.first_seq - 1)]


def assert_tells(frames: list[dict[str, Any]], entries: list[tuple[int, SessionEntry]]) -> None:
    """The frames say these entries, each once and in order, adjacent deltas perhaps merged."""
    told = [frame for frame in frames if "seq" in frame]
    seqs = [frame["seq"] for frame in told]
    assert seqs == sorted(set(seqs))
    assert not seqs or seqs[-1] == entries[-1][0]
    deltas = [entry for _, entry in entries if isinstance(entry, TurnDelta)]
    told_deltas = [frame for frame in told if frame["type"] == "turn.delta"]
    assert "".join(frame["text"] for frame in told_deltas) == "".join(d.text for d in deltas)
    assert sum(frame["n"] for frame in told_deltas) == sum(len(d.token_ids) for d in deltas)
    assert len(told) - len(told_deltas) == len(entries) - len(deltas)


async def hear_all(peer: RawPeer) -> list[dict[str, Any]]:
    """Everything a peer is told until there is nothing more."""
    await peer.read_to(1 << 30)
    return frames_in(peer.received)


@injects("reconnect, resume", "behind every entry, after every step of a turn", points=100)
async def test_who_comes_back_hears_exactly_what_was_missed(points: Points) -> None:
    async with wired() as server:
        is_over, num_steps = False, 0
        while not is_over:
            server.open("s")
            await server.submit("s", LONG)
            for _ in range(num_steps):
                server.step()
            is_over = not server.this.engine.is_busy
            entries = entries_of(server)
            for after in range(len(entries) + 1):
                peer = await attach(server, after, steps=False)
                hello, *frames = await hear_all(peer)
                assert (hello["resumed"], hello["seq"]) == (True, after)
                assert_tells(frames, entries[after:])
                peer.vanish(hard=after % 2 == 1)
                points.strike()
            peer = await attach(server, num_steps % len(entries))
            assert_tells((await hear_all(peer))[1:], entries_of(server)[num_steps % len(entries) :])
            peer.vanish(hard=False)
            await server.assert_recovered("s", {"long": LONG})
            num_steps += 1


@injects("reconnect, resume", "a journal too short, or another epoch, after every step", points=25)
async def test_what_cannot_be_replayed_is_replaced_by_the_state_at_that_moment(
    points: Points,
) -> None:
    short = SessionLimits(journal=JournalLimits(max_entries=2))
    async with wired(limits=short) as server:
        is_over, num_steps = False, 0
        while not is_over:
            server.open("s")
            await server.submit("s", LONG)
            for _ in range(num_steps):
                server.step()
            is_over = not server.this.engine.is_busy
            for epoch, reason in (("", "offset_lost"), ("other", "epoch_changed")):
                seq = server.sessions.get(ANONYMOUS, "s").seq
                peer = await attach(server, max(0, seq - 3), epoch=epoch, steps=False)
                hello, *frames = await hear_all(peer)
                is_whole = seq <= 2 and not epoch
                assert hello["resumed"] == is_whole
                if not is_whole:
                    assert frames[0] == {"type": "session.resume_failed", "reason": reason}
                    snapshot = frames[1]
                    assert (snapshot["type"], snapshot["seq"]) == ("session.snapshot", seq)
                    running = server.sessions.snapshot(ANONYMOUS, "s").running
                    expected = {"turn_id": "long", "text": running.text} if running else None
                    assert snapshot["turn"] == expected
                    assert len(frames) == 2
                peer.vanish(hard=False)
                points.strike()
            server.sessions.close(ANONYMOUS, "s")
            await server.assert_empty()
            num_steps += 1


@injects("reconnect, resume", "another tab takes over after every step of a turn", points=60)
async def test_tabs_that_take_each_other_over_tell_the_answer_once(points: Points) -> None:
    async with wired() as server:
        server.open("s")
        request = turn("long", *range(9, 20), max_tokens=70)
        await server.submit("s", request)
        told: list[dict[str, Any]] = []
        seq = 0
        peer = await attach(server, seq, steps=False)
        while server.this.engine.is_busy:
            server.step()
            before, peer = peer, await attach(server, seq, steps=False)
            frames = await hear_all(before)
            assert frames[-1] == {"type": "close", "code": CloseCode.SUPERSEDED}
            told += frames[1:-1]
            before.vanish(hard=False)
            # What the old tab got before it closed is not asked for again.
            seq = max([frame["seq"] for frame in told], default=0)
            peer.vanish(hard=False)
            peer = await attach(server, seq, steps=False)
            points.strike()
        told += (await hear_all(peer))[1:]
        assert_tells(told, entries_of(server))
        peer.vanish(hard=False)
        await server.assert_recovered("s", {"long": request})


@injects("reconnect, resume", "a storm of connections to one session, all at once", points=100)
async def test_of_a_storm_of_connections_one_stays_and_hears_everything(points: Points) -> None:
    async with wired() as server:
        server.open("s")
        await server.submit("s", LONG)
        peers = [await server.peer() for _ in range(STORM)]
        await asyncio.gather(*(peer.send(upgrade("s", "?after=0")) for peer in peers))
        heard = [await hear_all(peer) for peer in peers]
        survivors = [frames for frames in heard if frames[-1]["type"] != "close"]
        assert len(survivors) == 1
        assert_tells(survivors[0][1:], entries_of(server))
        for frames in heard:
            if frames is not survivors[0]:
                assert frames[-1]["code"] == CloseCode.SUPERSEDED
            points.strike()
        for peer in peers:
            peer.vanish(hard=True)
        await server.assert_recovered("s", {"long": LONG})
