"""`kill -9` of the engine, again and again, in the middle of everything."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from typing import Any

import pytest

from session_server.sessions.turn import TurnPhase
from tests.depth import at_depth
from tests.engine_host.live_echo import LiveStage
from tests.rig.decisions import Decisions
from tests.rig.echo_server import mortal_engine
from tests.rig.history import ENDS
from tests.rig.processes import ECHO_ENGINE, engines_of
from tests.rig.recovery import Reckoning, assert_books_balance
from tests.rig.scene import echo_turn
from tests.web.serving import Served, serving_live
from tests.web.wire_client import Wire, open_wire

MIN_KILLS, MAX_KILLS = at_depth(10, proof=24), 24
"""Kills end when everything was struck, but are so many at least and at most."""

NUM_TALKERS = 10
MAX_TOKENS = 400
"""Of a session's history; then another one is opened."""


class Talker:
    """Talks without pause, and knows every token of its session by its own reckoning."""

    def __init__(self, this: Served, number: int, saw: Counter[str]) -> None:
        self.this = this
        self.chance = Decisions(3, number)
        self.saw = saw
        self.is_leaving = False
        self.known = Reckoning()
        self._count = 0

    async def run(self) -> None:
        """One session after the other, until told to leave."""
        while not self.is_leaving:
            self.known = Reckoning()
            async with open_wire(self.this.url) as wire:
                hello = await wire.receive()
                while not self.is_leaving and len(self.known.tokens) < MAX_TOKENS:
                    await self._some_turns(wire)
                view = (await self.this.http.get(f"/v1/sessions/{hello['session_id']}")).json()
                assert view["tokens"] == len(self.known.tokens)
                await wire.send("session.close")
                assert await wire.close_code() == 4410
                self.saw["sessions closed"] += 1

    async def _some_turns(self, wire: Wire) -> None:
        """One to three turns in line, the first of them perhaps cancelled."""
        bodies = [self._body() for _ in range(self.chance.between(1, 3))]
        for body in bodies:
            await wire.send("turn.create", **body)
        if self.chance.happens(0.4):
            for _ in range(self.chance.between(1, 8)):
                if (await wire.receive())["type"] in ENDS:
                    break
            keep = self.chance.happens(0.5)
            await wire.send("turn.cancel", turn_id=bodies[0]["turn_id"], keep_partial=keep)
        for body in bodies:
            self._learn(body, await self._end_of(wire, body["turn_id"]))

    async def _end_of(self, wire: Wire, turn_id: str) -> dict[str, Any]:
        """The one terminal frame of the turn, heard before or to come."""
        heard = [f for f in wire.frames if f["type"] in ENDS and f["turn_id"] == turn_id]
        while not heard:
            frame = await wire.receive()
            self.saw["frames"] += 1
            if frame["type"] == "error":
                assert frame["error"]["code"] == "turn_not_active", frame
            elif frame["type"] in ENDS and frame["turn_id"] == turn_id:
                heard = [frame]
        assert len(heard) == 1, heard
        return heard[0]

    def _learn(self, body: dict[str, Any], end: dict[str, Any]) -> None:
        """The turn ended so; what the history must be now."""
        self.saw[end["type"]] += 1
        if end["type"] == "turn.failed":
            assert end["error"]["code"] == "engine_restarting", end
            assert end["retryable"] is True
        self.known.hear(body, end)

    def _body(self) -> dict[str, Any]:
        self._count += 1
        return echo_turn(self.chance, f"t{self._count}", max_tokens=self.chance.between(1, 30))


def phases(this: Served) -> Counter[str]:
    """How many turns are in which phase now."""
    found: Counter[str] = Counter()
    for session in this.sessions._sessions:
        for turn in session.turns():
            submitted = turn.submitted
            if turn.phase is TurnPhase.RUNNING and submitted is not None:
                found["decode" if submitted.answer.token_ids else "prefill"] += 1
            else:
                found[turn.phase.name.lower()] += 1
    return found


def is_enough(struck: Counter[str]) -> bool:
    """Whether engines were killed often enough, and whatever they did then."""
    rare = min(struck["ending"], struck["kills of a starting engine"])
    in_phases = min(struck[phase] for phase in ("waiting", "prefill", "decode"))
    return struck["kills"] >= MIN_KILLS and rare >= 2 and in_phases >= MIN_KILLS // 4


STARTING_POLLS = 200
"""Looks, 5 ms apart, for an engine that starts; there is none where the last kill struck none."""


@pytest.mark.timeout(600)
def test_an_engine_killed_at_any_moment_costs_its_running_turns_and_nothing_else() -> None:
    saw: Counter[str] = Counter()
    struck: Counter[str] = Counter()

    async def test() -> None:
        engine = mortal_engine(LiveStage(forward_s=0.004, is_device=True))
        async with serving_live(engine) as this:
            talkers = [Talker(this, number, saw) for number in range(NUM_TALKERS)]
            talks = [asyncio.create_task(talker.run()) for talker in talkers]
            chance = Decisions(4)
            while struck["kills"] < MAX_KILLS and not is_enough(struck):
                if chance.happens(0.8):  # the others strike an engine that starts
                    while engine.pid is None:
                        await asyncio.sleep(0.005)
                    wanted = saw["frames"] + chance.magnitude(400)
                    while saw["frames"] < wanted:
                        await asyncio.sleep(0.001)
                    if chance.happens(0.3):
                        while not phases(this)["ending"]:
                            await asyncio.sleep(0.001)
                else:
                    for _ in range(STARTING_POLLS):
                        if set(engines_of(os.getpid(), ECHO_ENGINE)) - {engine.pid}:
                            break
                        await asyncio.sleep(0.005)
                    await asyncio.sleep(chance.share() / 5)
                struck.update(phases(this))
                for pid in engines_of(os.getpid(), ECHO_ENGINE):
                    struck["kills"] += 1
                    struck["kills of a starting engine"] += pid != engine.pid
                    os.kill(pid, signal.SIGKILL)
            for talker in talkers:
                talker.is_leaving = True
            await asyncio.gather(*talks)
            assert this.sessions.stats().live_turns == this.sessions.stats().sessions == 0
            await asyncio.to_thread(assert_books_balance, this.url, is_running=False, is_open=False)

    asyncio.run(asyncio.wait_for(test(), 550))
    print(dict(struck), dict(saw))
    assert min(struck[phase] for phase in ("waiting", "prefill", "decode")) >= MIN_KILLS // 4
    assert struck["ending"] >= 2, "cancels that the engine did not live to confirm"
    assert struck["kills of a starting engine"] >= 2
    assert saw["turn.failed"] >= MIN_KILLS // 4
    assert saw["turn.completed"] >= MIN_KILLS
    assert saw["turn.cancelled"] >= MIN_KILLS // 4
