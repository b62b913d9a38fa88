"""When idle sessions expire, and what it costs to know."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from session_server.core.errors import SessionNotFound
from session_server.sessions.backlog import SLICE
from session_server.sessions.deadlines import Deadlines
from session_server.sessions.quotas import QuotaLimits
from session_server.sessions.session import Session
from tests.sessions.world import OWNER, World, turn

MANY = QuotaLimits(sessions=10_000, owner_sessions=10_000)


def is_open(world: World, name: str) -> bool:
    try:
        world.manager.get(OWNER, name)
    except SessionNotFound:
        return False
    return True


def count_takes(world: World) -> list[int]:
    """How many elements of the wheel each call of `due` takes out, from here on."""
    counts: list[int] = []
    deadlines = world.manager._sessions.deadlines
    due, take = deadlines.pop_expired, deadlines._take

    def counted_due(now_s: float) -> list[Session]:
        counts.append(0)
        return due(now_s)

    def counted_take() -> Session:
        counts[-1] += 1
        return take()

    deadlines.pop_expired = counted_due  # type: ignore[method-assign]
    deadlines._take = counted_take  # type: ignore[method-assign]
    return counts


def test_a_tick_looks_at_nothing_that_is_not_due() -> None:
    with World(quotas=MANY) as world:
        for index in range(500):
            world.now_s += 1.0
            world.open(ttl_s=1000.0, session_id=f"s{index}")
        takes = count_takes(world)
        for _ in range(10):
            world.manager.tick()
        assert takes == [0] * 10
        world.now_s += 503.0
        world.manager.tick()
        assert takes[-1] == 2
        assert [is_open(world, f"s{index}") for index in range(3)] == [False, False, True]


def test_a_clock_that_leaps_is_not_followed_second_by_second() -> None:
    with World() as world:
        first = world.open(ttl_s=1000.0, session_id="first")
        world.now_s += 1e12
        world.manager.tick()
        assert not is_open(world, first)
        second = world.open(ttl_s=1000.0, session_id="second")
        world.manager.tick()
        assert is_open(world, second)


def test_many_that_expire_at_once_are_closed_a_slice_at_a_time() -> None:
    with World(quotas=MANY) as world:
        for _ in range(2 * SLICE + 1):
            world.open(ttl_s=10.0)
        world.now_s += 12.0
        world.manager.tick()
        left = [world.manager.stats().sessions]
        while left[-1]:
            world.spin(1)
            left.append(world.manager.stats().sessions)
        assert (left[0], left[-1]) == (SLICE + 1, 0)


def test_a_shorter_time_to_live_counts_at_once_and_a_longer_one_too() -> None:
    with World() as world:
        short, long = world.open(ttl_s=100.0), world.open(ttl_s=100.0)
        world.manager.update(OWNER, short, ttl_s=5.0)
        world.manager.update(OWNER, long, ttl_s=500.0)
        world.now_s += 7.0
        world.manager.tick()
        assert [is_open(world, each) for each in (short, long)] == [False, True]
        world.now_s += 400.0
        world.manager.tick()
        assert is_open(world, long)
        world.now_s += 100.0
        world.manager.tick()
        assert not is_open(world, long)


def test_a_running_turn_keeps_its_session_open_and_its_end_begins_the_count_anew() -> None:
    with World() as world:
        session = world.open(ttl_s=10.0)
        world.submit(session, turn("1"))
        for _ in range(5):
            world.now_s += 100.0
            world.manager.tick()
        world.engine.run()
        world.now_s += 9.0
        world.manager.tick()
        assert is_open(world, session)
        world.now_s += 3.0
        world.manager.tick()
        assert not is_open(world, session)


def test_what_clients_change_and_close_does_not_pile_up() -> None:
    with World(quotas=MANY) as world:
        deadlines = world.manager._sessions.deadlines
        kept = world.open()
        for index in range(20_000):
            world.manager.update(OWNER, kept, ttl_s=80_000.0 - 3 * index)
            assert sum(map(len, deadlines._wheel.values())) == len(deadlines._wheel) == 1
        for _ in range(5000):
            world.manager.close(OWNER, world.open(ttl_s=5000.0))
        assert sum(map(len, deadlines._wheel.values())) == len(deadlines._wheel) == 1
        world.now_s += 80_000.0
        while deadlines.is_due(world.now_s):
            world.manager.tick()
        assert not deadlines._wheel
        assert not is_open(world, kept)


@given(
    ops=st.lists(
        st.tuples(st.sampled_from(["open", "touch", "ttl", "pass"]), st.integers(1, 40)),
        max_size=60,
    )
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_sessions_expire_within_a_second_of_their_time_and_never_before(
    ops: list[tuple[str, int]],
) -> None:
    with World() as world:
        expires: dict[str, float] = {}
        ttls: dict[str, float] = {}
        for op, number in ops:
            names = sorted(expires)
            name = names[number % len(names)] if names else ""
            if op == "open" or not names:
                name = world.open(ttl_s=float(number))
                ttls[name] = float(number)
            elif op == "touch":
                world.manager.update(OWNER, name, metadata={})
            elif op == "ttl":
                world.manager.update(OWNER, name, ttl_s=float(number))
                ttls[name] = float(number)
            else:
                world.now_s += number / 2
                world.manager.tick()
                for each, expires_s in list(expires.items()):
                    if expires_s >= world.now_s:
                        assert is_open(world, each)
                    elif expires_s + 1.0 < world.now_s:
                        assert not is_open(world, each)
                    if not is_open(world, each):
                        del expires[each]
                continue
            expires[name] = world.now_s + ttls[name]


def test_an_empty_wheel_has_nothing_due() -> None:
    assert not Deadlines().is_due(1e9)
    assert Deadlines().pop_expired(1e9) == []
