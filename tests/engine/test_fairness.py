"""What a turn gets beside other turns, in forwards and tokens: the bounds of docs/scheduling.md.

The real engine on the echo device, driven step by step; nothing here is measured in seconds.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.types import TurnId
from session_server.core.events import TurnStarted
from session_server.engine import plan_admission
from session_server.engine.config import MemoryCheck
from session_server.engine.shares import share_len
from tests.depth import at_depth
from tests.engine.crowd import Coming, Crowd, Given
from tests.sim.hand_engine import Sizes

ROOMY = Sizes(
    num_pages=8000,
    page_size=4,
    num_rows=300,
    max_context_len=4096,
    max_running=16,
    chunk_tokens=64,
    memory_check=MemoryCheck.WARN,
)
SHORT = share_len(ROOMY.chunk_tokens)
"""The longest input that counts as short."""


def first_tokens(crowd: Crowd, names: list[str]) -> list[int]:
    return [crowd.num_forwards(name) for name in names]


@pytest.mark.parametrize("num_in_flight", [1, 2])
@pytest.mark.parametrize("priority", [-1, 0, 9])
def test_short_turns_beside_a_hog_of_any_size_have_their_token_with_the_next_forward(
    num_in_flight: int, priority: int
) -> None:
    for hog_len in (0, 64, 500, 4000):
        crowd = Crowd(replace(ROOMY, num_in_flight=num_in_flight))
        if hog_len:
            crowd.submit("hog", hog_len, priority=priority)
        names = [f"t{i}" for i in range(16)]
        for name in names:
            crowd.submit(name, SHORT, max_new=3)
        crowd.finish()
        assert first_tokens(crowd, names) == [1] * 16, hog_len


def test_beside_twenty_hogs_a_short_turn_waits_no_longer_than_beside_one() -> None:
    crowd = Crowd(ROOMY)
    for i in range(20):
        crowd.submit(f"hog{i}", 1000)
    names = [f"t{i}" for i in range(16)]
    for name in names:
        crowd.submit(name, SHORT)
    crowd.finish()
    assert first_tokens(crowd, names) == [1] * 16


def test_short_turns_that_come_together_share_the_forwards_among_themselves() -> None:
    crowd = Crowd(replace(ROOMY, max_running=64, num_in_flight=1))
    crowd.submit("hog", 3000)
    names = [f"t{i}" for i in range(48)]
    crowd.arrive(dict.fromkeys(names, Coming(4)))
    crowd.finish()
    assert max(first_tokens(crowd, names)) <= 1 + 2 * 48 * 4 // ROOMY.chunk_tokens


def test_a_hog_has_its_share_of_every_forward_however_many_short_turns_come() -> None:
    crowd = Crowd(ROOMY)
    crowd.submit("hog", 1200)
    rng = random.Random(1)
    while "hog" in crowd.live():
        name = f"t{len(crowd.guests)}"
        crowd.submit(name, rng.randint(1, 2 * SHORT), max_new=rng.randint(1, 3))
    assert crowd.num_forwards("hog") <= 1200 // SHORT
    crowd.finish()


def test_prompts_that_do_not_fit_together_do_not_hold_up_those_that_do() -> None:
    stage = replace(ROOMY, num_pages=300, max_context_len=1200)
    crowd = Crowd(stage)
    for i in range(4):
        crowd.submit(f"hog{i}", 700, max_new=100)
    names = [f"t{i}" for i in range(16)]
    for name in names:
        crowd.submit(name, SHORT, max_new=4)
    crowd.finish()
    assert first_tokens(crowd, names) == [1] * 16
    lone_lives = [700 // 64 + 1 + 100] * 4
    assert crowd.num_forwards("hog3") <= sum(lone_lives)


def test_a_turn_that_waits_for_pages_is_not_starved_by_those_that_pass_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_admission, "MAX_BYPASSES", 8)
    crowd = Crowd(replace(ROOMY, num_pages=100, max_context_len=390))
    crowd.submit("first", 100, max_new=40)
    crowd.submit("hog", 380)
    num_passed = 0
    while not crowd.bench.turns[TurnId("hog")].starts:
        name = f"t{len(crowd.guests)}"
        crowd.submit(name, 6, max_new=10)
        num_passed += bool(crowd.bench.turns[TurnId(name)].starts)
        assert len(crowd.forwards) < 200, "the hog never came"
    assert num_passed == 8
    crowd.finish()
    assert crowd.bench.finished("first").num_retractions == 0


# Random crowds

Burst = tuple[int, list[Coming]]
"""Steps before some turns come together."""


def bursts(*, max_new: int) -> st.SearchStrategy[list[Burst]]:
    lengths = st.one_of(st.integers(1, 8), st.integers(1, 60), st.integers(100, 350))
    coming = st.builds(Coming, lengths, st.integers(1, max_new), st.integers(0, 2))
    steps = st.integers(0, 6)
    return st.lists(st.tuples(steps, st.lists(coming, min_size=1, max_size=20)), max_size=4)


def play(stage: Sizes, coming: list[Burst]) -> Crowd:
    """Let them come, and finish."""
    crowd = Crowd(stage)
    for num_steps, burst in coming:
        for _ in range(num_steps):
            crowd.step()
        crowd.arrive({f"t{len(crowd.guests) + i}": turn for i, turn in enumerate(burst)})
    crowd.finish()
    return crowd


def test_every_forward_gives_a_turn_its_share_or_half_of_itself_to_shorter_ones() -> None:
    reached: Counter[str] = Counter()

    @settings(max_examples=at_depth(35, proof=60), deadline=None, derandomize=True)
    @given(
        coming=bursts(max_new=12),
        chunk_tokens=st.sampled_from([8, 16, 37, 64]),
        max_running=st.sampled_from([2, 5, 16]),
        num_in_flight=st.sampled_from([1, 2]),
    )
    def check(coming: list[Burst], chunk_tokens: int, max_running: int, num_in_flight: int) -> None:
        limits = {"chunk_tokens": chunk_tokens, "max_running": max_running}
        stage = replace(ROOMY, num_in_flight=num_in_flight, **limits)
        for forward in play(stage, coming).forwards:
            check_shares(forward, stage, reached)

    check()
    assert min(reached[name] for name in ("less than a share", "no place", "has its share")) > 0


def check_shares(forward: dict[str, Given], stage: Sizes, reached: Counter[str]) -> None:
    """The promise of `shares.py`, for those that have a place among the running ones."""
    share = share_len(stage.chunk_tokens)
    running = [one for one in forward.values() if one.was_running or one.num_tokens]
    num_waiting = sum(not one.was_running for one in forward.values())
    num_long = sum(one.lacked > 1 for one in running)
    for name, mine in forward.items():
        if mine.num_tokens >= min(mine.lacked, share):
            reached["has its share"] += 1
            continue
        is_long = mine.lacked > share
        has_place = len(running) < stage.max_running and num_waiting <= stage.max_running
        if is_long:
            has_place &= num_long < max(1, stage.max_running // 2)
        if not (mine.was_running or has_place):
            reached["no place"] += 1
            continue
        reached["less than a share"] += 1
        limit = max(mine.lacked, share)
        shorter = sum(
            other.num_tokens
            for its_name, other in forward.items()
            if its_name != name and other.lacked <= limit
        )
        assert 2 * shorter >= stage.chunk_tokens, (name, forward)


def test_a_first_token_comes_within_a_bound_in_which_no_long_prompt_occurs() -> None:
    reached: Counter[str] = Counter()

    @settings(max_examples=at_depth(35, proof=60), deadline=None, derandomize=True)
    @given(
        coming=bursts(max_new=12),
        chunk_tokens=st.sampled_from([8, 16, 37, 64]),
        num_in_flight=st.sampled_from([1, 2]),
    )
    def check(coming: list[Burst], chunk_tokens: int, num_in_flight: int) -> None:
        limits = {"chunk_tokens": chunk_tokens, "max_running": 256}
        crowd = play(replace(ROOMY, num_in_flight=num_in_flight, **limits), coming)
        for name in crowd.guests:
            check_first_token(crowd, name, reached)

    check()
    assert min(reached[name] for name in ("at once", "later", "beside longer ones")) > 0


def check_first_token(crowd: Crowd, name: str, reached: Counter[str]) -> None:
    """At most ceil(n / share) + 2 W / B forwards."""
    budget = crowd.bench.sizes.chunk_tokens
    guest, num_forwards = crowd.guests[name], crowd.num_forwards(name)
    shorter = longer = 0
    for forward in crowd.forwards[guest.since : guest.since + num_forwards]:
        limit = max(forward[name].lacked, share_len(budget))
        others = [given for its_name, given in forward.items() if its_name != name]
        shorter += sum(other.num_tokens for other in others if other.lacked <= limit)
        longer += sum(other.num_tokens for other in others if other.lacked > limit)
    reached["at once" if num_forwards == 1 else "later"] += 1
    reached["beside longer ones"] += longer > 0
    assert num_forwards <= -(-guest.prompt_len // share_len(budget)) + 2 * shorter // budget


def test_when_memory_is_short_a_turn_waits_for_the_lives_of_those_ahead_and_no_longer() -> None:
    reached: Counter[str] = Counter()

    @settings(max_examples=at_depth(25, proof=40), deadline=None, derandomize=True)
    @given(
        coming=bursts(max_new=60),
        chunk_tokens=st.sampled_from([8, 64]),
        num_pages=st.sampled_from([103, 130, 250]),
        num_rows=st.sampled_from([2, 6, 40]),
    )
    def check(coming: list[Burst], chunk_tokens: int, num_pages: int, num_rows: int) -> None:
        sizes = {"num_pages": num_pages, "num_rows": num_rows, "max_context_len": 500}
        stage = replace(ROOMY, chunk_tokens=chunk_tokens, **sizes)
        crowd = play(stage, coming)
        reached["retracted"] += crowd.bench.engine.counters.retractions
        reached["cooled"] += crowd.bench.engine.counters.coolings
        for name in crowd.guests:
            check_waiting(crowd, name, reached)

    check()
    assert min(reached[name] for name in ("retracted", "cooled", "passed", "waited")) > 0


def check_waiting(crowd: Crowd, name: str, reached: Counter[str]) -> None:
    """The oldest running turn always advances and keeps its pages, so those who were there before
    a turn, and those who passed it, live one after another at worst.
    """
    started = [str(e.turn_id) for e in crowd.bench.events if isinstance(e, TurnStarted)]
    ahead = crowd.guests[name].ahead
    passed = set(started[: started.index(name)]) - ahead
    passed = {other for other in passed if crowd.guests[other].since >= crowd.guests[name].since}
    bound = sum(life(crowd, other) for other in (*ahead, *passed, name))
    num_forwards = crowd.num_forwards(name)
    reached["passed"] += bool(passed)
    reached["waited"] += num_forwards > 2
    assert num_forwards <= bound


def life(crowd: Crowd, name: str) -> int:
    """Forwards a turn needs at its share, all over again after each retraction."""
    guest = crowd.guests[name]
    share = share_len(crowd.bench.sizes.chunk_tokens)
    num_lives = 1 + crowd.bench.finished(name).num_retractions
    return num_lives * (-(-guest.prompt_len // share) + guest.max_new)
