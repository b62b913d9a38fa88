"""When an engine is blamed for making no progress, counted in ticks and not in time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from cache.types import SessionId, TurnId
from session_server.core.commands import FlushCache, SubmitTurn
from session_server.core.events import EngineEvent, PrefillProgressed, TurnFailed
from session_server.core.sampling import SamplingParams
from session_server.engine_host.watchdog import Watchdog

LIMIT_S = 8.0
MAX_TICKS = 100

SUBMITTED = SubmitTurn(
    session_id=SessionId("s"),
    turn_id=TurnId("t"),
    base_len=0,
    tokens=(1,),
    sampling=SamplingParams(),
)
MOVED = PrefillProgressed(turn_id=TurnId("t"), computed=1, total=2)
ENDED = TurnFailed(
    turn_id=TurnId("t"), session_id=SessionId("s"), code="device_failed", message="", history_len=0
)


def ticks_until_blamed(
    monkeypatch: pytest.MonkeyPatch, said: Mapping[int, SubmitTurn | FlushCache | EngineEvent]
) -> int | None:
    """Play what is sent and heard in each tick; None when the engine is never blamed."""
    dog, num_ticks = Watchdog(), 0

    async def tick(seconds: float) -> None:
        nonlocal num_ticks
        assert seconds == 1.0
        num_ticks += 1
        if num_ticks > MAX_TICKS:
            raise asyncio.CancelledError
        match said.get(num_ticks):
            case None:
                pass
            case SubmitTurn() | FlushCache() as command:
                dog.sent(command)
            case event:
                dog.heard(event)

    monkeypatch.setattr(asyncio, "sleep", tick)
    try:
        asyncio.run(dog.stalled(LIMIT_S))
    except asyncio.CancelledError:
        return None
    return num_ticks


@pytest.mark.parametrize(
    ("said", "ticks"),
    [
        pytest.param({}, None, id="idle"),
        pytest.param({3: FlushCache(request_id=1)}, None, id="asked, but without turns"),
        pytest.param({1: SUBMITTED}, 8, id="a turn that never moves"),
        pytest.param({20: SUBMITTED}, 27, id="rest before a turn does not count"),
        pytest.param({1: SUBMITTED, 7: MOVED}, 15, id="a turn that moved once, just in time"),
        pytest.param({1: SUBMITTED, **dict.fromkeys(range(5, 200, 5), MOVED)}, None, id="slow"),
        pytest.param({1: SUBMITTED, 5: ENDED}, None, id="a turn that has ended"),
    ],
)
def test_an_engine_is_blamed_when_it_has_turns_and_moves_none_of_them(
    said: Mapping[int, SubmitTurn | FlushCache | EngineEvent],
    ticks: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ticks_until_blamed(monkeypatch, said) == ticks
