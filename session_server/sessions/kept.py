"""Keep records of owners, bounded in bytes of each owner and in all: the one unused for longest
goes. Their bytes count as bytes of conversations.

With a store they are on disk as well, and bounded there by the same count: what goes, goes from
there too. After a restart a record is read when it is first asked for, and counts before as it did.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, Generic, Protocol, TypeVar

from session_server.core.errors import InternalInconsistency, QuotaExceeded, ServerBusy
from session_server.core.owner import Owner
from session_server.sessions.backlog import Backlog
from session_server.sessions.quotas import Quotas
from session_server.sessions.record_log import RecordLog
from session_server.sessions.restoring import reading
from session_server.sessions.store.records import Damaged, Parts, RecordRow
from session_server.sessions.store.writer import Beside

_logger: Final = logging.getLogger("session_server.store")

MAX_LOOKS: Final = 8
"""How often a record of a shared store is looked for that changes while it is."""


class KeptRecord(Protocol):
    """Name what `KeptRecords` asks of a record."""

    owner: Owner

    @property
    def key(self) -> str:
        """Return its id, unique for its owner."""

    @property
    def made_in(self) -> str:
        """Return the session in which it was made, which never changes; "" for none."""

    @property
    def num_bytes(self) -> int:
        """Return its host memory as it is now."""


_RecordT = TypeVar("_RecordT", bound=KeptRecord)


class RecordForm(Protocol[_RecordT]):
    """Say how records of one kind are written."""

    noun: str
    """What they are, in the plural."""

    may_change: bool
    """Whether they change once they are made: then another replica may change them too."""

    def parts(self, record: _RecordT) -> Parts:
        """Return all parts of a record."""

    def read(self, owner: Owner, key: str, parts: Parts) -> _RecordT:
        """Return a record from its first parts. Raises Damaged."""

    def read_on(self, record: _RecordT, parts: Parts) -> None:
        """Give a record further parts of it, which follow those that it has. Raises Damaged."""


@dataclass(slots=True, eq=False)
class _Slot(Generic[_RecordT]):
    """Hold a record; None while it is on disk alone. `number`: its own on disk, 0 before it was
    written; `num_writes` were asked for, of which `num_pending` are not told of, and the last is
    known as `used`."""

    owner: Owner
    key: str
    made_in: str
    record: _RecordT | None
    counted_bytes: int = 0
    number: int = 0
    num_writes: int = 0
    used: int = 0
    num_pending: int = 0


class KeptRecords(Generic[_RecordT]):
    """Hold records by owner and id.

    Those that go to make room go in slices: until the last has gone, an owner may hold one more
    than there is room for.
    """

    def __init__(
        self, quotas: Quotas, form: RecordForm[_RecordT], log: RecordLog, backlog: Backlog
    ) -> None:
        self.budget = quotas.budget_of(form.noun)
        self._quotas, self._form, self._log, self._backlog = quotas, form, log, backlog
        self._by_owner: dict[Owner, dict[str, _Slot[_RecordT]]] = {}
        self._in_order: dict[_Slot[_RecordT], None] = {}
        self._num_made_in: Counter[tuple[Owner, str]] = Counter()
        self._crowded: dict[Owner, None] = {}
        """Owners for whose records room is being made."""

        self._turnstile = asyncio.Lock()
        self._find_on_disk(log.rows(form.noun))

    def __len__(self) -> int:
        return len(self._in_order)

    def get(self, owner: Owner, key: str) -> _RecordT | None:
        """Return a record as one in use, or None. A long one that is on disk alone is refused:
        nobody is served while it is read, unless `load` reads it.

        Raises:
            InternalInconsistency: what is stored of it is damaged.
            ServerBusy: the disk cannot be read.
        """
        slot = self._by_owner.get(owner, {}).get(key)
        if slot is None:
            return None
        if slot.record is None:
            told = f"this one of the {self._form.noun} is not read yet: ask again"
            if self._log.is_shared:
                raise ServerBusy(told)
            first, *others = islice(self._read(owner, slot, self._log.slices(slot.number)), 2)
            if others:
                raise ServerBusy(told)
            self._hold(slot, first)
        self._touch(slot)
        assert slot.record is not None, "it was read"
        return slot.record

    async def load(self, owner: Owner, key: str) -> None:
        """Read a record that is on disk alone in slices, others being served in between; one record
        at a time. Does nothing for any other, but one that another replica has made or changed.
        Raises what `get` raises, and ServerBusy for one that goes on to change meanwhile."""
        if not self._log.is_shared:
            await self._load(owner, key)
            return
        for _ in range(MAX_LOOKS):
            slot = self._by_owner.get(owner, {}).get(key)
            if slot is not None and slot.number == 0:
                return  # it was never written
            if not await self._look_up(owner, key):
                return
            await self._load(owner, key)
            # What is here goes where a write of it fails, and is in the store then.
            slot = self._by_owner.get(owner, {}).get(key)
            if slot is not None and slot.record is not None:
                return
        raise ServerBusy(f"this one of the {self._form.noun} changes all the time: ask again")

    async def _load(self, owner: Owner, key: str) -> None:
        slot = self._by_owner.get(owner, {}).get(key)
        if slot is None or slot.record is not None:
            return
        async with self._turnstile:
            slot = self._by_owner.get(owner, {}).get(key)
            if slot is None or slot.record is not None:
                return
            with reading(self._log.store):
                slices = await self._log.read(slot.number)
            if not slices and self._log.is_shared:  # deleted by another replica since it was found
                if slot in self._in_order:
                    self._remove(slot, is_deleted=False)
                return
            record: _RecordT | None = None
            for found in self._read(owner, slot, slices):
                record = found
                await asyncio.sleep(0)
                if slot not in self._in_order or slot.record is not None:
                    return  # it was forgotten, or somebody has read it: it is short
            assert record is not None, "what cannot be read is refused"
            self._hold(slot, record)

    async def _look_up(self, owner: Owner, key: str) -> bool:
        """Find a record in a shared store; what is here of it goes if there is a newer one, or none
        any more. Return whether there may be one. Raises ServerBusy."""
        before = self._by_owner.get(owner, {}).get(key)
        num_writes = 0 if before is None else before.num_writes
        with reading(self._log.store):
            row = await self._log.find(owner.owner_id, key)
        slot = self._by_owner.get(owner, {}).get(key)
        if slot is not before or (slot is not None and self._is_newer(slot, num_writes)):
            return True
        is_there = row is not None and row.kind == self._form.noun
        if slot is not None and row is not None and is_there and row.num_writes <= num_writes:
            return True
        if slot is not None:
            self._remove(slot, is_deleted=False)
        if row is not None and is_there:
            self._find_on_disk([row])
        return is_there

    async def look_up_beside(self, owner: Owner, key: str) -> None:
        """As `look_up_made_in`, of the session in which a record was made."""
        slot = self._by_owner.get(owner, {}).get(key)
        if slot is not None:
            await self.look_up_made_in(owner, slot.made_in, beside=key)

    async def look_up_made_in(self, owner: Owner, session_id: str, *, beside: str = "") -> None:
        """Find out whether other replicas have made records in a session, beside one, or deleted
        all of them, before `num_made_in` is asked for it. Raises ServerBusy."""
        if not self._log.is_shared:
            return
        known = self._by_owner.get(owner, {}).values()
        others = [slot for slot in known if slot.made_in == session_id and slot.key != beside]
        before = [(slot, slot.num_writes) for slot in others]
        made_in = partial(self._log.store.record_made_in, owner.owner_id, session_id)
        with reading(self._log.store):
            row = await made_in(self._form.noun, beside=beside)
        if row is not None:
            if row.record_id not in self._by_owner.get(owner, {}):
                self._find_on_disk([row])
            return
        for slot, num_writes in before:
            if slot in self._in_order and not self._is_newer(slot, num_writes):
                self._remove(slot, is_deleted=False)

    def _is_newer(self, slot: _Slot[_RecordT], num_writes: int) -> bool:
        """Return whether a record has been written here since, or is nowhere else."""
        return slot.number == 0 or slot.num_pending > 0 or slot.num_writes > num_writes

    def add(self, record: _RecordT) -> None:
        """Keep a record, in memory alone for now; older ones go where there is no room.

        Raises:
            QuotaExceeded, ServerBusy: it is larger than all that may be kept, or conversations have
                no room for it.
        """
        self.check(record.owner, record.num_bytes)
        self._insert(_Slot(record.owner, record.key, record.made_in, record))
        self.recount(record)

    def check(self, owner: Owner, num_bytes: int) -> None:
        """Reject bytes for which there will never be room, or is none now: also while room is still
        being made for others of the owner's. Raises QuotaExceeded, ServerBusy."""
        if owner in self._crowded or not self.budget.has_room_for(owner, num_bytes):
            self.budget.check(owner, num_bytes)
        self._quotas.check_growth(owner, num_bytes)

    def check_stored(self, owner: Owner, num_bytes: int) -> None:
        """Reject bytes as `check` does, and those that the store has no room for."""
        self.check(owner, num_bytes)
        if self._log.has_store:
            self._quotas.stored_bytes.check(owner, num_bytes)

    def recount(self, record: _RecordT) -> None:
        """Count a record anew that has changed, if it is kept; older ones go to make room, and at
        last itself: a slice of them now, and the others later."""
        slot = self._slot_of(record)
        if slot is None:
            return
        self._count(slot, record.num_bytes)
        if self._next_to_go(slot.owner) is not None:
            is_at_work = bool(self._crowded)
            self._crowded[slot.owner] = None
            if not is_at_work:
                self._backlog.run(self._removals())

    def remove(self, record: _RecordT) -> None:
        """Forget a record, if it is kept, and delete it from the disk."""
        slot = self._slot_of(record)
        if slot is not None:
            self._remove(slot)

    def remove_unread(self, owner: Owner, key: str) -> str | None:
        """Forget a record that is on disk alone, and delete it there, readable or not; return the
        session in which it was made, None if there is no such record."""
        slot = self._by_owner.get(owner, {}).get(key)
        if slot is None or slot.record is not None:
            return None
        self._remove(slot)
        return slot.made_in

    def number_of(self, owner: Owner, key: str) -> int:
        """Return the number that a record has on disk; 0 if it was never written, or is unknown."""
        slot = self._by_owner.get(owner, {}).get(key)
        return 0 if slot is None else slot.number

    def is_gone(self, number: int) -> bool | None:
        """Return whether it is on disk that a record of this number was removed; None for one that
        was never there. Ask once all was written that was asked for."""
        if not number:
            return None
        return self._log.store.is_synced and not self._log.is_behind(number)

    def remove_some(self, owner: Owner, most: int) -> int:
        """Forget up to so many records of an owner; return their number."""
        oldest = tuple(islice(self._by_owner.get(owner, {}).values(), most))
        for slot in oldest:
            self._remove(slot)
        return len(oldest)

    def is_kept(self, record: _RecordT) -> bool:
        """Return whether this very record is kept."""
        return self._slot_of(record) is not None

    def num_made_in(self, owner: Owner, session_id: str) -> int:
        """Return how many records are kept that were made in a session."""
        return self._num_made_in.get((owner, session_id), 0)

    # -- on disk

    def is_durable(self, record: _RecordT) -> bool | None:
        """Return whether all of a record is on disk, once nothing is being written; None without a
        store."""
        slot = self._slot_of(record)
        if not self._log.has_store:
            return None
        is_written = slot is not None and not self._log.is_behind(slot.number)
        return is_written and self._log.store.is_synced

    def put(self, record: _RecordT, shown: _RecordT | None = None) -> None:
        """Write a record, as `shown` has it if given, if it is kept and there is a store."""
        write = self.write_of(record, record if shown is None else shown)
        if write is not None:
            self._log.ask(write)

    def write_of(self, record: _RecordT, shown: _RecordT) -> Beside | None:
        """Return the write of a record as `shown` has it; None if it is not kept, or nowhere on
        disk."""
        slot = self._slot_of(record)
        if slot is None or not self._log.has_store:
            return None
        if slot.number == 0:
            slot.number = self._log.new_number()
            self._quotas.stored_bytes.add(slot.owner, slot.counted_bytes)
        row = self._row(slot, shown)
        write = self._log.put(row, self._form.parts(shown), partial(self._again, slot))
        return self._watched(slot, write)

    def _watched(self, slot: _Slot[_RecordT], write: Beside) -> Beside:
        """Return a write of a record that is pending until it is told of."""
        slot.num_pending += 1

        def told(error: Exception | None) -> None:
            slot.num_pending -= 1
            write.told(error)
            if error is not None and self._log.is_shared and self._form.may_change:
                # To write all of it again might undo what another replica has written.
                self._log.give_up(slot.number)
                if slot in self._in_order:
                    self._remove(slot, is_deleted=False)

        return write._replace(told=told)

    def change_of(
        self, record: _RecordT, parts: Parts, removed: Sequence[int] = ()
    ) -> Beside | None:
        """Return the write of parts of a record, and the removal of others, as `write_of` does."""
        slot = self._slot_of(record)
        if slot is None or slot.number == 0 or self._log.is_behind(slot.number):
            return self.write_of(record, record)
        row, again = self._row(slot, record), partial(self._again, slot)
        return self._watched(slot, self._log.change(row, parts, removed, again))

    def change(self, record: _RecordT, parts: Parts, removed: Sequence[int] = ()) -> None:
        """Write parts of a record, and remove others, if it is kept and there is a store."""
        write = self.change_of(record, parts, removed)
        if write is not None:
            self._log.ask(write)

    def _again(self, slot: _Slot[_RecordT]) -> None:
        if slot in self._in_order and slot.record is not None:
            self.put(slot.record)

    def _row(self, slot: _Slot[_RecordT], shown: _RecordT) -> RecordRow:
        """Return what the disk has of a record besides its parts, for a write that is counted."""
        row = RecordRow(
            number=slot.number,
            kind=self._form.noun,
            owner_id=slot.owner.owner_id,
            record_id=slot.key,
            session_id=slot.made_in,
            num_bytes=shown.num_bytes,
            used=self._log.new_number(),
            num_writes=slot.num_writes,
            # Behind a write that was refused none is done: those of another replica count too.
            used_last=slot.used,
        )
        slot.num_writes, slot.used = slot.num_writes + 1, row.used
        return row

    def _read(
        self, owner: Owner, slot: _Slot[_RecordT], slices: Iterable[Parts]
    ) -> Iterator[_RecordT]:
        """Yield a record after each slice of it that is read."""
        record: _RecordT | None = None
        try:
            with reading(self._log.store):
                for parts in slices:
                    if record is None:
                        record = self._form.read(owner, slot.key, parts)
                    else:
                        self._form.read_on(record, parts)
                    yield record
            if record is None:
                raise Damaged("nothing of it is there")
        except Damaged as error:
            _logger.error("%s of %s cannot be read: %s", slot.key, self._form.noun, error)
            raise InternalInconsistency(f"what is stored of {slot.key} is damaged") from error

    def _hold(self, slot: _Slot[_RecordT], record: _RecordT) -> None:
        """Keep a record that was read in memory."""
        slot.record = record
        self._count(slot, record.num_bytes)

    # -- in memory

    def _find_on_disk(self, rows: Sequence[RecordRow]) -> None:
        """Hold records that are on disk alone: there may be hundreds of thousands."""
        owners = {owner_id: Owner(owner_id) for owner_id in {row.owner_id for row in rows}}
        num_bytes: Counter[Owner] = Counter()
        for row in rows:
            owner = owners[row.owner_id]
            slot: _Slot[_RecordT] = _Slot(
                *(owner, row.record_id, row.session_id, None),
                *(row.num_bytes, row.number, row.num_writes, row.used),
            )
            self._insert(slot)
            num_bytes[owner] += row.num_bytes
        for owner, amount in num_bytes.items():
            self.budget.add(owner, amount)
            self._quotas.history_bytes.add(owner, amount)
            self._quotas.stored_bytes.add(owner, amount)

    def _slot_of(self, record: _RecordT) -> _Slot[_RecordT] | None:
        slot = self._by_owner.get(record.owner, {}).get(record.key)
        return slot if slot is not None and slot.record is record else None

    def _insert(self, slot: _Slot[_RecordT]) -> None:
        self._by_owner.setdefault(slot.owner, {})[slot.key] = slot
        self._in_order[slot] = None
        self._num_made_in[slot.owner, slot.made_in] += 1

    def _remove(self, slot: _Slot[_RecordT], *, is_deleted: bool = True) -> None:
        """Forget a record, and delete it from the disk if it `is_deleted`."""
        self._count(slot, 0)
        owned, place = self._by_owner[slot.owner], (slot.owner, slot.made_in)
        del owned[slot.key], self._in_order[slot]
        if not owned:
            del self._by_owner[slot.owner]
        self._num_made_in[place] -= 1
        if not self._num_made_in[place]:
            del self._num_made_in[place]
        if slot.number and is_deleted:
            self._log.delete(slot.number)

    def _removals(self) -> Iterator[Callable[[], None]]:
        while self._crowded:
            yield self._remove_next

    def _remove_next(self) -> None:
        """Remove a record that goes to make room, or find that there is room for an owner."""
        owner = next(iter(self._crowded))
        slot = self._next_to_go(owner)
        if slot is None:
            del self._crowded[owner]
        else:
            self._remove(slot)

    def _next_to_go(self, owner: Owner) -> _Slot[_RecordT] | None:
        """Return the record that goes first because an owner, or all, hold too much; None if they
        do not."""
        try:
            self.budget.check(owner, 0)
        except QuotaExceeded:
            return next(iter(self._by_owner[owner].values()))
        except ServerBusy:
            return next(iter(self._in_order))
        return None

    def _touch(self, slot: _Slot[_RecordT]) -> None:
        owned = self._by_owner[slot.owner]
        owned[slot.key] = owned.pop(slot.key)
        del self._in_order[slot]
        self._in_order[slot] = None

    def _count(self, slot: _Slot[_RecordT], num_bytes: int) -> None:
        change = num_bytes - slot.counted_bytes
        self.budget.add(slot.owner, change)
        self._quotas.history_bytes.add(slot.owner, change)
        if slot.number:
            self._quotas.stored_bytes.add(slot.owner, change)
        slot.counted_bytes = num_bytes
