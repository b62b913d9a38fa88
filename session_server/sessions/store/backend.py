"""What a store asks of the database beneath it: verbs for one thread, and reads for another."""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar, Protocol

from session_server.sessions.store.deleted_rows import Freed
from session_server.sessions.store.ownership import HeldBy, Joined
from session_server.sessions.store.records import Holding, Parts, RecordRow, SessionRow
from session_server.sessions.store.survey import SurveyAnswer, SurveyQuestion


class StoreVerbs(Protocol):
    """Write, inside `transaction`."""

    def put(self, row: SessionRow, *entries: bytes) -> None:
        """Write a session with these entries, in place of all that was there of it."""

    def append(self, row: SessionRow, *entries: bytes) -> None:
        """Write entries behind `row.num_entries` others. Raises Behind, NotOurs."""

    def touch(self, row: SessionRow) -> None:
        """Write what the row says, but no entry. Raises as `append`."""

    def delete_some(self, number: int, epoch: int | None = None) -> Freed | None:
        """Delete a session as it is in an epoch, None: in any, or the last entries of a long one;
        None if it is not there. Raises NotOurs."""

    def retire(self, number: int, epoch: int | None = None) -> int:
        """Let a session have expired long ago; return the bytes of its entries. Raises NotOurs."""

    def note_time(self, now_s: float) -> None:
        """Write the time, by which a later server knows how long none was there."""

    def put_record(self, row: RecordRow, parts: Parts) -> None:
        """Write a record with all of its parts, in place of what was there of it."""

    def change_record(self, row: RecordRow, parts: Parts, removed: Sequence[int]) -> None:
        """Write parts of a record, and delete some. Raises Behind."""

    def delete_record(self, number: int) -> None:
        """Delete a record and its parts, if it is there."""


class StoreReads(Protocol):
    """Read what is there as of the last commit."""

    def find(self, owner_id: str, session_id: str) -> SessionRow | None:
        """Return a session by its id."""

    def numbered(self, number: int) -> SessionRow | None:
        """Return the session of a number."""

    def page(self, owner_id: str, *, after: int, now_s: float, limit: int) -> list[SessionRow]:
        """Return up to `limit` sessions of an owner that have a higher number, in order."""

    def holdings(self) -> list[Holding]:
        """Return what each owner has."""

    def expired(self, after: tuple[float, int], until_s: float, *, limit: int) -> list[SessionRow]:
        """Return up to `limit` sessions that expire before a time, behind a place in that order."""

    def num_expiring(self, since_s: float, until_s: float, *, limit: int) -> int:
        """Return how many sessions expire in this time, counted up to `limit`."""

    def noted_s(self) -> float | None:
        """Return the time that a server has noted last; None if none has."""

    def entries(
        self, number: int, *, start: int = 0, limit: int = -1, max_bytes: int | None = None
    ) -> list[bytes]:
        """Return entries of a session from a position on, in order."""

    def last_number(self) -> int:
        """Return the highest number of a session, 0 without one."""

    def census(self, now_s: float) -> tuple[int, int]:
        """Return how many sessions are open, and how many have expired."""

    def records(self) -> list[RecordRow]:
        """Return all records, that first which was not written for longest."""

    def parts(
        self, number: int, *, after: int = -1, limit: int = -1, max_bytes: int | None = None
    ) -> Parts:
        """Return parts of a record behind a position, in order."""

    def survey(self, question: SurveyQuestion) -> SurveyAnswer:
        """Look through all sessions; any thread may call it."""


class StoreDatabase(StoreVerbs, StoreReads, Protocol):
    """Hold the sessions of one server, or of several that share it."""

    read_errors: ClassVar[tuple[type[Exception], ...]]
    """What a read raises where the medium is at fault."""

    has_deleted: bool
    """Whether a file of its own may still have what was deleted."""

    @property
    def secret(self) -> bytes:
        """Random bytes that live as long as the store."""

    @property
    def place(self) -> str:
        """Where it is, as an operator is told: no password is in it."""

    @property
    def directory(self) -> Path | None:
        """The directory of a store that has one."""

    def transaction(self) -> AbstractContextManager[None]:
        """Commit what happens in the block, all or nothing."""

    def shorten_log(self, *, erases: bool) -> None:
        """Give back what a log of its own takes, and if it `erases` what was deleted."""

    def is_unavailable(self, error: Exception) -> bool:
        """Return whether the medium is at fault, and not what was to be written."""

    def fails_all(self, error: Exception) -> bool:
        """Return whether what one write met would meet every other one now."""

    def is_passing(self, error: Exception) -> bool:
        """Return whether a transaction was undone for another one, and may be tried again now."""

    def explain(self, error: Exception) -> str:
        """Return one line for an operator: what failed, and what to do."""

    def close(self) -> None:
        """Close it; call it when nobody uses it any more."""


class SharedDatabase(StoreDatabase, Protocol):
    """Hold the sessions of several replicas, each session held by one of them at a time.

    Reads, and what is about leases, may be called on any thread, and each may take as long as a
    network does.
    """

    replica_id: int
    """Which replica this is since it joined last."""

    def holdings_of(self, owner_ids: Sequence[str]) -> list[Holding]:
        """Return what some owners have."""

    def find_record(self, owner_id: str, record_id: str) -> RecordRow | None:
        """Return a record by its id."""

    def record_made_in(
        self, owner_id: str, session_id: str, kind: str, *, beside: str
    ) -> RecordRow | None:
        """Return a record of a kind that was made in a session, other than one of an id."""

    def evict_records(self, owner_id: str | None, most_bytes: int) -> list[tuple[str, int]]:
        """Delete some of the records that were written longest ago, while those of one kind that an
        owner has, None: all owners together, are more than so many bytes. Return owners and the
        bytes of theirs that are gone. Of several replicas one does so for all owners."""

    def join(self, address: str, lease_s: float, *, role: str = "both") -> Joined:
        """Take part from now on, until the lease is over unless it is renewed."""

    def peers(self, role: str) -> list[tuple[int, str]]:
        """Return id and address of each other replica of a role that can be reached."""

    def renew(self, lease_s: float) -> float:
        """Renew the lease; return the database's clock. Raises LeaseLost."""

    def address_of(self, replica_id: int) -> str | None:
        """Return where a replica is reached, "" where it has not said; None if its lease is
        over."""

    def leave(self) -> None:
        """Give up the lease, and with it every session."""

    def take(
        self, owner_id: str, session_id: str, without: Container[int] = ()
    ) -> SessionRow | HeldBy | None:
        """Become the holder of a session if nobody alive is it, and raise its epoch; None if there
        is no such session, or its number is among those it is to be `without`."""

    def release(self, numbers: Sequence[int]) -> None:
        """Hold sessions no longer."""

    def holders_of(self, numbers: Sequence[int]) -> list[HeldBy]:
        """Return which of these sessions other replicas hold, as `take` says it."""

    def ask_for(self, held: Sequence[HeldBy]) -> None:
        """Ask the holders of sessions to release them."""

    def asked(self, timeout_s: float) -> list[int]:
        """Wait for what others ask this replica to release; return the numbers."""
