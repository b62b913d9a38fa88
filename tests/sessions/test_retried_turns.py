"""A turn that failed by no fault of its client runs when it is asked for again, once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from session_server.core.errors import TurnConflict
from session_server.core.session_events import (
    TurnCancelled,
    TurnCompleted,
    TurnCreated,
    TurnFailedEntry,
    TurnRequest,
)
from session_server.sessions.stored_sessions import StoredSessions
from tests.sessions.recount import recount
from tests.sessions.test_stored_sessions import Disk
from tests.sessions.world import OWNER, World, completed, failed, turn

REQUEST = turn("a", max_tokens=9, ignore_eos=True)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "store")


@pytest.fixture(params=("in memory", "on disk"))
def world(request: pytest.FixtureRequest, disk: Disk) -> Iterator[World]:
    if request.param == "in memory":
        with World() as world:
            yield world
    else:
        with disk.world() as world:
            yield world


def opened(world: World) -> str:
    is_stored = isinstance(world.manager._sessions.on_disk, StoredSessions)
    return world.open(session_id="s", is_stored=is_stored)


def fail(world: World, session: str, request: TurnRequest = REQUEST) -> TurnFailedEntry:
    """Run a turn under which the engine dies; another one comes up."""
    world.submit(session, request)
    world.engine.step()
    world.engine.deliver()
    world.engine.die()
    world.engine.deliver()
    world.engine.come_up()
    world.engine.deliver()
    return failed(world.end_of(session, request.turn_id))


def said(world: World, session: str) -> list[str]:
    return [item.turn_id for item in world.manager.snapshot(OWNER, session).items]


def test_a_turn_whose_engine_died_runs_once_more_under_its_id(world: World) -> None:
    session = opened(world)
    world.run(session, turn("before"))
    assert fail(world, session).code == "engine_restarting"
    assert world.submit(session, REQUEST).end is None
    assert world.submit(session, REQUEST).end is None
    world.engine.run()
    end = completed(world.end_of(session, "a"))
    assert world.submit(session, REQUEST).end == end
    assert said(world, session) == ["before", "before", "a", "a"]
    view = world.manager.get(OWNER, session)
    assert view.num_turns == 2
    entries = [each for each in world.entries(session) if getattr(each, "turn_id", "") == "a"]
    kinds = [type(each) for each in entries]
    assert [kinds.count(kind) for kind in (TurnCreated, TurnFailedEntry, TurnCompleted)] == [
        2,
        1,
        1,
    ]
    recount(world.manager)


def test_a_turn_that_is_asked_for_again_is_the_same_request(world: World) -> None:
    session = opened(world)
    fail(world, session)
    with pytest.raises(TurnConflict):
        world.submit(session, turn("a", "Something else"))
    assert failed(world.end_of(session, "a"))


@pytest.mark.parametrize("code", ["numerical_error", "device_failed", "internal_inconsistency"])
def test_every_code_that_says_retry_may_be_retried(world: World, code: str) -> None:
    session = opened(world)
    world.submit(session, REQUEST)
    world.engine.step()
    world.engine.fail(next(iter(world.engine.slots)), code)
    world.engine.run()
    assert failed(world.end_of(session, "a")).retryable
    completed(world.run(session, REQUEST))
    assert said(world, session) == ["a", "a"]


def test_a_turn_that_failed_for_good_is_told_again(world: World) -> None:
    session = opened(world)
    world.submit(session, REQUEST)
    world.engine.step()
    world.engine.fail(next(iter(world.engine.slots)), "grammar_failed")
    world.engine.run()
    end = failed(world.end_of(session, "a"))
    assert not end.retryable
    assert world.submit(session, REQUEST).end == end


def test_a_turn_that_its_client_has_canceled_is_told_again(world: World) -> None:
    session = opened(world)
    world.submit(session, REQUEST)
    world.manager.cancel(OWNER, session, "a", keep_partial=False)
    world.engine.run()
    end = world.end_of(session, "a")
    assert isinstance(end, TurnCancelled)
    assert world.submit(session, REQUEST).end == end


def test_a_retried_turn_may_be_canceled_and_fail_again(world: World) -> None:
    session = opened(world)
    fail(world, session)
    assert fail(world, session).code == "engine_restarting"
    world.submit(session, REQUEST)
    world.manager.cancel(OWNER, session, "a", keep_partial=False)
    world.engine.run()
    assert isinstance(world.end_of(session, "a"), TurnCancelled)
    assert said(world, session) == []
    recount(world.manager)


def test_a_retried_turn_takes_the_place_of_the_failed_one_on_disk(disk: Disk) -> None:
    with disk.world() as world:
        session = world.open(session_id="s", is_stored=True)
        fail(world, session)
        world.run(session, turn("b"))
    with disk.world() as world:  # a failure that another process has told of
        end = completed(world.run(session, REQUEST))
        row = disk.store.find(OWNER.owner_id, session)
        assert row is not None
        assert row.num_turns == 2
    with disk.world() as world:
        view = world.submit(session, REQUEST)
        assert view.end is not None
        assert completed(view.end).outcome.text == end.outcome.text
        assert world.manager.get(OWNER, session).num_turns == 2
        assert said(world, session) == ["b", "b", "a", "a"]


def test_a_crash_in_a_retried_turn_leaves_the_failure_and_a_turn_to_ask_for(disk: Disk) -> None:
    with disk.world() as world:
        session = world.open(session_id="s", is_stored=True)
        fail(world, session)
        world.submit(session, REQUEST)
        world.engine.step()
        world.engine.deliver()
    with disk.world() as world:
        assert failed(world.end_of(session, "a")).code == "engine_restarting"
        completed(world.run(session, REQUEST))
        assert said(world, session) == ["a", "a"]


def test_a_turn_that_waited_when_its_server_was_told_to_end_runs_in_the_next(disk: Disk) -> None:
    with disk.world() as world:
        session = world.open(session_id="s", is_stored=True)
        world.submit(session, turn("first", max_tokens=9, ignore_eos=True))
        world.submit(session, REQUEST)
        draining = world.loop.create_task(world.manager.drain(0.0))
        world.spin()
        world.engine.run()
        world.do(draining)
        world.spin()
    with disk.world() as world:
        end = world.end_of(session, "a")
        assert isinstance(end, TurnCancelled)
        assert (end.reason, end.kept_partial) == ("draining", False)
        completed(world.run(session, REQUEST))
        assert said(world, session)[-2:] == ["a", "a"]
