"""Turns in their queues: their order, and how long a denial holds."""

from __future__ import annotations

import pytest

from cache.types import SessionId, TurnId
from session_server.core.commands import SubmitTurn
from session_server.core.sampling import SamplingParams
from session_server.engine.scheduler_view import BlockReason
from session_server.engine.turn import Turn, TurnClock
from session_server.engine.turn_line import TurnQueue
from session_server.engine.turn_queue import Supply, WaitingQueue
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
    queue, turns = TurnQueue(), [turn(str(number), float(number)) for number in range(5)]
    for each in (turns[3], turns[0], turns[4], turns[1], turns[2]):
        queue.insert(each)
    assert list(queue) == turns
    queue.remove(turns[2])
    assert [each.turn_id for each in queue] == ["0", "1", "3", "4"]
    with pytest.raises(AssertionError):
        queue.remove(turn("another", 3.0))


def test_leaving_a_long_queue_costs_what_leaving_a_short_one_does() -> None:
    def cost(num_turns: int) -> int:
        queue, turns = (
            TurnQueue(),
            [turn(str(number), float(number)) for number in range(num_turns)],
        )
        for each in turns:
            queue.insert(each)
        return count_calls(lambda: queue.remove(turns[num_turns // 2]))

    assert cost(1024) <= cost(64) + 8


def test_a_denial_holds_until_there_is_more_of_anything_or_anybody_else() -> None:
    cache = make_cache()
    queue = WaitingQueue(cache, (9,))
    queue.insert(turn("t", 1.0))
    supply = Supply((5, 3), 2)
    assert queue.known_denial(4, supply) is None
    queue.note_denial(BLOCKED, 4, supply)
    assert queue.known_denial(4, supply) == BLOCKED
    assert queue.known_denial(4, Supply((5, 2), 1)) == BLOCKED, "less is no reason to ask again"
    for more in (Supply((6, 3), 2), Supply((5, 4), 2), Supply((5, 3), 3), Supply((6, 0), 0)):
        assert queue.known_denial(4, more) is None
    assert queue.known_denial(3, supply) is None, "a place has come free"
    queue.insert(turn("u", 2.0))
    assert queue.known_denial(4, supply) is None
    queue.note_denial(BLOCKED, 4, supply)
    cache.open(SessionId("s"), namespace=NAMESPACES[0])
    run_turn(cache, SessionId("s"), [1, 2, 3, 4])
    assert queue.known_denial(4, supply) is None, "there is something new to match"
