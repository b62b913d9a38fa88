"""Run one completion of OpenAI's APIs: its prompts, several answers of each, one stream.

Of each prompt one turn runs first. When it has its first token the prompt is computed and its whole
pages are published; the other answers then run in forks of its session, which close with the call.
A client that leaves cancels all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, TypeVar

import msgspec
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
)
from session_server.core.sampling import TokenLogprob
from session_server.core.session_events import (
    TurnCancelled,
    TurnDelta,
    TurnEnd,
    TurnFailedEntry,
    TurnProgress,
    TurnRequest,
)
from session_server.protocol.chat_answer import ChatAnswer
from session_server.protocol.completions import TextAnswer
from session_server.protocol.errors import error_body, sanitize
from session_server.protocol.frames import failure_body
from session_server.sessions.views import TurnView
from session_server.web.event_stream import (
    DONE,
    HEARTBEAT,
    EventStream,
    data_event,
    error_event,
    until_disconnect,
)
from session_server.web.headers import REQUEST_ID
from session_server.web.refusals import JsonResponse, failure_response
from session_server.web.requests import Call
from session_server.web.turns import TurnReader, submitted

T = TypeVar("T")

_TOO_LONG: Final = WIRE_ERRORS[ContextTooLong].code


ChoiceAnswer = ChatAnswer | TextAnswer


class CompletionForm(Protocol):
    """Say what an API's completion is made of. `input_param`: its name for the input. `ends`: how
    each choice ended, with its logprobs."""

    @property
    def input_param(self) -> str: ...

    async def logprobs(self, index: int, values: Sequence[TokenLogprob]) -> Any:
        """Return the logprobs of a chunk or of an answer."""
        ...

    def completion(self, ends: Sequence[tuple[TurnEnd, Any]]) -> msgspec.Struct:
        """Return the whole completion."""
        ...

    def usage_chunk(self) -> msgspec.Struct | None:
        """Return the last chunk, if one was asked for."""
        ...


class _TurnFailed(Exception):
    """Report that a turn has failed, and the call with it."""

    def __init__(self, end: TurnFailedEntry) -> None:
        self.end = end


@dataclass(frozen=True, slots=True)
class ChoiceTurn:
    """Hold a submitted turn and its only reader. `keep_partial`: whether a cancel keeps what was
    said where the client leaves; None: the session closes with the call."""

    call: Call
    request: TurnRequest
    reader: TurnReader
    keep_partial: bool | None = None

    @property
    def view(self) -> TurnView:
        """Return the turn as it was accepted."""
        return self.reader.view

    def leave(self) -> None:
        """Cancel the turn if its end was not read, whoever else reads its session."""
        sessions, owner, session_id = self.call.sessions, self.call.owner, self.view.session_id
        self.reader.close()
        with contextlib.suppress(SessionServerError):  # it may have ended unread
            if not self.reader.has_ended:
                sessions.cancel(
                    owner,
                    session_id,
                    self.request.turn_id,
                    keep_partial=bool(self.keep_partial),
                    reason="disconnected",
                )
        with contextlib.suppress(SessionServerError):
            if self.keep_partial is None:
                sessions.close(owner, session_id)


@dataclass(slots=True)
class PromptRun:
    """Hold the answers of one prompt: the turn of the first, and when the others may begin.

    `forks`: sessions of the other answers, opened when the prompt is computed.
    """

    first: ChoiceTurn
    answers: Sequence[ChoiceAnswer]
    is_computed: asyncio.Event = field(default_factory=asyncio.Event)
    forks: list[str] = field(default_factory=list)

    def note_entry(self, entry: object) -> None:
        """Open the sessions of the other answers with the first token of the first. Raises what
        `SessionManager.open` raises."""
        if self.is_computed.is_set() or not isinstance(entry, TurnDelta | TurnEnd):
            return
        call, view = self.first.call, self.first.view
        call.resources.callback(self._close_forks)
        for _ in self.answers[1:]:
            fork = call.sessions.edits.fork_before(call.owner, view.session_id, view.turn_id)
            self.forks.append(fork.session_id)
        self.is_computed.set()

    async def turn(self, index: int, *, input_param: str) -> ChoiceTurn:
        """Return the turn of an answer when it runs. Raises SessionServerError."""
        if index == 0:
            return self.first
        await self.is_computed.wait()
        first, session_id = self.first, self.forks[index - 1]
        call, seed = first.call, first.request.sampling.seed
        request = replace(
            first.request,
            turn_id=f"{first.request.turn_id}-{index}",
            sampling=msgspec.structs.replace(
                first.request.sampling, seed=None if seed is None else (seed + index) % (1 << 63)
            ),
        )
        return await submit_to(call, request, session_id, input_param=input_param)

    def _close_forks(self) -> None:
        call = self.first.call
        for session_id in self.forks:
            with contextlib.suppress(SessionServerError):
                call.sessions.close(call.owner, session_id)


@dataclass(slots=True)
class CompletionRun:
    """Hold the state of one running completion. What has not ended is canceled with the call."""

    prompts: Sequence[PromptRun]
    form: CompletionForm
    _num_open: int = field(init=False)

    def __post_init__(self) -> None:
        self._num_open = sum(map(_num, self.prompts))

    async def response(self, receive: Receive, call_id: str, *, is_streamed: bool) -> Response:
        """Return the answers: when all have ended, or as they come.

        Raises:
            HttpRefusal: the client disconnected before.
            SessionClosing, ServerDraining: a turn was ended with its session.
            TurnNotFound: an answer was replaced before it was read.
        """
        headers = {REQUEST_ID: call_id}
        if is_streamed:
            return EventStream(self.events(), headers=headers)
        works = [self._end(prompt, i) for prompt in self.prompts for i in range(_num(prompt))]
        try:
            ends = await until_disconnect(_all(works), receive)
        except _TurnFailed as failure:
            return failure_response(failure.end)
        answers = [answer for prompt in self.prompts for answer in prompt.answers]
        scored = []
        for answer, end in zip(answers, ends, strict=True):
            scored.append((end, await self.form.logprobs(answer.index, answer.scored(end))))
            await asyncio.sleep(0)  # many short ones would hold up everybody else
        return JsonResponse(self.form.completion(scored), headers=headers)

    async def _end(self, prompt: PromptRun, index: int) -> TurnEnd:
        turn = await prompt.turn(index, input_param=self.form.input_param)

        async def note(entry: object) -> None:
            prompt.note_entry(entry)

        end = await turn.reader.wait(on_entry=note if index == 0 else None)
        _check(end, self.form.input_param)
        if index == 0:
            prompt.note_entry(end)
        return end

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the chunks as events without a name, then `[DONE]`."""
        sources = [self._chunks(prompt, i) for prompt in self.prompts for i in range(_num(prompt))]
        try:
            async with contextlib.aclosing(_merged(sources)) as chunks:
                async for chunk in chunks:
                    yield HEARTBEAT if chunk is None else data_event(chunk)
            if (last := self.form.usage_chunk()) is not None:
                yield data_event(last)
        except _TurnFailed as failure:
            self.prompts[0].first.call.resources.close()
            yield error_event(failure_body(failure.end))
        except SessionServerError as error:
            yield error_event(error_body(error))
        yield DONE

    async def _chunks(
        self, prompt: PromptRun, index: int
    ) -> AsyncGenerator[msgspec.Struct | None, None]:
        """Yield the chunks of one answer; None where nothing is said for a while."""
        answer = prompt.answers[index]
        turn = await prompt.turn(index, input_param=self.form.input_param)
        for opening in answer.opening():
            yield opening
        async for item in turn.reader.entries():
            entry = None if item is None else item[1]
            if isinstance(entry, TurnEnd):
                _check(entry, self.form.input_param)
            if index == 0:
                prompt.note_entry(entry)
            if entry is None:
                yield None
            elif isinstance(entry, TurnProgress):
                answer.note_progress(entry)
            elif isinstance(entry, TurnEnd):
                turn.leave()
                self._num_open -= 1
                if not self._num_open:
                    turn.call.resources.close()  # the client may send its next call now
                async for chunk in self._last_chunks(answer, turn.reader, entry):
                    yield chunk
            elif isinstance(entry, TurnDelta) and _is_shown(entry, turn.reader):
                yield await self._chunk(answer, entry)

    async def _last_chunks(
        self, answer: ChoiceAnswer, reader: TurnReader, end: TurnEnd
    ) -> AsyncGenerator[msgspec.Struct, None]:
        unsent = answer.unsent(end)
        if reader.has_gap and _has_news(unsent):
            yield await self._chunk(answer, unsent)
        yield answer.closing(end)

    async def _chunk(self, answer: ChoiceAnswer, delta: TurnDelta) -> msgspec.Struct:
        return answer.add(delta, logprobs=await self.form.logprobs(answer.index, delta.logprobs))


async def submit_to(
    call: Call,
    request: TurnRequest,
    session_id: str,
    *,
    input_param: str,
    on_end: Callable[[TurnEnd], None] | None = None,
    keep_partial: bool | None = None,
) -> ChoiceTurn:
    """Submit a turn, which is canceled with the call; `keep_partial` as in `ChoiceTurn`. Raises
    SessionServerError."""
    await call.sessions.load(call.owner, session_id)
    reader = TurnReader(call, session_id, keep_partial=None)
    try:
        reader.follow(await submitted(call, request, session_id, on_end=on_end))
    except ContextTooLong as error:
        raise ContextLengthExceeded(error.message, param=input_param) from None
    turn = ChoiceTurn(call, request, reader, keep_partial)
    call.resources.callback(turn.leave)
    return turn


async def submit_appended(
    call: Call, request: TurnRequest, session_id: str, *, input_param: str
) -> ChoiceTurn:
    """Submit a turn to the open session that `session_params` names. Raises SessionServerError."""
    try:
        return await submit_to(
            call, request, session_id, input_param=input_param, keep_partial=False
        )
    except SessionNotFound:
        name = sanitize(session_id)
        raise InvalidRequest(
            f"Invalid request: session id {name} does not exist", param="session_params.id"
        ) from None


def _num(prompt: PromptRun) -> int:
    return len(prompt.answers)


def _is_shown(delta: TurnDelta, reader: TurnReader) -> bool:
    """Return whether a delta makes a chunk. Behind a gap it would not be where it belongs."""
    return _has_news(delta) and not reader.has_gap


def _has_news(delta: TurnDelta) -> bool:
    return bool(delta.text or delta.logprobs or delta.reasoning or delta.tool_calls)


async def _all(works: Sequence[Any]) -> list[Any]:
    """Return the results of all; the first error cancels the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield what the sources yield, as it comes; the first error ends all. Of several, each is at
    most one value ahead."""
    if len(sources) == 1:
        async with contextlib.aclosing(sources[0]) as only:
            async for value in only:
                yield value
        return
    waiting: dict[asyncio.Future[T], AsyncGenerator[T, None]] = {}
    ready: asyncio.Queue[asyncio.Future[T]] = asyncio.Queue()

    def advance(source: AsyncGenerator[T, None]) -> None:
        following = asyncio.ensure_future(anext(source))
        following.add_done_callback(ready.put_nowait)
        waiting[following] = source

    try:
        for source in sources:
            advance(source)
        while waiting:
            first = await ready.get()
            source = waiting.pop(first)
            with contextlib.suppress(StopAsyncIteration):
                yield first.result()
                advance(source)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:
            await source.aclose()


def _check(end: TurnEnd, input_param: str) -> None:
    """Raise the error of a turn that failed, ended with its session or the server, or did not fit
    when its time came. One that somebody canceled has none: what it said is its answer.

    Raises:
        ContextLengthExceeded, ServerDraining, SessionClosing, _TurnFailed
    """
    match end:
        case TurnFailedEntry(code=code, message=message) if code == _TOO_LONG:
            raise ContextLengthExceeded(message, param=input_param)
        case TurnFailedEntry():
            raise _TurnFailed(end)
        case TurnCancelled(reason="draining"):
            raise ServerDraining("The server shuts down: it ended the turn.")
        case TurnCancelled(reason="session_closed"):
            raise SessionClosing("The session was closed before the turn's end.")
        case _:
            pass
