"""`SessionLogs`: write what changes in sessions to the store.

A session writes its changes in order, one write at a time. Where one fails, the session goes on in
memory, and its next write has all of it: nothing is appended to a log that lacks something.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from session_server.core.owner import Owner
from session_server.sessions.backlog import SLICE
from session_server.sessions.bugs import log_bug
from session_server.sessions.ended_turns import RECORD_BYTES
from session_server.sessions.footprint import item_bytes, text_bytes
from session_server.sessions.items import message_of
from session_server.sessions.record_log import RecordLog
from session_server.sessions.session import Hold, LogPlace, LogSize, Session
from session_server.sessions.store.ownership import Moved, NotOurs
from session_server.sessions.store.pieces import MAX_ENTRY_BYTES, LargeEntry, encode_pieces
from session_server.sessions.store.records import (
    EndRecord,
    LogEntry,
    SessionRow,
    StoredSettings,
    encode_settings,
)
from session_server.sessions.store.session_store import SessionStore
from session_server.sessions.store.writer import Beside, Told, tell_each, tell_nobody
from session_server.sessions.views import StoreUse

MAX_ENTRIES: Final = 1024
"""Entries of a session, all of which are read when it is, besides those that a large one is cut
into. The next one has all of it again."""

MAX_REWRITTEN_BYTES: Final = 16 << 20
"""Of sessions that are written again at a time; the last one may exceed it."""

EXPIRY_SLACK_S: Final = 1.0
"""By how much the end of a session's time on disk may differ from that in memory."""

BUSY_S: Final = 3600.0
"""Seconds for which a session is not looked at whose turns run, if its time on disk is over."""

PART_WAIT_S: Final = 30.0
"""How long a session that others ask for waits for a write that fails. They wait for less, and ask
again."""

_PART_LOOK_S: Final = 0.1

_MIN_LOG_BYTES: Final = 1 << 16


class SessionLogs:
    """Keep the sessions of a manager in a store, if there is one. `clock` returns monotonic
    seconds. `count_bytes` is told what an owner has more on disk, or less."""

    def __init__(
        self, *, clock: Callable[[], float], count_bytes: Callable[[Owner, int], None]
    ) -> None:
        self.store: SessionStore | None = None
        self.records = RecordLog()
        self._clock = clock
        self._count_bytes = count_bytes
        self._behind: dict[Session, None] = {}
        self.on_moved: Callable[[Session], None] = lambda _session: None
        """Told of a session whose write was refused because another replica holds it."""

    def keep_in(self, store: SessionStore) -> None:
        """Keep sessions, and records of other kinds, in a store from now on."""
        self.store = store
        self.records.keep_in(store)

    @property
    def directory(self) -> Path | None:
        """Return where the store is; None without one."""
        return None if self.store is None else self.store.directory

    def use(self) -> StoreUse | None:
        """Return what the store has done; None without one."""
        if self.store is None:
            return None
        counts = self.store.counts
        return StoreUse(
            num_commits=tuple(counts.num_commits),
            num_writes=counts.num_writes,
            num_failed=counts.num_failed,
            commit_s=counts.commit_s,
            num_behind=len(self._behind)
            + self.store.deletions.num_failed
            + self.records.num_behind,
            is_failing=self.store.failure is not None,
        )

    async def flush(self) -> None:
        """Wait until all that has changed so far is on disk, or could not be written."""
        if self.store is not None:
            await self.store.flush()
            # What changed during a write was asked for when that ended.
            await self.store.flush()

    def open(self, session: Session) -> None:
        """Begin the log of a session that was registered."""
        if self.store is not None:
            session.life.log = self._new_place(self.store)
            self.record(session)

    def begin(self, session: Session) -> None:
        """Begin the log of an open session that is not stored yet. Nothing of it is on disk before
        its next turn has ended; then all of it is."""
        if self.store is not None and session.life.log is None:
            session.life.log = self._new_place(self.store)
            session.life.log.has_changed = True

    def _new_place(self, store: SessionStore) -> LogPlace:
        hold = Hold(int(store.is_shared), store.replica_id)
        return LogPlace(is_synced=store.is_synced, hold=hold)

    def record_turn(
        self, session: Session, turn: EndRecord, told: Told, beside: Beside | None = None
    ) -> bool:
        """Write a turn that was computed, and what it has changed; return whether its end shall
        wait until `told` is called, which is when it is on disk, or cannot be."""
        is_awaited = self.store is not None and self.store.is_synced
        self.record(session, turn, told if is_awaited else tell_nobody, beside)
        return is_awaited

    def record(
        self,
        session: Session,
        turn: EndRecord | None = None,
        told: Told = tell_nobody,
        beside: Beside | None = None,
    ) -> None:
        """Write what has changed in a session, and a turn that has ended. `told` is called when it
        is on disk, or cannot be. `beside` goes to the disk in the same commit, or else before it.
        Does nothing for a session that is not stored."""
        place = session.life.log
        if place is None:
            return
        assert self.store is not None, "a log without a store"
        place.has_changed = True
        place.told.append(told)
        if turn is not None:
            place.ends.append(turn)
        if beside is not None and place.is_writing:
            self.store.ask(*beside)  # writes are in the order in which they were encoded
            beside = None
        self._write(session, place, beside)

    def touch(self, session: Session) -> None:
        """Write the settings of a session, and when it expires. Does nothing for one that is not
        stored."""
        place = session.life.log
        if place is not None:
            place.is_touched = True
            self._write(session, place)

    def close(self, session: Session, on_gone: Callable[[], object], *, leaves_kv: bool) -> None:
        """End the log of a session that closes, and delete it from the store; `on_gone` is called
        once it is gone from there too, or cannot be now. One that goes on in another process, or in
        another replica, is told of no end. `leaves_kv`: the store keeps its tokens until
        `StoredEnds` has read them."""
        place = session.life.log
        if place is None or self.store is None:
            on_gone()
            return
        if self.outlives(session):
            session.journal.suspend()
            self.leave(session)
            return
        session.life.log = None
        self._behind.pop(session, None)

        def told(error: Exception | None) -> None:
            if isinstance(error, NotOurs):
                place.has_moved = True
                session.journal.suspend()
            else:
                on_gone()

        number, deletions = session.life.order, self.store.deletions
        is_urgent = session.closing != "expired"
        if leaves_kv:
            owner_id, num_bytes = session.owner.owner_id, place.size.num_bytes
            asked = (number, owner_id, num_bytes, told)
            deletions.retire(*asked, epoch=place.hold.epoch, is_urgent=is_urgent)
        else:
            deletions.delete(number, told, epoch=place.hold.epoch, is_urgent=is_urgent)

    def leave(self, session: Session) -> None:
        """Write what is left of a session that goes on elsewhere, if anything is."""
        place = session.life.log
        if place is not None and place.is_behind:
            place.has_changed = True
            self._write(session, place)  # a last time: there may be room again
        elif not self.is_dated(session):
            self.touch(session)

    async def part_from(self, session: Session) -> bool:
        """Wait until all of a session is on disk that others may take then, and write nothing more
        of it; return whether it is this replica's to give. What cannot be written for `PART_WAIT_S`
        is lost, as its client was told that it may be."""
        place = session.life.log
        assert place is not None, "a session that nobody else can have"
        loop = asyncio.get_running_loop()
        until_s = loop.time() + PART_WAIT_S
        await self.flush()
        while not (place.is_written or place.has_moved) and loop.time() < until_s:
            await asyncio.sleep(_PART_LOOK_S)  # `retry` writes what has failed
        is_ours = not place.has_moved
        self._behind.pop(session, None)
        place.has_moved = True
        return is_ours

    def is_dated(self, session: Session) -> bool:
        """Return whether the store has when a session expires, as the clock is now."""
        place = session.life.log
        if place is None or self.store is None:
            return True
        expires_s = self.store.clock.end_s(session.expires_s - self._clock())
        return abs(expires_s - place.expires_s) <= EXPIRY_SLACK_S

    def is_gone(self, number: int | None) -> bool:
        """Return whether nothing is on disk of a session that was deleted, by its number."""
        return self.store is None or self.store.is_gone(number)

    def outlives(self, session: Session) -> bool:
        """Return whether a session that closes stays on disk, for another process."""
        is_stored = session.life.log is not None and self.store is not None
        return is_stored and session.closing == "draining"

    def retry(self) -> None:
        """Write sessions whose last write has failed: one, and more once that succeeds; and delete
        those that could not be deleted."""
        if self.store is None:
            return
        self.store.deletions.retry(is_failing=self.store.failure is not None)
        self.records.retry()
        num_left = 1 if self.store.failure is not None else SLICE
        num_bytes = 0
        for session in list(islice(self._behind, num_left)):
            place = session.life.log
            assert place is not None, "a closed session is not behind"
            place.has_changed = True
            self._behind[session] = self._behind.pop(session)  # the next time others come first
            self._write(session, place)
            num_bytes += session.num_bytes
            if num_bytes > MAX_REWRITTEN_BYTES:
                break

    def _write(self, session: Session, place: LogPlace, beside: Beside | None = None) -> None:
        """Write what waits, unless a write is under way: then it comes next."""
        if place.is_writing:
            return
        if place.has_moved:
            self._behind.pop(session, None)
            refused, place.told = place.told, []
            tell_each(refused, Moved())
            return
        assert self.store is not None, "a log without a store"
        ends, told = tuple(place.ends), tuple(place.told)
        place.ends.clear()
        place.told.clear()
        # What later entries have replaced stays in the log: no more than there is of the rest.
        size = place.size
        is_long = size.num_bytes > max(_MIN_LOG_BYTES, 2 * session.num_bytes)
        num_most = MAX_ENTRIES + 2 * size.num_bytes // MAX_ENTRY_BYTES  # more are no pieces
        is_full = size.num_entries == 0 or size.num_entries >= num_most
        is_whole = is_full or is_long or place.is_behind
        has_changed = is_whole or place.has_changed
        place.is_writing, place.has_changed, place.is_touched = True, False, False
        try:
            row = self._row(session, place, self.store, session.ended.num_with(ends))
            if not has_changed:
                touched = size._replace(num_row_bytes=len(row.settings))
                self.store.touch(row, self._on_written(session, place, told, lambda: touched))
                return
            if is_whole:
                session.transcript.forget_taken()
                ends = (*session.ended.records(), *ends)
            entry = LogEntry(session.transcript.take_change(), ends)
            num_bytes = session.num_bytes if is_whole else len(entry.change.tokens)
            most_bytes = session.num_bytes if is_whole else _added_bytes(entry)
            large = LargeEntry(entry, most_bytes) if num_bytes > MAX_ENTRY_BYTES else None
            pieces = encode_pieces(entry) if large is None else large.made
        except Exception as error:  # noqa: BLE001 - told as a disk that fails: nobody waits for ever
            log_bug("a session was not encoded", error)
            if beside is not None:
                self.store.ask(*beside)
            self._on_written(session, place, told, LogSize)(error)
            return
        before = LogSize() if is_whole else size

        def after() -> LogSize:
            num_bytes = before.num_bytes + sum(map(len, pieces))
            return LogSize(before.num_entries + len(pieces), num_bytes, len(row.settings))

        written = self._on_written(session, place, told, after)
        if is_whole:
            me = place.hold.replica_id
            self.store.put(row, large or pieces, written, beside, replica_id=me)
        else:
            self.store.append(row, large or pieces, written, beside)

    def _on_written(
        self, session: Session, place: LogPlace, told: Sequence[Told], after: Callable[[], LogSize]
    ) -> Told:
        """Return what is called when a write is on disk, or cannot be. `after`: what is there
        then."""

        def written(error: Exception | None) -> None:
            place.is_writing = False
            if error is None:
                # Of one that was deleted meanwhile too: it counts until it is gone.
                size = after()
                self._count_bytes(session.owner, size.total_bytes - place.size.total_bytes)
                place.size = size
                place.is_behind = False
                self._behind.pop(session, None)
            elif isinstance(error, NotOurs):
                place.has_moved = True
                self._behind.pop(session, None)
                self.on_moved(session)
            else:
                place.is_behind = True
                if session.life.log is place and not place.has_moved:
                    self._behind[session] = None
            tell_each(told, error)
            if place.is_durable:
                session.ended.note_written()
            if (place.has_changed or place.is_touched) and session.life.log is place:
                self._write(session, place)

        return written

    def _row(
        self, session: Session, place: LogPlace, store: SessionStore, num_turns: int
    ) -> SessionRow:
        """Return what a list says of a session."""
        rests = not session.queue and (session.live is None or session.is_concluding)
        left_s = session.expires_s - self._clock()
        # While turns run or wait it does not expire; each of them writes it anew.
        left_s = left_s if rests else max(left_s, 0.0) + BUSY_S
        place.expires_s, place.num_uses = store.clock.end_s(left_s), session.life.num_uses
        return SessionRow(
            number=session.life.order,
            owner_id=session.owner.owner_id,
            session_id=session.session_id,
            model=store.model,
            expires_s=place.expires_s,
            settings=encode_settings(_stored(session)),
            num_tokens=len(session.transcript),
            num_turns=num_turns,
            num_uses=session.life.num_uses,
            num_entries=place.size.num_entries,
            epoch=place.hold.epoch,
        )


def _added_bytes(entry: LogEntry) -> int:
    """Return the bytes of what an entry adds to others, at most."""
    change = entry.change
    items = sum(item_bytes(item.turn_id, message_of(item)) for item in change.items.added)
    tools = sum(map(text_bytes, change.tools or ()))
    return len(change.tokens) + items + tools + RECORD_BYTES * len(entry.turns)


def _stored(session: Session) -> StoredSettings:
    settings = session.settings
    return StoredSettings(
        settings.ttl_s,
        settings.metadata,
        settings.is_pinned,
        settings.created_s,
        settings.request_digest,
        settings.asked_history,
        session.transcript.now.timestamp(),
        session.life.num_own_uses,
    )
