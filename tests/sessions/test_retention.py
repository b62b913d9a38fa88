"""Sessions at rest whose KV is given to the tree, or pinned."""

from __future__ import annotations

import pytest

from session_server.core.commands import CoolSession, OpenSession
from session_server.core.errors import SessionBusy, UnsupportedOperation
from session_server.core.session_events import SessionStateChanged
from session_server.sessions.quotas import SessionLimits
from tests.sessions.world import OWNER, World, completed, turn


def opened(world: World) -> list[tuple[bool, int]]:
    """Whether each session was opened pinned, and with how many tokens."""
    return [(c.pinned, len(c.tokens)) for c in world.engine.seen if isinstance(c, OpenSession)]


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


def test_none_is_pinned_where_no_memory_is_kept_for_it() -> None:
    with World(limits=SessionLimits(allows_pinned=False)) as world:
        session = world.open()
        with pytest.raises(UnsupportedOperation):
            world.manager.edits.retention.pin(OWNER, session, pinned=True)
        world.manager.edits.retention.pin(OWNER, session, pinned=False)
