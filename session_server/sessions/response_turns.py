"""Run each response as a turn of a session: the one in which its conversation goes on.

What goes on from the newest response of a session is appended there. What goes on from an earlier
one, or from one whose session is in use, runs in a fork. Where the session is gone, the whole
conversation is rendered anew in another one, from what is kept of its responses.

A response that is stored is on disk with its turn, in one commit, before anybody is told that it
has ended; so is what it adds to a conversation. Its session is stored from then on. One that is not
stored runs in a session which is not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, Literal

from session_server.core.errors import (
    EngineUnavailable,
    InternalInconsistency,
    InvalidRequest,
    PreviousResponseNotFound,
    ResponseNotFound,
    SessionNotFound,
    SessionServerError,
    UnknownModel,
)
from session_server.core.owner import Owner
from session_server.core.session_events import (
    ChatInput,
    Message,
    TurnEnd,
    TurnRequest,
)
from session_server.sessions.footprint import input_bytes
from session_server.sessions.items import message_of
from session_server.sessions.kept_conversations import (
    ConversationEntry,
    KeptConversation,
    KeptConversations,
)
from session_server.sessions.manager import SessionManager
from session_server.sessions.opening import history_modes
from session_server.sessions.responses import (
    Asked,
    ResponseContent,
    ResponseStore,
    SaidIn,
    StoredResponse,
)
from session_server.sessions.resting import CountReaders, RestingSessions
from session_server.sessions.session import Session
from session_server.sessions.store.writer import Beside, together
from session_server.sessions.transcript import Transcript
from session_server.sessions.turn import TurnHooks
from session_server.sessions.turn_ends import with_durability
from session_server.sessions.views import OpenRequest, TurnView

CHAINED_AT_ONCE: Final = 16
"""Responses without their session that are read before others are served: half a millisecond."""

Keep = Literal["nowhere", "here", "on disk"]
"""Where what a response leaves stays for the next one: in its session, and with a store on disk."""


@dataclass(frozen=True, slots=True)
class Place:
    """Hold where a response runs, and what its turn is given there. `is_new`: the session was
    opened for it. `keep`: whether the session stays for the next response."""

    owner: Owner
    session: Session
    input: ChatInput
    is_new: bool
    keep: Keep

    @property
    def said_in(self) -> SaidIn:
        """Return the name of the session."""
        session = self.session
        return SaidIn(session.session_id, session.life.order, session.journal.epoch)


@dataclass(frozen=True, slots=True)
class ResponseWork:
    """Say what the end of a response's turn makes of it: its content, and what that adds to the
    conversation that it goes on with, if any.

    `interrupted`: its content if the process ends first, for one whose client is told of it before;
    None for any other. `is_kept`: somebody may ask for the response again.
    """

    response: StoredResponse
    content_of: Callable[[TurnEnd], ResponseContent]
    entries_of: Callable[[Message | None], list[ConversationEntry]]
    conversation: KeptConversation | None
    interrupted: ResponseContent | None
    is_kept: bool


@dataclass(frozen=True, slots=True)
class Recalled:
    """Hold a response that another one goes on from. `chain`: all that was said up to its end,
    without what its call began with; None where its session has it."""

    response: StoredResponse
    chain: tuple[Message, ...] | None


@dataclass(frozen=True, slots=True)
class _Said:
    """Say where a response ended: at item `last` of a session. `is_newest`: nothing follows it, and
    no turn runs."""

    session: Session
    last: int
    is_newest: bool

    @property
    def transcript(self) -> Transcript:
        return self.session.transcript

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
        parts = manager.edits.parts
        self._manager = manager
        self._logs, self._sessions = parts.logs, parts.sessions
        kept_by = parts.quotas, parts.logs.records, parts.backlog
        self.store, self.conversations = ResponseStore(*kept_by), KeptConversations(*kept_by)
        self._resting = RestingSessions(manager, count_readers)

    async def previous(
        self, owner: Owner, response_id: str, *, scope: object | None
    ) -> StoredResponse:
        """Return the response that another one goes on from.

        Raises:
            PreviousResponseNotFound: there is none.
            InvalidRequest: it has not ended, or left nothing.
        """
        await self.store.load(owner, response_id)
        try:
            found = self.store.find(owner, response_id, scope=scope)
        except ResponseNotFound:
            raise _not_found(response_id) from None
        param = "previous_response_id"
        if found.content.state == "running":
            raise InvalidRequest(f"Response '{response_id}' has not ended.", param=param)
        if found.content.state == "lost":
            raise InvalidRequest(
                f"Response '{response_id}' failed or was canceled, and left nothing.", param=param
            )
        return found

    async def recall(self, previous: StoredResponse) -> Recalled:
        """Bring into memory what a response ended with, its session or what is kept of it and of
        those before it, others being served in between. It stays there until something is awaited.

        Raises:
            PreviousResponseNotFound: its session is gone, and so is one of those before it.
            InvalidRequest: they have more messages than a turn may have.
            And what `SessionManager.load` raises.
        """
        await self._load(previous.owner, previous.place)
        if self._said(previous) is not None:
            return Recalled(previous, None)
        return Recalled(previous, await self._chain(previous))

    async def recall_conversation(self, owner: Owner, conversation_id: str) -> KeptConversation:
        """Bring a conversation and its session into memory, as `recall` does. Raises
        ConversationNotFound, and what `SessionManager.load` raises."""
        conversation = await self.conversations.load(owner, conversation_id)
        await self._load(owner, conversation.place)
        # Another replica may have gone on with it before it gave the session up.
        return await self.conversations.load(owner, conversation_id)

    async def _load(self, owner: Owner, place: SaidIn) -> None:
        """Bring the session in which something was said into memory, if it can be read."""
        with contextlib.suppress(SessionNotFound, UnknownModel, InternalInconsistency):
            await self._manager.load(owner, place.session_id)
            self._sessions.get(owner, place.session_id)

    def messages_before(self, previous: Recalled) -> tuple[Message, ...]:
        """Return all that was said up to the end of a response, without what its call began
        with."""
        said = self._said(previous.response)
        if said is None:
            return _chain_of(previous)
        return said.messages(len(previous.response.asked.opening))

    def place(self, owner: Owner, asked: Asked, previous: Recalled | None, *, keep: Keep) -> Place:
        """Return where a response runs: the session is open, and nothing spares it from here on.
        Raises whatever `SessionManager.open` raises."""
        if previous is None:
            return self._open(owner, asked, (), keep=keep)
        said = self._said(previous.response)
        if said is None:
            return self._open(owner, asked, _chain_of(previous), keep=keep)
        session = said.session
        # What is not to be stored leaves nothing in a session that is.
        is_next = keep == "on disk" or (keep == "here" and session.life.log is None)
        is_new = not (said.is_newest and is_next)
        if is_new:
            session = self._fork(session, said.item_id)
        else:
            self._resting.take(owner, session.session_id)
        turn_input = self._following(asked, previous.response, said)
        return Place(owner, session, turn_input, is_new=is_new, keep=keep)

    def place_whole(
        self, conversation: KeptConversation, asked: Asked, before: tuple[Message, ...]
    ) -> Place:
        """Return where a response to a whole conversation runs: in the session in which its last
        one was made, unless that is gone or in use. Raises what `SessionManager.open` raises."""
        owner, session = conversation.owner, self._session_of(conversation)
        if session is None:
            return self._open(owner, asked, before, keep="on disk")
        self._resting.take(owner, session.session_id)
        return Place(owner, session, _whole(asked, before), is_new=False, keep="on disk")

    def _session_of(self, conversation: KeptConversation) -> Session | None:
        """Return the session of a conversation; None if it is gone or in use."""
        session = self._session_at(conversation.owner, conversation.place)
        return session if session is not None and session.is_idle else None

    def _session_at(self, owner: Owner, place: SaidIn) -> Session | None:
        """Return the session in which something was said; None if it is gone, or `_load` could not
        read it."""
        if self._sessions.find(owner, place.session_id) is None:
            return None
        session = self._sessions.get(owner, place.session_id)
        is_same = session.life.order == place.number and session.closing is None
        return session if is_same else None

    @property
    def is_synced(self) -> bool:
        """Return whether what is told to be in the store, if there is one, is on disk."""
        return self._logs.store is not None and self._logs.store.is_synced

    async def forget_conversation(self, owner: Owner, conversation_id: str) -> int:
        """Delete a conversation, readable or not, and return the number that it had on disk; its
        session closes unless responses or somebody else use it. Raises ConversationNotFound,
        ServerBusy."""
        records = self.conversations.records
        try:
            conversation = await self.conversations.load(owner, conversation_id)
        except InternalInconsistency:
            number = records.number_of(owner, conversation_id)
            records.remove_unread(owner, conversation_id)
            return number
        # Before anything is awaited: what was read goes where a write of it fails.
        number = records.number_of(owner, conversation_id)
        records.remove(conversation)
        await self.store.records.look_up_made_in(owner, conversation.place.session_id)
        self._close_unasked(owner, conversation.place.session_id)
        return number

    async def submit(self, place: Place, request: TurnRequest, work: ResponseWork) -> TurnView:
        """Run a response at its place.

        Raises what `SessionManager.submit` raises, with nothing kept.
        """
        owner, session_id, response = place.owner, place.session.session_id, work.response
        records, ended = self.store.records, False
        written: ResponseContent | None = None

        def beside(end: TurnEnd) -> Beside | None:
            nonlocal written
            written = work.content_of(with_durability(end, is_durable=self.is_synced))
            return self._write_of(work, written)

        def on_end(end: TurnEnd) -> None:
            nonlocal ended
            ended = True
            if written is None or not end.outcome.is_durable:
                response.content = work.content_of(end)
            else:
                response.content = written
            if written is None:
                self._write_of(work, response.content)
            if work.conversation is not None:
                work.conversation.running = None
            records.recount(response)
            self._release(place, is_said=response.content.state == "said")
            if work.is_kept and not records.is_kept(response):
                self._close_unasked(owner, session_id)  # it was forgotten while it ran

        try:
            if work.is_kept:
                records.add(response)
            if place.keep == "on disk":
                self._logs.begin(place.session)
            if work.interrupted is not None:
                running_in = self._logs.records.replica_id
                content = replace(work.interrupted, running_in=running_in)
                records.put(response, replace(response, content=content))
            _count_use(place.session)
            hooks = TurnHooks(on_end, beside)
            view = await self._manager.submit(owner, session_id, request, hooks=hooks)
            if work.interrupted is not None:
                await self._manager.stored()
            return view
        except asyncio.CancelledError:
            records.remove(response)
            with contextlib.suppress(SessionServerError):  # its end releases
                self._manager.cancel(owner, session_id, request.turn_id, keep_partial=False)
            raise
        except Exception:
            records.remove(response)
            if not ended:
                self._release(place, is_said=False)
            raise

    def _write_of(self, work: ResponseWork, content: ResponseContent) -> Beside | None:
        """Add to a conversation what a response has said, and return what is to be on disk with its
        turn, if anything."""
        writes: list[Beside | None] = []
        if work.response.scope is None:
            shown = replace(work.response, content=content)
            writes.append(self.store.records.write_of(work.response, shown))
        if work.conversation is not None and content.state == "said":
            entries = work.entries_of(content.answer)
            add = self.conversations.append_said
            writes.append(add(work.conversation, entries, work.response.place))
        found = [write for write in writes if write is not None]
        return together(found) if found else None

    def give_back(self, place: Place) -> None:
        """Give up a place, of which no response was submitted."""
        self._release(place, is_said=False)

    async def count(self, owner: Owner, asked: Asked, previous: Recalled | None) -> int:
        """Return the tokens of the context that a response would have. Raises what its turn
        would."""
        said = None if previous is None else self._said(previous.response)
        turn_input = ChatInput((*asked.opening, *asked.messages), tools=asked.tools)
        transcript = None
        if previous is not None and said is None:
            messages = (*asked.opening, *_chain_of(previous), *asked.messages)
            turn_input = ChatInput(messages, tools=asked.tools)
        elif previous is not None and said is not None:
            transcript = said.transcript.fork(said.last + 1)
            turn_input = self._following(asked, previous.response, said)
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
        else uses it. Other replicas may have made some: `KeptRecords.look_up_beside`."""
        self.store.records.remove(response)
        self._close_unasked(response.owner, response.made_in)

    def forget_unread(self, owner: Owner, response_id: str) -> bool:
        """Delete a response that is on disk alone, readable or not, as `forget` does; return
        whether there is one."""
        made_in = self.store.records.remove_unread(owner, response_id)
        if made_in is not None:
            self._close_unasked(owner, made_in)
        return made_in is not None

    def forget_some(self, owner: Owner, most: int) -> bool:
        """Delete up to so many responses, and conversations, of an owner, and the sessions that
        rest; return whether there were any."""
        self._resting.close_all(owner)
        num_gone = self.store.records.remove_some(owner, most)
        num_gone += self.conversations.records.remove_some(owner, most)
        return num_gone > 0

    def _close_unasked(self, owner: Owner, session_id: str) -> None:
        """Close a session of responses that are gone, unless others are kept or somebody else uses
        it."""
        if self.store.records.num_made_in(owner, session_id):
            return
        session = self._sessions.find(owner, session_id)
        if session is None:
            self._sessions.spare_on_disk(owner, session_id)
        else:
            self._leave(session)  # it does not rest yet if it was read from the disk
            self._resting.close(owner, [session_id])

    def _following(self, asked: Asked, previous: StoredResponse, said: _Said) -> ChatInput:
        """Return the input of a turn that goes on from where a response ended."""
        if (previous.asked.opening, previous.asked.tools) == (asked.opening, asked.tools):
            return ChatInput(asked.messages, tools=asked.tools)
        # Instructions are not inherited: the longest beginning that both have stays.
        later = said.messages(len(previous.asked.opening))
        whole = (*asked.opening, *later, *asked.messages)
        return ChatInput(whole, is_whole=True, tools=asked.tools)

    def _open(
        self, owner: Owner, asked: Asked, before: tuple[Message, ...], *, keep: Keep
    ) -> Place:
        session_id = self._manager.open(owner, OpenRequest()).session_id
        messages = (*asked.opening, *before, *asked.messages)
        turn_input = ChatInput(messages, is_whole=bool(before), tools=asked.tools)
        return Place(owner, self._opened(owner, session_id), turn_input, is_new=True, keep=keep)

    def _fork(self, source: Session, item_id: str) -> Session:
        owner, session_id = source.owner, source.session_id
        self._resting.take(owner, session_id)  # so that nothing spares it for its own fork
        _count_use(source)
        try:
            branch = self._manager.edits.branch
            forked = branch(owner, session_id, at_item=item_id, is_stored=False).session_id
        finally:
            self._leave(source)
        return self._opened(owner, forked)

    def _opened(self, owner: Owner, session_id: str) -> Session:
        """Return a session that was opened here, and is not used yet."""
        session = self._sessions.get(owner, session_id)
        session.life.num_own_uses = 0
        return session

    def _said(self, response: StoredResponse) -> _Said | None:
        """Return where a response ended in its session; None if that does not hold it any more."""
        session = self._session_at(response.owner, response.place)
        if session is None:
            return None
        transcript, turn_id = session.transcript, response.response_id
        ended = session.ended.find(turn_id)
        last = transcript.num_items if ended is None else ended.answer_index
        # Somebody may have gone back to before its end, or changed what it said.
        if last >= transcript.num_items or transcript.item(last).turn_id != turn_id:
            return None
        return _Said(session, last, session.is_idle and last == transcript.num_items - 1)

    async def _chain(self, response: StoredResponse) -> tuple[Message, ...]:
        """Return all that was said up to a response, from what is kept of it and of those before
        it. Raises PreviousResponseNotFound if one of them is gone, InvalidRequest."""
        pieces: list[tuple[Message, ...]] = []
        each, room = response, self._manager.edits.limits.max_messages
        while room > 0:
            answer = () if each.content.answer is None else (each.content.answer,)
            pieces.append((*each.asked.messages, *answer))
            room -= max(1, len(pieces[-1]))
            if each.previous is None:
                return tuple(message for piece in reversed(pieces) for message in piece)
            if len(pieces) % CHAINED_AT_ONCE == 0:
                await asyncio.sleep(0)
            try:
                await self.store.load(response.owner, each.previous)
                each = self.store.find(response.owner, each.previous, scope=response.scope)
            except ResponseNotFound:
                raise _not_found(response.response_id) from None
        raise InvalidRequest(
            f"What response '{response.response_id}' goes on from has more messages than a turn "
            "may have, and the session that had them is gone.",
            param="previous_response_id",
        )

    def _release(self, place: Place, *, is_said: bool) -> None:
        """Let a session rest, or close one that nothing goes on from."""
        if (is_said and place.keep != "nowhere") or not place.is_new:
            self._leave(place.session)
            return
        with contextlib.suppress(SessionServerError):
            self._manager.close(place.owner, place.session.session_id)

    def _leave(self, session: Session) -> None:
        owner, session_id, num_uses = session.owner, session.session_id, session.life.num_own_uses
        if num_uses is not None and self._sessions.find(owner, session_id) is session:
            self._resting.leave(owner, session_id, num_uses=num_uses)


def _chain_of(previous: Recalled) -> tuple[Message, ...]:
    assert previous.chain is not None, "something was awaited since it was recalled"
    return previous.chain


def _count_use(session: Session) -> None:
    if session.life.num_own_uses is not None:
        session.life.num_own_uses += 1


def _whole(asked: Asked, before: tuple[Message, ...]) -> ChatInput:
    messages = (*asked.opening, *before, *asked.messages)
    return ChatInput(messages, is_whole=True, tools=asked.tools)


def _not_found(response_id: str) -> PreviousResponseNotFound:
    return PreviousResponseNotFound(
        f"Previous response with id '{response_id}' not found.", param="previous_response_id"
    )
