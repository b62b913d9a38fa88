"""What is counted per owner: sessions, turns, bytes, and input tokens per minute."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from session_server.core.errors import QuotaExceeded, ServerBusy, SessionServerError
from session_server.core.owner import Owner, TenantLimits
from session_server.core.session_events import (
    ChatInput,
    Message,
    TextInput,
    TurnEnd,
    TurnFailedEntry,
    TurnRequest,
)
from session_server.sessions.ended_turns import RECORD_BYTES
from session_server.sessions.footprint import (
    ENTRY_BYTES,
    LOGPROB_BYTES,
    TOP_LOGPROB_BYTES,
    TURN_BYTES,
    entry_bytes,
    logprob_bytes,
    request_bytes,
)
from session_server.sessions.quotas import QuotaLimits, SessionLimits
from session_server.sessions.rates import PAID_AT_ONCE, OwnerRate
from session_server.sessions.views import OpenRequest
from tests.sessions.recount import recount
from tests.sessions.world import OWNER, World, completed, failed, turn

A, B = Owner("a"), Owner("b")
MIB = 1 << 20


def refused(action: Callable[[], object]) -> str | None:
    """The class of the refusal, None when there was none."""
    try:
        action()
    except SessionServerError as error:
        return type(error).__name__
    return None


def opening(world: World) -> Callable[[], object]:
    return lambda: world.open(messages=(Message("system", "x" * 1000),))


def test_a_rate_refills_steadily_and_one_large_turn_is_slow_not_impossible() -> None:
    rate = OwnerRate("input tokens", 60)
    rate.charge(A, 600, now_s=0.0)
    for now_s in (0.0, 300.0, 540.0):
        with pytest.raises(QuotaExceeded):
            rate.charge(A, 1, now_s=now_s)
    rate.charge(A, 1, now_s=541.0)
    rate.charge(B, 60, now_s=541.0)


def test_a_clock_that_steps_back_charges_nobody() -> None:
    rate = OwnerRate("input tokens", 60)
    rate.charge(A, 30, now_s=1000.0)
    rate.charge(A, 30, now_s=0.0)


def test_an_owner_whose_bucket_is_full_again_costs_nothing() -> None:
    rate = OwnerRate("input tokens", 60)
    for index in range(100):
        rate.charge(Owner(str(index)), 30, now_s=0.0)
    rate.charge(Owner("0"), 10, now_s=20.0)
    assert len(rate.owners) == 100
    rate.drop_paid(29.0)
    assert len(rate.owners) == 100
    rate.drop_paid(31.0)
    assert rate.owners == {Owner("0")}
    rate.drop_paid(41.0)
    assert not rate.owners


@pytest.mark.parametrize("num_owners", [PAID_AT_ONCE + step for step in (-1, 0, 1)])
def test_owners_whose_buckets_are_full_again_together_are_dropped_in_slices(
    num_owners: int,
) -> None:
    rate = OwnerRate("input tokens", 60)
    for index in range(num_owners):
        rate.charge(Owner(str(index)), 30, now_s=0.0)
    assert rate.drop_paid(31.0) == (num_owners >= PAID_AT_ONCE)
    assert len(rate.owners) == max(0, num_owners - PAID_AT_ONCE)
    with World(quotas=QuotaLimits(owner_input_tokens_per_min=60)) as world:
        of_world = world.manager._quotas.input_rate
        for index in range(num_owners):
            of_world.charge(Owner(str(index)), 30, now_s=world.now_s)
        world.now_s += 31.0
        world.manager.tick()
        assert len(of_world.owners) == max(0, num_owners - PAID_AT_ONCE)
        world.spin()
        assert not of_world.owners


def test_a_debt_smaller_than_the_clock_can_tell_is_paid() -> None:
    rate, now_s = OwnerRate("input tokens", 7), float(1 << 50)
    rate.charge(A, 1, now_s=now_s)
    assert not rate.drop_paid(now_s + 8.5)
    assert not rate.owners


class TestHistoryBytes:
    """Every byte that a conversation keeps is counted, and given back when it closes."""

    def test_what_is_counted_is_what_is_there(self, world: World) -> None:
        for index in range(3):
            session = world.open(
                messages=(Message("system", "Be brief. " * index),), metadata={"a": "b" * index}
            )
            for number in range(index + 1):
                world.run(session, turn(str(number), "word " * number))
            world.submit(session, turn("live", max_tokens=50, ignore_eos=True))
            world.submit(session, turn("waits"))
            recount(world.manager)
        world.engine.step()
        world.engine.deliver()
        recount(world.manager)
        world.manager.update(OWNER, session, metadata={"key": "value" * 20})
        recount(world.manager)
        world.engine.run()
        recount(world.manager)
        for view in world.do(world.manager.list(OWNER)).sessions:
            world.manager.close(OWNER, view.session_id)
        recount(world.manager)
        assert not world.manager._quotas.owners

    def test_an_open_is_refused_at_the_limit_and_leaves_nothing(self) -> None:
        with World() as probe:
            opening(probe)()
            wanted = probe.manager._quotas.history_bytes.total
        for limit, error in ((wanted - 1, "ServerBusy"), (wanted, None), (wanted + 1, None)):
            with World(quotas=QuotaLimits(history_bytes=limit)) as world:
                assert refused(opening(world)) == error
                assert world.manager.stats().sessions == (error is None)
                recount(world.manager)

    @pytest.mark.parametrize("limited", ["history_bytes", "sessions"])
    def test_an_opening_that_waits_to_be_measured_holds_its_place(self, limited: str) -> None:
        messages = (Message("system", "x" * 1500),)
        with World() as probe:
            probe.open(messages=messages)
            wanted = probe.manager._quotas.history_bytes.total
        quotas = QuotaLimits(**{limited: wanted + 1000 if limited == "history_bytes" else 1})
        with World(quotas=quotas, limits=SessionLimits(inline_input_chars=0)) as world:

            async def crowd() -> None:
                create = partial(world.manager.create, OWNER, OpenRequest(messages=messages))
                first, *others = (asyncio.create_task(create()) for _ in range(20))
                await asyncio.sleep(0)
                recount(world.manager)
                assert len(world.manager._quotas.openings) == 1
                for other in others:
                    with pytest.raises(ServerBusy):
                        await other
                await first
                recount(world.manager)

            world.do(crowd())
            assert world.manager.stats().sessions == 1

    def test_an_opening_that_is_given_up_leaves_its_place(self) -> None:
        with World(limits=SessionLimits(inline_input_chars=0)) as world:

            async def give_up() -> None:
                request = OpenRequest(messages=(Message("system", "x" * 1500),))
                opening = asyncio.create_task(world.manager.create(OWNER, request))
                await asyncio.sleep(0)
                assert world.manager._quotas.openings
                opening.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await opening

            world.do(give_up())
            assert not world.manager._quotas.owners
            assert not world.manager._quotas.openings

    def test_an_owner_keeps_its_share_and_others_theirs(self) -> None:
        hog, other = Owner("hog", share=0.5), Owner("other", share=0.5)
        with World(quotas=QuotaLimits(history_bytes=MIB)) as world:
            text = Message("system", "x" * 100_000)
            sessions = [world.open(owner=hog, messages=(text,)) for _ in range(4)]
            world.open(owner=hog, messages=(text,))
            with pytest.raises(QuotaExceeded, match="bytes of conversations"):
                world.open(owner=hog, messages=(text,))
            world.open(owner=other, messages=(text,))
            world.manager.close(hog, sessions[0])
            world.open(owner=hog, messages=(text,))

    def test_a_turn_whose_input_has_no_room_is_refused_before_it_is_tokenized(self) -> None:
        with World(quotas=QuotaLimits(history_bytes=MIB)) as world:
            session = world.open(messages=(Message("system", "x" * (MIB - 20_000)),))
            with pytest.raises(ServerBusy, match="bytes of conversations"):
                world.submit(session, turn("1", TextInput("x" * 20_000)))
            assert world.history(session) == ()
            recount(world.manager)

    def test_a_turn_that_waited_and_has_no_room_any_more_fails(self) -> None:
        with World() as probe:
            session = probe.open()
            probe.run(session, turn("1", "word " * 100, max_tokens=1))
            wanted = probe.manager._quotas.history_bytes.total
        with World(quotas=QuotaLimits(history_bytes=wanted + 1000)) as world:
            session = world.open()
            for name in ("1", "2", "3"):
                world.submit(session, turn(name, "word " * 100, max_tokens=1))
            world.engine.run()
            completed(world.end_of(session, "1"))
            end = failed(world.end_of(session, "3"))
            assert (end.code, end.retryable) == ("server_busy", True)
            recount(world.manager)

    def test_metadata_is_refused_at_the_limit_and_stays_as_it_was(self) -> None:
        with World(quotas=QuotaLimits(history_bytes=8192)) as world:
            session = world.open(metadata={"a": "b"})
            with pytest.raises(ServerBusy):
                world.manager.update(OWNER, session, metadata={str(n): "x" * 512 for n in range(9)})
            assert world.manager.get(OWNER, session).metadata == {"a": "b"}
            recount(world.manager)


class TestTurnBytes:
    """What turns hold that have not ended: inputs, prompts, answers, scores."""

    def test_a_turn_is_refused_at_the_limit_and_leaves_nothing(self) -> None:
        request = turn("1", ChatInput((Message("user", "x" * 1000),)))
        with World() as probe:
            probe.submit(probe.open(), request)
            wanted = probe.manager._quotas.turn_bytes.total
        assert wanted > request_bytes(request)
        for limit, error in ((wanted - 1, "ServerBusy"), (wanted, None), (wanted + 1, None)):
            with World(quotas=QuotaLimits(turn_bytes=limit)) as world:
                submit = partial(world.submit, world.open(), request)
                assert refused(submit) == error
                world.engine.run()
                recount(world.manager)
                assert world.manager._quotas.turn_bytes.total == 0

    def test_a_prompt_without_room_is_refused_when_it_is_known(self) -> None:
        """Its tokens take forty times the bytes of its text."""
        quotas = QuotaLimits(turn_bytes=MIB)
        with World(quotas=quotas, max_turn_len=1 << 20) as world:
            session = world.open()
            with pytest.raises(ServerBusy, match="bytes of unfinished turns"):
                world.submit(session, turn("1", TextInput("x" * 30_000)))
            recount(world.manager)
            world.submit(session, turn("2", TextInput("x" * 20_000)))

    def test_answers_and_scores_count_while_their_turn_runs(self, world: World) -> None:
        session = world.open()
        world.submit(session, turn("1", max_tokens=50, ignore_eos=True, logprobs=True))
        held = world.manager._quotas.turn_bytes.total
        assert held > TURN_BYTES + 50 * LOGPROB_BYTES
        for _ in range(10):
            world.engine.step()
        world.engine.deliver()
        assert world.manager._quotas.turn_bytes.total >= held + 10 * ENTRY_BYTES
        world.engine.run()
        assert world.manager._quotas.turn_bytes.total == 0

    def test_scores_are_held_before_the_first_is_computed_and_never_exceed_that(self) -> None:
        scored = {"logprobs": True, "top_logprobs": 2, "prompt_logprobs_from": 1}
        with World() as world:
            session, counted = world.open(), world.manager._quotas.turn_bytes
            world.submit(session, turn("1", (60,) * 11, max_tokens=1))
            plain = counted.total
            world.engine.run()
            per_score = LOGPROB_BYTES + 2 * TOP_LOGPROB_BYTES
            session = world.open()
            world.submit(session, turn("1", (60,) * 11, max_tokens=5, ignore_eos=True, **scored))
            assert counted.total == plain + (10 + 5) * per_score
            turn_state = world.manager._sessions.get(OWNER, session).live
            assert turn_state is not None
            while not isinstance(entry := world.entries(session)[-1], TurnEnd):
                assert counted.total <= plain + 15 * per_score + entry_bytes(entry) * 5
                world.engine.step()
                world.engine.deliver()
            kept = entry.outcome.prompt_logprobs + entry.outcome.logprobs
            assert logprob_bytes(kept) <= 15 * per_score
            assert counted.total == 0

    def test_scores_beyond_the_share_of_an_owner_are_refused_and_others_go_on(self) -> None:
        hog, other = Owner("hog", share=0.1), Owner("other", share=0.5)
        request = turn("1", (60,) * 600, prompt_logprobs_from=0, top_logprobs=20)
        with World(quotas=QuotaLimits(turn_bytes=MIB)) as world:
            session = world.open(owner=hog)
            with pytest.raises(QuotaExceeded, match="bytes of unfinished turns"):
                world.submit(session, request, owner=hog)
            world.submit(session, turn("2"), owner=hog)
            world.submit(world.open(owner=other), turn("1"), owner=other)
            world.engine.run()
            recount(world.manager)
            assert world.manager._quotas.turn_bytes.total == 0

    def test_a_turn_that_waits_again_holds_its_request_alone(self) -> None:
        request = turn("1", (60,) * 11, prompt_logprobs_from=0, logprobs=True)
        with World() as world:
            world.engine.is_full = True
            world.submit(world.open(), request)
            assert world.manager._quotas.turn_bytes.total == request_bytes(request)

    def test_waiting_turns_of_one_owner_leave_room_for_others(self) -> None:
        hog, other = Owner("hog", share=0.5), Owner("other", share=0.5)
        with World(quotas=QuotaLimits(turn_bytes=MIB)) as world:
            session = world.open(owner=hog)
            text = TextInput("x" * 200_000)
            world.submit(session, turn("live"), owner=hog)
            for name in ("1", "2"):
                world.submit(session, turn(name, text), owner=hog)
            with pytest.raises(QuotaExceeded, match="bytes of unfinished turns"):
                world.submit(session, turn("3", text), owner=hog)
            theirs = world.open(owner=other)
            for name in ("live", "1"):
                world.submit(theirs, turn(name, text if name == "1" else "Hello"), owner=other)


def test_a_record_of_an_ended_turn_counts_and_stays(world: World) -> None:
    session = world.open()
    before = world.manager._quotas.history_bytes.total
    for index in range(10):
        world.submit(session, turn("live", max_tokens=9)) if index == 0 else None
        world.submit(session, turn(f"t{index}"))
        world.manager.cancel(OWNER, session, f"t{index}")
    world.manager.cancel(OWNER, session, "live", keep_partial=False)
    world.engine.run()
    assert world.manager._quotas.history_bytes.total == before + 11 * RECORD_BYTES


# What an owner is granted itself


def limited(**limits: int) -> Owner:
    return Owner("limited", limits=TenantLimits(**limits))


def wait_of(action: Callable[[], object]) -> float:
    """After how many seconds a refusal says that the same can succeed."""
    with pytest.raises(QuotaExceeded) as refusal:
        action()
    assert refusal.value.retry_after_s is not None
    return refusal.value.retry_after_s


def test_an_owner_has_as_many_sessions_as_it_is_granted_and_others_have_more() -> None:
    owner = limited(max_sessions=2)
    with World() as world:
        first = world.open(owner=owner)
        world.open(owner=owner)
        assert refused(lambda: world.open(owner=owner)) == "QuotaExceeded"
        world.open(owner="b")
        world.manager.close(owner, first)
        world.open(owner=owner)


def test_turns_per_minute_refill_and_the_refusal_says_when() -> None:
    owner = limited(turns_per_min=3)
    with World() as world:
        session_id = world.open(owner=owner)
        number = iter(range(100))

        def another() -> None:
            world.submit(session_id, turn(f"t{next(number)}", (5,), max_tokens=1), owner=owner)
            world.spin(20)

        for _ in range(3):
            another()
        wait_s = wait_of(another)
        assert wait_s == pytest.approx(20.0)
        world.now_s += wait_s - 0.01
        assert wait_of(another) == pytest.approx(0.01)
        world.now_s += 0.011
        another()


@pytest.mark.parametrize("num_before", [5, 6, 7])
def test_output_tokens_per_minute_hold_back_the_next_turn(num_before: int) -> None:
    owner = limited(output_tokens_per_min=6)
    with World() as world:
        rate = world.manager._quotas.output_rate
        rate.add(owner, num_before, now_s=world.now_s)
        session_id = world.open(owner=owner)

        def another() -> None:
            world.submit(session_id, turn("t", (5,), max_tokens=1), owner=owner)

        if num_before >= 6:
            world.now_s += wait_of(another)
        another()


def test_input_tokens_per_minute_are_those_that_the_owner_is_granted() -> None:
    owner = limited(input_tokens_per_min=60)
    with World(quotas=QuotaLimits(owner_input_tokens_per_min=1)) as world:
        rate = world.manager._quotas.input_rate
        rate.charge(owner, 59, now_s=0.0)
        rate.charge(owner, 1, now_s=0.0)
        assert wait_of(lambda: rate.charge(owner, 1, now_s=0.0)) == pytest.approx(1.0)
        rate.charge(owner, 1, now_s=1.0)
        assert rate.used(owner, now_s=1.0) == 60


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_tokens_of_kv_are_bounded_with_the_answer_to_come(spare: int) -> None:
    with World() as world:
        session_id = world.open()
        world.run(session_id, turn("first", (5, 6, 7), max_tokens=4))
        held = world.manager._quotas.kv_tokens.held_by(OWNER)
        assert held == len(world.history(session_id)) > 0
        request = turn("next", (5, 6, 7), max_tokens=9)
        other = world.open()
        OWNER.follow(Owner(OWNER.owner_id, limits=TenantLimits(max_kv_tokens=held + 12 + spare)))
        try:
            outcome = refused(lambda: world.submit(other, request))
        finally:
            OWNER.follow(Owner(OWNER.owner_id))
        assert outcome == (None if spare >= 0 else "QuotaExceeded")
        world.manager.close(OWNER, session_id)
        world.spin(50)


def test_kv_of_a_session_counts_while_its_next_turn_waits_for_the_engine() -> None:
    with World() as world:
        session_id = world.open()
        world.run(session_id, turn("first", (5, 6, 7)))
        held = world.manager._quotas.kv_tokens
        world.engine.is_full = True
        world.submit(session_id, turn("next", max_tokens=500))
        assert held.total == len(world.history(session_id)) > 0
        world.manager.cancel(OWNER, session_id)
        assert held.total == len(world.history(session_id))
        recount(world.manager)


def test_bytes_of_an_owner_are_those_of_its_conversations_and_turns_together() -> None:
    with World() as world:
        world.open(messages=(Message("system", "x" * 1000),))
        held = world.manager._quotas.history_bytes.held_by(OWNER)
    for limit, outcome in ((held - 1, "QuotaExceeded"), (held, None), (held + 1, None)):
        owner = limited(max_bytes=limit)
        with World() as world:
            found = refused(
                lambda w=world, o=owner: w.open(owner=o, messages=(Message("system", "x" * 1000),))
            )
            assert found == outcome


def test_a_turn_that_begins_keeps_its_owner_within_its_bytes() -> None:
    """What a prompt holds and what it adds to the conversation are one sum."""
    request = turn("t", (5, 6, 7) * 150, max_tokens=1)
    with World() as world:
        owner = Owner("o", limits=TenantLimits(max_bytes=1 << 30))
        session_id = world.open(owner=owner)
        world.submit(session_id, request, owner=owner)
        quotas = world.manager._quotas
        wanted = quotas.history_bytes.held_by(owner) + quotas.turn_bytes.held_by(owner)
    for limit, is_taken in ((wanted - 1, False), (wanted, True), (wanted + 1, True)):
        owner = Owner("o", limits=TenantLimits(max_bytes=limit))
        with World() as world:
            session_id = world.open(owner=owner)
            found = refused(lambda w=world, s=session_id, o=owner: w.submit(s, request, owner=o))
            assert (found is None) == is_taken, (found, limit)
            recount(world.manager)


@pytest.mark.parametrize("request_", [turn("t", (5,) * 8, max_tokens=1), turn("t", max_tokens=9)])
def test_a_turn_that_alone_is_more_kv_than_its_owner_may_hold_is_wrong_and_costs_nothing(
    request_: TurnRequest,
) -> None:
    owner = limited(max_kv_tokens=8, input_tokens_per_min=1000)
    with World() as world:
        session_id = world.open(owner=owner)
        assert refused(lambda: world.submit(session_id, request_, owner=owner)) == "ContextTooLong"
        assert world.manager._quotas.input_rate.used(owner, now_s=world.now_s) == 0
        fits = turn("fits", (5, 6, 7), max_tokens=5)
        assert refused(lambda: world.submit(session_id, fits, owner=owner)) is None


def test_a_turn_for_whose_kv_there_is_no_room_now_is_charged_no_input() -> None:
    owner = limited(max_kv_tokens=16, input_tokens_per_min=1000)
    with World() as world:
        session_id, other = world.open(owner=owner), world.open(owner=owner)
        world.submit(session_id, turn("first", (5, 6, 7), max_tokens=9), owner=owner)
        used = world.manager._quotas.input_rate.used(owner, now_s=world.now_s)
        request = turn("next", (5, 6, 7), max_tokens=9)
        assert refused(lambda: world.submit(other, request, owner=owner)) == "QuotaExceeded"
        assert world.manager._quotas.input_rate.used(owner, now_s=world.now_s) == used > 0


def test_output_holds_back_turns_that_waited_while_it_was_written() -> None:
    owner = limited(output_tokens_per_min=1)
    with World() as world:
        session_id = world.open(owner=owner)
        for number in range(3):
            request = turn(f"t{number}", (5,), max_tokens=20)
            world.submit(session_id, request, owner=owner)
        world.engine.run()
        ends = [world.manager.turn(owner, session_id, f"t{number}").end for number in range(3)]
        assert [end is not None and end.status for end in ends] == ["completed", "failed", "failed"]
        assert all(isinstance(end, TurnFailedEntry) for end in ends[1:])
        assert {end.code for end in ends[1:]} == {"quota_exceeded"}
