"""Sessions at rest whose KV is given to the tree, or pinned."""

from __future__ import annotations

import pytest

from session_server.core.commands import CoolSession, OpenSession, WarmSession
from session_server.core.errors import (
    SessionBusy,
    SessionClosing,
    SessionNotFound,
    UnsupportedOperation,
)
from session_server.core.owner import Owner
from session_server.core.session_events import SessionStateChanged
from session_server.sessions.quotas import SessionLimits
from tests.sessions.world import OWNER, World, completed, turn


def opened(world: World) -> list[tuple[bool, int]]:
    """Whether each session was opened pinned, and with how many tokens."""
    return [(c.pinned, len(c.tokens)) for c in world.engine.seen if isinstance(c, OpenSession)]


def num_warmed(world: World) -> int:
    """How often the engine was told to warm a session."""
    return len([c for c in world.engine.seen if isinstance(c, WarmSession)])


def test_a_cooled_session_goes_on_from_its_tokens(world: World) -> None:
    session, twin = world.open(), world.open()
    for each in (session, twin):
        world.run(each, turn("t1", "Hello", seed=1))
    assert world.manager.edits.retention.cool(OWNER, session).state == "cold"
    assert world.entries(session)[-1] == SessionStateChanged("cold", "client")
    world.manager.edits.retention.cool(OWNER, session)
    assert len([c for c in world.engine.seen if isinstance(c, CoolSession)]) == 1
    ends = [completed(world.run(each, turn("t2", "And?", seed=1))) for each in (session, twin)]
    assert ends[0].outcome.token_ids == ends[1].outcome.token_ids
    assert world.history(session) == world.history(twin)
    assert world.manager.get(OWNER, session).state == "resident"


def test_a_session_is_pinned_from_its_next_turn_on(world: World) -> None:
    session = world.open()
    world.run(session, turn("t1"))
    assert world.manager.edits.retention.pin(OWNER, session, pinned=True).is_pinned
    assert world.manager.get(OWNER, session).state == "cold"
    world.run(session, turn("t2"))
    assert world.manager.edits.retention.pin(OWNER, session, pinned=True).state == "resident"
    world.run(session, turn("t3"))
    assert not world.manager.edits.retention.pin(OWNER, session, pinned=False).is_pinned
    world.run(session, turn("t4"))
    assert [is_pinned for is_pinned, _ in opened(world)] == [False, True, False]


def test_a_session_with_a_turn_stays_as_it_is(world: World) -> None:
    session = world.open()
    world.submit(session, turn("t1"))
    with pytest.raises(SessionBusy):
        world.manager.edits.retention.cool(OWNER, session)
    with pytest.raises(SessionBusy):
        world.manager.edits.retention.pin(OWNER, session, pinned=True)
    world.engine.run()
    assert not world.manager.get(OWNER, session).is_pinned


@pytest.mark.parametrize("is_attached", [False, True])
def test_a_session_is_warmed_that_the_engine_knows_or_does_not(is_attached: bool) -> None:
    with World(kv_tiers="host") as world:
        retention = world.manager.edits.retention
        warm = retention.attach if is_attached else retention.warm
        session, twin = world.open(), world.open()
        for each in (session, twin):
            world.run(each, turn("t1", "Hello", seed=1))
        warm(OWNER, session)
        assert num_warmed(world) == 0  # it is resident
        retention.cool(OWNER, session)
        warm(OWNER, session)
        assert num_warmed(world) == 1
        assert world.entries(session)[-1] == SessionStateChanged("cold", "client")
        world.engine.die()
        world.engine.run()
        world.engine.come_up()
        world.engine.run()
        num_opened = len(opened(world))
        warm(OWNER, session)
        assert num_warmed(world) == 2
        assert opened(world)[num_opened:] == [(False, len(world.history(session)))]
        world.engine.run()
        assert world.manager.get(OWNER, session).state == "cold"
        ends = [completed(world.run(each, turn("t2", "And?", seed=1))) for each in (session, twin)]
        assert ends[0].outcome.token_ids == ends[1].outcome.token_ids
        assert world.history(session) == world.history(twin)


def test_where_nothing_can_come_back_warming_does_nothing(world: World) -> None:
    retention = world.manager.edits.retention
    session = world.open()
    world.run(session, turn("t1"))
    retention.cool(OWNER, session)
    retention.warm(OWNER, session)  # this engine keeps nothing outside of its pools
    assert num_warmed(world) == 0
    with World(kv_tiers="disk") as other:
        retention = other.manager.edits.retention
        session = other.open()
        retention.warm(OWNER, session)  # nothing was said in it
        other.submit(session, turn("t1"))
        num_opened = len(opened(other))
        retention.warm(OWNER, session)  # it has a turn
        other.engine.run()
        retention.cool(OWNER, session)
        other.engine.is_full = True
        retention.warm(OWNER, session)
        other.engine.is_full = False
        other.engine.die()
        other.engine.deliver()
        retention.warm(OWNER, session)
        assert (num_warmed(other), len(opened(other))) == (0, num_opened)
        for name, owner in (("none", OWNER), (session, Owner("another"))):
            with pytest.raises(SessionNotFound):
                retention.warm(owner, name)
            with pytest.raises(SessionNotFound):
                retention.attach(owner, name)


def test_a_session_that_closes_is_attached_to_and_not_warmed() -> None:
    with World(kv_tiers="host") as world:
        retention = world.manager.edits.retention
        session = world.open()
        world.run(session, turn("t1"))
        retention.cool(OWNER, session)
        world.submit(session, turn("t2"))
        world.manager.close(OWNER, session)
        with pytest.raises(SessionClosing):
            retention.warm(OWNER, session)
        retention.attach(OWNER, session)
        assert num_warmed(world) == 0


def test_an_engine_that_does_not_take_a_session_in_to_warm_it_runs_its_turn_later() -> None:
    with World(kv_tiers="host") as world:
        session = world.open()
        world.run(session, turn("t1"))
        world.engine.die()
        world.engine.run()
        world.engine.come_up()
        world.engine.run()
        world.engine.refuse_open = "server_busy"
        world.manager.edits.retention.warm(OWNER, session)
        world.engine.run()
        world.engine.refuse_open = None
        completed(world.run(session, turn("t2")))


def test_none_is_pinned_where_no_memory_is_kept_for_it() -> None:
    with World(limits=SessionLimits(allows_pinned=False)) as world:
        session = world.open()
        with pytest.raises(UnsupportedOperation):
            world.manager.edits.retention.pin(OWNER, session, pinned=True)
        world.manager.edits.retention.pin(OWNER, session, pinned=False)
