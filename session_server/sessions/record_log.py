"""`RecordLog`: write records that are no sessions to the store, and read them.

Writes of a record follow each other. Where one fails the record goes on in memory, and is written
again, whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count, islice
from typing import Final

from session_server.sessions.place_counter import PlaceCounter
from session_server.sessions.store.backend import StoreVerbs
from session_server.sessions.store.records import Parts, RecordRow
from session_server.sessions.store.session_store import SessionStore
from session_server.sessions.store.writer import Beside, Write

RETRIED_AT_ONCE: Final = 64
"""Records that are written again at a time, once a first one could be."""

Again = Callable[[], None]
"""Called some time after a write has failed, to have it done again."""


class RecordLog:
    """Write records of every kind to the store; without one nothing is written."""

    def __init__(self) -> None:
        self._store: SessionStore | None = None
        self._rows: list[RecordRow] = []
        self._numbers: Iterator[int] = count(1)
        self._behind: dict[int, Again] = {}

    def keep_in(self, store: SessionStore) -> None:
        """Keep records in a store from now on. Raises sqlite3.Error."""
        self._store = store
        if store.lease is not None:
            # Those of others are found when they are asked for.
            self._numbers = _places(store, PlaceCounter(slot=store.lease.slot_now))
            return
        self._rows = store.records()
        last = max((max(row.number, row.used) for row in self._rows), default=0)
        self._numbers = count(last + 1)

    @property
    def has_store(self) -> bool:
        """Return whether records are written."""
        return self._store is not None

    @property
    def store(self) -> SessionStore:
        """Return where records are written, if they are."""
        assert self._store is not None, "nothing is stored"
        return self._store

    @property
    def is_shared(self) -> bool:
        """Return whether other replicas write records to the same store."""
        return self._store is not None and self._store.is_shared

    @property
    def replica_id(self) -> int:
        """Return which replica of a shared store this is now; 0 without one. None has the id of
        another one, also of one whose lease is over."""
        lease = None if self._store is None else self._store.lease
        return 0 if lease is None else lease.replica_id

    async def address_of(self, replica_id: int) -> str | None:
        """Return where a replica is reached, "" where it has not said; None if its lease is over.
        Raises `read_errors`."""
        lease = self.store.lease
        assert lease is not None, "a store of this server alone"
        return await lease.read(partial(lease.database.address_of, replica_id))

    @property
    def num_behind(self) -> int:
        """Return the records that are not on disk as they are, or still there, because a write has
        failed."""
        return len(self._behind)

    def is_behind(self, number: int) -> bool:
        """Return whether the last write of a record has failed: the next one has all of it."""
        return number in self._behind

    def new_number(self) -> int:
        """Return a number that is higher than all before, and than those on disk."""
        return next(self._numbers)

    def rows(self, kind: str) -> list[RecordRow]:
        """Return the records of a kind that were on disk when the store was opened, that first
        which was not written for longest; once."""
        found = [row for row in self._rows if row.kind == kind]
        self._rows = [row for row in self._rows if row.kind != kind]
        return found

    def slices(self, number: int) -> Iterator[Parts]:
        """Yield the parts of a record that is on disk, some at a time. Raises sqlite3.Error."""
        return self.store.part_slices(number)

    async def find(self, owner_id: str, record_id: str) -> RecordRow | None:
        """Return a record of a shared store as it is there now. Raises `read_errors`."""
        return await self.store.find_record(owner_id, record_id)

    async def read(self, number: int) -> Iterable[Parts]:
        """Return the parts of a record, as `slices` does; all of them where that takes the way to
        another machine. Raises `read_errors`."""
        if not self.is_shared:
            return self.slices(number)
        return await self.store.read_parts(number)

    def give_up(self, number: int) -> None:
        """Write a record no more whose last write has failed."""
        self._behind.pop(number, None)

    def put(self, row: RecordRow, parts: Parts, again: Again) -> Beside:
        """Return the write of a whole record."""
        return self._written(row, parts, lambda database: database.put_record(row, parts), again)

    def change(self, row: RecordRow, parts: Parts, removed: Sequence[int], again: Again) -> Beside:
        """Return the write of some parts of a record, and the removal of others."""

        def write(database: StoreVerbs) -> None:
            database.change_record(row, parts, removed)

        return self._written(row, parts, write, again)

    def ask(self, write: Beside) -> None:
        """Have something written."""
        self.store.ask(*write)

    def delete(self, number: int) -> None:
        """Delete a record; where that fails it is tried again."""

        def write(database: StoreVerbs) -> None:
            database.delete_record(number)

        told = partial(self._note, number, partial(self.delete, number))
        self.ask(Beside(write, told, 0))

    def retry(self) -> None:
        """Do again what has failed: one write, and more once that succeeds."""
        num_tried = 1 if self.store.failure is not None else RETRIED_AT_ONCE
        for number in list(islice(self._behind, num_tried)):
            self._behind.pop(number)()

    def _written(self, row: RecordRow, parts: Parts, write: Write, again: Again) -> Beside:
        num_bytes = sum(len(part) for _, part in parts)
        return Beside(write, partial(self._note, row.number, again), num_bytes)

    def _note(self, number: int, again: Again, error: Exception | None) -> None:
        if error is None:
            self._behind.pop(number, None)
        else:
            self._behind[number] = again


def _places(store: SessionStore, counter: PlaceCounter) -> Iterator[int]:
    while True:
        yield counter.next(store.clock.now_s())
