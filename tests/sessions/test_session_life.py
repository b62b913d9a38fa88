"""Sessions open, expire, close and drain; owners and quotas keep them apart."""

from __future__ import annotations

from datetime import datetime

import pytest

from session_server.core.errors import (
    ContextTooLong,
    InvalidRequest,
    QuotaExceeded,
    ServerBusy,
    SessionClosing,
    SessionExists,
    SessionNotFound,
    UnsupportedOperation,
)
from session_server.core.owner import Owner
from session_server.core.session_events import (
    Message,
    SessionClosed,
    SessionUpdated,
    TokenInput,
    TurnCancelled,
    TurnDelta,
    TurnEnd,
    TurnFailedEntry,
)
from session_server.protocol.frames import failure_body
from session_server.sessions import registry
from session_server.sessions.journal import JournalLimits
from session_server.sessions.quotas import QuotaLimits, SessionLimits
from session_server.sessions.session import Session
from session_server.sessions.turn import TurnHooks
from session_server.text.chat_template import RenderFrame
from tests.sessions.world import OWNER, World, completed, model_text, turn
from tests.text.local_text import run_to_end


class TestLife:
    def test_closing_a_running_session_cancels_its_turns_and_ends_the_journal(
        self, world: World
    ) -> None:
        session = world.open()
        journal = world.manager.journal(OWNER, session)
        world.submit(session, turn("1", max_tokens=50, ignore_eos=True))
        world.submit(session, turn("2"))
        world.engine.step()
        assert world.manager.close(OWNER, session).state == "closing"
        assert world.manager.close(OWNER, session).state == "closing"
        with pytest.raises(SessionClosing):
            world.submit(session, turn("3"))
        world.engine.run()
        entries = [found.entry for found in journal.read(0)]
        ends = [entry for entry in entries if isinstance(entry, TurnCancelled)]
        assert [(end.turn_id, end.reason) for end in ends] == [
            ("2", "session_closed"),
            ("1", "session_closed"),
        ]
        assert entries[-1] == SessionClosed("client")
        assert journal.is_closed
        with pytest.raises(SessionNotFound):
            world.manager.get(OWNER, session)
        assert not world.engine.slots

    @pytest.mark.parametrize("is_long", [False, True])
    def test_first_messages_that_can_never_fit_are_refused_and_nothing_is_kept(
        self, is_long: bool
    ) -> None:
        limits = SessionLimits(inline_input_chars=8 if is_long else 1 << 20)
        message = Message("system", "word " * 20)
        chat = model_text().chat
        assert chat is not None
        frame = RenderFrame(datetime.now().astimezone(), add_generation_prompt=False)
        length = len(run_to_end(chat.encode_all((message,), frame), chat.renderer))
        for max_len in (length - 1, length, length + 1):
            with World(max_turn_len=max_len, limits=limits) as world:
                if max_len == length + 1:
                    world.create(messages=(message,))
                    continue
                with pytest.raises(ContextTooLong, match=rf"\({length} tokens\).*{max_len - 1}"):
                    world.create(messages=(message,))
                assert not world.manager._quotas.owners
                assert world.do(world.manager.list(OWNER)).sessions == ()

    def test_messages_that_the_template_refuses_alone_are_measured_by_their_contents(self) -> None:
        with World("alternating", max_turn_len=128) as world:
            begun = tuple(Message("user", "word " * 10) for _ in range(2))
            world.create(messages=begun)
            with pytest.raises(ContextTooLong):
                world.create(messages=begun * 10)

    def test_what_the_template_leaves_out_of_an_earlier_answer_is_not_measured(self) -> None:
        with World("thinking", max_turn_len=128) as world:
            answer = Message("assistant", f"<think>{'word ' * 2000}</think>Yes.")
            world.create(messages=(Message("user", "Hello"), answer))

    def test_the_key_of_a_session_that_closes_opens_none_until_it_has_closed(
        self, world: World
    ) -> None:
        session = world.create(idempotency_key="k")
        assert world.create(idempotency_key="k") == session
        world.submit(session, turn("1", max_tokens=50, ignore_eos=True))
        world.manager.close(OWNER, session)
        with pytest.raises(SessionClosing, match="this key is closing") as refused:
            world.create(idempotency_key="k")
        assert refused.value.param == "idempotency-key"
        world.engine.run()
        assert world.manager.get(OWNER, world.create(idempotency_key="k")).state == "cold"

    def test_nobody_pins_a_session_where_no_memory_is_kept_for_it(self) -> None:
        with World(limits=SessionLimits(allows_pinned=False)) as world:
            with pytest.raises(UnsupportedOperation, match="--pinned-fraction") as refused:
                world.create(pinned=True)
            assert refused.value.param == "pinned"
            assert world.do(world.manager.list(OWNER)).sessions == ()
            world.create(pinned=False)

    def test_another_owner_s_session_looks_like_none(self, world: World) -> None:
        session = world.open(session_id="mine")
        errors = []
        thief = Owner("thief")
        for owner, name in ((thief, session), (OWNER, "unknown")):
            with pytest.raises(SessionNotFound) as caught:
                world.manager.get(owner, name)
            errors.append(str(caught.value))
            with pytest.raises(SessionNotFound):
                world.submit(name, turn("1"), owner=owner)
            with pytest.raises(SessionNotFound):
                world.manager.close(owner, name)
        assert errors[0] == errors[1]
        world.open(session_id="mine", owner=thief)
        assert len(world.do(world.manager.list(thief)).sessions) == 1

    def test_owners_of_equal_ids_share_nothing(self, world: World) -> None:
        for owner in ("a", "b"):
            world.open(session_id="same", owner=owner)
            world.submit("same", turn("1"), owner=owner)
        world.engine.run()
        assert len(world.engine.slots) == 2
        assert len(set(world.engine.salts.values())) == 2
        assert not {"a", "b"} & set(world.engine.salts.values())

    @pytest.mark.parametrize("share_prefixes", [True, False])
    def test_sessions_of_one_owner_share_what_they_began_with(self, share_prefixes: bool) -> None:
        with World(share_prefixes=share_prefixes) as world:
            for name in ("x", "y"):
                world.run(world.open(session_id=name), turn("1"))
            salts = set(world.engine.salts.values())
        assert len(salts) == (1 if share_prefixes else 2)

    def test_an_id_is_free_again_after_closing(self, world: World) -> None:
        session = world.open(session_id="x")
        with pytest.raises(SessionExists):
            world.open(session_id="x")
        world.run(session, turn("1"))
        world.manager.close(OWNER, "x")
        world.open(session_id="x")
        assert world.history("x") == ()

    @pytest.mark.parametrize(
        "name", ["", "a b", "a/b", "a" * 65, "é", "a\x00", "a\n", "new", ".", ".."]
    )
    def test_bad_ids_are_refused(self, world: World, name: str) -> None:
        with pytest.raises(InvalidRequest):
            world.open(session_id=name)

    def test_the_time_to_live_counts_from_the_end_of_the_last_turn(self, world: World) -> None:
        session = world.open(ttl_s=10.0)
        journal = world.manager.journal(OWNER, session)
        world.submit(session, turn("1"))
        world.now_s += 1000
        world.manager.tick()
        world.engine.run()
        completed(world.end_of(session, "1"))
        world.now_s += 9
        world.manager.tick()
        world.manager.update(OWNER, session, ttl_s=20.0, metadata={"k": "v"})
        assert world.entries(session)[-1] == SessionUpdated(20.0, {"k": "v"})
        world.now_s += 19
        world.manager.tick()
        world.now_s += 2
        world.manager.tick()
        assert journal.is_closed
        assert journal.read(journal.last_seq - 1)[0].entry == SessionClosed("expired")

    @pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf"), 1e9])
    def test_life_times_are_bounded(self, world: World, ttl_s: float) -> None:
        with pytest.raises(InvalidRequest):
            world.open(ttl_s=ttl_s)

    @pytest.mark.parametrize(
        "metadata",
        [{"": "v"}, {"k" * 65: "v"}, {"k": "v" * 513}, {str(number): "v" for number in range(17)}],
        ids=["no key", "long key", "long value", "many keys"],
    )
    def test_metadata_is_bounded(self, world: World, metadata: dict[str, str]) -> None:
        longest = {f"{number:064}": "v" * 512 for number in range(16)}
        assert world.manager.get(OWNER, world.open(metadata=longest)).metadata == longest
        with pytest.raises(InvalidRequest) as error:
            world.open(metadata=metadata)
        assert error.value.param == "metadata"

    def test_lists_come_in_pages(self, world: World) -> None:
        names = [world.open() for _ in range(5)]
        world.open(owner="other")
        seen: list[str] = []
        page = world.do(world.manager.list(OWNER, limit=2))
        seen += [view.session_id for view in page.sessions]
        while page.next_after is not None:
            page = world.do(world.manager.list(OWNER, limit=2, after=page.next_after))
            seen += [view.session_id for view in page.sessions]
        assert seen == names
        after = world.do(world.manager.list(OWNER, limit=2, after=names[2]))
        assert [view.session_id for view in after.sessions] == names[3:]
        for limit in (0, 1001):
            with pytest.raises(InvalidRequest):
                world.do(world.manager.list(OWNER, limit=limit))

    def test_a_page_is_found_without_a_walk_from_the_oldest_session(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = [world.open() for _ in range(256)]
        looks, order = [0], registry._order

        def look(session: Session) -> int:
            looks[0] += 1
            return order(session)

        monkeypatch.setattr(registry, "_order", look)
        for index in (0, 100, 254):
            page = world.do(world.manager.list(OWNER, limit=1, after=names[index]))
            assert [view.session_id for view in page.sessions] == [names[index + 1]]
        world.manager.close(OWNER, names[200])
        assert looks[0] <= 4 * 9

    def test_a_page_is_the_last_exactly_when_nothing_follows(self, world: World) -> None:
        for _ in range(4):
            world.open()
        has_more = [
            world.do(world.manager.list(OWNER, limit=n)).next_after is not None for n in range(1, 6)
        ]
        assert has_more == [True, True, True, False, False]

    def test_a_cursor_outlives_the_session_it_points_at(self, world: World) -> None:
        names = [world.open() for _ in range(4)]
        page = world.do(world.manager.list(OWNER, limit=2))
        for name in (names[1], names[2]):
            world.manager.close(OWNER, name)
        names.append(world.open())
        rest = world.do(world.manager.list(OWNER, limit=2, after=page.next_after))
        assert [view.session_id for view in rest.sessions] == names[3:]
        for name in (names[0], names[3], names[4]):
            world.manager.close(OWNER, name)
        newest = world.open()
        empty = world.do(world.manager.list(OWNER, limit=1, after=page.next_after))
        assert [view.session_id for view in empty.sessions] == [newest]

    @pytest.mark.parametrize(
        "after", ["nobody", "~", "~x", "~-1", "~\N{ARABIC-INDIC DIGIT ONE}", ""]
    )
    def test_what_is_no_cursor_is_refused(self, world: World, after: str) -> None:
        with pytest.raises(InvalidRequest) as error:
            world.do(world.manager.list(OWNER, after=after))
        assert error.value.param == "after"

    def test_a_single_turn_session_closes_itself(self, world: World) -> None:
        session = world.open(single_turn=True)
        journal = world.manager.journal(OWNER, session)
        world.submit(session, turn("1"))
        world.engine.run()
        assert journal.is_closed
        assert not world.engine.slots
        assert world.manager.stats().sessions == 0
        refused = world.open(single_turn=True)
        with pytest.raises(InvalidRequest):
            world.submit(refused, turn("1", TokenInput(())))
        assert world.manager.stats().sessions == 0

    def test_a_snapshot_says_where_to_go_on(self, world: World) -> None:
        session = world.open()
        world.run(session, turn("1"))
        world.submit(session, turn("2", "Next", max_tokens=30, ignore_eos=True))
        world.submit(session, turn("3"))
        for _ in range(3):
            world.engine.step()
        world.engine.deliver()
        snapshot = world.manager.snapshot(OWNER, session)
        assert [item.role for item in snapshot.items] == ["user", "assistant"]
        assert snapshot.items[1].end_len == len(world.history(session))
        assert snapshot.running is not None
        assert len(snapshot.running.text) == 3
        assert [view.turn_id for view in snapshot.queued] == ["3"]
        journal = world.manager.journal(OWNER, session)
        world.engine.run()
        rest = "".join(
            found.entry.text
            for found in journal.read(snapshot.session.seq)
            if isinstance(found.entry, TurnDelta) and found.entry.turn_id == "2"
        )
        assert snapshot.running.text + rest == world.end_of(session, "2").outcome.text

    def test_quotas_are_per_owner_and_exact(self) -> None:
        quotas = QuotaLimits(sessions=4, owner_sessions=2, owner_turns=3, turns=4)
        with World(quotas=quotas) as world:
            names = [world.open() for _ in range(2)]
            with pytest.raises(QuotaExceeded):
                world.open()
            others = [world.open(owner="b"), world.open(owner="b")]
            with pytest.raises(ServerBusy):
                world.open(owner="c")
            for index in range(3):
                world.submit(names[0], turn(str(index)))
            with pytest.raises(QuotaExceeded):
                world.submit(names[1], turn("1"))
            world.submit(others[0], turn("1"), owner="b")
            with pytest.raises(ServerBusy):
                world.submit(others[1], turn("1"), owner="b")
            world.engine.run()
            world.manager.close(OWNER, names[0])
            completed(world.run(names[1], turn("1")))
            world.open()

    def test_input_tokens_have_a_rate(self) -> None:
        with World(quotas=QuotaLimits(owner_input_tokens_per_min=100)) as world:
            session = world.open()
            completed(world.run(session, turn("1", (60,) * 90)))
            with pytest.raises(QuotaExceeded):
                world.submit(session, turn("2", (60,) * 20))
            world.now_s += 7
            completed(world.run(session, turn("2", (60,) * 20)))

    def test_a_turn_that_a_rate_refused_says_as_long_as_it_is_known_when_to_come_again(
        self,
    ) -> None:
        limits = SessionLimits(journal=JournalLimits(max_entries=4))
        with World(limits=limits, quotas=QuotaLimits(owner_input_tokens_per_min=100)) as world:
            session = world.open()
            world.submit(session, turn("1", (60,) * 90))
            world.submit(session, turn("2", (60,) * 45))
            world.engine.run()
            end = world.manager.turn(OWNER, session, "2").end
            assert isinstance(end, TurnFailedEntry)
            for index in range(9):
                world.manager.update(OWNER, session, metadata={"n": str(index)})
            late = world.manager.turn(OWNER, session, "2").end
            assert isinstance(late, TurnFailedEntry)
            assert late.message != end.message, "the journal still has it"
            assert failure_body(late).retry_after_s == failure_body(end).retry_after_s == 21


@pytest.mark.parametrize("how", ["ends", "is canceled", "waits", "fails", "drains"])
def test_who_is_told_of_a_turn_s_end_may_close_its_session(how: str) -> None:
    """Its session closes in the middle of what ends the turn."""
    with World() as world:
        session, other = world.open(), world.open()
        told: list[TurnEnd] = []

        def close(end: TurnEnd) -> None:
            told.append(end)
            world.manager.close(OWNER, session)

        world.submit(other, turn("other", max_tokens=500, ignore_eos=True))
        if how == "waits":
            world.engine.die()
            world.engine.deliver()
        asked = turn("t", max_tokens=5 if how == "ends" else 500, ignore_eos=True)
        world.do(world.manager.submit(OWNER, session, asked, hooks=TurnHooks(close)))
        for _ in range(4):
            world.engine.step()
            world.engine.deliver()
        match how:
            case "is canceled" | "waits":
                world.manager.cancel(OWNER, session, "t")
            case "fails":
                world.engine.die()
            case "drains":
                world.do(world.manager.drain(0.0))
            case _:
                pass
        world.engine.deliver()
        if how in ("ends", "is canceled"):
            for _ in range(10):
                world.engine.step()
                world.engine.deliver()
        world.spin()
        assert len(told) == 1
        with pytest.raises(SessionNotFound):
            world.manager.get(OWNER, session)
        assert world.manager.stats().sessions == (0 if how == "drains" else 1)
