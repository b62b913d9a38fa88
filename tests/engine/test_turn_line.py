"""Turns in line: their order, and for how long nobody of the line is asked about again."""

from __future__ import annotations

import pytest

from cache import SessionId, TurnId
from session_server.core.commands import SubmitTurn
from session_server.core.sampling import SamplingParams
from session_server.engine.scheduler_view import BlockReason
from session_server.engine.turn import Turn, TurnClock
from session_server.engine.turn_line import Supply, TurnLine, WaitingLine
from tests.cache.kv_world import NAMESPACES, make_cache
from tests.cache.plain_turns import run_turn
from tests.cache.work import count_calls

BLOCKED = (TurnId("t"), BlockReason.PAGES)


def turn(name: str, order_s: float) -> Turn:
    command = SubmitTurn(
        session_id=SessionId(name),
        turn_id=TurnId(name),
        base_len=0,
        tokens=(1,),
        sampling=SamplingParams(max_tokens=1, seed=1),
    )
    return Turn(command, order=(order_s, 0), max_new=1, clock=TurnClock(0.0))


def test_turns_stand_in_their_order_and_leave_from_anywhere() -> None:
    line, turns = TurnLine(), [turn(str(number), float(number)) for number in range(5)]
    for each in (turns[3], turns[0], turns[4], turns[1], turns[2]):
        line.insert(each)
    assert list(line) == turns
    line.remove(turns[2])
    assert [each.turn_id for each in line] == ["0", "1", "3", "4"]
    with pytest.raises(AssertionError):
        line.remove(turn("another", 3.0))


def test_leaving_a_long_line_costs_what_leaving_a_short_one_does() -> None:
    def cost(num_turns: int) -> int:
        line, turns = TurnLine(), [turn(str(number), float(number)) for number in range(num_turns)]
        for each in turns:
            line.insert(each)
        return count_calls(lambda: line.remove(turns[num_turns // 2]))

    assert cost(1024) <= cost(64) + 8


def test_a_denial_holds_until_there_is_more_of_anything_or_anybody_else() -> None:
    cache = make_cache()
    line = WaitingLine(cache, (9,))
    line.insert(turn("t", 1.0))
    supply = Supply((5, 3), 2)
    assert line.known_denial(4, supply) is None
    line.note_denial(BLOCKED, 4, supply)
    assert line.known_denial(4, supply) == BLOCKED
    assert line.known_denial(4, Supply((5, 2), 1)) == BLOCKED, "less is no reason to ask again"
    for more in (Supply((6, 3), 2), Supply((5, 4), 2), Supply((5, 3), 3), Supply((6, 0), 0)):
        assert line.known_denial(4, more) is None
    assert line.known_denial(3, supply) is None, "a place has come free"
    line.insert(turn("u", 2.0))
    assert line.known_denial(4, supply) is None
    line.note_denial(BLOCKED, 4, supply)
    cache.open(SessionId("s"), namespace=NAMESPACES[0])
    run_turn(cache, SessionId("s"), [1, 2, 3, 4])
    assert line.known_denial(4, supply) is None, "there is something new to match"
