"""Serve OpenAI's Chat Completions over sessions, so that its clients run unchanged.

A call that names a session runs in it, and opens it if there is none; calls of one name wait
behind each other. Any other call runs in the session in which its conversation was held so far.
`prompt_cache_key` and headers narrow down which that is, and many conversations may share them. A
client that leaves cancels its turn.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from session_server.core.errors import SessionNotFound, SessionServerError
from session_server.core.sampling import TokenLogprob
from session_server.core.session_events import TurnEnd
from session_server.protocol.chat_answer import (
    AnswerHead,
    CallUsage,
    ChatAnswer,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    chat_completion,
    usage_chunk,
)
from session_server.protocol.chat_completions import ChatBody, ChatCall, parse_chat, session_id_of
from session_server.protocol.tools import tools_written
from session_server.sessions.conversations import UnnamedConversations
from session_server.sessions.views import OpenRequest
from session_server.web.completion_run import (
    ChoiceTurn,
    CompletionRun,
    PromptRun,
    submit_appended,
    submit_to,
)
from session_server.web.event_stream import until_disconnect
from session_server.web.headers import CONVERSATION_NAMES, LEFT_OUT
from session_server.web.openapi import answers, body_of
from session_server.web.requests import Call, Caller, read_body
from session_server.web.slices import encode_list

router = APIRouter(tags=["openai"])

_INPUT: Final = "messages"


@router.post(
    "/v1/chat/completions",
    openapi_extra=body_of(
        ChatBody,
        headers=dict.fromkeys(CONVERSATION_NAMES, "which conversation this is, in other words"),
    ),
    responses=answers(
        ChatCompletion, "The completion; or its chunks, with `stream`.", events=ChatChunk
    ),
)
async def create_chat_completion(request: Request, caller: Caller) -> Response:
    """Answer a conversation. A header says if its tools were left out."""
    caller.connect()
    body = await read_body(request, ChatBody)
    model = caller.services.model
    caller.services.check_model(body.model)
    tools = tools_written(body.tools, body.tool_choice, takes_tools=model.takes_tools)
    hints = (request.headers.get(name) for name in CONVERSATION_NAMES)
    chat = parse_chat(
        msgspec.structs.replace(body, tools=tools),
        turn_id=f"chatcmpl-{secrets.token_hex(16)}",
        hint=next(filter(None, hints), ""),
        defaults=model.defaults,
    )
    unnamed: UnnamedConversations = request.app.state.unnamed
    run = await until_disconnect(start_chat(caller, chat, unnamed), request.receive)
    answer = await run.response(request.receive, chat.request.turn_id, is_streamed=chat.stream)
    if body.tools and not tools:
        answer.headers[LEFT_OUT] = "tools"
    return answer


@dataclass(frozen=True, slots=True)
class ChatForm:
    """Say what a chat completion is made of."""

    chat: ChatCall
    head: AnswerHead
    usage: CallUsage
    answers: tuple[ChatAnswer, ...]
    input_param: str = _INPUT

    async def logprobs(self, index: int, values: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        """Return the logprobs of a chunk or a choice."""
        if not self.chat.request.sampling.logprobs:
            return None
        return ChatLogprobs(content=await encode_list(values, self.answers[index].logprob_body))

    def completion(self, ends: Sequence[tuple[TurnEnd, ChatLogprobs | None]]) -> ChatCompletion:
        """Return the whole completion."""
        choices = tuple(
            answer.choice(end, logprobs=logprobs)
            for answer, (end, logprobs) in zip(self.answers, ends, strict=True)
        )
        return chat_completion(self.chat, self.head, choices, first=ends[0][0], usage=self.usage)

    def usage_chunk(self) -> ChatChunk | None:
        """Return the last chunk, if one was asked for."""
        return usage_chunk(self.chat, self.head, self.usage)


async def start_chat(call: Call, chat: ChatCall, unnamed: UnnamedConversations) -> CompletionRun:
    """Submit the first turn to the session of its conversation.

    Raises:
        SessionServerError: refused; a session opened for it is gone.
    """
    first = await _submit(call, chat, unnamed)
    card = call.services.model
    created_s = int(call.services.wall_clock_s())
    head = AnswerHead(card.name, first.view.session_id, created_s, card.token_text)
    usage = CallUsage()
    answers = tuple(
        ChatAnswer(chat, head, usage=usage, index=index) for index in range(chat.num_choices)
    )
    return CompletionRun([PromptRun(first, answers)], ChatForm(chat, head, usage, answers))


async def _submit(call: Call, chat: ChatCall, unnamed: UnnamedConversations) -> ChoiceTurn:
    if chat.session is None:
        return await _submit_unnamed(call, chat, unnamed)
    if not chat.is_append:
        return await _submit_named(call, chat, session_id_of(chat.session))
    return await submit_appended(call, chat.request, chat.session, input_param=_INPUT)


async def _submit_named(call: Call, chat: ChatCall, session_id: str) -> ChoiceTurn:
    is_new = False
    await call.sessions.load(call.owner, session_id)
    try:
        call.sessions.get(call.owner, session_id)
    except SessionNotFound:
        call.sessions.open(call.owner, OpenRequest(session_id=session_id, is_stored=True))
        await call.sessions.stored()
        is_new = True
    try:
        return await submit_to(
            call, chat.request, session_id, input_param=_INPUT, keep_partial=True
        )
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


async def _submit_unnamed(call: Call, chat: ChatCall, unnamed: UnnamedConversations) -> ChoiceTurn:
    claim = unnamed.claim(call.owner, chat.input, hint=chat.hint)
    is_held = True

    def release(end: TurnEnd) -> None:
        nonlocal is_held
        is_held = False
        unnamed.release(claim, end)

    try:
        return await submit_to(
            call,
            chat.request,
            claim.session_id,
            input_param=_INPUT,
            on_end=release,
            keep_partial=True,
        )
    except Exception:  # a caller that is canceled leaves its turn, whose end releases
        if is_held:
            unnamed.release(claim, None)
        raise
