"""Serve OpenAI's Chat Completions over sessions, so that its clients run unchanged.

A call that names a session runs in it, and opens it if there is none; calls of one name wait
behind each other. Any other call runs in the session in which its conversation was held so far.
`prompt_cache_key` and headers narrow down which that is, and many conversations may share them. A
client that leaves cancels its turn.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from session_server.core.errors import (
    WIRE_ERRORS,
    ContextLengthExceeded,
    ContextTooLong,
    InvalidRequest,
    ServerDraining,
    SessionClosing,
    SessionNotFound,
    SessionServerError,
    TurnNotFound,
)
from session_server.core.session_events import (
    TurnCancelled,
    TurnDelta,
    TurnEnd,
    TurnFailedEntry,
    TurnProgress,
)
from session_server.protocol.chat_answer import (
    ChatAnswer,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
)
from session_server.protocol.chat_completions import ChatBody, ChatCall, parse_chat, session_id_of
from session_server.protocol.errors import error_body, sanitize
from session_server.protocol.frames import failure_body
from session_server.sessions.conversations import UnnamedConversations
from session_server.sessions.journal import Journal
from session_server.sessions.views import OpenRequest, TurnView
from session_server.web.event_stream import DONE, HEARTBEAT, EventStream, data_event, error_event
from session_server.web.headers import CONVERSATION_NAMES, REQUEST_ID
from session_server.web.openapi import answers, body_of
from session_server.web.refusals import JsonResponse, failure_response
from session_server.web.requests import Call, Caller, read_body
from session_server.web.slices import encode_list
from session_server.web.turns import TurnReader

router = APIRouter(tags=["openai"])

_TOO_LONG: Final = WIRE_ERRORS[ContextTooLong].code


@router.post(
    "/v1/chat/completions",
    openapi_extra=body_of(ChatBody),
    responses=answers(ChatCompletion, "The completion; or its chunks, with `stream`."),
)
async def create_chat_completion(request: Request, caller: Caller) -> Response:
    """Answer a conversation."""
    caller.readers.check_capacity(caller.owner, None)
    body = await read_body(request, ChatBody)
    caller.services.check_model(body.model)
    hints = (request.headers.get(name) for name in CONVERSATION_NAMES)
    chat = parse_chat(
        body,
        turn_id=f"chatcmpl-{secrets.token_hex(12)}",
        hint=next(filter(None, hints), ""),
        defaults=caller.services.model.defaults,
    )
    unnamed: UnnamedConversations = request.app.state.unnamed
    run = await start_chat(caller, chat, unnamed)
    headers = {REQUEST_ID: chat.request.turn_id}
    if chat.stream:
        return EventStream(run.events(), context=run.scope(), headers=headers)
    with run.scope():
        return await run.response(request.receive, headers)


@dataclass(frozen=True, slots=True)
class ChatRun:
    """Hold the state of one running completion."""

    call: Call
    chat: ChatCall
    session_id: str
    reader: TurnReader
    answer: ChatAnswer

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Cancel the turn if it has not ended behind the block, whoever else reads its session.

        Raises:
            ServerBusy: too many read the session.
        """
        try:
            with self.reader:
                yield
        finally:
            if not self.reader.has_ended:
                with contextlib.suppress(SessionServerError):  # it may have ended unread
                    self.call.sessions.cancel(
                        self.call.owner,
                        self.session_id,
                        self.chat.request.turn_id,
                        keep_partial=not self.chat.is_append,
                        reason="disconnected",
                    )

    async def response(self, receive: Receive, headers: dict[str, str]) -> Response:
        """Wait for the turn's end and return the whole answer.

        Raises:
            HttpRefusal: the client disconnected before.
            SessionClosing, ServerDraining: the turn was ended with its session.
            TurnNotFound: its answer was replaced before it was read.
        """
        end = await self.reader.end(receive)
        if (error := _cause_of(end)) is not None:
            raise error
        if isinstance(end, TurnFailedEntry):
            return failure_response(end)
        logprobs = await self._logprobs(end)
        return JsonResponse(self.answer.completion(end, logprobs=logprobs), headers=headers)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the chunks as events without a name, then `[DONE]`."""
        try:
            yield data_event(self.answer.opening())
            async for item in self.reader.entries():
                entry = None if item is None else item[1]
                if entry is None:
                    yield HEARTBEAT
                elif isinstance(entry, TurnProgress):
                    self.answer.note_progress(entry)
                elif isinstance(entry, TurnEnd):
                    self.reader.close()  # the client may send its next call before the last chunk
                    async for chunk in self._last_events(entry):
                        yield chunk
                elif isinstance(entry, TurnDelta) and self._is_shown(entry):
                    yield data_event(await self._chunk(entry))
        except (SessionClosing, TurnNotFound) as error:
            yield error_event(error_body(error))
        yield DONE

    async def _last_events(self, end: TurnEnd) -> AsyncGenerator[bytes, None]:
        if (error := _cause_of(end)) is not None:
            yield error_event(error_body(error))
            return
        if isinstance(end, TurnFailedEntry):
            yield error_event(failure_body(end))
            return
        unsent = self.answer.unsent(end)
        if self.reader.has_gap and (unsent.text or unsent.logprobs):
            yield data_event(await self._chunk(unsent))
        for chunk in self.answer.closing(end):
            yield data_event(chunk)

    def _is_shown(self, delta: TurnDelta) -> bool:
        """Return whether a delta makes a chunk. Behind a gap it would not be where it belongs."""
        return bool(delta.text or delta.logprobs) and not self.reader.has_gap

    async def _chunk(self, delta: TurnDelta) -> ChatChunk:
        return self.answer.add(delta, logprobs=await self._logprobs(delta))

    async def _logprobs(self, entry: TurnDelta | TurnEnd) -> ChatLogprobs | None:
        if not self.chat.request.sampling.logprobs:
            return None
        values = entry.logprobs if isinstance(entry, TurnDelta) else entry.outcome.logprobs
        return ChatLogprobs(content=await encode_list(values, self.answer.logprob_body))


async def start_chat(call: Call, chat: ChatCall, unnamed: UnnamedConversations) -> ChatRun:
    """Submit the turn to the session of its conversation.

    Raises:
        SessionServerError: refused; a session opened for it is gone.
    """
    view, journal = await _submit(call, chat, unnamed)
    card = call.services.model
    return ChatRun(
        call=call,
        chat=chat,
        session_id=view.session_id,
        reader=TurnReader(call, journal, view, keep_partial=None),
        answer=ChatAnswer(
            chat,
            model=card.name,
            session_id=view.session_id,
            created_s=int(call.services.wall_clock_s()),
            token_text=card.token_text,
        ),
    )


async def _submit(
    call: Call, chat: ChatCall, unnamed: UnnamedConversations
) -> tuple[TurnView, Journal]:
    """Submit the turn; return it with its journal, which stays readable when the session closes."""
    if chat.session is None:
        return await _submit_unnamed(call, chat, unnamed)
    if not chat.is_append:
        return await _submit_named(call, chat, session_id_of(chat.session))
    try:
        return await _submit_to(call, chat, chat.session)
    except SessionNotFound:
        name = sanitize(chat.session)
        raise InvalidRequest(
            f"Invalid request: session id {name} does not exist", param="session_params.id"
        ) from None


async def _submit_to(
    call: Call,
    chat: ChatCall,
    session_id: str,
    *,
    on_end: Callable[[TurnEnd], None] | None = None,
) -> tuple[TurnView, Journal]:
    journal = call.sessions.journal(call.owner, session_id)
    call.readers.check_capacity(call.owner, session_id)
    try:
        view = await call.sessions.submit(call.owner, session_id, chat.request, on_end=on_end)
    except ContextTooLong as error:
        raise ContextLengthExceeded(error.message, param="messages") from None
    return view, journal


async def _submit_named(call: Call, chat: ChatCall, session_id: str) -> tuple[TurnView, Journal]:
    is_new = False
    try:
        call.sessions.get(call.owner, session_id)
    except SessionNotFound:
        call.sessions.open(call.owner, OpenRequest(session_id=session_id))
        is_new = True
    try:
        return await _submit_to(call, chat, session_id)
    except SessionServerError:
        if is_new:
            _close_unused(call, session_id)
        raise


def _close_unused(call: Call, session_id: str) -> None:
    """Close a session that was opened for a call, unless others have joined it meanwhile."""
    with contextlib.suppress(SessionNotFound):
        view = call.sessions.get(call.owner, session_id)
        if view.running_turn is None and not view.queued_turns and not view.num_turns:
            call.sessions.close(call.owner, session_id)


async def _submit_unnamed(
    call: Call, chat: ChatCall, unnamed: UnnamedConversations
) -> tuple[TurnView, Journal]:
    claim = unnamed.claim(call.owner, chat.messages, hint=chat.hint)
    is_held = True

    def release(end: TurnEnd) -> None:
        nonlocal is_held
        is_held = False
        unnamed.release(claim, end)

    try:
        return await _submit_to(call, chat, claim.session_id, on_end=release)
    except Exception:  # a caller that is canceled leaves its turn, whose end releases
        if is_held:
            unnamed.release(claim, None)
        raise


def _cause_of(end: TurnEnd) -> SessionServerError | None:
    """Return the error for a turn that ended with its session or the server, or did not fit when
    its time came; None for one that somebody canceled: what it said until then is its answer."""
    match end:
        case TurnFailedEntry(code=code, message=message) if code == _TOO_LONG:
            return ContextLengthExceeded(message, param="messages")
        case TurnCancelled(reason="draining"):
            return ServerDraining("The server shuts down: it ended the turn.")
        case TurnCancelled(reason="session_closed"):
            return SessionClosing("The session was closed before the turn's end.")
        case _:
            return None
