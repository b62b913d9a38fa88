"""Keep records of owners, bounded in bytes of each owner and in all: the one unused for longest
goes. Their bytes count as bytes of conversations."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Final, Generic, Protocol, TypeVar

from session_server.core.errors import QuotaExceeded, ServerBusy
from session_server.core.owner import Owner
from session_server.sessions.budget import OwnerBudget
from session_server.sessions.quotas import Quotas

KEPT_DIVISOR: Final = 4
"""Records of one kind take one of so many parts of the bytes of conversations at most."""


class KeptRecord(Protocol):
    """Name what `KeptRecords` asks of a record."""

    owner: Owner
    counted_bytes: int

    @property
    def key(self) -> str:
        """Return its id, unique for its owner."""

    @property
    def num_bytes(self) -> int:
        """Return its host memory as it is now."""


_RecordT = TypeVar("_RecordT", bound=KeptRecord)


class KeptRecords(Generic[_RecordT]):
    """Hold records by owner and id. `on_dropped` is told of each that goes."""

    def __init__(
        self, quotas: Quotas, noun: str, *, on_dropped: Callable[[_RecordT], None]
    ) -> None:
        self._quotas = quotas
        self._on_dropped = on_dropped
        self.budget = OwnerBudget(f"bytes of {noun}", quotas.history_bytes.limit // KEPT_DIVISOR)
        self._by_owner: dict[Owner, dict[str, _RecordT]] = {}
        self._in_order: dict[tuple[Owner, str], None] = {}

    def __len__(self) -> int:
        return len(self._in_order)

    def get(self, owner: Owner, key: str) -> _RecordT | None:
        """Return a record as one in use, or None."""
        found = self._by_owner.get(owner, {}).get(key)
        if found is not None:
            self._touch(found)
        return found

    def add(self, record: _RecordT) -> None:
        """Keep a record; older ones go where there is no room.

        Raises:
            QuotaExceeded, ServerBusy: it is larger than all that may be kept, or conversations have
                no room for it.
        """
        self.check(record.owner, record.num_bytes)
        self._by_owner.setdefault(record.owner, {})[record.key] = record
        self._touch(record)
        self.recount(record)

    def check(self, owner: Owner, num_bytes: int) -> None:
        """Reject bytes for which there will never be room, or is none now. Raises QuotaExceeded,
        ServerBusy."""
        if not self.budget.has_room_for(owner, num_bytes):
            self.budget.check(owner, num_bytes)
        self._quotas.check_growth(owner, num_bytes)

    def recount(self, record: _RecordT) -> None:
        """Count a record anew that has changed, if it is kept; older ones go to make room, and at
        last itself."""
        if not self.is_kept(record):
            return
        num_bytes = record.num_bytes
        self._count(record, 0)
        while True:
            try:
                self.budget.check(record.owner, num_bytes)
            except QuotaExceeded:
                oldest = next(iter(self._by_owner[record.owner].values()))
            except ServerBusy:
                owner, key = next(iter(self._in_order))
                oldest = self._by_owner[owner][key]
            else:
                self._count(record, num_bytes)
                return
            self.remove(oldest)
            if oldest is record:
                return

    def remove(self, record: _RecordT) -> None:
        """Forget a record, if it is kept."""
        if not self.is_kept(record):
            return
        self._count(record, 0)
        owned = self._by_owner[record.owner]
        del owned[record.key], self._in_order[record.owner, record.key]
        if not owned:
            del self._by_owner[record.owner]
        self._on_dropped(record)

    def remove_some(self, owner: Owner, most: int) -> int:
        """Forget up to so many records of an owner; return their number."""
        oldest = tuple(islice(self._by_owner.get(owner, {}).values(), most))
        for record in oldest:
            self.remove(record)
        return len(oldest)

    def is_kept(self, record: _RecordT) -> bool:
        """Return whether this very record is kept."""
        return self._by_owner.get(record.owner, {}).get(record.key) is record

    def _touch(self, record: _RecordT) -> None:
        owned, key = self._by_owner[record.owner], record.key
        owned[key] = owned.pop(key)
        self._in_order.pop((record.owner, key), None)
        self._in_order[record.owner, key] = None

    def _count(self, record: _RecordT, num_bytes: int) -> None:
        change = num_bytes - record.counted_bytes
        self.budget.add(record.owner, change)
        self._quotas.history_bytes.add(record.owner, change)
        record.counted_bytes = num_bytes
