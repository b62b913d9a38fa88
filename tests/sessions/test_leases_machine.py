"""Three replicas that open, take, write, lose and delete the same sessions, in any order, some of
them in the midst of a commit: one at a time can write to each, and nothing that it has committed is
lost."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import hypothesis.strategies as st
import psycopg
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec import structs
from psycopg.errors import LockNotAvailable

from session_server.sessions.postgres import connections
from session_server.sessions.postgres.database import PostgresDatabase
from session_server.sessions.postgres.holdings import SCAN
from session_server.sessions.store.ownership import HeldBy, LeaseLost, Moved, NameTaken
from session_server.sessions.store.records import SessionRow
from tests.depth import at_depth
from tests.sessions.test_leases import LATER_S, LEASE_S, NEW

REPLICAS = range(3)
NAMES = ("a", "b")
WANTED = (
    *("opened", "name taken", "taken free", "taken again", "held by another"),
    *("taken from one that is over", "waits for a commit of one that is over"),
    *("written", "written in a commit", "refused: moved", "refused: lease lost"),
    *("moved in a commit", "committed after its lease", "undone"),
    *("released", "left", "came back", "renewed", "not renewed"),
    *("deleted", "not deleted: held", "not deleted: moved", "retired"),
)


@dataclass
class Shadow:
    """What a session is to be. `lock`: the replica whose commit under way has written it."""

    number: int
    epoch: int
    holder: int | None
    entries: list[tuple[int, bytes]] = field(default_factory=list)
    lock: int | None = None


@dataclass
class Commit:
    """A transaction that a replica is in the midst of, and what it has written."""

    stack: contextlib.ExitStack
    entries: list[tuple[Shadow, tuple[int, bytes]]] = field(default_factory=list)


class LeasesMachine(RuleBasedStateMachine):
    """`databases` are those of the replicas; their ids change as they come back."""

    reached: ClassVar[Counter[str]] = Counter()
    databases: ClassVar[list[PostgresDatabase]]
    superuser: ClassVar[psycopg.Connection]

    def __init__(self) -> None:
        super().__init__()
        tables = ("sessions", "replicas", "holdings")
        self.run(f"TRUNCATE {', '.join(f'session_server.{name}' for name in tables)} CASCADE")
        self.sessions: dict[str, Shadow] = {}
        self.rows: dict[tuple[int, str], SessionRow] = {}
        """What each replica believes to hold."""

        self.commits: dict[int, Commit] = {}
        self.live: set[int] = set()
        """Ids whose lease has not ended."""

        self.last_number = 0
        for replica in REPLICAS:
            self.join(replica)

    def run(self, statement: str) -> list[tuple[object, ...]]:
        found = self.superuser.execute(statement)
        return found.fetchall() if found.description else []

    def join(self, replica: int) -> None:
        self.live.add(self.databases[replica].join(f"r{replica}", LEASE_S).replica_id)

    def id_of(self, replica: int) -> int:
        return self.databases[replica].replica_id

    def is_live(self, replica: int) -> bool:
        return self.id_of(replica) in self.live

    def busy_ids(self) -> set[int]:
        return {self.id_of(replica) for replica in self.commits}

    def is_locked(self, shadow: Shadow, replica: int) -> bool:
        """Whether a write over the connection of a replica for commits waits for another's."""
        return shadow.lock not in {None, replica}

    def has_other_holder(self, shadow: Shadow, replica: int) -> bool:
        return shadow.holder in self.live - {self.id_of(replica)}

    def write(self, replica: int, act: Callable[[PostgresDatabase], object]) -> None:
        """Do something in a transaction; in none that is under way."""
        with self.databases[replica].transaction():
            act(self.databases[replica])

    # -- opening and writing

    @rule(replica=st.sampled_from(REPLICAS), name=st.sampled_from(NAMES))
    def put_new(self, replica: int, name: str) -> None:
        if replica in self.commits:
            self.end(replica, None)
        self.last_number += 1
        row = structs.replace(NEW, number=self.last_number, session_id=name)
        expected: type[Exception] | None = None
        if not self.is_live(replica):
            expected = LeaseLost
        elif name in self.sessions:
            is_locked = self.is_locked(self.sessions[name], replica)
            expected = LockNotAvailable if is_locked else NameTaken
        if expected is not None:
            with pytest.raises(expected):
                self.write(replica, lambda database: database.put(row, b"first"))
            self.reached["name taken"] += expected is NameTaken
            return
        self.write(replica, lambda database: database.put(row, b"first"))
        entries = [(1, b"first")]
        self.sessions[name] = Shadow(row.number, 1, self.id_of(replica), entries)
        self.rows[replica, name] = row
        self.reached["opened"] += 1

    @precondition(lambda self: self.rows)
    @rule(place=st.integers(0, 5), is_whole=st.booleans())
    def write_to(self, place: int, *, is_whole: bool) -> None:
        """Write what a replica believes to hold, alone or in the commit that is under way."""
        replica, name = sorted(self.rows)[place % len(self.rows)]
        self.write_row(replica, name, is_whole=is_whole)

    @precondition(lambda self: self.rows)
    @rule(place=st.integers(0, 5))
    def begin_to_write(self, place: int) -> None:
        replica, name = sorted(self.rows)[place % len(self.rows)]
        self.begin(replica)
        self.write_row(replica, name, is_whole=False)

    def write_row(self, replica: int, name: str, *, is_whole: bool) -> None:
        row = self.rows[replica, name]
        shadow = self.sessions.get(name)
        is_held = (
            shadow is not None
            and (shadow.number, shadow.epoch) == (row.number, row.epoch)
            and shadow.holder == self.id_of(replica)
        )
        commit = self.commits.get(replica)
        entry = b"%d of %d" % (self.last_number, replica)
        # In its first epoch a session that is not there is a new one: whoever has given one up
        # forgets it, and does not write it again.
        may_be_new = row.epoch == 1 and (shadow is None or shadow.number != row.number)
        is_whole = is_whole and commit is None and not may_be_new
        pending = 0 if shadow is None else self.num_pending(shadow)
        have = [] if shadow is None else shadow.entries
        row = structs.replace(row, num_entries=len(have) + pending)
        database = self.databases[replica]

        def act() -> None:
            if is_whole:
                database.put(row, *[data for _, data in have], entry)
            else:
                database.append(row, entry)

        if commit is not None:
            if is_held:
                assert shadow is not None
                act()
                commit.entries.append((shadow, (row.epoch, entry)))
                shadow.lock = replica
                self.reached["written in a commit"] += 1
                return
            with pytest.raises(Moved) as failed:
                act()
            self.end(replica, failed.value)
            self.reached["moved in a commit"] += 1
            return
        if not self.is_live(replica):
            expected: tuple[type[Exception], ...] = (LeaseLost,)
        elif is_held:
            self.write(replica, lambda _: act())
            assert shadow is not None
            # Whoever writes all of it writes it in the epoch that it has.
            kept = [(row.epoch, data) for _, data in have] if is_whole else have
            shadow.entries = [*kept, (row.epoch, entry)]
            self.reached["written"] += 1
            return
        else:
            # One that another's commit has written is waited for to put it, or its name.
            expected = (Moved, NameTaken, LockNotAvailable) if is_whole else (Moved,)
        with pytest.raises(expected):
            self.write(replica, lambda _: act())
        self.reached["refused: lease lost" if expected[0] is LeaseLost else "refused: moved"] += 1

    def num_pending(self, shadow: Shadow) -> int:
        written = (each for commit in self.commits.values() for each, _ in commit.entries)
        return sum(each is shadow for each in written)

    # -- a commit that takes its time

    def begin(self, replica: int) -> None:
        if replica in self.commits:
            return
        stack = contextlib.ExitStack()
        if not self.is_live(replica):
            with pytest.raises(LeaseLost):
                stack.enter_context(self.databases[replica].transaction())
            return
        stack.enter_context(self.databases[replica].transaction())
        self.commits[replica] = Commit(stack)

    @precondition(lambda self: self.commits)
    @rule(place=st.integers(0, 2), is_undone=st.booleans())
    def finish(self, place: int, *, is_undone: bool) -> None:
        replica = sorted(self.commits)[place % len(self.commits)]
        self.end(replica, KeyError() if is_undone else None)

    def end(self, replica: int, error: Exception | None) -> None:
        commit = self.commits.pop(replica)
        for shadow, written in commit.entries:
            shadow.lock = None
            if error is None:
                shadow.entries.append(written)
        if error is not None:
            with pytest.raises(type(error)), commit.stack:
                raise error
            self.reached["undone"] += 1
            return
        commit.stack.close()
        self.reached["committed after its lease"] += bool(
            commit.entries and not self.is_live(replica)
        )

    # -- who holds it

    @rule(replica=st.sampled_from(REPLICAS), name=st.sampled_from(NAMES))
    def take_one(self, replica: int, name: str) -> None:
        self.take(replica, name)

    def take(self, replica: int, name: str) -> None:
        database, shadow = self.databases[replica], self.sessions.get(name)
        if not self.is_live(replica):
            with pytest.raises(LeaseLost):
                database.take("alice", name)
            return
        if shadow is None:
            assert database.take("alice", name) is None
            return
        if self.has_other_holder(shadow, replica):
            assert shadow.holder is not None
            found = database.take("alice", name)
            assert isinstance(found, HeldBy)
            assert found[:2] == (shadow.number, shadow.holder)
            self.reached["held by another"] += 1
            return
        is_over = shadow.holder not in {None, self.id_of(replica)}
        # A commit under way of one that is over, or of this one's own to this session.
        if (is_over and shadow.holder in self.busy_ids()) or shadow.lock is not None:
            with pytest.raises(LockNotAvailable):
                database.take("alice", name)
            self.reached["waits for a commit of one that is over"] += is_over
            return
        how = "from one that is over" if is_over else "again" if shadow.holder else "free"
        self.reached[f"taken {how}"] += 1
        found = database.take("alice", name)
        assert isinstance(found, SessionRow)
        shadow.epoch += 1
        shadow.holder = self.id_of(replica)
        assert (found.number, found.epoch) == (shadow.number, shadow.epoch)
        assert found.num_entries == len(shadow.entries)
        self.rows[replica, name] = found

    @rule(replica=st.sampled_from(REPLICAS), name=st.sampled_from(NAMES))
    def release(self, replica: int, name: str) -> None:
        shadow = self.sessions.get(name)
        if shadow is None or shadow.lock is not None:
            return
        self.databases[replica].release([shadow.number])
        if shadow.holder == self.id_of(replica):
            shadow.holder = None
            self.reached["released"] += 1

    @precondition(lambda self: self.commits and self.sessions)
    @rule(place=st.integers(0, 2), other=st.sampled_from(REPLICAS), is_deleted=st.booleans())
    def pause_in_a_commit(self, place: int, other: int, *, is_deleted: bool) -> None:
        """Have the lease of one end whose commit is under way, while another one wants what it
        holds, and then once more when the commit is over."""
        paused = sorted(self.commits)[place % len(self.commits)]
        self.lapse(paused)
        for is_over in (False, True):
            if is_over:
                self.end(paused, None)
            for name in list(self.sessions):
                if is_deleted:
                    self.delete(other, name, is_retired=False)
                else:
                    self.take(other, name)

    @rule(replica=st.sampled_from(REPLICAS))
    def lapse_or_come_back(self, replica: int) -> None:
        if self.is_live(replica):
            self.lapse(replica)
        elif replica not in self.commits:
            self.join(replica)
            self.reached["came back"] += 1

    def lapse(self, replica: int) -> None:
        if self.is_live(replica):
            self.databases[replica].renew(LEASE_S)
            self.reached["renewed"] += 1
        query = "UPDATE session_server.replicas SET expires = clock_timestamp() WHERE id = "
        self.run(f"{query}{self.id_of(replica)}")
        self.live.discard(self.id_of(replica))
        with pytest.raises(LeaseLost):
            self.databases[replica].renew(LEASE_S)
        self.reached["not renewed"] += 1

    @rule(replica=st.sampled_from(REPLICAS))
    def leave(self, replica: int) -> None:
        holds = any(shadow.holder == self.id_of(replica) for shadow in self.sessions.values())
        if replica in self.commits or not holds or not self.is_live(replica):
            return
        left = self.id_of(replica)
        self.databases[replica].leave()
        self.live.discard(left)
        for shadow in self.sessions.values():
            shadow.holder = None if shadow.holder == left else shadow.holder
        self.reached["left"] += 1
        self.join(replica)

    # -- deleting

    @rule(replica=st.sampled_from(REPLICAS), name=st.sampled_from(NAMES), is_retired=st.booleans())
    def delete_one(self, replica: int, name: str, *, is_retired: bool) -> None:
        self.delete(replica, name, is_retired=is_retired)

    def delete(self, replica: int, name: str, *, is_retired: bool) -> None:
        shadow = self.sessions.get(name)
        if shadow is None or replica in self.commits:
            return
        number = shadow.number

        def act(database: PostgresDatabase) -> None:
            database.retire(number) if is_retired else database.delete_some(number)

        expected: type[Exception] | None = None
        if not self.is_live(replica):
            expected = LeaseLost
        elif self.is_locked(shadow, replica):
            expected = LockNotAvailable
        elif self.has_other_holder(shadow, replica):
            expected = Moved
        if expected is not None:
            with pytest.raises(expected):
                self.write(replica, act)
            self.reached["not deleted: moved"] += expected is Moved
            self.reached["not deleted: held"] += expected is LockNotAvailable
            return
        self.write(replica, act)
        del self.sessions[name]
        self.reached["retired" if is_retired else "deleted"] += 1

    # -- what is there

    @invariant()
    def what_was_committed_is_there(self) -> None:
        query = (
            "SELECT id, number, epoch, num_entries, (SELECT array_agg(entries.epoch ORDER BY"
            " position) FROM session_server.entries WHERE session = number),"
            " (SELECT array_agg(entry ORDER BY position) FROM session_server.entries"
            f" WHERE session = number) FROM session_server.sessions WHERE expires = {LATER_S}"
        )
        found = {
            name: (number, epoch, num_entries, list(zip(epochs, entries, strict=True)))
            for name, number, epoch, num_entries, epochs, entries in self.run(query)
        }
        assert found == {
            name: (shadow.number, shadow.epoch, len(shadow.entries), shadow.entries)
            for name, shadow in self.sessions.items()
        }
        for *_, entries in found.values():
            epochs = [epoch for epoch, _ in entries]
            assert epochs == sorted(epochs)

    @invariant()
    def what_owners_have_is_counted(self) -> None:
        query = "SELECT owner, sum(num_sessions), sum(num_bytes), sum(num_retired)"
        scanned = self.run(f"{query} FROM ({SCAN}) AS each GROUP BY owner")
        assert self.databases[0].holdings() == scanned

    def teardown(self) -> None:
        for replica in list(self.commits):
            self.end(replica, None)
        self.what_was_committed_is_there()


def test_replicas_keep_their_promises(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LOCK_WAIT_S", 0.02)
    monkeypatch.setattr(connections, "IDLE_TIMEOUT_S", 300)
    LeasesMachine.reached.clear()
    with contextlib.ExitStack() as stack:
        superuser = psycopg.connect(url, autocommit=True, options="-c search_path=session_server")
        LeasesMachine.superuser = stack.enter_context(superuser)
        LeasesMachine.databases = [
            stack.enter_context(contextlib.closing(PostgresDatabase(url))) for _ in REPLICAS
        ]
        run_state_machine_as_test(
            LeasesMachine,
            settings=settings(
                max_examples=at_depth(200, proof=2000),
                stateful_step_count=50,
                deadline=None,
                derandomize=True,
                database=None,
                phases=(Phase.generate,),
            ),
        )
    missing = [name for name in WANTED if not LeasesMachine.reached[name]]
    assert not missing, f"never happened: {missing}; reached {dict(LeasesMachine.reached)}"
