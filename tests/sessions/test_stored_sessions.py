"""Sessions in a store: what was told of them is there in the next process, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from session_server.core.errors import (
    InternalInconsistency,
    QuotaExceeded,
    ServerBusy,
    ServerDraining,
    SessionBusy,
    SessionExists,
    SessionNotFound,
    TurnConflict,
    TurnNotActive,
    UnknownModel,
)
from session_server.core.owner import Owner, TenantLimits
from session_server.core.session_events import (
    ChatInput,
    Message,
    SessionClosed,
    SessionRewound,
    TokenInput,
    TurnCompleted,
    TurnFailedEntry,
)
from session_server.sessions import ended_turns, session_logs
from session_server.sessions.journal import JournalLimits
from session_server.sessions.quotas import QuotaLimits, SessionLimits
from session_server.sessions.store.records import LogEntry, decode_entry, encode_entry
from session_server.sessions.store.writer import Told, Write
from session_server.sessions.transcript import Transcript
from session_server.sessions.views import OpenRequest
from tests.sessions.paper_store import PaperStore, count
from tests.sessions.world import OWNER, World, completed, letters, turn


class Disk:
    """A directory, the clock on the wall, and the worlds that lived there one after another."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now_s = 1_000_000.0
        self.store: PaperStore

    @contextmanager
    def world(self, kind: str = "chatml", **options: Any) -> Iterator[World]:
        """A process: it ends without a word, as one that is killed."""
        model = options.pop("model", b"tokenizer")
        self.store = PaperStore(self.directory, lambda: self.now_s, model=model)
        world = World(kind, store=self.store, **options)
        try:
            yield world
        finally:
            self.store.finish()
            world.finish()


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "store")


def state_of(world: World, name: str) -> dict[str, object]:
    """All that a conversation is."""
    session = world.manager._sessions.get(OWNER, name)
    said: Transcript = session.transcript
    return {
        "tokens": said.tokens(),
        "items": said.items,
        "num_made": said._items._num_made,
        "num_bytes": said._items.num_bytes,
        "tools": said._tools,
        "answer": (said._answer_len, said._is_end_replaced),
        "open": said._open,
        "answers": (said._answers._indexes, said._answers._ends),
        "mode": said.mode,
        "now": said.now,
        "num_turns": len(session.ended),
        "num_uses": session.life.num_uses,
        "order": session.life.order,
        "settings": session.settings,
    }


def test_a_conversation_goes_on_in_the_next_process_as_if_nothing_had_happened(disk: Disk) -> None:
    with disk.world() as world:
        name = world.create(is_stored=True, metadata={"a": "b"}, ttl_s=500.0)
        for number in range(5):
            end = completed(world.run(name, turn(f"t{number}", max_tokens=9)))
            assert end.outcome.is_durable is True
        world.run(name, turn("raw", letters(world.text, "abc")))
        before = state_of(world, name)
        with World() as other:
            assert other.create(is_stored=True)  # without a store it is as any other
        reference = completed(world.run(name, turn("next", "and then?")))
    with disk.world() as world:
        # The last turn was told of, so it is there too.
        assert world.manager.get(OWNER, name).num_turns == 7
        world.manager.edits.rewind(OWNER, name, before["items"][-1].id)  # type: ignore[index]
        assert world.history(name) == before["tokens"]
        again = completed(world.run(name, turn("again", "and then?")))
        assert again.outcome.token_ids == reference.outcome.token_ids
        assert again.outcome.usage.cached_tokens == 0


@pytest.mark.parametrize("kind", ["chatml", "counting", "hermes", "thinking_tools"])
def test_every_change_of_a_conversation_is_in_the_log(disk: Disk, kind: str) -> None:
    states: list[dict[str, object]] = []
    with disk.world(kind) as world:
        name = world.create(is_stored=True, messages=(Message("system", "Be brief."),))
        states.append(state_of(world, name))

        def changed() -> None:
            states.append(state_of(world, name))
            recovered = restored_state(disk, name, kind)
            assert recovered == states[-1]

        world.run(name, turn("1"))
        changed()
        world.run(name, turn("read", max_tokens=0))
        changed()
        world.run(name, turn("answer", ChatInput(())))
        changed()
        tools = ('{"type": "function", "function": {"name": "f", "parameters": {}}}',)
        if kind == "chatml":
            world.run(name, turn("raw", TokenInput(letters(world.text, "abca"))))
            changed()
        if world.text.takes_tools:
            asked = ChatInput((Message("user", "call"),), is_whole=True, tools=tools)
            world.run(name, turn("tools", asked))
            changed()
        items = world.manager.snapshot(OWNER, name).items
        user = next(item for item in items if item.role == "user")
        world.manager.edits.edit_item(OWNER, name, user.id, "something else")
        changed()
        world.run(name, turn("edited", ChatInput(())))
        changed()
        said = [
            Message(item.role, item.content) for item in world.manager.snapshot(OWNER, name).items
        ]
        whole = ChatInput((*said[:-1], Message("user", "again")), is_whole=True)
        world.run(name, turn("whole", whole))
        changed()
        world.manager.edits.rewind(OWNER, name, None)
        changed()
        world.manager.update(OWNER, name, ttl_s=77.0, metadata={"k": "v"})
        changed()
        fork = world.manager.edits.fork(OWNER, name).session_id
        assert restored_state(disk, fork, kind) == state_of(world, fork)
    assert len({repr(state["tokens"]) for state in states}) > 4


def restored_state(disk: Disk, name: str, kind: str) -> dict[str, object]:
    """What another process would make of the store now."""
    with World(kind) as other:
        other.manager.store_in(disk.store)
        return state_of(other, name)


def test_a_turn_that_was_not_told_of_is_as_if_it_had_never_been(disk: Disk) -> None:
    with disk.world() as world:
        name = world.create(is_stored=True)
        kept = completed(world.run(name, turn("kept")))
        world.submit(name, turn("lost", max_tokens=50, ignore_eos=True))
        world.engine.step()
        world.engine.deliver()
    with disk.world() as world:
        view = world.manager.get(OWNER, name)
        assert (view.num_turns, view.running_turn) == (1, None)
        assert world.history(name)[-len(kept.outcome.token_ids) :] == kept.outcome.token_ids
        assert completed(world.run(name, turn("lost"))).outcome.is_durable


def test_an_end_is_told_once_it_is_on_disk_and_not_before(disk: Disk) -> None:
    with disk.world() as world:
        name = world.create(is_stored=True)
        disk.store.is_slow = True
        world.submit(name, turn("1"))
        world.submit(name, turn("2"))
        world.engine.run()
        entries = world.entries(name)
        assert not [entry for entry in entries if isinstance(entry, TurnCompleted)]
        view = world.manager.get(OWNER, name)
        assert (view.running_turn, view.queued_turns) == ("1", 1)
        assert world.manager.turn(OWNER, name, "1").status == "running"
        with pytest.raises(TurnNotActive):
            world.manager.cancel(OWNER, name, "1")
        with pytest.raises(SessionBusy):
            world.manager.edits.rewind(OWNER, name, None)
        snapshot = world.do(world.manager.settled_snapshot(OWNER, name))  # it waits
        assert [item.turn_id for item in snapshot.items] == ["1", "1"]
        assert snapshot.running is not None
        assert snapshot.running.turn_id == "2"
        world.engine.run()
        disk.store.tell()
        assert completed(world.end_of(name, "2")).outcome.is_durable


def test_a_turn_repeated_after_a_restart_runs_once(disk: Disk) -> None:
    with disk.world() as world:
        name = world.create(is_stored=True)
        first = completed(world.run(name, turn("1")))
    with disk.world() as world:
        view = world.submit(name, turn("1"))
        assert view.status == "completed"
        assert view.end is not None
        assert view.end.outcome.text == first.outcome.text
        assert view.end.outcome.usage == first.outcome.usage
        assert view.end.outcome.is_durable
        with pytest.raises(TurnConflict):
            world.submit(name, turn("1", "something else"))
        assert not world.engine.slots


def test_a_full_disk_ends_nothing_and_all_is_written_once_there_is_room(disk: Disk) -> None:
    with disk.world() as world:
        name = world.create(is_stored=True)
        assert completed(world.run(name, turn("1"))).outcome.is_durable
        disk.store.fails = True
        assert completed(world.run(name, turn("2"))).outcome.is_durable is False
        new = world.create(is_stored=True)
        assert completed(world.run(new, turn("n"))).outcome.is_durable is False
        logs = world.manager._flow.conclusion.logs
        assert len(logs._behind) == 2
        assert disk.store.failure is not None
        world.manager.tick()
        assert len(logs._behind) == 2
        disk.store.fails = False
        world.manager.tick()
        world.manager.tick()
        assert (len(logs._behind), disk.store.failure) == (0, None)
        states = [state_of(world, each) for each in (name, new)]
    with disk.world() as world:
        assert [state_of(world, each) for each in (name, new)] == states
        assert world.submit(name, turn("2")).status == "completed"


def test_a_turn_behind_a_failed_write_brings_all_of_it(disk: Disk) -> None:
    with disk.world() as world:
        name = world.create(is_stored=True)
        disk.store.fails = True
        world.run(name, turn("1"))
        disk.store.fails = False
        assert completed(world.run(name, turn("2"))).outcome.is_durable
        state = state_of(world, name)
    with disk.world() as world:
        assert state_of(world, name) == state
        assert world.submit(name, turn("1")).status == "completed"


def test_a_session_that_cannot_be_written_keeps_no_other_from_the_disk(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk.world() as world:
        names = [world.create(is_stored=True) for _ in range(4)]
        disk.store.fails = True
        for name in names:
            world.run(name, turn("1", "word " * (500 if name == names[0] else 1)))
        disk.store.fails, write = False, disk.store._ask

        def ask(write_: Write, told: Told, *, num_bytes: int) -> None:
            disk.store.fails = num_bytes > 2000
            write(write_, told, num_bytes=num_bytes)

        monkeypatch.setattr(disk.store, "_ask", ask)
        for _ in range(8):
            world.manager.tick()
        logs = world.manager._flow.conclusion.logs
        assert [each.session_id for each in logs._behind] == names[:1]


def test_a_long_log_is_written_anew(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_logs, "MAX_ENTRIES", 4)
    with disk.world() as world:
        name = world.create(is_stored=True)
        for number in range(9):
            world.run(name, turn(f"t{number}"))
            row = disk.store.find(OWNER.owner_id, name)
            assert row is not None
            assert row.num_entries <= 4
            assert len(disk.store._database.entries(row.number)) == row.num_entries
        state = state_of(world, name)
    with disk.world() as world:
        assert state_of(world, name) == state
        assert world.submit(name, turn("t0")).status == "completed"


def test_what_was_replaced_does_not_fill_the_disk(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_logs, "_MIN_LOG_BYTES", 256)
    with disk.world() as world:
        name = world.create(is_stored=True)
        for number in range(40):
            world.run(name, turn(f"t{number}", "word " * 50))
            world.manager.edits.rewind(OWNER, name, None)
            row = disk.store.find(OWNER.owner_id, name)
            assert row is not None
            num_bytes = sum(map(len, disk.store._database.entries(row.number)))
            session = world.manager._sessions.get(OWNER, name)
            assert num_bytes <= 2 * session.num_bytes + 2048


def test_sessions_on_disk_are_listed_with_those_in_memory_in_their_order(disk: Disk) -> None:
    with disk.world() as world:
        names = [world.create(is_stored=True) for _ in range(7)]
        world.run(names[3], turn("1"))
        world.create(owner="stranger", is_stored=True)
    with disk.world() as world:
        loaded = [world.manager.get(OWNER, names[at]).session_id for at in (5, 1)]
        assert loaded == [names[5], names[1]]
        names.append(world.create(is_stored=True))
        names.append(world.create())
        after, found = None, []
        while True:
            page = world.do(world.manager.list(OWNER, limit=2, after=after))
            found += [view.session_id for view in page.sessions]
            if not page.has_more:
                break
            after = page.next_after
        assert found == names
        views = {view.session_id: view for view in world.do(world.manager.list(OWNER)).sessions}
        assert views[names[3]].num_turns == 1
        assert views[names[3]].num_tokens == len(world.history(names[3]))
        assert not world.do(world.manager.list(OWNER, after="~99999999999999999999")).sessions
        by_id = world.do(world.manager.list(OWNER, after=names[4])).sessions
        assert [view.session_id for view in by_id] == names[5:]


def test_a_session_on_disk_is_its_owners_alone_and_its_id_is_taken(disk: Disk) -> None:
    with disk.world() as world:
        name = world.create(is_stored=True, session_id="mine")
    with disk.world() as world:
        with pytest.raises(SessionNotFound):
            world.manager.get(Owner("stranger"), name)
        with pytest.raises(SessionExists):
            world.manager.open(OWNER, OpenRequest(session_id="mine"))
        assert world.open(owner="stranger", session_id="mine") == "mine"
        assert world.manager.get(OWNER, "mine").session_id == "mine"


def test_a_session_that_was_closed_or_has_expired_does_not_come_back(disk: Disk) -> None:
    with disk.world() as world:
        closed = world.create(is_stored=True)
        short, long = (world.create(is_stored=True, ttl_s=ttl_s) for ttl_s in (60.0, 6000.0))
        world.manager.close(OWNER, closed)
        with pytest.raises(SessionNotFound):
            world.manager.get(OWNER, closed)
        world.create(is_stored=True, session_id=closed)  # the id is free again
        world.manager.close(OWNER, closed)
    disk.now_s += 61.0
    with disk.world() as world:
        for name in (closed, short):
            with pytest.raises(SessionNotFound):
                world.manager.get(OWNER, name)
        assert [view.session_id for view in world.do(world.manager.list(OWNER)).sessions] == [long]
        world.manager.tick()
        assert count(disk.store._database)[0] == 1
        # What is left of its time goes on in the new process.
        world.manager.get(OWNER, long)
        world.now_s += 5900.0
        disk.now_s += 5900.0
        world.manager.tick()
        assert world.manager.get(OWNER, long).session_id == long
        world.now_s += 61.0
        disk.now_s += 61.0
        world.manager.tick()
        with pytest.raises(SessionNotFound):
            world.manager.get(OWNER, long)
        assert count(disk.store._database)[0] == 0


def test_a_session_is_closed_once_it_is_gone_from_the_disk(disk: Disk) -> None:
    with disk.world() as world:
        name = world.create(is_stored=True)
        journal = world.manager.journal(OWNER, name)
        disk.store.is_slow = True
        world.manager.close(OWNER, name)
        with pytest.raises(SessionNotFound):
            world.manager.get(OWNER, name)
        assert not journal.is_closed
        world.do(world.manager.stored())
        assert journal.find(journal.last_seq) == SessionClosed("client")


def test_a_session_in_use_outlives_the_time_that_was_written(disk: Disk) -> None:
    with disk.world() as world:
        name = world.create(is_stored=True, ttl_s=60.0)
        world.submit(name, turn("long", max_tokens=100, ignore_eos=True))
        world.engine.step()
        for _ in range(5):
            disk.now_s += 50.0
            world.now_s += 50.0
            world.manager.tick()
        world.engine.run()
        assert completed(world.end_of(name, "long")).outcome.is_durable
        assert disk.store.find(OWNER.owner_id, name) is not None


def test_a_server_that_drains_keeps_its_sessions(disk: Disk) -> None:
    with disk.world() as world:
        name = world.create(is_stored=True)
        world.run(name, turn("1"))
        disk.store.is_slow = True
        world.submit(name, turn("2"))
        world.engine.run()
        journal = world.manager.journal(OWNER, name)
        world.do(world.manager.drain(0.0))
        # Its readers are told of the turn's end, and of none of the session.
        assert journal.is_closed
        assert completed(journal.find(journal.last_seq)).outcome.is_durable  # type: ignore[arg-type]
    with disk.world() as world:
        assert world.manager.get(OWNER, name).num_turns == 2


def test_an_idempotency_key_gives_the_session_of_an_earlier_process(disk: Disk) -> None:
    request = OpenRequest(idempotency_key="key", is_stored=True)
    with disk.world() as world:
        name = world.do(world.manager.create(OWNER, request)).session_id
    with disk.world() as world:
        assert world.do(world.manager.create(OWNER, request)).session_id == name
        other = OpenRequest(idempotency_key="key", is_stored=True, ttl_s=5.0)
        with pytest.raises(SessionExists):
            world.do(world.manager.create(OWNER, other))


def test_tokens_of_another_tokenizer_are_not_served(disk: Disk) -> None:
    with disk.world() as world:
        name = world.create(is_stored=True)
    with disk.world(model=b"another") as world, pytest.raises(UnknownModel):
        world.manager.get(OWNER, name)
    with disk.world() as world:
        assert world.manager.get(OWNER, name).session_id == name


@pytest.mark.parametrize("place", [0, 3, 4, 40, -1])
def test_a_damaged_session_is_refused_and_the_others_are_served(disk: Disk, place: int) -> None:
    with disk.world() as world:
        damaged, whole = world.create(is_stored=True), world.create(is_stored=True)
        world.run(damaged, turn("1"))
        row = disk.store.find(OWNER.owner_id, damaged)
        assert row is not None
        with disk.store._database.transaction():
            execute = disk.store._database._writer.execute
            query = "SELECT entry FROM entries WHERE session = ? AND position = 1"
            ((entry,),) = execute(query, (row.number,)).fetchall()
            changed = bytearray(entry)
            changed[place] ^= 1
            values = (bytes(changed), row.number)
            execute("UPDATE entries SET entry = ? WHERE session = ? AND position = 1", values)
    with disk.world() as world:
        with pytest.raises(InternalInconsistency):
            world.manager.get(OWNER, damaged)
        assert world.manager.get(OWNER, whole).session_id == whole
        assert len(world.do(world.manager.list(OWNER)).sessions) == 2


@pytest.mark.parametrize("odd", ["nothing is said", "a number that does not fit"])
def test_content_that_no_server_has_written_is_refused_as_damaged(disk: Disk, odd: str) -> None:
    """Every checksum matches: somebody has written it with tools."""
    with disk.world() as world:
        for session in ("odd", "whole"):
            world.open(session_id=session, is_stored=True)
            world.run(session, turn("a"))
        row = disk.store.find(OWNER.owner_id, "odd")
        assert row is not None
        entry = decode_entry(disk.store._database.entries(row.number)[-1])
        change, turns = entry.change, entry.turns
        if odd == "nothing is said":
            change = structs.replace(change, answer_len=0)
        else:
            turns = tuple(structs.replace(each, item=1 << 40) for each in turns)
        disk.store.put(row, [encode_entry(LogEntry(change, turns))], lambda _error: None)
    with disk.world() as world:
        with pytest.raises(InternalInconsistency):
            world.manager.get(OWNER, "odd")
        assert [each.session_id for each in world.do(world.manager.list(OWNER)).sessions] == [
            "odd",
            "whole",
        ]
        completed(world.run("whole", turn("b")))


def test_sessions_that_nobody_asked_to_keep_leave_nothing(disk: Disk) -> None:
    with disk.world() as world:
        name = world.create()
        assert completed(world.run(name, turn("1"))).outcome.is_durable is None
        world.create(single_turn=True)
        assert count(disk.store._database)[0] == 0


def test_nothing_is_appended_to_a_log_that_lacks_something(disk: Disk) -> None:
    """A fork's log has one entry, and so has one that is written anew: they are not alike."""
    with disk.world() as world:
        source = world.create(is_stored=True)
        world.run(source, turn("1"))
        name = world.manager.edits.fork(OWNER, source).session_id
        disk.store.is_slow = True
        disk.store.fails = True
        world.submit(name, turn("lost"))
        world.engine.run()
        disk.store.tell(1)  # it fails, and all of the session is asked for
        disk.store.fails = False
        world.submit(name, turn("next"))
        world.engine.run()
        disk.store.tell()
        assert completed(world.end_of(name, "next")).outcome.is_durable
        state = state_of(world, name)
    with disk.world() as world:
        assert state_of(world, name) == state
        assert world.submit(name, turn("lost")).status == "completed"


@pytest.mark.parametrize("change", ["tick", "update"])
def test_a_turn_on_its_way_to_disk_is_part_of_whatever_is_written_beside_it(
    disk: Disk, change: str
) -> None:
    with disk.world() as world:
        name = world.create(is_stored=True)
        world.run(name, turn("1"))
        disk.store.is_slow = True
        world.submit(name, turn("2"))
        world.engine.run()
        world.now_s += 1.0
        if change == "update":
            world.manager.update(OWNER, name, ttl_s=50.0)
        else:
            world.manager.tick()
        disk.store.tell()
        assert completed(world.end_of(name, "2")).outcome.is_durable
        assert count(disk.store._database)[0] == 1
        state = state_of(world, name)
    with disk.world() as world:
        assert state_of(world, name) == state
        assert world.submit(name, turn("2")).status == "completed"
        if change == "update":
            assert world.manager.get(OWNER, name).ttl_s == 50.0


def test_a_session_has_one_write_under_way_whatever_is_changed(disk: Disk) -> None:
    with disk.world() as world:
        name = world.create(is_stored=True)
        world.run(name, turn("1"))
        item = world.manager.snapshot(OWNER, name).items[0].id
        disk.store.is_slow = True
        for number in range(50):
            world.manager.update(OWNER, name, metadata={"n": str(number)})
            world.manager.edits.edit_item(OWNER, name, item, f"edit {number}")
            assert disk.store.num_untold == 1
        disk.store.tell()
        assert world.manager.get(OWNER, name).is_durable
    with disk.world() as world:
        assert world.manager.snapshot(OWNER, name).items[0].content == "edit 49"
        assert world.manager.get(OWNER, name).metadata == {"n": "49"}


def test_a_tick_asks_once_for_sessions_whose_time_on_disk_is_over(disk: Disk) -> None:
    with disk.world() as world:
        names = [world.create(is_stored=True, ttl_s=1.0) for _ in range(70)]
        for name in names:
            world.submit(name, turn("long", max_tokens=100, ignore_eos=True))
        world.engine.step()
        disk.store.is_slow = True
        disk.now_s += 2 * session_logs.BUSY_S
        for _ in range(3):
            world.manager.tick()
            world.spin(20)
            assert 0 < disk.store.num_untold <= len(names)
        disk.store.tell()
        world.manager.tick()
        disk.store.tell()
        assert disk.store.expired((0.0, 0), disk.now_s, limit=99) == []


def test_a_list_goes_on_behind_sessions_that_are_gone(disk: Disk) -> None:
    with disk.world() as world:
        for _ in range(5):
            world.create(is_stored=True, ttl_s=1.0)
        gone = [world.create(is_stored=True) for _ in range(5)]
        kept = [world.create(is_stored=True) for _ in range(3)]
    disk.now_s += 10.0
    with disk.world() as world:
        disk.store.is_slow = True
        for name in gone:
            assert world.manager.close(OWNER, name).state == "closing"
        page = world.do(world.manager.list(OWNER, limit=2))
        assert ([view.session_id for view in page.sessions], page.has_more) == (kept[:2], True)
        last = world.do(world.manager.list(OWNER, limit=2, after=page.next_after))
        assert ([view.session_id for view in last.sessions], last.has_more) == (kept[2:], False)


def test_a_session_that_could_not_be_deleted_is_deleted_later(disk: Disk) -> None:
    with disk.world() as world:
        names = [world.create(is_stored=True) for _ in range(3)]
        disk.store.fails = True
        for name in names:
            world.manager.close(OWNER, name)
        store = world.manager.stats().store
        assert store is not None
        assert store.num_behind == 3
        disk.store.fails = False
        for _ in range(3):
            world.manager.tick()
        assert count(disk.store._database)[0] == 0
        assert disk.store.deletions.num_failed == 0


def test_what_cannot_be_served_can_be_listed_and_deleted(disk: Disk) -> None:
    with disk.world() as world:
        names = [world.create(is_stored=True) for _ in range(4)]
        number = "(SELECT number FROM sessions WHERE id = ?)"
        with disk.store._database.transaction():
            execute = disk.store._database._writer.execute
            execute("UPDATE sessions SET settings = x'00' WHERE id = ?", (names[0],))
            execute(f"UPDATE entries SET entry = x'00' WHERE session = {number}", (names[1],))
            execute("UPDATE sessions SET model = x'00' WHERE id = ?", (names[2],))
    with disk.world(quotas=QuotaLimits(sessions=1)) as world:
        errors = (InternalInconsistency, InternalInconsistency, UnknownModel)
        for name, error in zip(names, errors, strict=False):
            with pytest.raises(error):
                world.manager.get(OWNER, name)
        world.create()
        with pytest.raises(ServerBusy):
            world.manager.get(OWNER, names[3])
        listed = [view.session_id for view in world.do(world.manager.list(OWNER)).sessions]
        assert listed[:4] == names
        world.manager.tick()
        for name in names:
            assert world.manager.close(OWNER, name).state == "closing"
        assert count(disk.store._database)[0] == 0


def test_a_reason_keeps_its_name_when_others_are_added(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = turn("1", max_tokens=50, ignore_eos=True)
    with disk.world() as world:
        name = world.create(is_stored=True)
        world.submit(name, request)
        world.engine.step()
        session = world.manager._sessions.get(OWNER, name)
        world.engine.fail(session.copy.session_id, "device_failed")
        world.engine.run()
        told = world.end_of(name, "1")
        assert isinstance(told, TurnFailedEntry)
    monkeypatch.setattr(ended_turns, "_CODES", ("a_new_code", *ended_turns._CODES))
    with disk.world() as world:
        view = world.manager.turn(OWNER, name, "1")
        assert isinstance(view.end, TurnFailedEntry)
        assert view.end.code == told.code
        assert view.end.outcome.is_durable


def test_a_drain_writes_what_could_not_be_written(disk: Disk) -> None:
    with disk.world() as world:
        name = world.create(is_stored=True)
        disk.store.fails = True
        world.run(name, turn("1"))
        disk.store.fails = False
        world.do(world.manager.drain(0.0))
    with disk.world() as world:
        assert world.manager.get(OWNER, name).num_turns == 1


def test_a_fork_keeps_how_its_history_is_rendered(disk: Disk) -> None:
    with disk.world() as world:
        name = world.create(is_stored=True, history="template")
        world.run(name, turn("1"))
        fork = world.manager.edits.fork(OWNER, name).session_id
    with disk.world() as world:
        assert world.manager.get(OWNER, fork).history == "template"


def test_a_turn_says_that_it_is_on_disk_when_its_journal_has_forgotten_it(disk: Disk) -> None:
    limits = SessionLimits(journal=JournalLimits(max_entries=2))
    with disk.world(limits=limits) as world:
        name = world.create(is_stored=True)
        for number in range(4):
            world.run(name, turn(f"t{number}"))
        assert completed(world.end_of(name, "t0")).outcome.is_durable is True


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_turn_that_was_written_late_is_on_disk_for_whoever_asks_then(
    disk: Disk, is_kept: bool
) -> None:
    """It was told not to be; `is_kept`: the journal still has what was told."""
    limits = SessionLimits(journal=JournalLimits(max_entries=16_384 if is_kept else 1))
    with disk.world(limits=limits) as world:
        name = world.create(is_stored=True)
        disk.store.fails = True
        told = completed(world.run(name, turn("1")))
        assert told.outcome.is_durable is False
        assert world.end_of(name, "1").outcome.is_durable is False
        disk.store.fails = False
        world.manager.tick()
        again = world.submit(name, turn("1")).end
        assert again is not None
        assert again.outcome.is_durable is True
        assert again.outcome.text == told.outcome.text
        disk.store.fails = True
        world.run(name, turn("2"))
        assert world.end_of(name, "1").outcome.is_durable is True, "what is there stays there"
        assert world.end_of(name, "2").outcome.is_durable is False


def test_nothing_is_told_to_be_on_disk_that_was_not_synced(disk: Disk) -> None:
    with disk.world() as world:
        disk.store.durability = "relaxed"
        name = world.create(is_stored=True)
        disk.store.is_slow = True
        told = completed(world.run(name, turn("1")))
        assert told.outcome.is_durable is False
        disk.store.tell()
        assert world.end_of(name, "1").outcome.is_durable is False
        assert world.manager.get(OWNER, name).is_durable is False
        rewound = world.manager.edits.rewind(OWNER, name, None)
        disk.store.tell()
        assert rewound.is_durable is False
        assert world.manager.get(OWNER, name).is_durable is False
    with disk.world() as world:
        disk.store.durability = "relaxed"
        (view,) = world.do(world.manager.list(OWNER)).sessions
        assert view.is_durable is False
        assert world.end_of(name, "1").outcome.is_durable is False
        assert world.manager.get(OWNER, name).is_durable is False
    with disk.world() as world:  # what one that waits for the disk has found is on it
        assert world.manager.get(OWNER, name).is_durable is True
        assert world.end_of(name, "1").outcome.is_durable is True


def test_nobody_is_told_of_a_rewind_that_a_crash_could_undo(disk: Disk) -> None:
    """A whole conversation replaces items that readers hold; they hear it with the turn's end."""
    with disk.world() as world:
        name = world.create(is_stored=True)
        world.run(name, turn("1"))
        state = state_of(world, name)
        disk.store.is_slow = True
        other = ChatInput((Message("user", "something else"),), is_whole=True)
        world.submit(name, turn("2", other))
        world.engine.run()
        assert not [each for each in world.entries(name) if isinstance(each, SessionRewound)]
    with disk.world() as world:
        assert state_of(world, name)["items"] == state["items"]
        world.submit(name, turn("2", other))
        world.engine.run()
        *_, rewound, end = world.entries(name)
        assert isinstance(rewound, SessionRewound)
        assert completed(end).outcome.is_durable  # type: ignore[arg-type]


def test_a_disk_that_cannot_be_read_is_told_of_and_ends_nothing(disk: Disk) -> None:
    with disk.world() as world:
        name = world.create(is_stored=True)
    with disk.world() as world:
        other = world.create(is_stored=True)
        disk.store._database._writer.execute("ALTER TABLE sessions RENAME TO away")
        for ask in (world.manager.get, world.manager.close):
            with pytest.raises(ServerBusy):
                ask(OWNER, name)
        with pytest.raises(ServerBusy):
            world.do(world.manager.list(OWNER))
        world.manager.tick()
        assert completed(world.run(other, turn("1"))).outcome.is_durable is False


def test_sessions_on_disk_count_for_their_owner(disk: Disk) -> None:
    owner = Owner("small", limits=TenantLimits(max_sessions=2))
    request = OpenRequest(is_stored=True, ttl_s=50.0)
    for _ in range(2):
        with disk.world() as world:
            world.manager.open(owner, request)
    with disk.world() as world:
        with pytest.raises(QuotaExceeded):
            world.manager.open(owner, request)
        first = world.do(world.manager.list(owner)).sessions[0].session_id
        world.manager.close(owner, first)
        world.manager.open(owner, request)
        disk.now_s += 60.0
        world.now_s += 60.0
        world.manager.tick()
        world.manager.open(owner, request)


def changed_during_a_write(disk: Disk, world: World) -> str:
    """A session that is rewound while its metadata are being written."""
    name = world.create(is_stored=True)
    world.run(name, turn("1"))
    disk.store.is_slow = True
    world.manager.update(OWNER, name, metadata={"a": "b"})
    world.manager.edits.rewind(OWNER, name, None)
    return name


def test_a_drain_writes_what_was_changed_during_a_write(disk: Disk) -> None:
    with disk.world() as world:
        name = changed_during_a_write(disk, world)
        world.do(world.manager.drain(0.0))
        disk.store.tell()
    with disk.world() as world:
        assert world.manager.get(OWNER, name).metadata == {"a": "b"}
        assert world.history(name) == ()


def test_a_session_whose_last_write_is_under_way_is_not_read_again(disk: Disk) -> None:
    with disk.world() as world:
        name = world.create(is_stored=True)
        world.run(name, turn("1"))
        disk.store.is_slow = True
        world.manager.update(OWNER, name, metadata={"a": "b"})
        world.do(world.manager.drain(0.0))
        for ask in (world.manager.get, partial(world.manager.update, metadata={"c": "d"})):
            with pytest.raises(ServerDraining):
                ask(OWNER, name)
        disk.store.tell()
    with disk.world() as world:
        assert world.manager.get(OWNER, name).metadata == {"a": "b"}


def test_what_changes_during_a_write_is_on_disk_before_its_client_is_told(disk: Disk) -> None:
    with disk.world() as world:
        name = changed_during_a_write(disk, world)
        world.do(world.manager.stored())
    with disk.world() as world:
        assert world.history(name) == ()


def test_one_that_closes_with_its_turn_is_not_gone_before(disk: Disk) -> None:
    with disk.world() as world:
        stored, other = world.create(is_stored=True), world.create()
        world.submit(stored, turn("t"))
        view = world.do(world.manager.exits.delete(OWNER, stored))
        assert (view.state, view.is_durable) == ("closing", False)
        world.engine.run()
        world.do(world.manager.stored())
        with pytest.raises(SessionNotFound):
            world.do(world.manager.exits.delete(OWNER, stored))
        assert world.do(world.manager.exits.delete(OWNER, other)).is_durable is None
        stored = world.create(is_stored=True)
        assert world.do(world.manager.exits.delete(OWNER, stored)).is_durable is True
    with World() as world:
        assert world.do(world.manager.exits.delete(OWNER, world.create())).is_durable is None
