"""Run one response of OpenAI's Responses, from its submission to its last event."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive

from session_server.core.errors import (
    WIRE_ERRORS,
    ContextLengthExceeded,
    ContextTooLong,
    ConversationNotFound,
    ResponseNotFound,
    ServerBusy,
    ServerDraining,
    SessionBusy,
    SessionClosing,
    SessionMoved,
    SessionNotFound,
    SessionServerError,
    TurnNotFound,
)
from session_server.core.session_events import (
    Message,
    TurnCancelled,
    TurnDelta,
    TurnEnd,
    TurnFailedEntry,
)
from session_server.protocol.response_body import ResponseBody, answer_of
from session_server.protocol.response_events import ResponseEvent, ResponseEvents, score_body
from session_server.protocol.response_items import (
    FindItem,
    InputItemBody,
    answer_parts,
    check_calls,
    joined,
    open_calls_of,
    part_of_response,
    parts_of,
)
from session_server.protocol.responses import ResponseCall, ResponseFields, parse_response
from session_server.protocol.tools import tools_written
from session_server.sessions.kept_conversations import ConversationEntry, KeptConversation
from session_server.sessions.response_turns import (
    Keep,
    Place,
    Recalled,
    ResponseTurns,
    ResponseWork,
)
from session_server.sessions.responses import Asked, ResponseContent, StoredResponse
from session_server.sessions.turn_ends import is_kept
from session_server.web.event_stream import DONE, HEARTBEAT, each_entry
from session_server.web.refusals import JsonResponse, failure_response
from session_server.web.requests import Call
from session_server.web.slices import encode_list
from session_server.web.turns import TurnReader


@dataclass(frozen=True, slots=True)
class ResponseRun:
    """Hold the state of one response that somebody reads.

    `body`: as it began. `is_bound`: a lost reader cancels its turn.
    """

    call: Call
    body: ResponseBody
    stored: StoredResponse
    reader: TurnReader
    events: ResponseEvents
    is_bound: bool

    def leave(self) -> None:
        """Stop to read; a turn that is bound to its reader is canceled if it has not ended, and
        leaves nothing."""
        self.reader.close()
        if self.is_bound and not self.reader.has_ended:
            self.cancel(keep_partial=False)

    def cancel(self, *, keep_partial: bool) -> None:
        """Cancel the turn unless it has ended, maybe unread."""
        with contextlib.suppress(SessionServerError):
            self.call.sessions.cancel(
                self.call.owner,
                self.stored.made_in,
                self.stored.response_id,
                keep_partial=keep_partial,
                reason="client_cancelled" if keep_partial else "disconnected",
            )

    async def end(self, receive: Receive) -> TurnEnd:
        """Wait for the turn's end.

        Raises:
            HttpRefusal: the client disconnected before.
            SessionClosing, ServerDraining: the turn was ended with its session.
            TurnNotFound: its answer was replaced before it was read.
        """
        end = await self.reader.end(receive)
        if (error := cause_of(end)) is not None:
            raise error
        return end

    async def response(self, receive: Receive) -> Response:
        """Wait for the turn's end and return the whole response. Raises what `end` raises."""
        end = await self.end(receive)
        if isinstance(end, TurnFailedEntry):
            return failure_response(end)
        *_, last = [event async for event in self._closing(end)]
        return JsonResponse(last.response)

    async def stream(self, *, after: int = -1) -> AsyncGenerator[bytes, None]:
        """Yield the events behind number `after`, then `[DONE]`."""
        async for event in self.read(after=after):
            yield HEARTBEAT if event is None else event_bytes(event)
        yield DONE

    async def read(self, *, after: int = -1) -> AsyncGenerator[ResponseEvent | None, None]:
        """Yield the events behind number `after`; None after each silent heartbeat interval. What
        was lost between two of them stands in the last."""
        try:
            async for event in self._built():
                if event is None or event.sequence_number > after:
                    yield event
                elif self.reader.has_gap and isinstance(event.response, ResponseBody):
                    yield self.events.last(event.response, after=after)
        except (SessionClosing, SessionMoved, TurnNotFound):
            body = msgspec.json.decode(self.stored.content.body, type=ResponseBody)
            yield self.events.last(body, after=after)

    async def _built(self) -> AsyncGenerator[ResponseEvent | None, None]:
        for event in self.events.opening():
            yield event
        async for item in self.reader.entries():
            entry = None if item is None else item[1]
            if entry is None:
                yield None
            elif isinstance(entry, TurnEnd):
                self.call.resources.close()  # the client may send its next call now
                async for event in self._closing(entry):
                    yield event
            elif isinstance(entry, TurnDelta) and not self.reader.has_gap:
                # Behind a gap it would not be where it belongs.
                scores = [score_body(each, self._token_text) for each in entry.logprobs]
                for event in self.events.add(entry, logprobs=scores):
                    yield event

    async def _closing(self, end: TurnEnd) -> AsyncGenerator[ResponseEvent, None]:
        scores: Any = ()
        if end.outcome.logprobs:
            body_of = partial(score_body, token_text=self._token_text)
            scores = await encode_list(end.outcome.logprobs, body_of)
        ended_s = self.stored.content.ended_s
        for event in self.events.closing(end, ended_s=ended_s, logprobs=scores):
            yield event

    @property
    def _token_text(self) -> Callable[[int], str]:
        return self.call.services.model.token_text


def event_bytes(event: ResponseEvent) -> bytes:
    """Encode an event for a stream."""
    payload = msgspec.json.encode(event)
    return b"".join((b"event: ", event.type.encode(), b"\ndata: ", payload, b"\n\n"))


async def parse(
    turns: ResponseTurns, call: Call, fields: ResponseFields, *, scope: object | None = None
) -> ResponseCall:
    """Translate a request. `scope` as in `ask`. Raises UnknownModel, and what `parse_response`
    raises."""
    services = call.services
    services.check_model(fields.model)
    await load_references(turns, call, fields.input)
    takes_tools = services.model.takes_tools
    tools = tools_written(fields.tools, fields.tool_choice, takes_tools=takes_tools)
    return parse_response(
        msgspec.structs.replace(fields, tools=tools),
        response_id=f"resp_{secrets.token_hex(16)}",
        model=services.model.name,
        created_s=int(services.wall_clock_s()),
        defaults=services.model.defaults,
        find=item_finder(turns, call, scope=scope),
    )


async def load_references(
    turns: ResponseTurns, call: Call, items: str | Sequence[InputItemBody] | None
) -> None:
    """Bring into memory what items refer to, others being served in between, so that `item_finder`
    finds it. Raises ServerBusy, InternalInconsistency."""
    for item in () if items is None or isinstance(items, str) else items:
        if item.type == "item_reference":
            suffix = _suffix_of(item.id or "")
            await turns.store.records.load(call.owner, f"resp_{suffix}")
            await turns.conversations.records.load(call.owner, f"conv_{suffix}")


def item_finder(turns: ResponseTurns, call: Call, *, scope: object | None = None) -> FindItem:
    """Return what finds the items that are kept for a caller: of responses and conversations, whose
    ids begin with theirs."""

    def find(item_id: str) -> Message | None:
        suffix = _suffix_of(item_id)
        with contextlib.suppress(ResponseNotFound):
            kept = turns.store.find(call.owner, f"resp_{suffix}", scope=scope)
            messages, answer = kept.asked.messages, kept.content.answer
            return part_of_response(item_id, suffix, messages, answer)
        with contextlib.suppress(ConversationNotFound):
            entries = turns.conversations.find(call.owner, f"conv_{suffix}").entries
            index = entries.index_of(item_id)
            return None if index is None else entries[index].message
        return None

    return find


def _suffix_of(item_id: str) -> str:
    """Return what the id of an item has in common with that of its response or conversation."""
    return f"{item_id}__".split("_")[1]


async def recall(
    turns: ResponseTurns, call: Call, asked: ResponseCall, *, scope: object | None = None
) -> Recalled | None:
    """Bring into memory what a response goes on from, and return it if that is a response. `scope`:
    the connection that asks, for one that only it may know. Raises what `ResponseTurns.recall` and
    `ResponseTurns.previous` raise, ConversationNotFound."""
    body = asked.body
    if body.conversation is not None:
        await turns.recall_conversation(call.owner, body.conversation["id"])
    if body.conversation is not None or body.previous_response_id is None:
        return None
    previous = await turns.previous(call.owner, body.previous_response_id, scope=scope)
    return await turns.recall(previous)


def _ask(asked: ResponseCall, previous: Recalled | None) -> Asked:
    """Return what a request asks. Raises InvalidRequest."""
    before = () if previous is None else previous.response.open_calls
    open_calls = check_calls(asked.messages, before)
    return Asked(asked.opening, asked.messages, asked.tools, open_calls)


def _conversation_of(
    turns: ResponseTurns, call: Call, body: ResponseBody
) -> KeptConversation | None:
    """Return the conversation that a response goes on with, if it names one. Raises
    ConversationNotFound, SessionBusy."""
    if body.conversation is None:
        return None
    conversation = turns.conversations.find(call.owner, body.conversation["id"])
    if conversation.running is not None:
        raise SessionBusy("A response of this conversation has not ended.", param="conversation")
    return conversation


def _place(
    turns: ResponseTurns,
    call: Call,
    asked: ResponseCall,
    before: KeptConversation | Recalled | None,
    *,
    scope: object | None,
) -> tuple[Asked, Place]:
    """Return what a response is asked, and where it runs."""
    if not isinstance(before, KeptConversation):
        said = _ask(asked, before)
        keep: Keep = "on disk" if asked.body.store else "nowhere" if scope is None else "here"
        return said, turns.place(call.owner, said, before, keep=keep)
    said, messages = _behind(before, asked)
    return said, turns.place_whole(before, said, messages)


def _behind(
    conversation: KeptConversation, asked: ResponseCall
) -> tuple[Asked, tuple[Message, ...]]:
    """Return what a request asks, and the conversation before it. Raises InvalidRequest."""
    before = joined(conversation.entries.messages())
    open_calls = check_calls(asked.messages, open_calls_of(before))
    return Asked(asked.opening, asked.messages, asked.tools, open_calls), before


async def count_tokens(turns: ResponseTurns, call: Call, asked: ResponseCall) -> int:
    """Return the tokens of the context that a response would have. Raises what its turn would."""
    named, previous = asked.body.conversation, await recall(turns, call, asked)
    try:
        if named is None:
            return await turns.count(call.owner, _ask(asked, previous), previous)
        conversation = turns.conversations.find(call.owner, named["id"])
        return await turns.count_whole(conversation, *_behind(conversation, asked))
    except ContextTooLong as error:
        raise ContextLengthExceeded(error.message, param="input") from None


def _entries_of(response: StoredResponse, answer: Message | None) -> list[ConversationEntry]:
    """Return what a response adds to its conversation: what it was asked and has answered."""
    suffix = response.key.partition("_")[2]
    parts = parts_of(response.asked.messages, suffix)
    if answer is not None:
        parts += answer_parts(answer, suffix)
    return [ConversationEntry(item_id, part) for item_id, part in parts]


def _content_of(body: ResponseBody, end: TurnEnd, *, now_s: int) -> ResponseContent:
    """Return what a response is at its turn's end."""
    return ResponseContent(
        msgspec.json.encode(body.ended(end, now_s=now_s)),
        "said" if is_kept(end) else "lost",
        now_s,
        answer_of(end),
    )


@contextlib.contextmanager
def _begun(conversation: KeptConversation | None, response_id: str) -> Iterator[None]:
    """Let a conversation wait for a response, unless that is refused. Raises
    ContextLengthExceeded."""
    if conversation is not None:
        conversation.running = response_id
    try:
        yield
    except SessionServerError as error:
        if conversation is not None:
            conversation.running = None
        if isinstance(error, ContextTooLong):
            raise ContextLengthExceeded(error.message, param="input") from None
        raise


async def start_response(
    call: Call,
    turns: ResponseTurns,
    asked: ResponseCall,
    *,
    scope: object | None = None,
    stream_id: str | None = None,
) -> ResponseRun:
    """Submit the turn of a response, which ends with the call unless it runs in the background.

    `scope`: the connection that asks; one that is not stored is known to it alone.

    Raises:
        SessionServerError: refused, with nothing kept.
    """
    body, owner = asked.body, call.owner
    previous = await recall(turns, call, asked, scope=scope)
    # From its place to its turn nothing is awaited: no other response takes the same place.
    conversation = _conversation_of(turns, call, body)
    said, place = _place(turns, call, asked, conversation or previous, scope=scope)
    body = msgspec.structs.replace(body, session_id=place.said_in.session_id)
    stored = StoredResponse(
        response_id=asked.response_id,
        owner=owner,
        place=place.said_in,
        asked=said,
        previous=body.previous_response_id if conversation is None else conversation.key,
        scope=None if body.store else scope,
        content=ResponseContent(msgspec.json.encode(body)),
    )
    interrupted = None
    if body.background and body.store:
        # Its client is told of it now, and asks for it by its id later.
        lost = body.interrupted(is_durable=turns.is_synced)
        interrupted = ResponseContent(msgspec.json.encode(lost), "lost")
    work = ResponseWork(
        response=stored,
        content_of=lambda end: _content_of(body, end, now_s=int(call.services.wall_clock_s())),
        entries_of=partial(_entries_of, stored),
        conversation=conversation,
        interrupted=interrupted,
        is_kept=body.store or scope is not None,
    )
    reader = _reader_at(call, turns, place)
    with _begun(conversation, asked.response_id):
        view = await turns.submit(place, asked.turn(place.input), work)
    run = ResponseRun(
        call=call,
        body=body,
        stored=stored,
        reader=reader.follow(view),
        events=ResponseEvents(body, stream_id=stream_id),
        is_bound=not body.background,
    )
    call.resources.callback(run.leave)
    return run


def _reader_at(call: Call, turns: ResponseTurns, place: Place) -> TurnReader:
    """Return the reader of a response that is to run at a place. Raises ServerBusy, with the place
    given back."""
    session_id = place.session.session_id
    try:
        return TurnReader(call, session_id, keep_partial=None, merge=each_entry)
    except ServerBusy:
        turns.give_back(place)
        raise


def resume_response(
    call: Call, stored: StoredResponse, *, is_bounded: bool = True
) -> ResponseRun | None:
    """Return a run that reads a response again; None if its session is gone. `is_bounded`: as in
    `Readers.reading`. Raises ServerBusy."""
    owner, session_id = call.owner, stored.made_in
    session = call.sessions.edits.parts.sessions.find(owner, session_id)
    if session is None or session.journal.epoch != stored.place.epoch:
        return None  # one that has left the memory has another journal
    try:
        view = call.sessions.turn(owner, session_id, stored.response_id)
    except (SessionNotFound, TurnNotFound):
        return None
    body = msgspec.json.decode(stored.content.body, type=ResponseBody).begun()
    reader = TurnReader(
        call, session_id, keep_partial=None, merge=each_entry, is_bounded=is_bounded
    )
    return ResponseRun(
        call=call,
        body=body,
        stored=stored,
        reader=reader.follow(view),
        events=ResponseEvents(body),
        is_bound=False,
    )


_TOO_LONG = WIRE_ERRORS[ContextTooLong].code


def cause_of(end: TurnEnd) -> SessionServerError | None:
    """Return the error for a turn that ended with its session or the server, or did not fit when
    its time came; None for any other."""
    match end:
        case TurnFailedEntry(code=code, message=message) if code == _TOO_LONG:
            return ContextLengthExceeded(message, param="input")
        case TurnCancelled(reason="draining"):
            return ServerDraining("The server shuts down: it ended the turn.")
        case TurnCancelled(reason="session_closed"):
            return SessionClosing("The session was closed before the turn's end.")
        case _:
            return None
