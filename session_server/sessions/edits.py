"""Change what was said in a session at rest: rewinds, edited items, forks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from msgspec import structs

from session_server.core.errors import (
    ItemNotFound,
    SessionBusy,
    SessionServerError,
    UnsupportedOperation,
)
from session_server.core.owner import Owner
from session_server.core.session_events import ItemEdited, SessionForked, SessionRewound
from session_server.sessions.drafts import SessionDrafts
from session_server.sessions.footprint import message_bytes
from session_server.sessions.items import message_of
from session_server.sessions.parts import NOT_ENDED, SessionParts
from session_server.sessions.quotas import SessionLimits
from session_server.sessions.retention import SessionRetention
from session_server.sessions.session import Session
from session_server.sessions.transcript import Transcript
from session_server.sessions.validation import check_messages
from session_server.sessions.views import OpenRequest, SessionView
from session_server.text.model_text import ModelText


@dataclass(frozen=True, slots=True)
class HistoryEdits:
    """Rewind, edit and fork the sessions of a manager.

    `open_with` opens a session with a conversation.
    """

    parts: SessionParts
    text: ModelText
    limits: SessionLimits
    clock: Callable[[], float]
    open_with: Callable[[Owner, OpenRequest, Transcript], SessionView]
    drafts: SessionDrafts

    @property
    def retention(self) -> SessionRetention:
        """Return what cools and pins these sessions."""
        return SessionRetention(self.parts, self.limits, self.drafts)

    async def stored_view(self, owner: Owner, view: SessionView) -> SessionView:
        """Return a session that was just changed, once that is on disk, or cannot be. Raises
        SessionMoved if another replica took it meanwhile."""
        session = self.parts.sessions.find(owner, view.session_id)
        log = None if session is None else session.life.log
        await self.parts.logs.flush()
        if session is not None:
            session.check_not_lost(log)
        try:
            await self.parts.sessions.load(owner, view.session_id)
            return self.parts.sessions.get(owner, view.session_id).view()
        except SessionServerError:  # it has closed meanwhile
            return view

    def rewind(self, owner: Owner, session_id: str, to_item: str | None) -> SessionView:
        """Go back to where the conversation ended with this item; None: to its beginning.

        Raises:
            SessionNotFound, SessionClosing
            SessionBusy: a turn has not ended.
            ItemNotFound: there is no such item.
        """
        session = self.parts.resting(owner, session_id)
        self._cut(session, 0 if to_item is None else _index_of(session, to_item, "to_item") + 1)
        lengths = len(session.transcript), self._kept_len(session)
        session.journal.append(SessionRewound(to_item, *lengths))
        self.parts.logs.record(session)
        return session.view()

    def edit_item(self, owner: Owner, session_id: str, item_id: str, content: str) -> SessionView:
        """Give an item another text, and drop those behind it.

        It is a message like any other then: the next turn renders and computes it.

        Raises:
            SessionNotFound, SessionClosing, SessionBusy, ItemNotFound
            UnsupportedOperation: the item is raw input, which is no message, or no turn renders it.
            InvalidRequest: the content is too long.
            QuotaExceeded, ServerBusy: conversations have no room for it.
        """
        session = self.parts.resting(owner, session_id)
        index = _index_of(session, item_id, "item_id")
        item = session.transcript.item(index)
        if item.role == "raw":
            raise UnsupportedOperation(
                "raw input is no message that can be edited", param="item_id"
            )
        if self.text.chat is None or not session.transcript.can_render(index):
            raise UnsupportedOperation("no later turn could render this item", param="item_id")
        message = structs.replace(message_of(item), content=content)
        check_messages((message,), self.limits)
        self.parts.quotas.check_growth(owner, message_bytes(message))
        self._cut(session, index)
        session.transcript.add_open(message, item_id=item_id)
        self.parts.quotas.recount(session)
        lengths = len(session.transcript), self._kept_len(session)
        session.journal.append(ItemEdited(item_id, *lengths))
        self.parts.logs.record(session)
        return session.view()

    def fork(
        self,
        owner: Owner,
        session_id: str,
        *,
        at_item: str | None = None,
        new_id: str | None = None,
    ) -> SessionView:
        """Open a session with the conversation up to this item; None: with all of it.

        Its first turn finds the KV that both have in common in the radix tree, as far as it is
        there. It is not pinned. Raises what `rewind` and `SessionManager.open` raise.
        """
        source = self.parts.sessions.get(owner, session_id)
        if not source.is_idle:
            raise SessionBusy(NOT_ENDED)
        is_stored = source.life.log is not None
        return self.branch(owner, session_id, at_item=at_item, new_id=new_id, is_stored=is_stored)

    async def fork_as(
        self, owner: Owner, session_id: str, new_id: str | None, *, at_item: str | None = None
    ) -> SessionView:
        """Fork as `fork` does, once it is known whether an id that a client chose is free in all
        replicas of a store."""
        if new_id is not None:
            await self.parts.sessions.look_up(owner, new_id)
            await self.parts.sessions.load(owner, session_id)  # it may have left meanwhile
        return self.fork(owner, session_id, at_item=at_item, new_id=new_id)

    def branch(
        self,
        owner: Owner,
        session_id: str,
        *,
        at_item: str | None = None,
        new_id: str | None = None,
        is_stored: bool,
    ) -> SessionView:
        """Fork what has ended in a session, whatever runs in it now. Raises what `fork` raises, but
        for SessionBusy."""
        source = self.parts.sessions.use(owner, session_id)
        source.check_not_closing()
        num_items = source.transcript.num_items
        if at_item is not None:
            num_items = _index_of(source, at_item, "at_item") + 1
        request = OpenRequest(
            session_id=new_id,
            ttl_s=source.settings.ttl_s,
            metadata=source.settings.metadata,
            history=source.settings.asked_history,
            is_stored=is_stored,
        )
        view = self.open_with(owner, request, source.transcript.fork(num_items))
        if not source.journal.is_closed:  # it may have closed to make room
            source.journal.append(SessionForked(view.session_id, view.num_tokens))
        return view

    def fork_before(self, owner: Owner, session_id: str, turn_id: str) -> SessionView:
        """Open a session with the conversation as it was before this turn, which may still run.

        It is for another answer to the turn's input. Readers are not told, and the session counts
        as unused. Raises SessionNotFound and what `SessionManager.open` raises.
        """
        source = self.parts.sessions.get(owner, session_id)
        transcript, ttl_s = source.transcript, source.settings.ttl_s
        said = transcript.fork(transcript.num_items_before(turn_id))
        return self.open_with(owner, OpenRequest(ttl_s=ttl_s), said)

    def last_answer(self, owner: Owner, session_id: str, num_items: int) -> tuple[int, str | None]:
        """Return how many items there are up to the last answer among the first ones of a session,
        and the id of that answer. Raises SessionNotFound."""
        transcript = self.parts.sessions.get(owner, session_id).transcript
        num_answered = transcript.last_answer_before(num_items)
        return num_answered, transcript.item(num_answered - 1).id if num_answered else None

    def _cut(self, session: Session, num_items: int) -> None:
        """Keep the first items of a session at rest."""
        if num_items < session.transcript.num_items:
            copies, generation = self.drafts.copies, self.parts.link.generation
            before = session.transcript.tokens() if copies.must_drop_end(session) else None
            session.transcript.cut(num_items)
            num_kept, known = len(session.transcript), session.copy.known_len(generation)
            if before is not None:
                copies.drop_end(session, before, num_kept)
            if known is not None:
                session.copy.set_known_len(min(known, num_kept), generation)
        session.life.last_active_s = self.clock()
        self.parts.sessions.deadlines.watch(session)
        self.parts.quotas.recount(session)

    def _kept_len(self, session: Session) -> int:
        """Return how many tokens of the history have KV, as far as is known here."""
        known = session.copy.known_len(self.parts.link.generation)
        return known or 0 if session.copy.state == "resident" else 0


def _index_of(session: Session, item_id: str, param: str) -> int:
    """Return the index of an item. Raises ItemNotFound, with the field that names it."""
    index = session.transcript.index_of(item_id)
    if index is None:
        raise ItemNotFound("no such item in this session", param=param)
    return index
