"""Responses and conversations whose sessions have left the memory, and what all of them have on
disk."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from session_server.core.errors import QuotaExceeded, ServerBusy
from session_server.core.owner import Owner, TenantLimits
from session_server.core.session_events import Message
from session_server.sessions.kept_conversations import ConversationEntry
from session_server.sessions.quotas import QuotaLimits
from session_server.sessions.resting import MAX_RESTING
from session_server.sessions.store.database import Database
from tests.sessions.test_stored_dialects import Desk, desk, rows_of
from tests.sessions.test_stored_sessions import Disk
from tests.sessions.test_unloading import loaded
from tests.sessions.world import OWNER, World, turn


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "store")


def counted(world: World) -> int:
    return world.manager.stats().budgets["store_bytes"].held


def on_disk(disk: Disk) -> int:
    """The bytes of all sessions, and of all records as they are in memory."""
    with closing(sqlite3.connect(disk.directory / Database.FILE)) as database:
        (of_entries,) = database.execute("SELECT total(length(entry)) FROM entries").fetchone()
        (of_rows,) = database.execute("SELECT total(length(settings)) FROM sessions").fetchone()
        (of_records,) = database.execute("SELECT total(num_bytes) FROM records").fetchone()
    return int(of_entries + of_rows + of_records)


def recount(world: World) -> None:
    """Compare with what there is how many sessions are counted, and of whom."""
    quotas, registry = world.manager._quotas, world.manager._sessions
    assert quotas.sessions.total == len(registry)
    for owner in quotas.owned_sessions.owners:
        page = world.do(registry.page(owner, limit=1000, after=None))
        assert quotas.owned_sessions.held_by(owner) == len(page.sessions)


def unload(world: World, *, num: int) -> None:
    """Take sessions out of the memory."""
    for _ in range(num):
        world.manager._sessions.by_use.in_hand = None
        assert world.manager.exits._unload_one(OWNER, of_others=True)


def test_responses_go_on_in_a_session_that_was_unloaded_in_between(disk: Disk) -> None:
    said = ["one", "two", "three", "four"]
    with World() as world:
        alone, previous, reference = Desk(world), None, []
        for text in said:
            previous = alone.ask(text, previous)
            reference.append(previous.content.answer)
    with desk(disk) as this:
        previous, places, epochs = None, set(), set()
        for text, answer in zip(said, reference, strict=True):
            previous = this.ask(text, previous)
            assert previous.content.answer == answer
            places.add((previous.place.session_id, previous.place.number))
            epochs.add(previous.place.epoch)
            unload(this.world, num=1)
            assert not loaded(this.world)
            recount(this.world)
        assert (len(places), len(epochs)) == (1, len(said))
        assert rows_of(disk, "sessions") == 1
        first = this.find("resp_one")
        branch = this.ask("another", first)  # behind the first one, though others follow
        assert branch.place.session_id != first.place.session_id
        assert len(loaded(this.world)) == 2
        this.turns.forget(branch)
        for text in said:
            this.turns.forget(this.find(f"resp_{text}"))
        assert (rows_of(disk, "sessions"), loaded(this.world)) == (0, set())
        recount(this.world)


def test_a_conversation_goes_on_in_a_session_that_was_unloaded_in_between(disk: Disk) -> None:
    with desk(disk) as this:
        conversation = this.converse("hello")
        first = this.ask("one", conversation=conversation)
        unload(this.world, num=1)
        second = this.ask("two", conversation=conversation)
        assert second.place.number == first.place.number
        assert second.place.epoch != first.place.epoch
        assert rows_of(disk, "sessions") == 1


def test_responses_of_more_sessions_than_memory_holds_all_go_on(disk: Disk) -> None:
    with desk(disk, quotas=QuotaLimits(sessions=2)) as this:
        chains = [this.ask(f"{number}") for number in range(6)]
        for turn_number in range(3):
            for number, chain in enumerate(chains):
                later = this.ask(f"{number}, {turn_number}", chain)
                assert later.place.session_id == chain.place.session_id
                assert later.content.body.endswith(b"True")
                chains[number] = later
        assert len(loaded(this.world)) == 2
        assert rows_of(disk, "sessions") == 6
        recount(this.world)


def test_those_that_have_left_the_memory_rest_no_longer(disk: Disk) -> None:
    with desk(disk) as this:
        first = [this.ask(f"{number}") for number in range(40)]
        unload(this.world, num=40)
        for number in range(40, 40 + MAX_RESTING):
            this.ask(f"{number}")
        assert len(loaded(this.world)) == MAX_RESTING, "none has closed for one that has left"
        assert rows_of(disk, "sessions") == 40 + MAX_RESTING
        assert this.ask("more", first[0]).place.session_id == first[0].place.session_id


def test_sessions_of_responses_that_have_left_the_memory_make_room_for_others(disk: Disk) -> None:
    owner = Owner("tenant", limits=TenantLimits(max_sessions=3))
    with desk(disk) as this:
        one = this.ask("one", owner=owner)
        forked = this.ask("two", owner=owner)
        this.ask("three", owner=owner)
        this.world.manager.edits.fork(owner, forked.place.session_id)  # in place of the first
        assert rows_of(disk, "sessions") == 3
        for _ in range(2):  # the one that was forked leaves once that is on disk
            this.world.manager._sessions.by_use.in_hand = None
            while this.world.manager.exits._unload_one(owner, of_others=True):
                pass
        assert not loaded(this.world)
        this.world.create(owner=owner, is_stored=True)  # in place of the third
        ids = {view.session_id for view in this.world.do(this.world.manager.list(owner)).sessions}
        assert forked.place.session_id in ids, "somebody has used it"
        with pytest.raises(QuotaExceeded):
            this.world.create(owner=owner, is_stored=True)
        with pytest.raises(QuotaExceeded):
            this.ask("four", this.find(one.key, owner), owner=owner)
        recount(this.world)


def test_what_records_have_on_disk_is_counted_with_sessions(disk: Disk) -> None:
    with desk(disk) as this:
        conversation = this.converse("hello", "again")
        assert counted(this.world) == on_disk(disk) > 0
        one = this.ask("one", conversation=conversation)
        this.ask("two", one)
        this.ask("three", one, is_background=True)
        this.ask("not stored", keep="here")
        assert counted(this.world) == on_disk(disk)
        entry = ConversationEntry("i_more", Message("user", "more"))
        this.turns.conversations.append(conversation, [entry])
        this.turns.conversations.delete_item(conversation, "i_hello")
        this.turns.conversations.update(conversation, {"c": "d"})
        assert counted(this.world) == on_disk(disk)
        this.turns.forget(this.find("resp_two"))
        assert counted(this.world) == on_disk(disk)
    with desk(disk) as this:
        assert counted(this.world) == on_disk(disk)
        this.turns.forget(this.find("resp_one"))
        assert this.turns.forget_unread(OWNER, "resp_three")
        this.world.do(this.turns.forget_conversation(OWNER, "conv_1"))
        assert counted(this.world) == on_disk(disk)
        disk.now_s += 10_000
        this.world.manager.tick()
        assert counted(this.world) == on_disk(disk) == 0


def test_a_full_store_refuses_responses_and_conversations_and_nothing_that_makes_room(
    disk: Disk,
) -> None:
    with desk(disk) as this:
        one, conversation = this.ask("one"), this.converse("hello")
        stored = this.world.manager._quotas.stored_bytes
        limit, stored._limit = stored._limit, stored.total
        entry = ConversationEntry("i_more", Message("user", "more"))
        for refused in (
            lambda: this.ask("two", one),
            lambda: this.ask("three", conversation=conversation),
            lambda: this.converse("other", name="conv_2"),
            lambda: this.turns.conversations.append(conversation, [entry]),
            lambda: this.turns.conversations.update(conversation, {"c": "d"}),
        ):
            with pytest.raises(ServerBusy, match="bytes in the store"):
                refused()
        assert this.ask("not stored", keep="here").content.state == "said"
        assert counted(this.world) == on_disk(disk)
        this.turns.conversations.delete_item(conversation, "i_hello")
        this.turns.forget(one)
        stored._limit = limit
        assert this.ask("two").content.body.endswith(b"True")
        assert counted(this.world) == on_disk(disk)


def test_a_session_that_runs_a_response_stays_where_its_record_needs_room(disk: Disk) -> None:
    with desk(disk) as this:
        chains = [this.ask("word " * 100 + str(n), name=f"resp_{n}") for n in range(4)]
        history = this.world.manager._quotas.history_bytes
        history._limit = history.total + 2_000
        later = this.ask("and then", chains[0])
        assert later.place.session_id == chains[0].place.session_id
        assert len(loaded(this.world)) < 4
        assert this.world.history(later.place.session_id)
        recount(this.world)


def test_a_turn_by_its_id_and_an_unloading_leave_a_session_to_its_client(disk: Disk) -> None:
    with desk(disk) as this:
        mine, theirs = this.ask("one"), this.ask("two")
        this.world.run(theirs.place.session_id, turn("by its id"))
        unload(this.world, num=2)
        for each in (mine, theirs):
            this.turns.forget(each)
        left = [view.session_id for view in this.world.do(this.world.manager.list(OWNER)).sessions]
        assert left == [theirs.place.session_id]
