"""Serve OpenAI's older Completions: raw prompts, each in a session of its own or behind an open
one."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from session_server.core.errors import SessionServerError
from session_server.core.sampling import TokenLogprob
from session_server.core.session_events import (
    TextInput,
    TokenInput,
    TurnEnd,
    TurnInput,
    TurnRequest,
)
from session_server.protocol.chat_answer import LEAST_LOGPROB, AnswerHead, CallUsage
from session_server.protocol.completions import (
    CompletionBody,
    CompletionCall,
    TextAnswer,
    TextCompletion,
    TextLogprobs,
    parse_completion,
    text_completion,
)
from session_server.sessions.views import OpenRequest
from session_server.web.completion_run import (
    ChoiceTurn,
    CompletionRun,
    PromptRun,
    submit_appended,
    submit_to,
)
from session_server.web.event_stream import until_disconnect
from session_server.web.openapi import answers, body_of
from session_server.web.requests import Call, Caller, read_body
from session_server.web.slices import encode_list

router = APIRouter(tags=["openai"])

_INPUT: Final = "prompt"


@router.post(
    "/v1/completions",
    openapi_extra=body_of(CompletionBody),
    responses=answers(
        TextCompletion, "The completion; or its chunks, with `stream`.", events=TextCompletion
    ),
)
async def create_completion(request: Request, caller: Caller) -> Response:
    """Continue texts."""
    caller.connect()
    body = await read_body(request, CompletionBody)
    caller.services.check_model(body.model)
    completion = parse_completion(
        body,
        completion_id=f"cmpl-{secrets.token_hex(16)}",
        defaults=caller.services.model.defaults,
    )
    run = await until_disconnect(_start(caller, completion), request.receive)
    return await run.response(request.receive, completion.id, is_streamed=completion.stream)


@dataclass(frozen=True, slots=True)
class TextForm:
    """Say what a completion is made of."""

    completion_call: CompletionCall
    head: AnswerHead
    usage: CallUsage
    answers: tuple[TextAnswer, ...]
    input_param: str = _INPUT

    async def logprobs(self, index: int, values: Sequence[TokenLogprob]) -> TextLogprobs | None:
        """Return the logprobs of a chunk or of an answer."""
        if not self.completion_call.sampling.logprobs:
            return None
        answer = self.answers[index]
        return TextLogprobs(
            tokens=await encode_list(values, answer.text_of),
            token_logprobs=await encode_list(values, _logprob_of),
            top_logprobs=await encode_list(values, answer.top_of),
            text_offset=await encode_list(values, answer.offset_of),
        )

    def completion(self, ends: Sequence[tuple[TurnEnd, TextLogprobs | None]]) -> TextCompletion:
        """Return the whole completion."""
        choices = [
            answer.choice(end, logprobs=logprobs)
            for answer, (end, logprobs) in zip(self.answers, ends, strict=True)
        ]
        return text_completion(self.completion_call, self.head, choices, usage=self.usage)

    def usage_chunk(self) -> TextCompletion | None:
        """Return the last chunk, if one was asked for."""
        if not self.completion_call.options.include_usage:
            return None
        return text_completion(self.completion_call, self.head, (), usage=self.usage)


async def _start(call: Call, completion: CompletionCall) -> CompletionRun:
    """Submit a turn for each prompt. Raises SessionServerError."""
    turns: list[ChoiceTurn] = []
    echoes: list[str] = []
    for request in completion.requests:
        turns.append(await _submit(call, request, completion.session))
        echoes.append(_echo(call, request.input) if completion.echo else "")
        await asyncio.sleep(0)  # many short ones would hold up everybody else
    card, usage = call.services.model, CallUsage()
    created_s = int(call.services.wall_clock_s())
    head = AnswerHead(card.name, turns[0].view.session_id, created_s, card.token_text)
    num_choices = completion.num_choices
    made = tuple(
        TextAnswer(completion, head, usage=usage, index=index, prompt=echoes[index // num_choices])
        for index in range(len(turns) * num_choices)
    )
    prompts = [
        PromptRun(turn, made[index * num_choices : (index + 1) * num_choices])
        for index, turn in enumerate(turns)
    ]
    return CompletionRun(prompts, TextForm(completion, head, usage, made))


async def _submit(call: Call, request: TurnRequest, appended_to: str | None) -> ChoiceTurn:
    if appended_to is not None:
        return await submit_appended(call, request, appended_to, input_param=_INPUT)
    session_id = call.sessions.open(call.owner, OpenRequest()).session_id
    try:
        return await submit_to(call, request, session_id, input_param=_INPUT)
    except BaseException:
        with contextlib.suppress(SessionServerError):
            call.sessions.close(call.owner, session_id)
        raise


def _echo(call: Call, given: TurnInput) -> str:
    """Return the text of a prompt."""
    match given:
        case TextInput(text=text):
            return text
        case TokenInput(token_ids=token_ids):
            return call.sessions.text.tokenizer.decode(token_ids)
        case _:
            raise AssertionError("a prompt is raw input")


def _logprob_of(score: TokenLogprob) -> float | None:
    return None if score.logprob is None else max(score.logprob, LEAST_LOGPROB)
