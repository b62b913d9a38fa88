"""Build prompts without blocking the event loop: small ones inline, large ones on threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from itertools import chain
from typing import Any, Final, Protocol, TypeVar, assert_never

from session_server.core.errors import (
    InvalidRequest,
    ServerBusy,
    SessionServerError,
    TokenizeFailed,
)
from session_server.core.owner import Owner
from session_server.core.session_events import (
    ChatInput,
    ContinueInput,
    Message,
    RawInput,
    TextInput,
    TokenInput,
    TurnInput,
    TurnRequest,
)
from session_server.sessions.answer_grammar import longest_form
from session_server.sessions.daemon_threads import DaemonThreads
from session_server.sessions.fair_slots import FairSlots
from session_server.sessions.prompt import (
    Prompt,
    PromptState,
    build_prompt,
    check_beginning,
    check_length,
    check_num_ids,
    check_rendered,
    check_text,
    opening_len,
)
from session_server.sessions.quotas import SessionLimits
from session_server.text.chat_template import RenderJob
from session_server.text.model_text import ModelText
from session_server.text.rendering import Rendering, advance, render_or_error

NUM_THREADS: Final = 2
"""Large inputs that are tokenized at the same time."""

MAX_THREADS: Final = 8
"""Bound on threads, including those abandoned because their input hangs the tokenizer; each may use
a core."""

PromptOutcome = Prompt | SessionServerError

_T = TypeVar("_T")
_LateT = TypeVar("_LateT", TokenizeFailed, ServerBusy)

MESSAGE_CHARS: Final = 32
"""Characters that a message counts beside its content: about what a template writes around it."""

_BYTES_PER_CHAR: Final = 4


class Requested(Protocol):
    """Describe what a prompt is built for, a turn or a draft; compared by identity."""

    @property
    def request(self) -> TurnRequest: ...


_FAILED: Final = "the input could not be tokenized"
_TOO_LONG: Final = "the input takes too long to tokenize"
_NO_ANSWER: Final = "the process that prepares inputs does not answer"

_logger: Final = logging.getLogger("session_server.sessions")


Ahead = Callable[[Prompt], Coroutine[None, None, Prompt] | None]


def _nothing_ahead(_prompt: Prompt) -> None:
    """Use a prompt at once."""


class PromptBuilder:
    """Build prompts; `tokenizers` releases the interpreter lock while it encodes.

    Large inputs get a thread each, so that an input that hangs the tokenizer can be abandoned. A
    render in another process is awaited. Owners take turns at both; deadlines begin with the work.
    """

    def __init__(self, text: ModelText, limits: SessionLimits) -> None:
        self._text = text
        self._renderer = text.chat.renderer if text.chat is not None else None
        self._limits = limits
        self._slots = FairSlots(NUM_THREADS)
        self._renders = FairSlots(1)
        self._checks = FairSlots(1)
        self._threads = DaemonThreads("tokenize")
        self._tasks: dict[Requested, asyncio.Task[Any]] = {}

    def build(
        self,
        owner: Owner,
        state: PromptState,
        turn: Requested,
        on_built: Callable[[PromptOutcome], None],
        *,
        max_len: int,
        ahead: Ahead = _nothing_ahead,
    ) -> PromptOutcome | None:
        """Return the prompt, or the error that prevents it; None if `on_built` will be called with
        either.

        `max_len` bounds the context; an input far longer is not tokenized to its end. `ahead`
        returns what is to be done with a prompt before it is used, which returns it; None: nothing.
        """
        request = turn.request

        def steps() -> Rendering[Prompt]:
            check_beginning(self._text, state, request.input, max_len=max_len)
            generate = request.sampling.max_tokens > 0
            built = build_prompt(self._text, state, request.input, generate=generate)
            return (yield from check_rendered(self._text, built, max_len=max_len, param="input"))

        resume = partial(advance, steps(), self._renderer)
        is_large = self._is_large(state, request.input)
        stage = None if is_large else _outcome_of(resume)

        async def complete(stage: RenderJob | None) -> PromptOutcome:
            built = await self._complete(owner, resume, stage, is_large=is_large)
            work = None if isinstance(built, SessionServerError) else ahead(built)
            return built if work is None else await work

        if stage is None or isinstance(stage, RenderJob):
            self._follow(turn, complete(stage), on_built)
            return None
        work = None if isinstance(stage, SessionServerError) else ahead(stage)
        if work is not None:
            self._follow(turn, work, on_built)
        return stage if work is None else None

    def check(
        self,
        owner: Owner,
        turn: Requested,
        on_checked: Callable[[SessionServerError | None], None],
    ) -> bool:
        """Return whether answers can be held to the turn's grammar, as far as is known; False if
        `on_checked` will be called with why not: InvalidRequest, ServerBusy."""
        asked = turn.request.sampling.grammar
        if asked is None:
            return True
        grammar, param = longest_form(self._text, asked), asked.param
        if self._text.grammars.knows(grammar):
            return True

        async def check() -> SessionServerError | None:
            try:
                await self._text.grammars.check(grammar)
            except SessionServerError as error:
                if isinstance(error, InvalidRequest):
                    error.param = param or error.param
                return error
            return None

        late = ServerBusy(_NO_ANSWER)
        self._follow(turn, self._in_slot(self._checks, owner, check, late=late), on_checked)
        return False

    def _follow(
        self,
        turn: Requested,
        work: Coroutine[Any, Any, _T | SessionServerError],
        on_done: Callable[[_T | SessionServerError], None],
    ) -> None:
        """Call `on_done` with what work for a turn gives, also when it is canceled."""

        def finish(task: asyncio.Task[_T | SessionServerError]) -> None:
            del self._tasks[turn]
            outcome: _T | SessionServerError = TokenizeFailed(_FAILED)
            try:
                if not task.cancelled():
                    outcome = task.result()
            finally:
                on_done(outcome)

        task = asyncio.get_running_loop().create_task(work)
        self._tasks[turn] = task
        task.add_done_callback(finish)

    def cancel(self, turn: Requested) -> bool:
        """Stop a build or a check; return whether there is one. It holds its input until its
        callback is called: soon, unless a thread or another process works on it."""
        task = self._tasks.get(turn)
        if task is not None:
            task.cancel()
        return task is not None

    async def encode(
        self, owner: Owner, raw: RawInput, *, add_bos: bool, max_len: int
    ) -> tuple[int, ...]:
        """Return the token ids of raw input, whose text may contain control tokens. Raises
        ContextTooLong, TokenizeFailed, ServerBusy."""
        if isinstance(raw, TokenInput):
            check_num_ids(raw, max_len)
            return raw.token_ids
        text = raw.text

        def encode() -> list[int]:
            check_text(self._text.tokenizer.encode_control, [text], max_len=max_len, param="input")
            return self._text.tokenizer.encode_control(text, add_bos=add_bos)

        is_large = len(text) > self._limits.inline_input_chars
        outcome = await self._run_in_thread(owner, encode) if is_large else _outcome_of(encode)
        if isinstance(outcome, SessionServerError):
            raise outcome
        return tuple(outcome)

    async def measure(
        self, owner: Owner, state: PromptState, turn_input: TurnInput, *, max_len: int
    ) -> int:
        """Return the tokens of the context that a turn would have. Raises what its prompt
        would."""

        def steps() -> Rendering[int]:
            check_beginning(self._text, state, turn_input, max_len=max_len)
            built = build_prompt(self._text, state, turn_input, generate=True)
            prompt = yield from check_rendered(self._text, built, max_len=max_len, param="input")
            return prompt.context_len

        resume = partial(advance, steps(), self._renderer)
        is_large = self._is_large(state, turn_input)
        stage = None if is_large else _outcome_of(resume)
        outcome = await self._complete(owner, resume, stage, is_large=is_large)
        if isinstance(outcome, SessionServerError):
            raise outcome
        return outcome

    async def check_opening(self, owner: Owner, state: PromptState, *, max_len: int) -> None:
        """Reject first messages of a session that leave no room for a turn within `max_len`. Raises
        ContextTooLong, TokenizeFailed, ServerBusy."""
        num_chars = sum(message.num_chars for message in state.open_messages)
        # A text never has more tokens than bytes, so messages this short always fit and need not
        # be tokenized twice. The other half is room for what the template adds.
        if num_chars * _BYTES_PER_CHAR <= max_len // 2:
            return

        def steps() -> Rendering[int]:
            check_beginning(self._text, state, None, max_len=max_len)
            return (yield from opening_len(self._text, state, max_len=max_len))

        resume = partial(advance, steps(), self._renderer)
        is_large = self._exceeds_inline(state.open_messages)
        stage = None if is_large else _outcome_of(resume)
        outcome = await self._complete(owner, resume, stage, is_large=is_large)
        if isinstance(outcome, SessionServerError):
            raise outcome
        # Every turn adds at least one token.
        check_length(outcome, max_len - 1, param="messages")

    async def _complete(
        self,
        owner: Owner,
        resume: Callable[..., RenderJob | _T],
        stage: RenderJob | _T | SessionServerError | None,
        *,
        is_large: bool,
    ) -> _T | SessionServerError:
        """Run steps to their result, from a pending render job or from the beginning (`stage`
        None)."""
        if stage is None:
            stage = await self._run_in_thread(owner, resume)
        while isinstance(stage, RenderJob):
            texts = await self._await_render(owner, stage)
            if isinstance(texts, ServerBusy):
                return texts
            work = partial(resume, texts)
            stage = await self._run_in_thread(owner, work) if is_large else _outcome_of(work)
        return stage

    async def _await_render(
        self, owner: Owner, job: RenderJob
    ) -> list[str] | TokenizeFailed | ServerBusy:
        assert self._renderer is not None, "only a chat template asks for renders"
        render = partial(render_or_error, self._renderer, job)
        return await self._in_slot(self._renders, owner, render, late=ServerBusy(_NO_ANSWER))

    async def _run_in_thread(self, owner: Owner, work: Callable[[], _T]) -> _T | SessionServerError:
        async def run() -> _T | SessionServerError:
            if self._threads.num_alive >= MAX_THREADS:
                return ServerBusy("too many inputs hang the tokenizer")
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, partial(_outcome_of, work))

        late = TokenizeFailed(_TOO_LONG, param="input")
        return await self._in_slot(self._slots, owner, run, late=late)

    async def _in_slot(
        self, slots: FairSlots, owner: Owner, work: Callable[[], Awaitable[_T]], *, late: _LateT
    ) -> _T | _LateT | ServerBusy:
        """Run work in a slot, and return `late` where it takes too long. A cancel takes effect
        while it waits for the slot, or when the work has ended: until then it holds its input."""

        async def run() -> _T | _LateT:
            try:
                async with asyncio.timeout(self._limits.tokenize_deadline_s):
                    return await work()
            except TimeoutError:
                return late

        try:
            async with slots.slot(owner, max_wait_s=self._limits.tokenize_wait_s):
                running = asyncio.create_task(run())
                try:
                    return await asyncio.shield(running)
                except asyncio.CancelledError:
                    await asyncio.wait([running])
                    raise
        except ServerBusy as error:
            return error

    def _is_large(self, state: PromptState, turn_input: TurnInput) -> bool:
        """Return whether tokenizing the input inline would hold up the event loop."""
        messages = [state.open_messages]
        num_chars = 0
        match turn_input:
            case ChatInput():
                num_chars = sum(map(len, state.tools))
                messages += [state.messages or (), state.new_messages(turn_input)]
            case TextInput(text=text):
                num_chars = len(text)
            case ContinueInput():
                messages.append(state.messages or ())
            case TokenInput():
                pass
            case _:
                assert_never(turn_input)
        return self._exceeds_inline(chain.from_iterable(messages), num_chars)

    def _exceeds_inline(self, messages: Iterable[Message], num_chars: int = 0) -> bool:
        """Return whether messages, with further text, are too large to tokenize inline. Look at no
        more of them than fit."""
        for message in messages:
            num_chars += MESSAGE_CHARS + message.num_chars
            if num_chars > self._limits.inline_input_chars:
                return True
        return num_chars > self._limits.inline_input_chars


def _outcome_of(work: Callable[[], _T]) -> _T | SessionServerError:
    try:
        return work()
    except SessionServerError as error:
        return error
    except Exception as error:  # noqa: BLE001 - one input must not end the engine or a thread
        # The error's message may contain text of the client, so only its type is logged.
        _logger.error("an input was not tokenized error=%s", type(error).__name__)
        return TokenizeFailed(_FAILED)
