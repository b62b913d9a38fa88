"""Large inputs: where they are tokenized, and what counts them until nothing holds them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from session_server.core.errors import ContextTooLong
from session_server.core.session_events import ChatInput, Message, TextInput, TokenInput, TurnInput
from session_server.sessions.footprint import request_bytes
from session_server.sessions.prompt import check_text
from session_server.sessions.quotas import SessionLimits
from session_server.sessions.tokenizing import MESSAGE_CHARS, NUM_THREADS
from session_server.sessions.turn import SessionTurn, TurnPhase
from tests.sessions.recount import recount
from tests.sessions.world import OWNER, World, turn


class HeldThreads(Executor):
    """Threads whose work is done when told to."""

    num_alive = 0

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.work.append(lambda: future.set_result(fn(*args, **kwargs)))
        return future

    def finish(self) -> None:
        while self.work:
            self.work.pop()()


def hold_threads(world: World) -> HeldThreads:
    world.manager._flow.prompt_builder._threads = held = HeldThreads()  # type: ignore[assignment]
    return held


@pytest.mark.parametrize("is_closed", [False, True], ids=["canceled", "closed"])
def test_a_canceled_input_is_counted_exactly_as_long_as_it_is_held(is_closed: bool) -> None:
    request = turn("t", "word " * 1000)
    with World(limits=SessionLimits(inline_input_chars=0)) as world:
        held, quotas = hold_threads(world), world.manager._quotas
        builder = world.manager._flow.prompt_builder
        sessions = [world.open() for _ in range(NUM_THREADS + 3)]
        submits = [
            world.loop.create_task(world.manager.submit(OWNER, s, request)) for s in sessions
        ]
        world.spin()
        turns = list(builder._tasks)
        for session in sessions:
            if is_closed:
                world.manager.close(OWNER, session)
            else:
                world.manager.cancel(OWNER, session)
        world.spin(5)
        assert {each.phase for each in turns} == {TurnPhase.ENDED}
        # The others have left the slots, and nothing holds their input.
        assert not builder._slots._waiting
        assert list(builder._tasks) == turns[:NUM_THREADS]
        assert quotas.turns.total == NUM_THREADS == len(held.work)
        assert quotas.turn_bytes.total == NUM_THREADS * request_bytes(request)
        held.finish()
        world.spin(5)
        assert not builder._tasks
        assert not builder._slots._num_held
        recount(world.manager)
        world.do(asyncio.wait_for(asyncio.gather(*submits, return_exceptions=True), 1.0))


def test_a_caller_that_leaves_while_its_turn_is_refused_hears_of_the_refusal() -> None:
    """No end follows: whoever took something for the turn must give it back now."""
    with World(limits=SessionLimits(inline_input_chars=0), max_turn_len=64) as world:
        held, session = hold_threads(world), world.open()
        long = turn("t", "a b " * 100)
        submit = world.loop.create_task(world.manager.submit(OWNER, session, long))
        world.spin()
        (waiting,) = world.manager._flow.prompt_builder._tasks
        assert isinstance(waiting, SessionTurn)
        waiting.accepted.add_done_callback(lambda _: submit.cancel())
        held.finish()
        world.spin(5)
        with pytest.raises(ContextTooLong):
            world.do(submit)
        recount(world.manager)


def test_a_canceled_input_in_a_thread_keeps_its_slot() -> None:
    with World(limits=SessionLimits(inline_input_chars=0)) as world:
        held, session = hold_threads(world), world.open()
        for number in range(NUM_THREADS + 2):
            world.loop.create_task(world.manager.submit(OWNER, session, turn(f"t{number}")))
            world.spin()
            world.manager.cancel(OWNER, session, f"t{number}")
            world.spin()
        assert len(held.work) == NUM_THREADS
        held.finish()
        world.spin(5)
        recount(world.manager)


def test_kv_that_is_lost_while_the_next_turn_is_tokenized_counts_no_more() -> None:
    with World(limits=SessionLimits(inline_input_chars=0)) as world:
        session, kv_tokens = world.open(), world.manager._quotas.kv_tokens
        world.run(session, turn("first", (5, 6, 7)))
        assert kv_tokens.total == len(world.history(session)) > 0
        held = hold_threads(world)
        world.loop.create_task(world.manager.submit(OWNER, session, turn("next")))
        world.spin()
        (slot_id,) = world.engine.slots
        world.engine.cool(slot_id)
        world.engine.deliver()
        assert kv_tokens.total == 0
        world.manager.cancel(OWNER, session)
        held.finish()
        world.spin(5)
        assert kv_tokens.total == 0
        recount(world.manager)


def test_many_short_messages_are_large() -> None:
    limit = 8 * MESSAGE_CHARS
    with World(limits=SessionLimits(inline_input_chars=limit)) as world:
        held = hold_threads(world)

        def is_large(turn_input: TurnInput, session: str, turn_id: str) -> bool:
            world.loop.create_task(
                world.manager.submit(OWNER, session, turn(turn_id, turn_input, max_tokens=0))
            )
            world.spin()
            was_large = bool(held.work)
            held.finish()
            world.spin(5)
            world.engine.run()
            return was_large

        session, empty = world.open(), Message("user", "")
        assert not is_large(ChatInput((empty,) * 4), session, "a")
        assert not is_large(ChatInput((empty,) * 4), session, "b"), "eight are at the bound"
        assert is_large(ChatInput((empty,)), session, "c"), "nine messages are rendered"
        opening = world.open(messages=(empty,) * 9)
        assert is_large(TextInput("x"), opening, "text"), "it renders the opening messages"
        opening = world.open(messages=(empty,) * 9)
        assert is_large(TokenInput((5,)), opening, "tokens")
        assert not is_large(TokenInput((5,)), world.open(messages=(empty,) * 8), "few")


def test_of_many_texts_as_many_characters_are_probed_as_of_one() -> None:
    probed = []

    def encode(text: str) -> list[int]:
        probed.append(text)
        return [0]

    check_text(encode, ["a" * 100, "b" * 30, "c" * 200, "d"], max_len=10, param="input")
    assert probed == ["a" * 100, "b" * 30, "c" * 30, ""]
