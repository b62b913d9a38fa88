"""What a bug anywhere between a turn's request and its end may do: fail that turn, and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from session_server.core.session_events import TurnCompleted, TurnFailedEntry
from session_server.sessions import drafts, session_logs, turn_conclusion, turn_flow
from session_server.sessions.answer import Answer
from session_server.sessions.ended_turns import EndedTurns
from session_server.sessions.engine_copies import EngineCopies
from session_server.sessions.engine_link import EngineLink
from session_server.sessions.quotas import Quotas
from session_server.sessions.residents import Residents
from session_server.sessions.session_logs import SessionLogs
from session_server.sessions.tokenizing import PromptBuilder
from session_server.sessions.transcript import Transcript
from session_server.sessions.turn import TurnHooks
from tests.sessions.recount import recount
from tests.sessions.test_stored_sessions import Disk
from tests.sessions.world import OWNER, World, completed, turn

BEFORE = (
    (Transcript, "state"),
    (PromptBuilder, "check"),
    (PromptBuilder, "build"),
    (turn_flow, "fit_sampling"),
    (turn_flow, "held_behind_thought"),
    (Quotas, "reserve"),
    (EngineCopies, "base_len"),
    (turn_flow, "Answer"),
    (EngineCopies, "open"),
    (Transcript, "context"),
    (EngineLink, "send"),
)
"""What is called before the engine has the turn."""

DURING = (
    (Residents, "mark_resident"),
    (Answer, "feed"),
    (turn_flow, "entry_bytes"),
    (Answer, "finish"),
    (turn_flow, "completed"),
    (Transcript, "commit"),
)
"""What is called for the engine's events, up to the end."""

AFTER = (
    (turn_conclusion, "record_of"),
    (SessionLogs, "record_turn"),
    (session_logs, "encode_pieces"),
    (EndedTurns, "add"),
    (turn_conclusion, "report_of"),
)
"""What is called once the turn is part of its conversation."""


class Bug(Exception):
    pass


@contextmanager
def a_bug(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Iterator[list[str]]:
    """Have one call raise; the list says whether there was one."""
    real: Callable[..., Any] = getattr(owner, name)
    raised: list[str] = []

    def broken(*args: Any, **options: Any) -> Any:
        if not raised:
            raised.append(name)
            raise Bug(name)
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        yield raised


@pytest.fixture(params=("in memory", "on disk"))
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    if request.param == "in memory":
        with World() as world:
            yield world
    else:
        with Disk(tmp_path / "store").world() as world:
            yield world


def opened(world: World) -> str:
    return world.open(is_stored=world.manager._sessions.on_disk is not None)


def ask(world: World, session: str, turn_id: str, **options: Any) -> None:
    """Send a turn and play what comes of it."""
    world.submit(session, turn(turn_id, **options))
    world.spin()
    world.engine.run()
    world.spin()


def goes_on(world: World, session: str) -> None:
    """The session takes a turn, an edit and its end, and nothing is held for what has failed."""
    manager = world.manager
    recount(manager)
    told = manager.turn(OWNER, session, "broken").end
    ask(world, session, "next")
    assert completed(world.end_of(session, "next")).outcome.usage.output_tokens
    said = [item.turn_id for item in manager.snapshot(OWNER, session).items]
    assert said == [
        each
        for each in ("first", "broken", "next")
        if each != "broken" or isinstance(told, TurnCompleted)
        for _ in "qa"
    ]
    manager.edits.rewind(OWNER, session, None)
    manager.close(OWNER, session)
    world.spin()
    recount(manager)
    assert not list(manager._sessions)


@pytest.mark.parametrize(("owner", "name"), BEFORE + DURING)
def test_a_turn_fails_by_a_bug_and_its_session_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    session = opened(world)
    ask(world, session, "first")
    with a_bug(monkeypatch, owner, name) as raised:
        ask(world, session, "broken")
    assert raised
    end = world.end_of(session, "broken")
    assert isinstance(end, TurnFailedEntry)
    assert (end.code, end.retryable) == ("internal_error", False)
    goes_on(world, session)


@pytest.mark.parametrize(("owner", "name"), AFTER)
def test_a_turn_that_was_computed_is_told_whatever_fails_behind_it(
    world: World, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    session = opened(world)
    ask(world, session, "first")
    journal = world.manager.journal(OWNER, session)
    with a_bug(monkeypatch, owner, name) as raised:
        world.manager.on_turn_ended(lambda _report: None)
        ask(world, session, "broken")
    is_stored = world.manager.get(OWNER, session).is_durable is not None
    assert raised or not is_stored
    entries = journal.read(journal.first_seq - 1)
    ends = [each.entry for each in entries if isinstance(each.entry, TurnCompleted)]
    assert [end.turn_id for end in ends] == ["first", "broken"]
    world.manager.tick()
    if owner is not EndedTurns:  # else it was told, and is not remembered
        goes_on(world, session)


@pytest.mark.parametrize("hook", ["on_end", "beside", "listener"])
def test_what_others_do_at_a_turns_end_may_fail(world: World, hook: str) -> None:
    def broken(_: object) -> Any:
        raise Bug

    session = opened(world)
    ask(world, session, "first")
    hooks = TurnHooks() if hook == "listener" else TurnHooks(**{hook: broken})
    if hook == "listener":
        world.manager.on_turn_ended(broken)
    world.do(world.manager.submit(OWNER, session, turn("broken"), hooks=hooks))
    world.engine.run()
    world.spin()
    assert isinstance(world.end_of(session, "broken"), TurnCompleted)
    goes_on(world, session)


@pytest.mark.parametrize(("owner", "name"), BEFORE)
def test_a_turn_behind_one_that_fails_by_a_bug_runs(
    world: World, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """It waited, and was told that it would run: it fails, and who waits behind it does not."""
    session = opened(world)
    world.submit(session, turn("first"))
    world.submit(session, turn("broken"))
    world.submit(session, turn("behind"))
    with a_bug(monkeypatch, owner, name):
        world.engine.run()
        world.spin()
        world.engine.run()
    world.spin()
    world.engine.run()
    ends = {each: world.end_of(session, each) for each in ("first", "broken", "behind")}
    assert isinstance(ends["first"], TurnCompleted)
    assert isinstance(ends["behind"], TurnCompleted)
    recount(world.manager)


def answering(world: World) -> str:
    """A session of which a second turn has begun to answer."""
    session = opened(world)
    ask(world, session, "first")
    world.submit(session, turn("broken", max_tokens=9, ignore_eos=True))
    world.engine.step()
    world.engine.deliver()
    return session


def test_a_cancel_that_fails_by_a_bug_ends_its_turn(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = answering(world)
    with a_bug(monkeypatch, Answer, "finish"):
        world.manager.cancel(OWNER, session, "broken")
    world.engine.run()
    world.spin()
    assert isinstance(world.end_of(session, "broken"), TurnFailedEntry)
    goes_on(world, session)


def test_a_turn_whose_engine_dies_in_a_bug_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = answering(world)
    with a_bug(monkeypatch, Answer, "feed"):
        world.engine.step()
        world.engine.deliver()
        world.engine.die()
    world.engine.come_up()
    world.engine.deliver()
    world.spin()
    assert isinstance(world.end_of(session, "broken"), TurnFailedEntry)
    goes_on(world, session)


@pytest.mark.parametrize(("owner", "name"), [*BEFORE[:1], *BEFORE[2:4], *BEFORE[8:]])
def test_a_draft_that_fails_by_a_bug_is_answered_and_the_next_one_computed(
    world: World, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    session = opened(world)
    ask(world, session, "first")
    answers: list[Any] = []
    with a_bug(monkeypatch, drafts if owner is turn_flow else owner, name):
        world.manager.drafts.submit(OWNER, session, turn("draft"), answers.append)
        world.spin()
    assert [getattr(each, "message", None) is not None for each in answers] == [True]
    world.manager.drafts.submit(OWNER, session, turn("other"), answers.append)
    world.spin()
    world.engine.run()
    assert answers[1].processed
    recount(world.manager)


def test_a_draft_that_cannot_be_answered_holds_up_no_turn(world: World) -> None:
    def broken(_: object) -> None:
        raise Bug

    session = opened(world)
    ask(world, session, "first")
    world.manager.drafts.submit(OWNER, session, turn("draft"), broken)
    ask(world, session, "broken")
    assert isinstance(world.end_of(session, "broken"), TurnCompleted)
    goes_on(world, session)
