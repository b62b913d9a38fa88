"""Sessions that are deleted, many at once or long ones: nobody waits for them, and what is left of
them is counted until it is gone."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from session_server.core.errors import ServerBusy
from session_server.core.owner import Owner
from session_server.core.session_events import Message
from session_server.sessions.backlog import SLICE
from session_server.sessions.store import deleted_rows, deletions, patience, writer
from session_server.sessions.store.database import Database
from session_server.sessions.store.deletions import Deletions
from session_server.sessions.store.ownership import LeaseLost
from session_server.sessions.store.session_store import SessionStore
from session_server.sessions.store.writer import Told, Write
from session_server.web.revoked_owners import CLOSED_AT_ONCE, RevokedOwners
from tests.sessions.paper_store import count
from tests.sessions.test_left_kv import num_rows, stored, tick, told
from tests.sessions.test_store import DATA, hang_until, row
from tests.sessions.test_store_bounds import counted, on_disk
from tests.sessions.test_stored_sessions import Disk
from tests.sessions.world import OWNER, World, turn

NOW_S = 1_000_000.0


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "store")


@contextmanager
def served(directory: Path, **options: Any) -> Iterator[tuple[World, SessionStore]]:
    """A world whose store writes on a thread."""
    store = SessionStore.in_directory(
        directory, model=b"model", wall=lambda: NOW_S, clock=lambda: NOW_S
    )
    with World(store=store, **options) as world:
        store.start(world.loop)
        yield world, store
        world.do(store.close())


def fill(directory: Path, num_sessions: int, *, expires_s: float, num_entries: int = 1) -> None:
    """Sessions of an earlier process."""
    with closing(Database(directory)) as database, database.transaction():
        database.note_time(NOW_S)
        for number in range(1, num_sessions + 1):
            database.put(row(number, expires_s=expires_s), DATA)
            for place in range(1, num_entries):
                database.append(row(number, expires_s=expires_s, num_entries=place), DATA)


def settle(world: World, is_done: Any) -> None:
    async def wait() -> None:
        while not is_done():
            await asyncio.sleep(0.001)

    world.do(asyncio.wait_for(wait(), 60.0))


def test_many_that_expired_while_no_server_ran_keep_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_expired = 20 * SLICE
    fill(tmp_path, num_expired, expires_s=NOW_S - 1.0)
    with served(tmp_path) as (world, store):
        num_read: Counter[int] = Counter()
        read = store._database.expired

        def read_and_note(*place: Any, limit: int) -> Any:
            found = read(*place, limit=limit)
            num_read.update(each.number for each in found)
            return found

        monkeypatch.setattr(store._database, "expired", read_and_note)
        goes_on = threading.Event()
        hang_until(goes_on, store)
        for _ in range(3):
            world.now_s += 1.0
            world.manager.tick()
            world.spin(100)
        assert len(store._commits._later) <= SLICE, "what is asked for and not on disk"
        assert store.counts.num_writes == 0
        num_left: list[int] = []
        mine = row(num_expired + 1, expires_s=NOW_S + 9.0)
        store.put(mine, [DATA], lambda _error: num_left.append(count(store._database)[0]))
        goes_on.set()
        settle(world, lambda: count(store._database)[0] == 1 and num_left)
        assert num_left[0] > num_expired - 2 * SLICE, "a turn waits for no more"
        assert len(num_read) == num_expired
        assert set(num_read.values()) == {1}, "each is read once"
        assert store.counts.num_writes == num_expired + 2
        assert world.manager._quotas.owned_sessions.held_by(OWNER) == 0
        assert counted(world) == 0


def test_a_disk_that_fails_is_asked_for_no_more_than_a_slice(disk: Disk) -> None:
    fill(disk.directory, 5 * SLICE, expires_s=1.5)
    with disk.world() as world:
        disk.store.fails = True
        for _ in range(3):
            world.now_s += 1.0
            world.manager.tick()
            world.spin(50)
        assert 0 < disk.store.deletions.num_failed <= SLICE
        assert num_rows(disk) == 5 * SLICE
        disk.store.fails = False
        for _ in range(4):
            tick(world)
        assert num_rows(disk) == disk.store.deletions.num_failed == 0


def test_all_that_expire_in_memory_at_once_keep_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tmp_path) as (world, store):
        for _ in range(5 * SLICE):
            world.create(is_stored=True, ttl_s=10.0)
        name = world.create(is_stored=True, ttl_s=1000.0)
        goes_on = threading.Event()
        hang_until(goes_on, store)
        world.now_s += 100.0
        world.manager.tick()
        world.spin(20)
        assert len(world.do(world.manager.list(OWNER)).sessions) == 1
        num_before = store.counts.num_writes
        world.submit(name, turn("1"))
        world.engine.run()
        deliver, at_end = store._commits._deliver, list[int]()

        def deliver_and_note(run: Any) -> None:
            num_written = store.counts.num_writes  # by now, and no longer when it is heard

            def run_and_note() -> None:
                run()
                if not at_end and world.manager.turn(OWNER, name, "1").end:
                    at_end.append(num_written)

            deliver(run_and_note)

        monkeypatch.setattr(store._commits, "_deliver", deliver_and_note)
        goes_on.set()
        settle(world, lambda: at_end)
        assert at_end[0] < num_before + 3 * SLICE
        settle(world, lambda: count(store._database)[0] == 1)


def test_a_revoked_key_asks_for_no_more_than_a_slice(tmp_path: Path) -> None:
    fill(tmp_path, 10 * CLOSED_AT_ONCE, expires_s=NOW_S + 100.0)
    with served(tmp_path) as (world, store):
        unnamed = SimpleNamespace(resting=SimpleNamespace(close_all=lambda _owner: None))
        responses = SimpleNamespace(forget_some=lambda _owner, _most: False)
        keys = SimpleNamespace(has_key=lambda _owner: False)
        revoked: Any = RevokedOwners(world.manager, unnamed, responses, keys)  # type: ignore[arg-type]
        revoked.add([OWNER])
        goes_on = threading.Event()
        hang_until(goes_on, store)
        task = world.loop.create_task(revoked.close_all())
        world.spin(200)
        assert len(store.deletions.hidden) <= CLOSED_AT_ONCE
        goes_on.set()
        world.do(asyncio.wait_for(task, 60.0))
        assert count(store._database)[0] == 0


def test_a_disk_that_has_much_to_write_is_not_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "DISK_WAIT_S", 1.0)
    monkeypatch.setattr(writer, "MAX_GROUP", 1)

    async def run() -> None:
        store = SessionStore.in_directory(
            tmp_path, model=b"model", wall=lambda: NOW_S, clock=lambda: NOW_S
        )
        store.start(asyncio.get_running_loop())
        told: list[Exception | None] = []
        for _ in range(15):
            store.ask(lambda _database: time.sleep(0.1), told.append)
        await store.flush()
        assert told == [None] * 15
        assert store.failure is None
        await store.close()

    asyncio.run(run())


def test_one_that_is_asked_for_again_and_again_of_a_silent_disk_counts_once() -> None:
    asked: list[tuple[Told, Told]] = []

    database: Any = SimpleNamespace(retire=lambda _number, _epoch: 100)

    def ask(write: Write, written: Told, told: Told, *, is_urgent: bool) -> None:
        assert is_urgent
        write(database)
        asked.append((written, told))

    ends = Deletions(ask)
    ends.retire(1, "owner", 100)
    for _ in range(3):
        _, told = asked[-1]
        told(sqlite3.OperationalError(patience.NO_ANSWER))
        assert ends.num_failed == 1
        ends.retry(is_failing=True)
    for written, _ in asked:
        written(None)
    assert not ends.hidden
    assert dict(ends._retired_bytes) == {"owner": 100}


def test_one_that_was_not_answered_and_is_refused_then_is_told_both() -> None:
    answers: list[tuple[Told, Told]] = []

    def ask(write: Write, written: Told, told: Told, *, is_urgent: bool) -> None:
        del write, is_urgent
        answers.append((written, told))

    def answer(error: Exception) -> None:
        for tell in answers.pop():
            tell(error)

    asked, heard = Deletions(ask), list[Exception | None]()
    asked.delete(1, heard.append, epoch=1)
    for _ in range(3):
        answer(TimeoutError())
        assert not asked.is_gone(1)
        asked.retry(is_failing=True)
    assert [type(error) for error in heard] == [TimeoutError]
    answer(LeaseLost())
    assert [type(error) for error in heard] == [TimeoutError, LeaseLost]
    assert not (asked.hidden)
    assert not (asked.num_failed)
    assert not (asked._told_late)


def test_a_long_session_is_deleted_in_parts_that_are_hidden_and_counted(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deleted_rows, "DELETED_ENTRIES", 4)
    stored(disk, "long", num_turns=10)
    with disk.world() as world:
        disk.store.is_slow = True
        world.manager.close(OWNER, "long")
        before = counted(world)
        left = [before]
        while disk.store.num_untold:
            disk.store.tell(1)
            assert counted(world) == on_disk(disk)
            left.append(counted(world))
            assert not world.do(world.manager.list(OWNER)).sessions
            world.manager._sessions.check_free(OWNER, "long")
        assert left == sorted(set(left), reverse=True)
        assert len(left) == 1 + 3, "eleven entries"
        assert num_rows(disk) == counted(world) == 0


def test_what_a_crash_leaves_of_a_long_one_goes_when_a_server_starts(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deleted_rows, "DELETED_ENTRIES", 4)
    stored(disk, "long", num_turns=10)
    with disk.world() as world:
        disk.store.is_slow = True
        world.manager.close(OWNER, "long")
        disk.store.tell(1)
    with disk.world(kv_tiers="disk") as world:
        assert num_rows(disk) == 1
        assert counted(world) == on_disk(disk) > 0
        assert world.manager._quotas.owned_sessions.held_by(OWNER) == 0
        for _ in range(3):
            tick(world)
        assert not told(world), "the half of a history is none"
        assert num_rows(disk) == counted(world) == 0


def test_parts_are_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deleted_rows, "DELETED_BYTES", 2 * len(DATA) + 1)
    fill(tmp_path, 1, expires_s=NOW_S, num_entries=5)
    with closing(Database(tmp_path)) as database:
        freed = []
        while count(database)[0]:
            with database.transaction():
                freed.append(database.delete_some(1))
        found = [each and (each.num_bytes // len(DATA), each.is_gone) for each in freed]
        assert found == [(2, False), (2, False), (1, True)]


def test_a_fork_that_has_computed_nothing_is_deleted_at_once(disk: Disk) -> None:
    stored(disk, "one")
    with disk.world(kv_tiers="disk") as world:
        forks = [world.manager.edits.fork(OWNER, "one").session_id for _ in range(2)]
        world.manager.close(OWNER, forks[0])
        assert num_rows(disk) == 2
    with disk.world(kv_tiers="disk") as world:
        world.manager.close(OWNER, forks[1])
        assert num_rows(disk) == 1
        tick(world)
        assert not told(world)


def test_retired_sessions_count_for_their_owner_until_they_are_gone(disk: Disk) -> None:
    stored(disk, "one", "two")
    with disk.world(kv_tiers="disk") as world:
        before = counted(world)
        world.manager.get(OWNER, "two")
        for name in ("one", "two"):
            world.manager.close(OWNER, name)
        assert (num_rows(disk), counted(world)) == (2, before)
        stored_bytes = world.manager._quotas.stored_bytes
        stored_bytes._limit = before
        with pytest.raises(ServerBusy, match="bytes in the store"):
            world.create(is_stored=True, messages=(Message("user", "word"),))
    with disk.world(kv_tiers="disk") as world:
        assert counted(world) == before
        assert world.manager._quotas.owned_sessions.held_by(OWNER) == 0
        tick(world)
        assert len(told(world)) == 2
        assert counted(world) == on_disk(disk) == 0


def test_beyond_a_bound_sessions_are_deleted_and_their_kv_ages_out(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    histories = stored(disk, "one", "two", "three", "four")
    other = Owner("other")
    with disk.world(kv_tiers="disk") as world:
        world.create(owner=other, is_stored=True, session_id="one")
        world.submit("one", turn("1"), owner=other)
        world.engine.run()
        size = counted(world) // 5
    monkeypatch.setattr(deletions, "MAX_RETIRED_BYTES", int(1.5 * size))
    with disk.world(kv_tiers="disk") as world:
        for name in ("one", "two"):
            world.manager.close(OWNER, name)
        assert num_rows(disk) == 4
        world.manager.close(other, "one")
        assert num_rows(disk) == 4, "of another owner's there is none yet"
    with disk.world(kv_tiers="disk") as world:  # and so it is behind a restart
        world.manager.close(OWNER, "three")
        assert num_rows(disk) == 3
        tick(world)
        assert histories["one"] in told(world)
        assert len(told(world)) == 2
        world.manager.close(OWNER, "four")
        assert num_rows(disk) == 1, "there is room for one again"
        tick(world)
        assert told(world)[-1] == histories["four"]


def test_retired_sessions_keep_no_other_from_expiring(disk: Disk) -> None:
    stored(disk, *(f"s{number}" for number in range(SLICE)), "old")
    with disk.world(kv_tiers="disk") as world:
        for number in range(SLICE):
            world.manager.close(OWNER, f"s{number}")
        with disk.store._database.transaction():
            execute = disk.store._database._writer.execute
            execute("UPDATE sessions SET expires = 5.0, model = x'00' WHERE id = 'old'")
        world.engine.die()
        world.engine.deliver()
        tick(world)
        assert num_rows(disk) == SLICE, "nobody has to be told of the one that expired"


def test_what_owners_hold_is_known_without_a_look_at_entries(tmp_path: Path) -> None:
    fill(tmp_path, 50, expires_s=NOW_S + 1.0, num_entries=3)
    with closing(Database(tmp_path)) as database:
        tables: set[str | None] = set()

        def note(_action: int, table: str | None, *_: object) -> int:
            tables.add(table)
            return 0

        database._reader.set_authorizer(note)
        assert database.holdings() == [
            (OWNER.owner_id, 50, 150 * len(DATA) + 50 * len(row(1).settings), 0)
        ]
        assert "sessions" in tables
        assert "entries" not in tables
        database._reader.set_authorizer(None)


def test_books_of_bytes_are_those_of_the_entries(disk: Disk) -> None:
    with disk.world() as world:
        for name in ("one", "two"):
            world.create(is_stored=True, session_id=name)
            for number in range(3):
                world.run(name, turn(f"t{number}"))
        world.manager.edits.rewind(OWNER, "one", None)
        world.manager.update(OWNER, "two", metadata={"a": "b"})
        found = disk.store._database._reader.execute(
            "SELECT num_bytes, (SELECT sum(length(entry)) FROM entries WHERE session = number)"
            " FROM sessions"
        ).fetchall()
        assert len(found) == 2
        assert all(kept == held for kept, held in found)


def test_what_a_disk_answers_late_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "DISK_WAIT_S", 0.05)
    monkeypatch.setattr(deleted_rows, "DELETED_ENTRIES", 2)
    fill(tmp_path, 1, expires_s=NOW_S + 9.0, num_entries=5)
    with served(tmp_path) as (world, store):
        goes_on = threading.Event()
        hang_until(goes_on, store)
        told: list[str] = []
        store.deletions._begun.add(1)  # a part of it is gone
        store.deletions.delete(1, lambda error: told.append(str(error)))
        settle(world, lambda: told)
        assert told == [patience.NO_ANSWER]
        goes_on.set()
        settle(world, lambda: not store.deletions.hidden)
        assert count(store._database)[0] == 0
        assert not store.deletions._begun
        assert not store.deletions.num_failed
