"""Build a turn's prompt: how much of the history stays, and the tokens after it.

Pure: frozen state in, frozen prompt out, so that a long input can be tokenized on another thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, TypeVar, assert_never

import msgspec

from session_server.core.errors import (
    ContextTooLong,
    InvalidRequest,
    SessionServerError,
    TokenizeFailed,
    UnsupportedOperation,
)
from session_server.core.sampling import SamplingParams
from session_server.core.session_events import (
    ChatInput,
    ContinueInput,
    Message,
    TextInput,
    TokenInput,
    TurnInput,
)
from session_server.sessions.views import HistoryMode
from session_server.text.answer_format import Thinking
from session_server.text.chat_encoder import ChatEncoder, check_roles
from session_server.text.chat_template import RenderFrame
from session_server.text.model_text import ModelText
from session_server.text.rendering import Rendering

_T = TypeVar("_T")

NUM_TAIL: Final = 32
"""Last tokens of an answer that say how its text goes on."""

_TOO_LONG: Final = "Send less, or begin a new session."
_PROBE_CHARS_PER_TOKEN: Final = 16
"""Characters of a beginning per token that fits: four times what most texts take."""


@dataclass(frozen=True, slots=True)
class Continued:
    """Hold the answer that a turn goes on from: its item, what it says, and its last tokens.

    `is_rendered`: its tokens are the end of the history. `is_raw`: it answers raw input.
    """

    item_id: str
    said: Message
    tail: tuple[int, ...]
    is_rendered: bool
    is_raw: bool


@dataclass(frozen=True, slots=True)
class PromptState:
    """Hold what a prompt depends on.

    `answer_len`: tokens of the history up to the end of the last answer, 0 before the first.
    `last_id`: the token there, -1 when there is none or the answer counts as cut off.
    `open_messages`: messages after it that no answer follows yet; what the history holds beyond
    `answer_len` is their render, and they are rendered again together with new ones. `messages`:
    the whole conversation, None when raw input made it unknown; kept for `mode` "template" only.
    `tools`: what the conversation is rendered with.
    `num_agreed`: of an input that is a whole conversation, the leading messages that the history
    holds already, the last of them an answer; everything above describes the history up to there.
    `num_kept`: the items that stay, of which those behind that answer are rendered again.
    `last`: the answer that the conversation ends with, for a turn that goes on from it.
    """

    mode: HistoryMode
    num_tokens: int
    answer_len: int
    last_id: int
    open_messages: tuple[Message, ...]
    messages: tuple[Message, ...] | None
    now: datetime
    tools: tuple[str, ...] = ()
    num_agreed: int = 0
    num_kept: int = 0
    last: Continued | None = None

    @property
    def is_empty(self) -> bool:
        """Return whether nothing comes before the next input."""
        return self.num_tokens == 0 and not self.open_messages

    def new_messages(self, chat: ChatInput) -> tuple[Message, ...]:
        """Return the messages that the history does not hold yet."""
        return chat.messages[self.num_agreed :]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Describe the context of a turn: the first `keep_len` tokens of the history, then `tokens`.

    `messages` holds the chat messages that become items, empty for raw input, whose text is
    `raw_text`. With `generate` False the turn only computes its input. `num_items`: the items of
    the conversation that stay; None keeps all. `tools`: those of the conversation from here on.
    `continued`: the answer that grows instead of a new one.
    """

    keep_len: int
    tokens: tuple[int, ...]
    messages: tuple[Message, ...]
    raw_text: str | None
    generate: bool
    num_items: int | None = None
    tools: tuple[str, ...] = ()
    continued: Continued | None = None

    @property
    def inputs(self) -> tuple[Message, ...]:
        """Return what becomes items, raw input among it."""
        raw = () if self.raw_text is None else (Message("raw", self.raw_text),)
        return (*raw, *self.messages)

    @property
    def is_raw(self) -> bool:
        """Return whether raw input is answered, in text alone."""
        is_raw_continued = self.continued is not None and self.continued.is_raw
        return self.raw_text is not None or is_raw_continued

    @property
    def context_len(self) -> int:
        """Return the number of tokens of the whole context."""
        return self.keep_len + len(self.tokens)


def build_prompt(
    text: ModelText, state: PromptState, turn_input: TurnInput, *, generate: bool
) -> Rendering[Prompt]:
    """Build the prompt of a turn, in steps between which its messages are rendered.

    Raises:
        InvalidRequest: empty input, or a role that is none.
        TokenizeFailed: the tokenizer or the template refused.
        UnsupportedOperation: messages where there is no chat template, or after raw input in a
            session whose history is rendered anew each turn.
    """
    match turn_input:
        case ChatInput():
            return (yield from _chat_prompt(text, state, turn_input, generate=generate))
        case TextInput(text=raw):
            ids = text.tokenizer.encode_control(raw, add_bos=state.is_empty)
            return (yield from _raw_prompt(text, state, ids, raw, generate=generate))
        case TokenInput(token_ids=token_ids):
            ids = list(token_ids)
            return (yield from _raw_prompt(text, state, ids, "", generate=generate))
        case ContinueInput():
            return (yield from _continued_prompt(text, state, generate=generate))
        case _:
            assert_never(turn_input)


def fit_sampling(sampling: SamplingParams, prompt: Prompt, max_len: int) -> SamplingParams:
    """Return `sampling` clipped to the room that `max_len` leaves after the prompt, with a seed.

    Raises:
        ContextTooLong: not even one token fits behind it.
    """
    num_needed = 1 if prompt.generate else 0
    check_length(prompt.context_len, max_len - num_needed, param="input")
    max_tokens = min(sampling.max_tokens, max_len - prompt.context_len)
    return msgspec.structs.replace(
        sampling,
        max_tokens=max_tokens,
        min_tokens=min(sampling.min_tokens, max_tokens),
        seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
    )


def opening_len(text: ModelText, state: PromptState, *, max_len: int) -> Rendering[int]:
    """Return the number of tokens of a session's first messages, which every later turn contains.

    They are rendered alone. Where the template wants more than they are (a user's message behind
    the system's), their contents are what is measured.

    Raises:
        ContextTooLong: their beginning alone takes twice `max_len`.
        TokenizeFailed: the tokenizer refused a text.
    """
    chat, messages = _chat_of(text), state.open_messages
    frame = RenderFrame(state.now, add_generation_prompt=False)
    steps = chat.encode_all(messages, frame)
    try:
        return len((yield from check_rendered(text, steps, max_len=max_len, param="messages")))
    except TokenizeFailed:
        contents, encode = (
            [each.content.strip() for each in messages],
            text.tokenizer.encode_content,
        )
        check_text(encode, contents, max_len=max_len, param="messages")
        return sum(len(encode(content)) for content in contents)


def check_beginning(
    text: ModelText, state: PromptState, turn_input: TurnInput | None, *, max_len: int
) -> None:
    """Reject an input whose beginning alone takes twice `max_len`, so that an input far too long
    costs neither the memory nor the time to tokenize all of it.

    Twice, because the last word of a beginning may be tokenized otherwise than in the whole. What a
    template may leave out (white space around a message, earlier answers) is not measured. None
    measures the first messages of a session alone. Raises ContextTooLong, TokenizeFailed.
    """
    match turn_input:
        case ChatInput() | None:
            encode = text.tokenizer.encode_content
            messages = () if turn_input is None else state.new_messages(turn_input)
            measured = (m for m in (*state.open_messages, *messages) if m.role != "assistant")
            parts = [message.content.strip() for message in measured]
        case TextInput(text=raw):
            encode, parts = text.tokenizer.encode_control, [raw]
        case ContinueInput():
            encode = text.tokenizer.encode_content
            parts = [message.content.strip() for message in state.open_messages]
        case TokenInput():
            return
        case _:
            assert_never(turn_input)
    check_text(encode, parts, max_len=max_len, param="messages" if turn_input is None else "input")


def check_text(
    encode: Callable[[str], list[int]], parts: Sequence[str], *, max_len: int, param: str
) -> None:
    """Reject texts whose beginning alone takes twice `max_len`. Raises ContextTooLong,
    TokenizeFailed."""
    num_chars, num_tokens = _PROBE_CHARS_PER_TOKEN * max_len, 0
    if sum(map(len, parts)) <= num_chars:
        return
    for part in parts:
        num_tokens += len(encode(part[:num_chars]))
        num_chars = max(0, num_chars - len(part))
    if num_tokens > 2 * max_len:
        raise ContextTooLong(
            f"Input length (at least {2 * max_len} tokens) exceeds the maximum allowed length "
            f"({max_len - 1} tokens). {_TOO_LONG}",
            param=param,
        )


def check_rendered(
    text: ModelText, steps: Rendering[_T], *, max_len: int, param: str
) -> Rendering[_T]:
    """Reject what a template wrote if its beginning alone takes twice `max_len`, before `steps`
    tokenize it. Raises ContextTooLong, TokenizeFailed.

    Only then it is known which parts of the earlier answers the template keeps.
    """
    encode = text.tokenizer.encode_control
    try:
        job = next(steps)
        while True:
            try:
                texts = yield job
                # A second text is the first with marks, from which a template may strip less.
                check_text(encode, texts[:1], max_len=max_len, param=param)
            except SessionServerError as error:
                job = steps.throw(error)
            else:
                job = steps.send(texts)
    except StopIteration as end:
        result: _T = end.value
        return result


def check_num_ids(turn_input: TurnInput, max_len: int) -> None:
    """Reject more token ids than any context holds, before they are copied. Raises
    ContextTooLong."""
    # One more may fit: a leading BOS of a later turn is dropped.
    if isinstance(turn_input, TokenInput) and len(turn_input.token_ids) > max_len + 1:
        check_length(len(turn_input.token_ids), max_len - 1, param="input")


def check_length(num_tokens: int, max_tokens: int, *, param: str) -> None:
    """Reject an input of more than `max_tokens`. Raises ContextTooLong with both numbers."""
    if num_tokens > max_tokens:
        raise ContextTooLong(
            f"Input length ({num_tokens} tokens) exceeds the maximum allowed length "
            f"({max_tokens} tokens). {_TOO_LONG}",
            param=param,
        )


def _chat_prompt(
    text: ModelText, state: PromptState, turn_input: ChatInput, *, generate: bool
) -> Rendering[Prompt]:
    chat = _chat_of(text)
    messages = state.new_messages(turn_input)
    pending = (*state.open_messages, *messages)
    if not pending or not (messages or generate):
        raise InvalidRequest("a turn needs at least one message", param="input")
    check_roles(pending)
    _check_tools(chat, state, turn_input)
    frame = RenderFrame(state.now, add_generation_prompt=generate)
    keep_len, skip = 0, 0
    if state.mode == "template":
        if state.messages is None:
            raise UnsupportedOperation(
                "messages cannot follow raw input where the template renders the whole history"
            )
        every = (*state.messages, *messages)
        ids = yield from chat.encode_all(every, frame, tools=state.tools)
    else:
        keep_len, ids, skip = yield from _encode_pending(text, state, pending, frame)
    if keep_len + len(ids) - skip == 0:
        raise TokenizeFailed("the chat template wrote nothing", param="input")
    num_items = None
    if turn_input.is_whole:
        num_items, messages = state.num_kept, turn_input.messages[state.num_kept :]
    return Prompt(
        keep_len, tuple(ids[skip:]), messages, None, generate, num_items, tools=state.tools
    )


def _check_tools(chat: ChatEncoder, state: PromptState, turn_input: ChatInput) -> None:
    """Reject tools that the template does not write, or other ones in the middle of a
    conversation. Raises UnsupportedOperation."""
    if (turn_input.tools or state.tools) and not chat.traits.takes_tools:
        raise UnsupportedOperation("this model's chat template takes no tools", param="tools")
    if turn_input.tools and turn_input.tools != state.tools:
        raise UnsupportedOperation(
            "other tools need the conversation from its beginning: session.rewind to null first",
            param="tools",
        )
    has_calls = any(message.tool_calls for message in state.new_messages(turn_input))
    if has_calls and chat.traits.call_form is None:
        raise UnsupportedOperation("this model's chat template takes no tool calls", param="input")


def _raw_prompt(
    text: ModelText, state: PromptState, ids: list[int], raw: str, *, generate: bool
) -> Rendering[Prompt]:
    # A BOS belongs at the start of the context only.
    if not state.is_empty and ids and ids[0] == text.bos_token_id:
        ids = ids[1:]
    if not ids:
        raise InvalidRequest("a turn needs at least one input token", param="input")
    keep_len = state.num_tokens
    if state.open_messages and keep_len == state.answer_len:  # no turn has read them yet
        frame = RenderFrame(state.now, add_generation_prompt=False)
        keep_len, rendered, skip = yield from _encode_pending(
            text, state, state.open_messages, frame
        )
        ids = [*rendered[skip:], *ids]
    return Prompt(keep_len, tuple(ids), (), raw, generate, tools=state.tools)


def _continued_prompt(text: ModelText, state: PromptState, *, generate: bool) -> Rendering[Prompt]:
    """Go on behind the last answer's last token but an end of turn. An answer that the history does
    not hold is rendered as the beginning of one."""
    last = state.last
    if last is None:
        raise InvalidRequest("the conversation does not end with an answer", param="continue")
    if last.said.tool_calls or not generate:
        what = "an answer that calls tools has ended" if generate else "it computes an answer"
        raise InvalidRequest(f"continue is not possible here: {what}", param="continue")
    if last.is_rendered:
        num_ends = int(state.last_id in text.eos_token_ids)
        tail = last.tail[: len(last.tail) - num_ends]
        keep_len, ids = state.answer_len - num_ends, list[int]()
    else:
        keep_len, ids = yield from _encode_beginning(text, state, last.said)
        tail = tuple(ids[-NUM_TAIL:])
    return Prompt(
        keep_len,
        tuple(ids),
        (),
        None,
        generate,
        tools=state.tools,
        continued=replace(last, tail=tail),
    )


def _encode_beginning(
    text: ModelText, state: PromptState, said: Message
) -> Rendering[tuple[int, list[int]]]:
    """Encode the open messages up to an answer, and its text as what it begins with. Return how
    many tokens of the history stay, and the ids."""
    chat, frame = _chat_of(text), RenderFrame(state.now, add_generation_prompt=True)
    before = (state.messages or state.open_messages)[:-1]
    keep_len, skip = 0, 0
    if not before and state.answer_len == 0:
        raise InvalidRequest("nothing precedes the answer", param="continue")
    if state.mode == "template":
        ids = yield from chat.encode_all(before, frame, tools=state.tools)
    else:
        keep_len, ids, skip = yield from _encode_pending(text, state, before, frame)
    prompt = text.tokenizer.decode(ids[-NUM_TAIL:], skip_special_tokens=False)
    if said.reasoning or text.answer_format.thinking_after(prompt) is Thinking.OPEN:
        raise UnsupportedOperation(
            "an answer that was changed and begins with reasoning cannot go on", param="continue"
        )
    return keep_len, [*ids[skip:], *text.tokenizer.encode_content(said.content)]


def _encode_pending(
    text: ModelText, state: PromptState, pending: Sequence[Message], frame: RenderFrame
) -> Rendering[tuple[int, list[int], int]]:
    """Encode messages behind the last answer. Return how many tokens of the history stay, the ids,
    and how many of these to leave out."""
    chat = _chat_of(text)
    if state.answer_len == 0:
        return 0, (yield from chat.encode_all(pending, frame, tools=state.tools)), 0
    ids = yield from chat.encode_after_answer(pending, frame, tools=state.tools)
    # The answer and the template may both spell its end of turn: keep one of them.
    drop, skip = chat.join(state.last_id, ids, text.eos_token_ids)
    return state.answer_len - drop, ids, skip


def _chat_of(text: ModelText) -> ChatEncoder:
    if text.chat is None:
        raise UnsupportedOperation(
            "this model has no chat template: send text or token ids", param="input"
        )
    return text.chat
