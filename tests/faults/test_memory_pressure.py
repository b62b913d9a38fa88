"""A turn that can never fit, a pool that is too small for everybody, an allocation that fails."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from cache.errors import OutOfPages, OutOfRows
from session_server.core.errors import ContextTooLong
from session_server.engine.config import MemoryCheck
from tests.faults.exchange import BEHIND, SIZES, assert_completed, exchange
from tests.faults.points import Points, injects
from tests.rig.moments import OWNER, Rig, turn
from tests.sim.hand_engine import Sizes

PAGE_SIZES = (1, 2, 3, 4, 5, 7, 8, 16)


def tokens(num: int, start: int = 1) -> tuple[int, ...]:
    """An input of so many tokens, its own for each `start`."""
    return tuple(1 + (start + index * 7) % 29 for index in range(num))


@injects("turn that can never fit", "two around the context, two around the pool", points=300)
def test_a_turn_that_cannot_fit_is_refused_with_its_numbers_and_all_others_run(
    points: Points,
) -> None:
    for page_size in PAGE_SIZES:
        pool = Sizes(page_size=page_size, num_pages=-(-40 // page_size), max_context_len=4096)
        context = Sizes(page_size=page_size, num_pages=200, max_context_len=37)
        for sizes in (pool, context):
            with Rig(sizes) as rig:
                ready = rig.manager.engine_ready
                assert ready is not None
                most = ready.max_turn_len
                assert most <= min(sizes.max_context_len, sizes.num_pages * page_size)
                for past, excess in itertools.product((0, 5), range(-2, 3)):
                    for max_tokens in (0, 1, 6):
                        strike_around(rig, most + excess, past, max_tokens=max_tokens)
                        points.strike()


def strike_around(rig: Rig, context_len: int, past: int, *, max_tokens: int) -> None:
    """A turn whose context has exactly this length, `past` of it from before."""
    ready = rig.manager.engine_ready
    assert ready is not None
    most = ready.max_turn_len
    session_id = rig.open(session_id="s")
    if past:
        rig.run(session_id, turn("past", *tokens(past - 1), max_tokens=1))
    before = rig.manager.history(OWNER, session_id)
    request = turn("big", *tokens(context_len - past), max_tokens=max_tokens)
    if context_len + min(1, max_tokens) > most:
        with pytest.raises(ContextTooLong, match=str(context_len)):
            rig.submit(session_id, request)
        assert rig.manager.history(OWNER, session_id) == before
    else:
        after = rig.run(session_id, request)
        assert len(after) == min(context_len + max_tokens, most)
    rig.check_histories()
    rig.manager.close(OWNER, session_id)
    rig.requests.clear()
    rig.assert_recovered()


@injects("KV pool exhausted", "pools of every size from one turn's to everybody's", points=100)
def test_in_a_pool_too_small_for_all_everybody_still_gets_the_exact_answer(points: Points) -> None:
    num_coolings = num_retractions = 0
    for page_size, num_in_flight in ((1, 1), (4, 2)):
        for num_tokens in range(44, 200, 3):
            sizes = Sizes(
                page_size=page_size,
                num_pages=-(-num_tokens // page_size),
                num_rows=6,
                chunk_tokens=9,
                num_in_flight=num_in_flight,
                memory_check=MemoryCheck.WARN,
            )
            with Rig(sizes) as rig:
                sessions = [rig.open() for _ in range(4)]
                for round_number in range(2):
                    for number, session_id in enumerate(sessions):
                        name = f"t{round_number}"
                        rig.submit(session_id, turn(name, *tokens(7, number), max_tokens=9))
                        rig.moment()
                    rig.rest()
                    for session_id in sessions:
                        assert_completed(rig, session_id, name)
                counters = rig.engine.hand.engine.counters
                num_coolings += counters.coolings
                num_retractions += counters.retractions
                rig.assert_recovered()
            points.strike()
    assert min(num_coolings, num_retractions) > 20, "there was no pressure"


# Steps in which every turn decodes ask for pages only where one begins, and cannot fail.
@injects("KV pool exhausted", "every call that takes pages or a row fails once", points=70)
def test_an_allocation_that_fails_is_tried_again_and_nothing_is_lost(points: Points) -> None:
    for sizes in SIZES:
        for name, error in (("grow", OutOfPages), ("begin_turn", OutOfRows)):
            with Rig(sizes) as rig:
                for at in itertools.count():
                    trap = Nth(getattr(rig.engine.hand.cache, name), at, error)
                    with mock.patch.object(rig.engine.hand.cache, name, trap):
                        exchange(rig)()
                        rig.submit("mine", BEHIND)
                        rig.rest()
                    for session_id, turn_id in (("mine", "main"), ("mine", "behind")):
                        assert_completed(rig, session_id, turn_id)
                    assert_completed(rig, "neighbour", "long")
                    rig.assert_recovered()
                    if trap.num_calls <= at:
                        break
                    points.strike()


class Nth:
    """A function whose call number `at` raises."""

    def __init__(self, function: Callable[..., Any], at: int, error: type[Exception]) -> None:
        self._function = function
        self._at = at
        self._error = error
        self.num_calls = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == self._at + 1:
            raise self._error("injected")
        return self._function(*args, **options)
