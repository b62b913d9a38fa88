"""Take sessions out of the memory: closed for good, or unloaded, to be read again from the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from session_server.core.owner import Owner
from session_server.core.session_events import CancelReason, CloseReason, SessionClosed
from session_server.sessions.backlog import SLICE
from session_server.sessions.drafts import SessionDrafts
from session_server.sessions.drain import Drain
from session_server.sessions.parts import SessionParts
from session_server.sessions.session import Session
from session_server.sessions.turn_ends import turn_moved
from session_server.sessions.turn_flow import TurnFlow
from session_server.sessions.views import SessionView


class SessionExits:
    """Close and unload the sessions of a manager.

    `count_readers`: how many connections read a session of an owner. `on_left`: told of a session
    that has left for another replica.
    """

    def __init__(self, parts: SessionParts, flow: TurnFlow, drafts: SessionDrafts) -> None:
        self.parts = parts
        self.flow = flow
        self._drafts = drafts
        self.count_readers: Callable[[Owner, str], int] = lambda _owner, _session_id: 0
        close = partial(self.close, reason="draining")
        self.on_left: Callable[[Session], None] = lambda _session: None
        self._num_losing = 0
        self.drain = Drain(parts.sessions, flow, parts.link, close)
        parts.quotas.room_makers.unload = self._unload_one

    async def delete(self, owner: Owner, session_id: str) -> SessionView:
        """Close a session as `close_named` does, and wait until that is on disk, or cannot be.

        Returns:
            The session as it closes; `is_durable` says whether it is gone from the disk, which it
            is not while the turn goes on that was canceled. None for one that was never there.

        Raises:
            SessionMoved: another replica has it, or had it when it was to be deleted here.
            SessionNotFound, ServerBusy
        """
        sessions, logs = self.parts.sessions, self.parts.logs
        await sessions.prepare_close(owner, session_id)
        session, number = sessions.find(owner, session_id), sessions.order_of(owner, session_id)
        place = None if session is None else session.life.log
        is_stored = session is None or place is not None
        view = self.close_named(owner, session_id, "client")
        await logs.flush()  # the end of a turn, with which the session goes
        await logs.flush()
        if place is not None:
            place.check_not_moved()
        is_open = session is not None and session is sessions.find(owner, session_id)
        # One that was deleted unread has been waited for already, and its view says how that went.
        has_failed = session is None and view.is_durable is False
        is_gone = not (is_open or has_failed) and logs.is_gone(number)
        return replace(view, is_durable=is_gone if is_stored else None)

    async def prepare_close(self, owner: Owner, session_id: str) -> None:
        """Do what has to be awaited before a session is closed by its id. Raises SessionMoved,
        ServerBusy."""
        await self.parts.sessions.prepare_close(owner, session_id)

    def close_named(self, owner: Owner, session_id: str, reason: CloseReason) -> SessionView:
        """Close a session, in memory or on disk alone, by its id. Raises SessionNotFound."""
        if (view := self.parts.sessions.close_on_disk(owner, session_id)) is not None:
            return view
        session = self.parts.sessions.get(owner, session_id)
        self.close(session, reason)
        return session.view()

    def close(self, session: Session, reason: CloseReason) -> None:
        """Reject new turns, end waiting ones, cancel a running one; `finish` does the rest when the
        last has ended."""
        if session.closing is not None:
            return
        session.closing = reason
        cancel_reason: CancelReason = "draining" if reason == "draining" else "session_closed"
        waiting_first = (*session.queue, *([session.live] if session.live else []))
        self.flow.cancel(session, *waiting_first, keep_partial=True, reason=cancel_reason)

    def give_up(self, session: Session, *, is_lost: bool) -> None:
        """Let a session go on in another replica, once the turns that it has have ended: none is
        cut because somebody asks elsewhere. One that `is_lost` is another's already: nothing of it
        is written, and its turns fail."""
        log = session.life.log
        if log is None or (session.closing is not None and not is_lost):
            return
        log.has_moved |= is_lost
        session.closing = "moved"
        lost = (*session.queue, *([session.live] if session.live else [])) if is_lost else ()
        self.flow.cancel(session, *lost, keep_partial=False, reason="draining", moved=turn_moved())

    def lose_all(self) -> None:
        """Give up all sessions of a shared store: the lease of this replica is over."""

        def calls() -> Iterator[Callable[[], None]]:
            for session in self.parts.sessions:
                if session.life.log is not None:
                    yield partial(self.give_up, session, is_lost=True)
            self._num_losing -= 1

        self._num_losing += 1
        self.flow.backlog.run(calls())

    @property
    def is_losing(self) -> bool:
        """Return whether `lose_all` is not done: sessions are in memory that nobody knows to be
        another replica's."""
        return self._num_losing > 0

    def expire(self, now_s: float) -> None:
        """Close sessions whose time has come, a slice at a time."""
        for session in self.parts.sessions.deadlines.pop_expired(now_s):
            self.close(session, "expired")
        if self.parts.sessions.deadlines.is_due(now_s):
            self.flow.backlog.defer(partial(self.expire, now_s))

    def finish(self, session: Session) -> None:
        """End a session that is closing, and in which no turn is left."""
        assert session.closing is not None, "a session that nobody has closed"
        if session.closing == "moved":
            self.parts.logs.leave(session)
            self._unload(session)
            self.on_left(session)
            return
        leaves_kv = self._let_go(session)
        self.parts.sessions.remove(session, session.closing)
        if self.parts.logs.outlives(session):
            self.parts.quotas.unload_session(session)
        else:
            self.parts.quotas.release_session(session)
        tell = partial(session.journal.append, SessionClosed(session.closing))
        self.parts.logs.close(session, tell, leaves_kv=leaves_kv)

    def _unload_one(self, owner: Owner, *, of_others: bool) -> bool:
        """Unload a session at rest, the one unused for longest of this owner, or of all where
        memory is scarce; return whether there was one. Looks at no more than `SLICE`."""
        logs, quotas, order = self.parts.logs, self.parts.quotas, self.parts.sessions.by_use
        if logs.store is None or logs.store.failure is not None:
            return False
        is_scarce = quotas.sessions.is_in_reserve or quotas.history_bytes.is_in_reserve
        whose = None if of_others or is_scarce else owner
        pinned: Session | None = None
        for _ in range(min(SLICE, order.num_of(whose))):
            session = order.first(whose)
            assert session is not None, "as many as were counted"
            if self._can_be_read_again(session):
                if not _keeps_pinned_kv(session):
                    self._unload(session)
                    return True
                pinned = pinned or session
            order.postpone(session)
        if pinned is not None:  # a pin keeps KV, and no place of which others have none
            self._unload(pinned)
        return pinned is not None

    def _can_be_read_again(self, session: Session) -> bool:
        """Return whether nobody has a session in hand, and all that matters of it is on disk."""
        place = session.life.log
        is_at_rest = session.is_idle and session.closing is None
        if place is None or not place.is_written or not is_at_rest:
            return False
        is_own, num_uses = session.life.num_own_uses is None, session.life.num_uses
        is_same = is_own or place.num_uses == num_uses  # else somebody may have it spared
        if not is_same or not self.parts.logs.is_dated(session):
            self.parts.logs.touch(session)  # it may go once that is on disk
            return False
        return not (
            session is self.parts.sessions.by_use.in_hand
            or session.transcript.attached_bytes
            or session.journal.has_listeners
            or self._drafts.is_drafting(session)
            or self.count_readers(session.owner, session.session_id)
        )

    def _unload(self, session: Session) -> None:
        self._let_go(session)
        self.parts.sessions.unload(session)
        self.parts.quotas.unload_session(session)
        session.journal.suspend()

    def _let_go(self, session: Session) -> bool:
        """Give back what a session at rest has beside its place in memory; see `EngineCopies.close`
        for what is returned."""
        self._drafts.stop(session)
        self.parts.sessions.deadlines.remove(session)
        self.flow.residents.drop(session)
        return self.flow.copies.close(session)


def _keeps_pinned_kv(session: Session) -> bool:
    """Return whether a pin keeps KV of the session, which leaves the pools with it."""
    return session.settings.is_pinned and session.copy.state == "resident"
