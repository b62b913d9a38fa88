"""`SimDatabase`: a shared store that one simulated replica uses, as `PostgresDatabase` is one."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from typing import ClassVar, TypeVar

from msgspec import structs

from session_server.sessions.store.database import Behind
from session_server.sessions.store.deleted_rows import DELETED_BYTES, DELETED_ENTRIES, Freed
from session_server.sessions.store.ownership import HeldBy, Joined, Moved, NameTaken
from session_server.sessions.store.pieces import first_rows
from session_server.sessions.store.records import Holding, Parts, RecordRow, SessionRow
from session_server.sessions.store.survey import STATE, SurveyAnswer, SurveyQuestion, owners_with
from tests.sim_replicas.server import DatabaseServer, Transaction
from tests.sim_replicas.tables import Change, HeldRow, Tables

_T = TypeVar("_T")
_MOST = 1 << 63

_PLACES: dict[str, Callable[[SessionRow], float]] = {
    "opened": lambda _row: 0.0,
    "active": lambda row: 1e12 - row.expires_s,
    "tokens": lambda row: -1.0 * row.num_tokens,
    "turns": lambda row: -1.0 * row.num_turns,
    "cached": lambda _row: 2.0,
    "ttft": lambda _row: 2.0,
}
"""As `survey.PLACES`, which is SQL."""


class SimDatabase:
    """Implements `SharedDatabase`. `way`: how a question comes to the server and an answer back;
    None for at once."""

    read_errors: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    has_deleted = False
    directory = None

    def __init__(
        self, server: DatabaseServer, way: Callable[[Callable[[], object]], object] | None = None
    ) -> None:
        self.server = server
        self.replica_id = 0
        self.begun: Transaction | None = None
        """A transaction that was begun already: the next block goes on with it."""

        self._way = way
        self._work: Tables | None = None
        self._changes: list[Change] = []

    def _ask(self, call: Callable[[], _T]) -> _T:
        if self._way is None:
            return call()
        return self._way(call)  # type: ignore[return-value]  # what the call returned

    @property
    def secret(self) -> bytes:
        """See `StoreDatabase`."""
        return self.server.secret

    @property
    def place(self) -> str:
        """See `StoreDatabase`."""
        return "a simulated database"

    def shorten_log(self, *, erases: bool) -> None:
        """Do nothing: there is none."""

    def is_unavailable(self, error: Exception) -> bool:
        """Return whether the way to the database is at fault."""
        return isinstance(error, OSError)

    def fails_all(self, error: Exception) -> bool:
        """Return whether the way to the database is at fault."""
        return isinstance(error, OSError)

    def is_passing(self, error: Exception) -> bool:
        """Return False: no transaction is undone for another one."""
        return False

    def explain(self, error: Exception) -> str:
        """See `StoreDatabase`."""
        return str(error) or type(error).__name__

    def close(self) -> None:
        """Do nothing: no connection is open."""

    # -- verbs

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit what happens in the block, all or nothing. Raises LeaseLost, ConnectionError."""
        begun = self.begun or self.server.begin(self.replica_id)
        self.begun = None
        self._work, self._changes = self.server.tables.copy(), []
        try:
            yield
            self.server.commit(begun, self._work, self._changes)
        finally:
            self._work = None
            self.server.end(begun)

    @property
    def _tables(self) -> Tables:
        assert self._work is not None, "a verb outside of a transaction"
        return self._work

    def put(self, row: SessionRow, *entries: bytes) -> None:
        """Write a session with these entries. Raises Moved, NameTaken."""
        _check_bounds(row)
        self._free_name(row)
        tables = self._tables
        there = tables.sessions.get(row.number)
        sizes = {"num_entries": len(entries), "num_bytes": sum(map(len, entries))}
        if there is None:
            if row.epoch > 1:
                raise Moved(f"session {row.number} is gone")
        else:
            was = there.row
            ours = (row.owner_id, row.session_id, self.replica_id, row.epoch)
            if (was.owner_id, was.session_id, there.holder, was.epoch) != ours:
                raise Moved(f"session {row.number} is not held in epoch {row.epoch}")
        tables.sessions[row.number] = HeldRow(structs.replace(row, **sizes), self.replica_id)
        tables.entries[row.number] = entries
        self._note(row, entries, is_whole=True)

    def _free_name(self, row: SessionRow) -> None:
        held = self._tables.named(row.owner_id, row.session_id)
        if held is None or held.row.number == row.number:
            return
        if not self.server.is_over(held.row) or self.server.is_anothers(held, self.replica_id):
            raise NameTaken(f"{row.session_id} is another open session")
        freed = _hidden(held.row, expires_s=min(held.row.expires_s, 1.0))
        self._tables.sessions[freed.number] = HeldRow(freed, None)

    def append(self, row: SessionRow, *entries: bytes) -> None:
        """Write entries behind others. Raises Behind, Moved."""
        _check_bounds(row)
        held = self._tables.sessions.get(row.number)
        if held is None or (held.holder, held.row.epoch) != (self.replica_id, row.epoch):
            raise Moved(f"session {row.number} is not held in epoch {row.epoch}")
        if held.row.num_entries != row.num_entries:
            raise Behind(f"session {row.number} has not {row.num_entries} entries")
        changed = structs.replace(
            held.row,
            expires_s=row.expires_s,
            settings=row.settings,
            num_tokens=row.num_tokens,
            num_turns=row.num_turns,
            num_uses=row.num_uses,
            num_entries=row.num_entries + len(entries),
            num_bytes=held.row.num_bytes + sum(map(len, entries)),
        )
        self._tables.sessions[row.number] = held._replace(row=changed)
        self._tables.entries[row.number] += entries
        self._note(row, entries, is_whole=False)

    def touch(self, row: SessionRow) -> None:
        """Write what the row says, but no entry. Raises as `append`."""
        self.append(row)

    def _note(self, row: SessionRow, entries: tuple[bytes, ...], *, is_whole: bool) -> None:
        me = self.replica_id
        change = Change(row.number, row.session_id, row.epoch, me, entries, is_whole)
        self._changes.append(change)

    def delete_some(self, number: int, epoch: int | None = None) -> Freed | None:
        """Delete a session, or the last entries of a long one. Raises Moved."""
        held = self._deletable(number, epoch)
        if held is None:
            return None
        row, entries = held.row, self._tables.entries[number]
        num_retired = row.num_bytes if row.expires_s == 0 else 0
        num_left, num_bytes = _last_entries(entries)
        if num_left == 0:
            del self._tables.sessions[number], self._tables.entries[number]
            total = row.num_bytes + len(row.settings)
            return Freed(row.owner_id, total, num_retired, is_gone=True)
        sizes = {"num_entries": num_left, "num_bytes": row.num_bytes - num_bytes}
        if row.expires_s >= 0:
            row = _hidden(row, expires_s=-1.0)
        self._tables.sessions[number] = held._replace(row=structs.replace(row, **sizes))
        self._tables.entries[number] = entries[:num_left]
        return Freed(row.owner_id, num_bytes, num_retired, is_gone=False)

    def retire(self, number: int, epoch: int | None = None) -> int:
        """Let a session have expired long ago. Raises Moved."""
        held = self._deletable(number, epoch)
        if held is None:
            return 0
        self._tables.sessions[number] = held._replace(row=_hidden(held.row, expires_s=0.0))
        return held.row.num_bytes

    def _deletable(self, number: int, epoch: int | None) -> HeldRow | None:
        held = self._tables.sessions.get(number)
        if held is None:
            return None
        is_anothers = self.server.is_anothers(held, self.replica_id)
        if held.row.expires_s > 0 and (is_anothers or epoch not in (None, held.row.epoch)):
            raise Moved(f"session {number} is another replica's, or was since epoch {epoch}")
        return held

    def note_time(self, now_s: float) -> None:
        """Do nothing: the clock of the database is the time."""

    def put_record(self, row: RecordRow, parts: Parts) -> None:
        """Write a record with all of its parts. Raises NameTaken."""
        for other in self._tables.records.values():
            is_same = (other.owner_id, other.record_id) == (row.owner_id, row.record_id)
            if (other.number == row.number) != is_same:
                raise NameTaken(f"record {row.number}, {row.record_id}, is another one")
        written = structs.replace(row, num_writes=row.num_writes + 1, used_last=0)
        self._tables.records[row.number] = written
        self._tables.parts[row.number] = dict(parts)

    def change_record(self, row: RecordRow, parts: Parts, removed: Sequence[int]) -> None:
        """Write parts of a record, and delete some. Raises Behind."""
        was = self._tables.records.get(row.number)
        if was is None or was.num_writes != row.num_writes or row.used_last not in (0, was.used):
            raise Behind(f"record {row.number} was not written {row.num_writes} times")
        self._tables.records[row.number] = structs.replace(
            was, num_bytes=row.num_bytes, used=row.used, num_writes=row.num_writes + 1
        )
        left = self._tables.parts[row.number] | dict(parts)
        self._tables.parts[row.number] = {n: p for n, p in left.items() if n not in set(removed)}

    def delete_record(self, number: int) -> None:
        """Delete a record and its parts, if it is there."""
        self._tables.records.pop(number, None)
        self._tables.parts.pop(number, None)

    # -- reads

    def _rows(self, wanted: Callable[[SessionRow], bool], limit: int = -1) -> list[SessionRow]:
        def read() -> list[SessionRow]:
            found = [held.row for held in self.server.tables.sessions.values() if wanted(held.row)]
            found.sort(key=lambda row: row.number)
            return found if limit < 0 else found[:limit]

        return self._ask(read)

    def find(self, owner_id: str, session_id: str) -> SessionRow | None:
        """Return a session by its id."""

        def read() -> SessionRow | None:
            held = self.server.tables.named(owner_id, session_id)
            return None if held is None else held.row

        return self._ask(read)

    def numbered(self, number: int) -> SessionRow | None:
        """Return the session of a number."""
        return next(iter(self._rows(lambda row: row.number == number)), None)

    def page(self, owner_id: str, *, after: int, now_s: float, limit: int) -> list[SessionRow]:
        """Return up to `limit` sessions of an owner that have a higher number, in order."""
        return self._rows(
            lambda row: row.owner_id == owner_id and row.number > after and row.expires_s >= now_s,
            limit,
        )

    def holdings(self) -> list[Holding]:
        """Return what each owner has."""
        found: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        for row in self._rows(lambda _row: True):
            counts = found[row.owner_id]
            counts[0] += row.expires_s > 0
            counts[1] += row.num_bytes + len(row.settings)
            counts[2] += row.num_bytes if row.expires_s == 0 else 0
        for record in self.records():
            found[record.owner_id][1] += record.num_bytes
        return [Holding(owner_id, *counts) for owner_id, counts in found.items()]

    def holdings_of(self, owner_ids: Sequence[str]) -> list[Holding]:
        """Return what some owners have."""
        return [held for held in self.holdings() if held.owner_id in owner_ids]

    def expired(self, after: tuple[float, int], until_s: float, *, limit: int) -> list[SessionRow]:
        """Return up to `limit` sessions that expire before a time and that no other live replica
        holds, behind a place in that order."""

        def read() -> list[SessionRow]:
            found = [
                held.row
                for held in self.server.tables.sessions.values()
                if held.row.expires_s < until_s
                and (held.row.expires_s, held.row.number) > after
                and not self.server.is_anothers(held, self.replica_id)
            ]
            return sorted(found, key=lambda row: (row.expires_s, row.number))[:limit]

        return self._ask(read)

    def num_expiring(self, since_s: float, until_s: float, *, limit: int) -> int:
        """Return how many sessions expire in this time, counted up to `limit`."""
        return len(self._rows(lambda row: since_s <= row.expires_s < until_s, limit))

    def noted_s(self) -> float | None:
        """Return None: the database has a clock."""
        return None

    def entries(
        self, number: int, *, start: int = 0, limit: int = -1, max_bytes: int | None = None
    ) -> list[bytes]:
        """Return entries of a session from a position on, in order."""

        def read() -> list[bytes]:
            found = list(self.server.tables.entries.get(number, ()))[start:]
            return _bounded(found, limit, max_bytes)

        return self._ask(read)

    def last_number(self) -> int:
        """Return the highest number of a session, 0 without one."""
        return self._ask(lambda: max(self.server.tables.sessions, default=0))

    def census(self, now_s: float) -> tuple[int, int]:
        """Return how many sessions are open, and how many have expired."""
        rows = self._rows(lambda row: row.expires_s > 0)
        num_open = sum(row.expires_s >= now_s for row in rows)
        return num_open, len(rows) - num_open

    def records(self) -> list[RecordRow]:
        """Return all records, that first which was not written for longest."""
        return self._ask(
            lambda: sorted(self.server.tables.records.values(), key=lambda row: row.used)
        )

    def find_record(self, owner_id: str, record_id: str) -> RecordRow | None:
        """Return a record as of the last commit."""
        found = [r for r in self.records() if (r.owner_id, r.record_id) == (owner_id, record_id)]
        return next(iter(found), None)

    def record_made_in(
        self, owner_id: str, session_id: str, kind: str, *, beside: str
    ) -> RecordRow | None:
        """Return a record of a kind that was made in a session, other than one of an id."""
        asked = owner_id, session_id, kind
        made = [r for r in self.records() if (r.owner_id, r.session_id, r.kind) == asked]
        return next((row for row in made if row.record_id != beside), None)

    def evict_records(self, owner_id: str | None, most_bytes: int) -> list[tuple[str, int]]:
        """Delete some of the records that were written longest ago; see `SharedDatabase`. At once:
        nobody waits for it, and what is lost on the way is asked for again."""
        return self.server.evict(self.replica_id, owner_id, most_bytes)

    def parts(
        self, number: int, *, after: int = -1, limit: int = -1, max_bytes: int | None = None
    ) -> Parts:
        """Return parts of a record behind a position, in order."""

        def read() -> Parts:
            parts = sorted(self.server.tables.parts.get(number, {}).items())
            found = [part for part in parts if part[0] > after]
            return first_rows(found[: None if limit < 0 else limit], 1, max_bytes)

        return self._ask(read)

    def survey(self, question: SurveyQuestion) -> SurveyAnswer:
        """Look through all sessions for a page of them."""
        rows = self._rows(lambda _row: True)
        owners = owners_with(question, lambda: sorted({row.owner_id for row in rows}))
        place = _PLACES[question.sort]
        found = [
            (place(row), row)
            for row in rows
            if row.expires_s >= question.now_s
            and row.number not in question.without
            and (
                question.text in STATE or question.text in row.session_id or row.owner_id in owners
            )
        ]
        found.sort(key=lambda each: (each[0], each[1].number))
        after = question.after or (-1e300, 0)
        page = [each for each in found if (each[0], each[1].number) > after]
        return SurveyAnswer(page[: question.limit], len(found))

    # -- leases

    def peers(self, role: str) -> list[tuple[int, str]]:
        """Return nobody: replicas of the simulator have no other role."""
        return []

    def join(self, address: str, lease_s: float, *, role: str = "both") -> Joined:
        """Take part from now on; see `SharedDatabase`."""
        joined = self._ask(lambda: self.server.join(address, lease_s))
        self.replica_id = joined.replica_id
        return joined

    def renew(self, lease_s: float) -> float:
        """Renew the lease; return the database's clock. Raises LeaseLost."""
        me = self.replica_id
        return self._ask(lambda: self.server.renew(me, lease_s))

    def address_of(self, replica_id: int) -> str | None:
        """Return where a replica is reached; None if its lease is over."""
        return self._ask(lambda: self.server.address_of(replica_id))

    def leave(self) -> None:
        """Give up the lease, and with it every session."""
        me = self.replica_id
        self._ask(lambda: self.server.leave(me))
        self.replica_id = 0

    def take(
        self, owner_id: str, session_id: str, without: Container[int] = ()
    ) -> SessionRow | HeldBy | None:
        """Become the holder of a session; see `SharedDatabase`. Raises LeaseLost."""
        me = self.replica_id
        return self._ask(lambda: self.server.take(me, (owner_id, session_id), without))

    def release(self, numbers: Sequence[int]) -> None:
        """Hold sessions no longer."""
        me = self.replica_id
        self._ask(lambda: self.server.release(me, numbers))

    def holders_of(self, numbers: Sequence[int]) -> list[HeldBy]:
        """Return which of these sessions other replicas hold."""
        me = self.replica_id
        return self._ask(lambda: self.server.holders_of(me, numbers))

    def ask_for(self, held: Sequence[HeldBy]) -> None:
        """Ask the holders of sessions to release them."""
        self._ask(lambda: self.server.ask_for(held))

    def asked(self, timeout_s: float) -> list[int]:
        """Wait for what others ask this replica to release; return the numbers."""
        me = self.replica_id
        return self._ask(lambda: self.server.take_asked(me, timeout_s))


def _check_bounds(row: SessionRow) -> None:
    """Refuse what a column of PostgreSQL does not hold."""
    if max(row.num_tokens, row.num_turns, row.num_uses, row.number) >= _MOST:
        raise OverflowError("an integer is out of range")


def _hidden(row: SessionRow, *, expires_s: float) -> SessionRow:
    """Return a row under another name, which nothing that its holder may still have to write
    changes."""
    name = f"{row.session_id}/{row.number}"
    return structs.replace(row, session_id=name, expires_s=expires_s, epoch=row.epoch + 1)


def _last_entries(entries: Sequence[bytes]) -> tuple[int, int]:
    """Return how many entries are left behind one write that deletes, and its bytes."""
    num_left, total = len(entries), 0
    for entry in entries[::-1][:DELETED_ENTRIES]:
        if total and total + len(entry) > DELETED_BYTES:
            break
        num_left, total = num_left - 1, total + len(entry)
    return num_left, total


def _bounded(entries: list[bytes], limit: int, max_bytes: int | None) -> list[bytes]:
    rows = [(entry,) for entry in (entries if limit < 0 else entries[:limit])]
    return [entry for (entry,) in first_rows(rows, 0, max_bytes)]
