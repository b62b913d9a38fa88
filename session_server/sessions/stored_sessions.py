"""`StoredSessions`: bring sessions that are on disk into memory when they are asked for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from session_server.core.errors import ServerBusy
from session_server.core.owner import Owner
from session_server.sessions.backlog import SLICE
from session_server.sessions.restoring import Restorer, is_spare, reading, refusing
from session_server.sessions.session import Session
from session_server.sessions.store.records import SessionRow
from session_server.sessions.store.survey import SurveyQuestion
from session_server.sessions.views import SessionView, StoredSummary


@dataclass(frozen=True, slots=True)
class StoredSessions:
    """Restore the sessions of a store of this server's own. Each is read once, when a client first
    names it."""

    restorer: Restorer
    _turnstile: asyncio.Lock = field(default_factory=asyncio.Lock)

    def check(self) -> None:
        """Do nothing: no other server has this store."""

    def forget(self, session: Session) -> None:
        """Do nothing: the disk is read when it is asked."""

    async def look_up(self, owner: Owner, session_id: str) -> None:
        """Do nothing: `order_of` reads the disk."""

    async def prepare_close(self, owner: Owner, session_id: str) -> None:
        """Do nothing: `close` reads the disk."""

    def restore(self, owner: Owner, session_id: str) -> Session | None:
        """Return a session that is on disk, registered and counted, or None if there is none. A
        long one is refused: nobody is served while it is read, unless `load` reads it.

        Raises:
            UnknownModel: its tokens are those of another tokenizer or chat template, or it has some
                that the model does not have.
            UnsupportedOperation: it asked for a `history` that this model's template cannot write.
            InternalInconsistency: what is stored of it is damaged.
            QuotaExceeded, ServerBusy: there is no room for it in memory, or no disk to read.
            ServerDraining: this process is about to end.
        """
        with reading(self.restorer.store):
            row = self.restorer.store.find(owner.owner_id, session_id)
            if row is None:
                return None
            restored = self.restorer.begin(owner, row)
            if self.restorer.store.is_long(row):
                raise ServerBusy("the session has just left the memory: ask again")
            with refusing(row):
                for entries, num_bytes in self.restorer.store.slices(row):
                    self.restorer.read(restored, entries, num_bytes)
        session = self.restorer.finish(restored)
        self.restorer.register(session)
        return session

    async def load(self, owner: Owner, session_id: str) -> None:
        """Restore a long session in slices, others being served in between; one such session at a
        time, because it is counted when it is there. Does nothing for any other. Raises what
        `restore` raises."""
        if self._find_long(owner, session_id) is None:
            return
        async with self._turnstile:
            row = self._find_long(owner, session_id)
            if row is None:
                return
            restored = self.restorer.begin(owner, row)
            with reading(self.restorer.store), refusing(row):
                for entries, num_bytes in self.restorer.store.slices(row):
                    self.restorer.read(restored, entries, num_bytes)
                    await asyncio.sleep(0)
                    is_same = self.restorer.store.find(owner.owner_id, session_id) == row
                    if not is_same or self.restorer.sessions.find(owner, session_id) is not None:
                        return  # it was deleted, and may have been opened anew
            self.restorer.register(self.restorer.finish(restored))

    def _find_long(self, owner: Owner, session_id: str) -> SessionRow | None:
        """Return a long session that is on disk alone."""
        if self.restorer.sessions.find(owner, session_id) is not None:
            return None
        with reading(self.restorer.store):
            row = self.restorer.store.find(owner.owner_id, session_id)
            return row if row is not None and self.restorer.store.is_long(row) else None

    def order_of(self, owner: Owner, session_id: str) -> int | None:
        """Return the place of a session on disk in the order of its owner's, or None. Raises
        ServerBusy if the disk cannot be read."""
        with reading(self.restorer.store):
            row = self.restorer.store.find(owner.owner_id, session_id)
        return None if row is None else row.number

    async def page(self, owner: Owner, *, limit: int, after: int) -> list[tuple[int, SessionView]]:
        """Return up to `limit` sessions of an owner that are on disk, oldest first, with their
        places in the order, without those that are in memory. Raises ServerBusy if the disk cannot
        be read."""
        with reading(self.restorer.store):
            rows = self.restorer.store.page(owner.owner_id, after=after, limit=limit)
        return [
            (row.number, self.restorer.view(row, "cold"))
            for row in rows
            if self.restorer.sessions.find(owner, row.session_id) is None
        ]

    async def survey(self, question: SurveyQuestion) -> tuple[list[StoredSummary], int]:
        """Look through all sessions on disk alone; return those that were asked for, and how many
        match. Raises ServerBusy if the disk cannot be read."""
        with reading(self.restorer.store):
            answer = await self.restorer.store.survey(question)
        found = [self.restorer.summary(row, place) for place, row in answer.found]
        return found, answer.num_matching

    async def numbered(self, number: int) -> StoredSummary | None:
        """Return the session of a number that is on disk; None if there is none. Raises ServerBusy
        if the disk cannot be read."""
        with reading(self.restorer.store):
            row = self.restorer.store.numbered(number)
        return None if row is None else self.restorer.summary(row, 0.0)

    def close(self, owner: Owner, session_id: str) -> SessionView | None:
        """Delete a session that is on disk alone, whether or not it could be served; None if there
        is none. Raises ServerBusy if the disk cannot be read."""
        with reading(self.restorer.store):
            row = self.restorer.store.find(owner.owner_id, session_id)
            if row is None:
                return None
            self.restorer.ends.delete(row)
        return self.restorer.view(row, "closing")

    def spare(self, owner: Owner, session_id: str) -> None:
        """Delete a session that is on disk alone, if only the surface that opened it for a client
        has used it. Raises ServerBusy if the disk cannot be read."""
        with reading(self.restorer.store):
            row = self.restorer.store.find(owner.owner_id, session_id)
            if row is not None and is_spare(row):
                self.restorer.ends.delete(row)

    def make_room(self, owner: Owner, *, of_others: bool) -> bool:
        """Delete the oldest session of an owner that is on disk alone and that nobody but its
        surface has used, if one of the first ones is such; return whether it is. Raises ServerBusy
        if the disk cannot be read."""
        with reading(self.restorer.store):
            for row in self.restorer.store.page(owner.owner_id, after=0, limit=SLICE):
                if self.restorer.sessions.find(owner, row.session_id) is None and is_spare(row):
                    self.restorer.ends.delete(row)
                    return True
        return False

    def expire(self, now_s: float) -> bool:
        """Delete some whose time is over; see `StoredEnds.expire`."""
        return self.restorer.ends.expire(now_s)
