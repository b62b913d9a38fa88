"""`SessionLogs`: write what changes in sessions to the store, and make sessions of what is there.

A session writes its changes in order. Where a write fails, it goes on in memory, and its next write
has all of it: nothing is appended to a log that lacks something.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Final

from session_server.core.errors import InternalInconsistency, UnknownModel
from session_server.sessions.backlog import SLICE
from session_server.sessions.session import LogPlace, Session, SessionConfig
from session_server.sessions.store.records import (
    Damaged,
    EndRecord,
    LogEntry,
    SessionRow,
    StoredSettings,
    encode_entry,
)
from session_server.sessions.store.session_store import SessionStore
from session_server.sessions.store.writer import Told
from session_server.sessions.views import StoreUse

_logger: Final = logging.getLogger("session_server.store")

MAX_ENTRIES: Final = 1024
"""Entries of a session, all of which are read when it is. The next one has all of it again."""

_MIN_LOG_BYTES: Final = 1 << 16


def _ignore(_error: Exception | None) -> None:
    pass


class SessionLogs:
    """Keep the sessions of a manager in a store, if there is one. `clock` returns monotonic
    seconds."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self.store: SessionStore | None = None
        self._clock = clock
        self._behind: dict[Session, None] = {}

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
            num_behind=len(self._behind),
            is_failing=self.store.failure is not None,
        )

    async def flush(self) -> None:
        """Wait until all that has changed so far is on disk, or could not be written."""
        if self.store is not None:
            await self.store.flush()

    def open(self, session: Session) -> None:
        """Begin the log of a session that was registered."""
        if self.store is not None:
            session.life.log = LogPlace()
            self._write_whole(session, session.life.log, _ignore)

    def record_turn(self, session: Session, turn: EndRecord, told: Told) -> bool:
        """Write a turn that was computed, and what it has changed; return whether its end shall
        wait until `told` is called, which is when it is on disk, or cannot be."""
        is_awaited = self.store is not None and self.store.durability == "turn"
        self.record(session, turn, told if is_awaited else _ignore)
        return is_awaited

    def record(self, session: Session, turn: EndRecord | None = None, told: Told = _ignore) -> None:
        """Write what has changed in a session, and a turn that has ended. `told` is called when it
        is on disk, or cannot be. Does nothing for a session that is not stored."""
        place = session.life.log
        if place is None or self.store is None:
            return
        # What later entries have replaced stays in the log: no more than there is of the rest.
        is_long = place.num_bytes > max(_MIN_LOG_BYTES, 2 * session.num_bytes)
        if place.is_behind or is_long or place.num_entries >= MAX_ENTRIES:
            self._write_whole(session, place, told, turn)
            return
        turns = () if turn is None else (turn,)
        data = encode_entry(LogEntry(session.transcript.take_change(), turns))
        row = self._row(session, place, self.store, num_new=len(turns))
        place.num_entries += 1
        place.num_bytes += len(data)
        self.store.append(row, data, partial(self._on_written, session, told))

    def touch(self, session: Session) -> None:
        """Write the settings of a session, and when it expires."""
        place = session.life.log
        if place is None or self.store is None:
            return
        if place.is_behind:
            self._write_whole(session, place, _ignore)
        else:
            told = partial(self._on_written, session, _ignore)
            self.store.touch(self._row(session, place, self.store), told)

    def close(self, session: Session, on_gone: Callable[[], object]) -> None:
        """End the log of a session that closes, and delete it from the store; `on_gone` is called
        once it is gone from there too. One that goes on in another process is told of no end."""
        place, session.life.log = session.life.log, None
        self._behind.pop(session, None)
        if place is None or self.store is None:
            on_gone()
        elif session.closing == "draining":
            session.journal.suspend()
        else:

            def told(_error: Exception | None) -> None:
                on_gone()

            owner_id, number = session.owner.owner_id, session.life.order
            self.store.delete(owner_id, session.session_id, number, told)

    def retry(self) -> None:
        """Write sessions whose last write has failed: one, and more once that succeeds."""
        if not self._behind:
            return
        assert self.store is not None, "no write has failed without a store"
        num_tried = 1 if self.store.failure is not None else SLICE
        for session in list(islice(self._behind, num_tried)):
            assert session.life.log is not None, "a closed session is not behind"
            self._write_whole(session, session.life.log, _ignore)

    def fill(self, session: Session, row: SessionRow) -> None:
        """Give a new session the conversation that is in the store.

        Raises:
            UnknownModel: its tokens are those of another tokenizer.
            InternalInconsistency: what is in the store is damaged.
        """
        assert self.store is not None, "a row of no store"
        if row.model != self.store.model:
            raise UnknownModel("this session was held with a model that has another tokenizer")
        session.transcript.now = datetime.fromtimestamp(row.settings.now_s).astimezone()
        try:
            entries, num_bytes = self.store.entries(row)
            for entry in entries:
                session.transcript.apply(entry.change)
                for turn in entry.turns:
                    session.ended.restore(turn)
        except (Damaged, ValueError) as error:
            _logger.error("session %s cannot be read: %s", row.session_id, error)
            raise InternalInconsistency("what is stored of this session is damaged") from error
        session.life.log = LogPlace(row.num_entries, num_bytes)

    def _write_whole(
        self, session: Session, place: LogPlace, told: Told, turn: EndRecord | None = None
    ) -> None:
        session.transcript.forget_taken()
        turns = () if turn is None else (turn,)
        entry = LogEntry(session.transcript.take_change(), (*session.ended.records(), *turns))
        assert self.store is not None, "a log without a store"
        data, row = encode_entry(entry), self._row(session, place, self.store, num_new=len(turns))
        place.num_entries, place.num_bytes, place.is_behind = 1, len(data), False
        self._behind.pop(session, None)
        self.store.put(row, data, partial(self._on_written, session, told))

    def _on_written(self, session: Session, told: Told, error: Exception | None) -> None:
        if error is not None and session.life.log is not None:
            session.life.log.is_behind = True
            self._behind[session] = None
        told(error)

    def _row(
        self, session: Session, place: LogPlace, store: SessionStore, *, num_new: int = 0
    ) -> SessionRow:
        """Return what a list says of a session; `num_new` turns are about to be recorded."""
        ttl_s = session.settings.ttl_s
        left_s = session.expires_s - self._clock() if session.is_idle else ttl_s
        return SessionRow(
            number=session.life.order,
            owner_id=session.owner.owner_id,
            session_id=session.session_id,
            model=store.model,
            expires_s=store.wall_clock() + left_s,
            settings=_stored(session),
            num_tokens=len(session.transcript),
            num_turns=len(session.ended) + num_new,
            num_uses=session.life.num_uses,
            num_entries=place.num_entries,
        )


def settings_of(row: SessionRow) -> SessionConfig:
    """Return the settings of a session in the store."""
    stored = row.settings
    return SessionConfig(
        ttl_s=stored.ttl_s,
        metadata=stored.metadata,
        is_pinned=stored.is_pinned,
        is_single_turn=False,
        created_s=stored.created_s,
        request_digest=stored.request_digest,
        asked_history=stored.history,
    )


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
    )
