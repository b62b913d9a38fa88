"""Run each response as a turn of a session: the one in which its conversation goes on.

What goes on from the newest response of a session is appended there. What goes on from an earlier
one, or from one whose session is in use, runs in a fork. Where the session is gone, the whole
conversation is rendered anew in another one, from what is kept of its responses.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from weakref import WeakKeyDictionary

from session_server.core.errors import (
    EngineUnavailable,
    InvalidRequest,
    PreviousResponseNotFound,
    ResponseNotFound,
    SessionNotFound,
    SessionServerError,
)
from session_server.core.owner import Owner
from session_server.core.session_events import (
    ChatInput,
    Message,
    TurnCancelled,
    TurnCompleted,
    TurnEnd,
    TurnRequest,
)
from session_server.sessions.footprint import input_bytes
from session_server.sessions.items import message_of
from session_server.sessions.journal import Journal
from session_server.sessions.kept_conversations import KeptConversation, KeptConversations
from session_server.sessions.manager import SessionManager
from session_server.sessions.opening import history_modes
from session_server.sessions.responses import Asked, ResponseStore, StoredResponse
from session_server.sessions.resting import CountReaders, RestingSessions
from session_server.sessions.session import Session
from session_server.sessions.transcript import Transcript
from session_server.sessions.views import OpenRequest, TurnView

OnEnd = Callable[[StoredResponse, TurnEnd], None]


@dataclass(frozen=True, slots=True)
class Place:
    """Hold where a response runs, and what its turn is given there. `is_new`: the session was
    opened for it. `is_kept`: the session stays for the next response."""

    owner: Owner
    session_id: str
    input: ChatInput
    is_new: bool
    is_kept: bool


@dataclass(frozen=True, slots=True)
class _Said:
    """Say where a response ended: at item `last` of a conversation. `is_newest`: nothing follows
    it, and no turn runs."""

    transcript: Transcript
    last: int
    is_newest: bool

    @property
    def item_id(self) -> str:
        return self.transcript.item(self.last).id

    def messages(self, start: int) -> tuple[Message, ...]:
        """Return the messages from one on, up to the end of the response."""
        indexes = range(start, self.last + 1)
        return tuple(message_of(self.transcript.item(index)) for index in indexes)


class ResponseTurns:
    """Run the responses of all owners."""

    def __init__(self, manager: SessionManager, *, count_readers: CountReaders) -> None:
        self._manager = manager
        self.store = ResponseStore(manager.edits.parts.quotas)
        self.conversations = KeptConversations(manager.edits.parts.quotas)
        self._resting = RestingSessions(manager, count_readers)
        self._uses: WeakKeyDictionary[Journal, int] = WeakKeyDictionary()
        """How often each session that was opened here has been used here."""

    def previous(self, owner: Owner, response_id: str, *, scope: object | None) -> StoredResponse:
        """Return the response that another one goes on from.

        Raises:
            PreviousResponseNotFound: there is none.
            InvalidRequest: it has not ended, or left nothing.
        """
        try:
            found = self.store.find(owner, response_id, scope=scope)
        except ResponseNotFound:
            raise _not_found(response_id) from None
        param = "previous_response_id"
        if found.state == "running":
            raise InvalidRequest(f"Response '{response_id}' has not ended.", param=param)
        if found.state == "lost":
            raise InvalidRequest(
                f"Response '{response_id}' failed or was canceled, and left nothing.", param=param
            )
        return found

    def messages_before(self, previous: StoredResponse) -> tuple[Message, ...]:
        """Return all that was said up to the end of a response, without what its call began with.
        Raises PreviousResponseNotFound: a part of it is gone."""
        said = self._said(previous)
        if said is None:
            return self._chain(previous)
        return said.messages(len(previous.asked.opening))

    def place(
        self, owner: Owner, asked: Asked, previous: StoredResponse | None, *, is_kept: bool
    ) -> Place:
        """Return where a response runs: the session is open, and nothing spares it from here on.

        `is_kept` False: nothing may go on from it. Raises PreviousResponseNotFound, and whatever
        `SessionManager.open` raises.
        """
        if previous is None:
            return self._open(owner, asked, (), is_kept=is_kept)
        said = self._said(previous)
        if said is None:
            return self._open(owner, asked, self._chain(previous), is_kept=is_kept)
        session_id, is_new = previous.session_id, not (said.is_newest and is_kept)
        if is_new:
            session_id = self._fork(owner, session_id, said.item_id)
        else:
            self._resting.take(owner, session_id)
        turn_input = self._following(asked, previous, said)
        return Place(owner, session_id, turn_input, is_new=is_new, is_kept=is_kept)

    def place_whole(
        self, conversation: KeptConversation, asked: Asked, before: tuple[Message, ...]
    ) -> Place:
        """Return where a response to a whole conversation runs: in the session in which its last
        one was made, unless that is gone or in use. Raises what `SessionManager.open` raises."""
        owner, session = conversation.owner, self._session_of(conversation)
        if session is None:
            return self._open(owner, asked, before, is_kept=True)
        self._resting.take(owner, session.session_id)
        whole = _whole(asked, before)
        return Place(owner, session.session_id, whole, is_new=False, is_kept=True)

    def _session_of(self, conversation: KeptConversation) -> Session | None:
        """Return the session of a conversation; None if it is gone or in use."""
        owner, session_id = conversation.owner, conversation.session_id
        try:
            session = self._manager.edits.parts.sessions.get(owner, session_id)
        except SessionNotFound:
            return None
        is_same = session.journal.epoch == conversation.epoch and session.closing is None
        return session if is_same and session.is_idle else None

    def forget_conversation(self, conversation: KeptConversation) -> None:
        """Delete a conversation; its session closes unless responses or somebody else use it."""
        self.conversations.records.remove(conversation)
        if not self.store.num_in(conversation.owner, conversation.session_id):
            self._resting.close(conversation.owner, [conversation.session_id])

    async def submit(
        self,
        place: Place,
        request: TurnRequest,
        response: StoredResponse,
        on_end: OnEnd,
        *,
        is_stored: bool,
    ) -> TurnView:
        """Run a response at its place, and keep it if `is_stored`.

        `on_end` is told of its end before the session is given back; it sets body and answer.
        Raises what `SessionManager.submit` raises, with nothing kept.
        """
        owner, session_id = place.owner, place.session_id
        has_ended = False

        def end(end: TurnEnd) -> None:
            nonlocal has_ended
            has_ended = True
            is_said = isinstance(end, TurnCompleted) or (
                isinstance(end, TurnCancelled) and end.kept_partial
            )
            response.state = "said" if is_said else "lost"
            on_end(response, end)
            self.store.records.recount(response)
            self._release(place, is_said=is_said)
            if is_stored and not self.store.records.is_kept(response):
                self._close_unasked(response)  # it was forgotten while it ran

        try:
            if is_stored:
                self.store.add(response)
            self._count_use(owner, session_id)
            return await self._manager.submit(owner, session_id, request, on_end=end)
        except asyncio.CancelledError:
            self.store.records.remove(response)
            with contextlib.suppress(SessionServerError):  # its end releases
                self._manager.cancel(owner, session_id, request.turn_id, keep_partial=False)
            raise
        except Exception:
            self.store.records.remove(response)
            if not has_ended:
                self._release(place, is_said=False)
            raise

    def give_back(self, place: Place) -> None:
        """Give up a place, of which no response was submitted."""
        self._release(place, is_said=False)

    async def count(self, owner: Owner, asked: Asked, previous: StoredResponse | None) -> int:
        """Return the tokens of the context that a response would have. Raises what its turn
        would."""
        said = None if previous is None else self._said(previous)
        turn_input = ChatInput((*asked.opening, *asked.messages), tools=asked.tools)
        transcript = None
        if previous is not None and said is None:
            messages = (*asked.opening, *self._chain(previous), *asked.messages)
            turn_input = ChatInput(messages, tools=asked.tools)
        elif previous is not None and said is not None:
            transcript = said.transcript.fork(said.last + 1)
            turn_input = self._following(asked, previous, said)
        return await self._measure(owner, transcript, turn_input)

    async def count_whole(
        self, conversation: KeptConversation, asked: Asked, before: tuple[Message, ...]
    ) -> int:
        """Return the tokens of the context that a response to a whole conversation would have.
        Raises what its turn would."""
        session = self._session_of(conversation)
        transcript = None if session is None else session.transcript
        return await self._measure(conversation.owner, transcript, _whole(asked, before))

    async def _measure(
        self, owner: Owner, transcript: Transcript | None, turn_input: ChatInput
    ) -> int:
        """Return the tokens of a context. None: a new session's."""
        edits = self._manager.edits
        link, text = edits.parts.link, self._manager.text
        if link.ready is None:
            raise EngineUnavailable("there is no engine")
        if transcript is None:
            transcript = Transcript(history_modes(None, text), (), now=datetime.now().astimezone())
        with edits.parts.quotas.turn_bytes.held(owner, input_bytes(turn_input)):
            return await edits.parts.prompts.measure(
                owner, transcript.state(turn_input), turn_input, max_len=link.ready.max_turn_len
            )

    def forget(self, response: StoredResponse) -> None:
        """Delete a response; its session closes with the last of its responses, unless somebody
        else uses it."""
        self.store.records.remove(response)
        self._close_unasked(response)

    def forget_some(self, owner: Owner, most: int) -> bool:
        """Delete up to so many responses, and conversations, of an owner, and the sessions that
        rest; return whether there were any."""
        self._resting.close_all(owner)
        num_gone = self.store.records.remove_some(owner, most)
        num_gone += self.conversations.records.remove_some(owner, most)
        return num_gone > 0

    def _close_unasked(self, response: StoredResponse) -> None:
        """Close the session of a response that is gone if it was the last."""
        if not self.store.num_in(response.owner, response.session_id):
            self._resting.close(response.owner, [response.session_id])

    def _following(self, asked: Asked, previous: StoredResponse, said: _Said) -> ChatInput:
        """Return the input of a turn that goes on from where a response ended."""
        if (previous.asked.opening, previous.asked.tools) == (asked.opening, asked.tools):
            return ChatInput(asked.messages, tools=asked.tools)
        # Instructions are not inherited: the longest beginning that both have stays.
        later = said.messages(len(previous.asked.opening))
        whole = (*asked.opening, *later, *asked.messages)
        return ChatInput(whole, is_whole=True, tools=asked.tools)

    def _open(
        self, owner: Owner, asked: Asked, before: tuple[Message, ...], *, is_kept: bool
    ) -> Place:
        session_id = self._manager.open(owner, OpenRequest()).session_id
        self._begin(owner, session_id)
        messages = (*asked.opening, *before, *asked.messages)
        turn_input = ChatInput(messages, is_whole=bool(before), tools=asked.tools)
        return Place(owner, session_id, turn_input, is_new=True, is_kept=is_kept)

    def _fork(self, owner: Owner, session_id: str, item_id: str) -> str:
        self._resting.take(owner, session_id)  # so that nothing spares it for its own fork
        self._count_use(owner, session_id)
        try:
            forked = self._manager.edits.branch(owner, session_id, at_item=item_id).session_id
        finally:
            self._leave(owner, session_id)
        self._begin(owner, forked)
        return forked

    def _said(self, response: StoredResponse) -> _Said | None:
        """Return where a response ended in its session; None if that does not hold it any more."""
        try:
            session = self._manager.edits.parts.sessions.get(response.owner, response.session_id)
        except SessionNotFound:
            return None
        if session.closing is not None or session.journal.epoch != response.epoch:
            return None
        transcript, turn_id = session.transcript, response.response_id
        ended = session.ended.find(turn_id)
        last = transcript.num_items if ended is None else ended.answer_index
        # Somebody may have gone back to before its end, or changed what it said.
        if last >= transcript.num_items or transcript.item(last).turn_id != turn_id:
            return None
        return _Said(transcript, last, session.is_idle and last == transcript.num_items - 1)

    def _chain(self, response: StoredResponse) -> tuple[Message, ...]:
        """Return all that was said up to a response, from what is kept of it and of those before
        it. Raises PreviousResponseNotFound if one of them is gone."""
        pieces: list[tuple[Message, ...]] = []
        each = response
        while True:
            answer = () if each.answer is None else (each.answer,)
            pieces.append((*each.asked.messages, *answer))
            if each.previous is None:
                return tuple(message for piece in reversed(pieces) for message in piece)
            try:
                each = self.store.find(response.owner, each.previous, scope=response.scope)
            except ResponseNotFound:
                raise _not_found(response.response_id) from None

    def _release(self, place: Place, *, is_said: bool) -> None:
        """Let a session rest, or close one that nothing goes on from."""
        owner, session_id = place.owner, place.session_id
        if (is_said and place.is_kept) or not place.is_new:
            self._leave(owner, session_id)
            return
        with contextlib.suppress(SessionServerError):
            self._manager.close(owner, session_id)

    def _leave(self, owner: Owner, session_id: str) -> None:
        with contextlib.suppress(SessionNotFound):
            num_uses = self._uses.get(self._manager.journal(owner, session_id), -1)
            self._resting.leave(owner, session_id, num_uses=num_uses)

    def _begin(self, owner: Owner, session_id: str) -> None:
        self._uses[self._manager.journal(owner, session_id)] = 0

    def _count_use(self, owner: Owner, session_id: str) -> None:
        journal = self._manager.journal(owner, session_id)
        if journal in self._uses:
            self._uses[journal] += 1


def _whole(asked: Asked, before: tuple[Message, ...]) -> ChatInput:
    messages = (*asked.opening, *before, *asked.messages)
    return ChatInput(messages, is_whole=True, tools=asked.tools)


def _not_found(response_id: str) -> PreviousResponseNotFound:
    return PreviousResponseNotFound(
        f"Previous response with id '{response_id}' not found.", param="previous_response_id"
    )
