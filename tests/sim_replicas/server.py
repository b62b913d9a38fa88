"""`DatabaseServer`: what PostgreSQL decides for replicas, in one place and without waiting.

Every method is one statement, or one transaction that takes no time. The one that takes time is a
commit: from `begin` to `end` it locks the row of its replica, as FOR KEY SHARE does, and whoever
would bury that replica has to wait (`Waits`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Final, NamedTuple

from msgspec import structs

from session_server.sessions.store.lock import StoreUnusable
from session_server.sessions.store.ownership import HeldBy, Joined, LeaseLost
from session_server.sessions.store.records import SessionRow
from tests.sim_replicas.tables import Change, HeldRow, Tables

MAX_REPLICAS: Final = 1024
"""As in `sessions.postgres.leases`, which needs a driver to be imported."""

IDLE_TIMEOUT_S: Final = 5.0
"""How long a transaction may do nothing before the database ends it; as in
`sessions.postgres.connections`."""

LOCK_WAIT_S: Final = 8.0
"""How long a statement waits for another transaction; as there."""

_UNLOCKED: Final = "a transaction has ended"


class Waits(Exception):
    """Report a statement that waits for something: ask again when `DatabaseServer.on_ready` names
    it. After `timeout_s` it gets `otherwise`; None: an error."""

    def __init__(self, what: str, timeout_s: float, otherwise: object = None) -> None:
        super().__init__(what)
        self.what, self.timeout_s, self.otherwise = what, timeout_s, otherwise


class Member(NamedTuple):
    """Hold the row of a replica."""

    slot: int
    address: str
    expires_s: float


class Transaction:
    """A commit under way. `is_over`: it has committed, or the database has ended it."""

    def __init__(self, replica_id: int) -> None:
        self.replica_id = replica_id
        self.is_over = False


class DatabaseServer:
    """Hold what replicas share. `clock` returns its own seconds since 1970."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.secret = bytes(range(32))
        self.tables = Tables()
        self.members: dict[int, Member] = {}
        self.reached: Counter[str] = Counter()
        self.on_committed: Callable[[Sequence[Change]], None] = lambda _changes: None
        self.on_ready: Callable[[str], None] = lambda _what: None
        self.after: Callable[[float, Callable[[], None]], None] = lambda _delay_s, _run: None
        self.asked: dict[int, list[int]] = {}
        """Of each replica that listens: what others have asked of it."""

        self._open: list[Transaction] = []
        self._num_joined = 0

    # -- leases

    def join(self, address: str, lease_s: float) -> Joined:
        """Give a replica the smallest slot that is free. Raises StoreUnusable."""
        now_s = self.clock()
        for replica_id, member in list(self.members.items()):
            if member.expires_s <= now_s and not self._is_locked(replica_id):
                del self.members[replica_id]
        taken = {member.slot for member in self.members.values()}
        slot = next((slot for slot in range(MAX_REPLICAS) if slot not in taken), None)
        if slot is None:
            raise StoreUnusable(f"{MAX_REPLICAS} replicas share it: stop one")
        self._num_joined += 1
        self.members[self._num_joined] = Member(slot, address, now_s + lease_s)
        return Joined(self._num_joined, slot, now_s)

    def renew(self, replica_id: int, lease_s: float) -> float:
        """Hold everything for so many seconds from now on. Raises LeaseLost."""
        now_s = self.check(replica_id)
        member = self.members[replica_id]
        self.members[replica_id] = member._replace(expires_s=now_s + lease_s)
        self.reached["renewed"] += 1
        return now_s

    def leave(self, replica_id: int) -> None:
        """Give up all sessions, and the lease. Raises Waits."""
        self._free([n for n, held in self.tables.sessions.items() if held.holder == replica_id])
        self._bury(replica_id)

    def address_of(self, replica_id: int) -> str | None:
        """Return where a replica is reached; None if its lease is over."""
        return self.members[replica_id].address if self.is_live(replica_id) else None

    def check(self, replica_id: int) -> float:
        """Return the time. Raises LeaseLost if the lease of a replica is over."""
        if not self.is_live(replica_id):
            raise LeaseLost(f"the lease of replica {replica_id} is over")
        return self.clock()

    def is_live(self, replica_id: int | None) -> bool:
        """Return whether a replica may write what it holds."""
        member = None if replica_id is None else self.members.get(replica_id)
        return member is not None and member.expires_s > self.clock()

    def is_held(self, owner_id: str, session_id: str) -> bool:
        """Return whether any replica may write a session."""
        held = self.tables.named(owner_id, session_id)
        return held is not None and self.is_live(held.holder)

    def is_anothers(self, held: HeldRow, replica_id: int) -> bool:
        """Return whether another live replica holds a session."""
        return held.holder != replica_id and self.is_live(held.holder)

    def is_over(self, row: SessionRow) -> bool:
        """Return whether a session has expired."""
        return row.expires_s < self.clock()

    def take(
        self, replica_id: int, name: tuple[str, str], without: Container[int]
    ) -> SessionRow | HeldBy | None:
        """Hold a session in a new epoch, or say who holds it. Raises LeaseLost, Waits."""
        self.check(replica_id)
        held = self.tables.named(*name)
        if held is None:
            return None
        row, holder = held
        if holder is not None and holder != replica_id:
            member = self.members.get(holder)
            if member is not None and self.is_live(holder):
                return HeldBy(row.number, holder, member.address)
            if member is not None:
                self._bury(holder)
                self.reached["replica buried"] += 1
        if self.is_over(row) or row.number in without:
            return None
        self.reached[f"taken from {_whom(holder, replica_id)}"] += 1
        row = structs.replace(row, epoch=row.epoch + 1)
        self._put_row(HeldRow(row, replica_id))
        return row

    def release(self, replica_id: int, numbers: Sequence[int]) -> None:
        """Hold sessions no longer, those of them that a replica holds."""
        sessions = self.tables.sessions
        self._free([n for n in numbers if n in sessions and sessions[n].holder == replica_id])

    def holders_of(self, replica_id: int, numbers: Sequence[int]) -> list[HeldBy]:
        """Return which of these sessions other replicas hold that live."""
        there = [self.tables.sessions[each] for each in numbers if each in self.tables.sessions]
        return [
            HeldBy(row.number, holder, self.members[holder].address)
            for row, holder in there
            if holder not in (None, replica_id) and row.expires_s > 0 and self.is_live(holder)
        ]

    def ask_for(self, held: Sequence[HeldBy]) -> None:
        """Tell the holders of sessions that another replica asks for them."""
        for each in held:
            if each.replica_id in self.asked:
                self.asked[each.replica_id].append(each.number)
                self.on_ready(_asked(each.replica_id))

    def take_asked(self, replica_id: int, timeout_s: float) -> list[int]:
        """Return what was asked of a replica since it listens, each session once. Raises Waits."""
        asked = self.asked.setdefault(replica_id, [])
        if not asked:
            raise Waits(_asked(replica_id), timeout_s, [])
        self.asked[replica_id] = []
        return list(dict.fromkeys(asked))

    def evict(
        self, replica_id: int, owner_id: str | None, most_bytes: int
    ) -> list[tuple[str, int]]:
        """Delete the records of each kind that are more than so many bytes, those first that were
        written longest ago; those of all owners for the first replica alone."""
        if owner_id is None and replica_id != min(filter(self.is_live, self.members), default=None):
            return []
        held: Counter[str] = Counter()
        rows = [row for row in self.tables.records.values() if owner_id in (None, row.owner_id)]
        for row in rows:
            held[row.kind] += row.num_bytes
        gone: Counter[str] = Counter()
        for row in sorted(rows, key=lambda row: row.used):
            if held[row.kind] > most_bytes:
                held[row.kind] -= row.num_bytes
                gone[row.owner_id] += row.num_bytes
                del self.tables.records[row.number]
                self.tables.parts.pop(row.number, None)
                self.reached["record evicted"] += 1
        return list(gone.items())

    def _free(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.reached["released"] += 1
            self._put_row(self.tables.sessions[number]._replace(holder=None))

    def _put_row(self, held: HeldRow) -> None:
        self.tables.sessions[held.row.number] = held

    def _bury(self, replica_id: int) -> None:
        if self._is_locked(replica_id):
            self.reached["burying waits for a commit"] += 1
            raise Waits(_UNLOCKED, LOCK_WAIT_S)
        self.members.pop(replica_id, None)

    def _is_locked(self, replica_id: int) -> bool:
        return any(each.replica_id == replica_id for each in self._open)

    # -- commits

    def begin(self, replica_id: int) -> Transaction:
        """Begin a transaction: until its `end` nobody buries its replica. Raises LeaseLost."""
        self.check(replica_id)
        begun = Transaction(replica_id)
        self._open.append(begun)
        self.after(IDLE_TIMEOUT_S, partial(self.end, begun))
        return begun

    def commit(self, begun: Transaction, tables: Tables, changes: Sequence[Change]) -> None:
        """Make what a transaction did what everybody sees. Raises ConnectionError if the database
        has ended it."""
        if begun.is_over:
            raise ConnectionError("the transaction has done nothing for too long")
        if not self.is_live(begun.replica_id):
            self.reached["commit behind the end of its lease"] += 1
        self.reached["commit"] += 1
        self.reached["log write"] += sum(bool(change.entries) for change in changes)
        self.tables = tables
        self.on_committed(changes)

    def end(self, begun: Transaction) -> None:
        """Give up the locks of a transaction; what it has not committed is undone."""
        if not begun.is_over:
            begun.is_over = True
            self._open.remove(begun)
            self.on_ready(_UNLOCKED)

    def end_all(self) -> None:
        """End every transaction, as a database that is started again does."""
        for begun in list(self._open):
            self.end(begun)


def _asked(replica_id: int) -> str:
    return f"replica {replica_id} is asked"


def _whom(holder: int | None, replica_id: int) -> str:
    if holder is None:
        return "nobody"
    return "itself" if holder == replica_id else "one that is over"
