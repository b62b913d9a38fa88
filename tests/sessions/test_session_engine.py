"""The engine dies, restarts, refuses and runs late; sessions go on from their tokens."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from session_server.core.commands import OpenSession, ReportMemory, SubmitTurn
from session_server.core.errors import (
    EngineUnavailable,
    InvalidRequest,
    ServerDraining,
)
from session_server.core.events import CheckerReport, EngineStats, MemoryReported
from session_server.core.session_events import (
    ChatInput,
    Message,
    SessionClosed,
    SessionDraining,
    SessionStateChanged,
    TurnCreated,
    TurnEnd,
    TurnProgress,
    TurnRequest,
)
from session_server.sessions import tokenizing
from session_server.sessions.prompt import Prompt, build_prompt
from session_server.sessions.quotas import SessionLimits
from session_server.sessions.views import OpenRequest, TurnView
from session_server.text.rendering import Rendering
from tests.sessions.world import OWNER, World, cancelled, completed, failed, turn


def sample(*, running: int = 0, waiting: int = 0, check_runs: int = 0) -> EngineStats:
    """Figures an engine sent while its books were right."""
    return EngineStats(
        steps=1,
        forward_ms=1.0,
        host_ms=1.0,
        prompt_tokens=1,
        cached_tokens=0,
        generated_tokens=1,
        draft_tokens=0,
        accepted_tokens=0,
        retractions=0,
        coolings=0,
        running=running,
        waiting=waiting,
        sessions=running + waiting,
        check_runs=check_runs,
        check_violations=0,
    )


class TestEngine:
    def test_a_dead_engine_fails_the_running_turn_and_nothing_else(self, world: World) -> None:
        session = world.open()
        world.run(session, turn("1"))
        before = world.history(session)
        world.submit(session, turn("2", max_tokens=50, ignore_eos=True))
        world.submit(session, turn("3"))
        world.engine.step()
        world.engine.die()
        world.engine.deliver()
        end = failed(world.end_of(session, "2"))
        assert (end.code, end.retryable) == ("engine_restarting", True)
        assert "send the turn again" in end.message
        assert world.history(session) == before
        assert SessionStateChanged("cold", "engine_restart") in world.entries(session)
        assert world.submit(session, turn("4")).status == "queued"
        with pytest.raises(EngineUnavailable):
            world.submit(session, turn("5", queue=False))
        world.engine.come_up()
        world.engine.run()
        completed(world.end_of(session, "3"))
        completed(world.end_of(session, "4"))
        reopened = [each for each in world.engine.seen if isinstance(each, OpenSession)][-1]
        assert reopened.tokens == before

    def test_a_cancel_accepted_stands_though_the_engine_refuses_the_session(
        self, world: World
    ) -> None:
        session = world.open()
        world.engine.refuse_open = "server_busy"
        world.submit(session, turn("1"))
        world.manager.cancel(OWNER, session, "1", keep_partial=True)
        world.engine.run()
        assert cancelled(world.end_of(session, "1")).kept_partial
        world.engine.refuse_open = None
        completed(world.run(session, turn("2")))

    def test_the_figures_of_a_dead_engine_are_forgotten(self, world: World) -> None:
        world.manager.on_event(sample(running=12, waiting=3))
        world.engine.die()
        world.engine.deliver()
        assert world.manager.stats().engine is None

    def test_a_memory_report_is_newer_than_the_last_sample_of_an_idle_engine(
        self, world: World
    ) -> None:
        world.manager.on_event(sample(check_runs=5))
        world.manager.on_event(
            MemoryReported(
                request_id=99,
                pools={},
                rows=1,
                rows_free=1,
                num_sessions=0,
                sessions=(),
                checks=CheckerReport(
                    runs=6,
                    levels={"0": 5, "2": 1},
                    violations=2,
                    recent=("a page has two holders",),
                ),
            )
        )
        shown = world.manager.stats().engine
        assert shown is not None
        assert (shown.check_runs, shown.check_violations) == (6, 2)

    def test_answers_after_a_restart_are_as_if_nothing_had_happened(self, world: World) -> None:
        twins = world.open(), world.open()
        for session in twins:
            world.run(session, turn("1"))
        world.engine.die()
        world.engine.come_up()
        world.engine.deliver()
        first = world.run(twins[0], turn("2")).outcome.token_ids
        other = World()
        with other:
            fresh = other.open()
            other.run(fresh, turn("1"))
            assert other.run(fresh, turn("2")).outcome.token_ids == first

    def test_an_engine_that_does_not_come_back_fails_what_waits(self, world: World) -> None:
        session = world.open()
        world.submit(session, turn("1", max_tokens=50))
        world.submit(session, turn("2"))
        world.engine.die(will_restart=False)
        world.engine.deliver()
        assert failed(world.end_of(session, "1")).code == "engine_unavailable"
        assert failed(world.end_of(session, "2")).code == "engine_unavailable"
        with pytest.raises(EngineUnavailable):
            world.submit(session, turn("3"))

    def test_a_death_not_yet_reported_puts_the_turn_back_in_line(self, world: World) -> None:
        session = world.open()
        world.engine.die()
        assert world.submit(session, turn("1")).status == "queued"
        world.engine.deliver()
        world.engine.come_up()
        world.engine.run()
        completed(world.end_of(session, "1"))

    def test_an_engine_that_takes_nothing_for_a_while_is_asked_again(self, world: World) -> None:
        session, other = world.open(), world.open()
        world.run(other, turn("1"))
        world.submit(session, turn("0", max_tokens=50, ignore_eos=True))
        world.engine.step()
        world.engine.deliver()
        world.engine.is_full = True
        world.manager.cancel(OWNER, session)
        world.manager.close(OWNER, other)
        assert world.submit(session, turn("1")).status == "queued"
        world.engine.run()
        assert cancelled(world.end_of(session, "0")).kept_partial
        assert len(world.engine.slots) == 2
        world.manager.tick()
        assert world.manager.turn(OWNER, session, "1").status == "queued"
        world.engine.is_full = False
        world.manager.tick()
        world.engine.run()
        completed(world.end_of(session, "1"))
        assert len(world.engine.slots) == 1

    def test_a_long_input_that_the_engine_does_not_take_is_not_tokenized_without_end(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        built: list[object] = []

        def build(*args: Any, **kwargs: Any) -> Rendering[Prompt]:
            built.append(args)
            return build_prompt(*args, **kwargs)

        monkeypatch.setattr(tokenizing, "build_prompt", build)
        with World(limits=SessionLimits(inline_input_chars=0)) as world:
            session = world.open()
            world.engine.is_full = True

            async def submit_both() -> list[TurnView]:
                submit = partial(world.manager.submit, OWNER, session)
                return await asyncio.gather(submit(turn("1")), submit(turn("2", (1, 2))))

            assert [view.status for view in world.do(submit_both())] == ["queued", "queued"]

            async def until_nothing_is_under_way() -> None:
                while others := asyncio.all_tasks() - {asyncio.current_task()}:
                    await asyncio.wait(others)
                    assert len(built) == 1

            world.do(until_nothing_is_under_way())
            assert len(built) == 1
            world.engine.is_full = False
            world.loop.call_soon(world.manager.tick)
            while not world.engine.commands:
                world.do(asyncio.sleep(0.001))
            world.engine.run()
            completed(world.end_of(session, "1"))
            completed(world.end_of(session, "2"))
            assert len(built) == 3  # the first once more, and the second

    def test_a_turn_behind_one_that_is_being_tokenized_is_accepted_after_it(self) -> None:
        with World(limits=SessionLimits(inline_input_chars=0)) as world:
            session = world.open()

            async def submit_both() -> None:
                submit = partial(world.manager.submit, OWNER, session)
                await asyncio.gather(submit(turn("1")), submit(turn("2", (1, 2))))

            world.do(submit_both())
            created = [each for each in world.entries(session) if isinstance(each, TurnCreated)]
            assert created == [TurnCreated("1", 0), TurnCreated("2", 1)]
            while not world.engine.commands:
                world.do(asyncio.sleep(0.001))
            world.engine.run()
            completed(world.end_of(session, "1"))
            completed(world.end_of(session, "2"))

    def test_what_was_decided_before_the_death_stays_decided(self, world: World) -> None:
        a = world.text.tokenizer.encode_content("a")[0]
        world.engine.next_token = lambda _: a
        stopped, kept = world.open(), world.open()
        world.submit(stopped, turn("1", max_tokens=50, stop=("aa",)))
        world.submit(kept, turn("1", max_tokens=50))
        for _ in range(3):
            world.engine.step()
        world.engine.deliver()
        world.manager.cancel(OWNER, kept)
        world.engine.die()
        world.engine.deliver()
        assert completed(world.end_of(stopped, "1")).outcome.token_ids == (a, a)
        assert cancelled(world.end_of(kept, "1")).outcome.token_ids == (a, a, a)
        assert world.history(kept)[-3:] == (a, a, a)
        world.engine.come_up()
        world.engine.run()
        completed(world.run(stopped, turn("2")))

    def test_a_fault_of_one_turn_leaves_the_history_and_the_next_turn_alone(
        self, world: World
    ) -> None:
        session = world.open()
        world.run(session, turn("1"))
        before = world.history(session)
        world.submit(session, turn("2", max_tokens=50, ignore_eos=True))
        world.engine.step()
        world.engine.fail(next(iter(world.engine.slots)), "numerical_error")
        world.engine.run()
        end = failed(world.end_of(session, "2"))
        assert (end.code, end.retryable) == ("numerical_error", True)
        assert end.outcome.token_ids == ()
        assert world.history(session) == before
        completed(world.run(session, turn("3")))

    def test_pressure_is_told_and_the_next_turn_says_resident_again(self, world: World) -> None:
        session = world.open()
        world.run(session, turn("1"))
        world.engine.cool(next(iter(world.engine.slots)))
        world.engine.deliver()
        assert world.manager.get(OWNER, session).state == "cold"
        end = completed(world.run(session, turn("2")))
        assert end.outcome.usage.cached_tokens == 0
        states = [each for each in world.entries(session) if isinstance(each, SessionStateChanged)]
        assert states == [
            SessionStateChanged("cold", "pressure"),
            SessionStateChanged("resident", "turn"),
        ]

    def test_a_session_the_engine_will_not_open_fails_its_turn(self, world: World) -> None:
        world.engine.refuse_open = "quota_exceeded"
        session = world.open(pinned=True)
        assert failed(world.run(session, turn("1"))).code == "quota_exceeded"
        world.engine.refuse_open = None
        completed(world.run(session, turn("2")))

    def test_a_session_the_engine_forgot_is_opened_again(self, world: World) -> None:
        session = world.open()
        world.run(session, turn("1"))
        world.engine.slots.clear()
        assert failed(world.run(session, turn("2"))).code == "session_not_found"
        completed(world.run(session, turn("3")))

    def test_progress_is_told_once_even_when_a_turn_is_admitted_again(self, world: World) -> None:
        session = world.open()
        world.submit(session, turn("1", max_tokens=50, ignore_eos=True))
        world.engine.step()
        started = world.engine.events[0]
        world.engine.events.append(started)
        world.engine.deliver()
        told = [each for each in world.entries(session) if isinstance(each, TurnProgress)]
        assert len(told) == 1

    def test_memory_and_flush_are_answered(self, world: World) -> None:
        session = world.open()
        world.run(session, turn("1"))

        async def ask() -> bool:
            memory = asyncio.create_task(world.manager.memory(full=True))
            flush = asyncio.create_task(world.manager.flush())
            await asyncio.sleep(0)
            world.engine.step()
            world.engine.deliver()
            assert (await memory).checks.violations == 0
            return await flush

        assert world.do(ask())
        assert SessionStateChanged("cold", "flush") in world.entries(session)

    @pytest.mark.parametrize("asked", [{}, {"full": True}, {"trace": True}])
    def test_memory_is_recounted_and_traced_where_that_is_asked_for(
        self, world: World, asked: dict[str, bool]
    ) -> None:
        async def ask() -> None:
            memory = asyncio.create_task(world.manager.memory(**asked))
            await asyncio.sleep(0)
            world.engine.step()
            world.engine.deliver()
            await memory

        world.do(ask())
        (command,) = (each for each in world.engine.seen if isinstance(each, ReportMemory))
        assert (command.full, command.trace) == (asked.get("full", False), "trace" in asked)

    def test_a_question_to_a_dying_engine_is_answered_too(self, world: World) -> None:
        async def ask() -> None:
            memory = asyncio.create_task(world.manager.memory())
            await asyncio.sleep(0)
            world.engine.die()
            world.engine.deliver()
            with pytest.raises(EngineUnavailable):
                await memory
            with pytest.raises(EngineUnavailable):
                await world.manager.flush()

        world.do(ask())

    def test_seeds_are_drawn_where_none_is_given(self, world: World) -> None:
        session = world.open()
        world.run(session, turn("1"))
        world.run(session, turn("2", seed=7))
        submits = [each for each in world.engine.seen if isinstance(each, SubmitTurn)]
        assert submits[0].sampling.seed is not None
        assert submits[1].sampling.seed == 7

    def test_draining_waits_then_cancels_then_closes(self, world: World) -> None:
        session, idle = world.open(), world.open()
        journals = [world.manager.journal(OWNER, each) for each in (session, idle)]
        world.submit(session, turn("1", max_tokens=3))
        world.submit(session, turn("2"))

        async def drain() -> None:
            task = asyncio.create_task(world.manager.drain(5.0))
            await asyncio.sleep(0)
            with pytest.raises(ServerDraining):
                world.manager.open(OWNER, OpenRequest())
            with pytest.raises(ServerDraining):
                await world.manager.submit(OWNER, session, turn("3"))
            world.engine.run()
            await task

        world.do(drain())
        entries = [found.entry for found in journals[0].read(0)]
        assert SessionDraining(5.0) in entries
        assert entries[-1] == SessionClosed("draining")
        ends = {entry.turn_id: entry for entry in entries if isinstance(entry, TurnEnd)}
        completed(ends["1"])
        assert cancelled(ends["2"]).reason == "draining"
        assert journals[1].is_closed

    def test_draining_with_an_engine_that_hangs_still_ends(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("session_server.sessions.drain._CANCEL_GRACE_S", 0.01)
        session = world.open()
        journal = world.manager.journal(OWNER, session)
        world.submit(session, turn("1", max_tokens=3))
        world.do(world.manager.drain(0.01))
        entries = [found.entry for found in journal.read(0)]
        assert cancelled(entries[-2]).reason == "draining"  # type: ignore[arg-type]
        assert entries[-1] == SessionClosed("draining")


def test_a_turn_id_has_bounds(world: World) -> None:
    session = world.open()
    for name in ("", "x" * 65, "a\nb"):
        with pytest.raises(InvalidRequest):
            world.submit(session, turn(name))


def test_stop_strings_have_bounds(world: World) -> None:
    session = world.open()
    for stop in (("",), ("x" * 257,), ("x",) * 17):
        with pytest.raises(InvalidRequest):
            world.submit(session, turn("1", stop=stop))


def test_equal_requests_are_equal_after_a_copy(world: World) -> None:
    session = world.open()
    request = turn("1")
    world.submit(session, request)
    copy = TurnRequest(
        request.turn_id, ChatInput((Message("user", "Hello"),)), turn("1").sampling, request.text
    )
    world.submit(session, copy)
