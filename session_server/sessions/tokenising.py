"""Prompts built where they do not hold up the event loop: small ones here, large ones aside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from session_server.core.errors import SessionServerError, TokenizeFailed
from session_server.core.session_events import ChatInput, TextInput, TurnRequest
from session_server.sessions.prompt import Prompt, PromptState, build_prompt
from session_server.sessions.quotas import SessionLimits
from session_server.text.model_text import ModelText

_NUM_THREADS: Final = 2

PromptOutcome = Prompt | SessionServerError


class Tokenising:
    """Builds prompts; `tokenizers` gives up the interpreter lock while it encodes."""

    def __init__(self, text: ModelText, limits: SessionLimits) -> None:
        self._text = text
        self._limits = limits
        self._executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenise")
        self._tasks: set[asyncio.Task[None]] = set()

    def stop(self) -> None:
        """Release the threads."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def build(
        self, state: PromptState, request: TurnRequest, later: Callable[[PromptOutcome], None]
    ) -> PromptOutcome | None:
        """The prompt, or why there is none; None when `later` will be called with it."""
        build = partial(
            build_prompt,
            self._text,
            state,
            request.input,
            generate=request.sampling.max_tokens > 0,
        )
        if self._is_large(state, request):
            task = asyncio.get_running_loop().create_task(self._build_aside(build, later))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return None
        try:
            return build()
        except SessionServerError as error:
            return error

    async def _build_aside(
        self, build: Callable[[], Prompt], later: Callable[[PromptOutcome], None]
    ) -> None:
        outcome: PromptOutcome = TokenizeFailed("the input could not be tokenised")
        try:
            future = asyncio.get_running_loop().run_in_executor(self._executor, build)
            outcome = await asyncio.wait_for(future, self._limits.tokenize_deadline_s)
        except TimeoutError:
            outcome = TokenizeFailed("the input takes too long to tokenise", param="input")
        except SessionServerError as error:
            outcome = error
        finally:
            later(outcome)

    def _is_large(self, state: PromptState, request: TurnRequest) -> bool:
        """Whether tokenising would hold up the event loop."""
        match request.input:
            case ChatInput(messages=messages):
                size = sum(len(message.content) for message in (*state.open_messages, *messages))
                if state.messages is not None:
                    size += sum(len(message.content) for message in state.messages)
            case TextInput(text=text):
                size = len(text)
            case _:
                size = 0
        return size > self._limits.inline_input_chars
