"""Encode messages as token ids that are appended to a history which is never rendered again.

Two guarantees. *Token-exact append*: what a new turn adds is the part of a render that follows a
placeholder for the last answer, so the answer keeps the ids that were sampled. *User text is never
control*: where a message's text looks like a control token, that part is encoded with special
tokens off; everything else gets exactly the ids of the joint render.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Final, get_args

from session_server.core.errors import InvalidRequest, TokenizeFailed
from session_server.core.session_events import Message, Role
from session_server.text.chat_template import Conversation, RenderFrame, RenderJob
from session_server.text.rendering import Rendering, TemplateRenderer
from session_server.text.template_traits import ANSWER, ANSWERED, TemplateTraits, find_traits
from session_server.text.template_values import CallForm, Mark, conversation_of
from session_server.text.tokenizer import Tokenizer

ROLES: Final = frozenset(get_args(Role))

_NONCHARACTERS: Final = tuple(chr(code) for code in range(0xFDD0, 0xFDF0)) + tuple(
    chr(code) for code in range(0xF0000, 0xF0100)
)


class ChatEncoder:
    """Encode conversations with a chat template and its tokenizer.

    `traits` say what the template can do; `check_append` finds them out. Where a conversation
    cannot be appended to, every turn needs `encode_all`. Methods that need rendered text are
    generators of render jobs: see `rendering`. `closing_len`: the tokens behind the last message of
    a user, up to where the answer begins.
    """

    def __init__(self, tokenizer: Tokenizer, renderer: TemplateRenderer) -> None:
        self.renderer = renderer
        self.traits = TemplateTraits()
        self.closing_len = 0
        self._tokenizer = tokenizer
        self._special_tokens = tokenizer.special_tokens
        self._first_chars = frozenset(text[0] for text in self._special_tokens)

    def check_append(self) -> Rendering[str | None]:
        """Set `traits` by rendering a few conversations.

        Returns:
            Why not even a plain conversation can be rendered, None if it can.
        """
        found = yield from find_traits()
        if isinstance(found, str):
            return found
        self.traits = found
        self.closing_len = len(self._tokenizer.encode_control(found.closing))
        return None

    def encode_all(
        self, messages: Sequence[Message], frame: RenderFrame, *, tools: Sequence[str] = ()
    ) -> Rendering[list[int]]:
        """Encode a whole conversation; `tools` are JSON texts.

        Raises:
            InvalidRequest: a role outside `ROLES`.
            TokenizeFailed: the template or the tokenizer refused.
        """
        check_roles(messages)
        return (yield from self._encode(messages, tools, frame, is_answered=False))

    def encode_after_answer(
        self, messages: Sequence[Message], frame: RenderFrame, *, tools: Sequence[str] = ()
    ) -> Rendering[list[int]]:
        """Encode what follows an assistant's answer: the end of its turn, then `messages`.

        Only where `traits` say that it can be appended. Raises like `encode_all`.
        """
        check_roles(messages)
        assert self.traits.can_append, "this template's turns depend on their history"
        assert self.traits.can_append_tools or not tools, "its tools move"
        return (yield from self._encode(messages, tools, frame, is_answered=True))

    def join(self, last_id: int, delta: list[int], end_ids: Collection[int]) -> tuple[int, int]:
        """Return how to append `delta` (from `encode_after_answer`) to an answer that ended in
        `last_id`.

        The last sampled token has no KV yet, so replacing it is free. If the answer ended by itself
        with the end of turn that starts the delta, that token is dropped from the delta. If it
        ended with another end token, the template's own replaces it. If it was cut off, the delta
        closes it.

        Returns:
            Tokens to drop from the end of the history (0 or 1), and from the start of `delta`.
        """
        leading = self._leading_control(delta)
        if leading is None:
            return 0, 0
        if last_id == delta[leading] and (last_id in end_ids or self._is_control(last_id)):
            return 0, leading + 1
        return (1, 0) if last_id in end_ids else (0, 0)

    def _leading_control(self, delta: list[int]) -> int | None:
        """Return the index of the first control token if only white space precedes it."""
        for index, token_id in enumerate(delta):
            if self._is_control(token_id):
                return index
            if self._tokenizer.decode([token_id]).strip():
                return None
        return None

    def _is_control(self, token_id: int) -> bool:
        return token_id in self._tokenizer.special_ids

    def _encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[str],
        frame: RenderFrame,
        *,
        is_answered: bool,
    ) -> Rendering[list[int]]:
        def values(mark: Mark) -> Conversation:
            form = self.traits.call_form or CallForm()
            made = conversation_of(messages, tools, mark=mark, form=form)
            before = conversation_of(ANSWERED if is_answered else (), ()).messages
            return Conversation([*before, *made.messages], made.tools)

        chars: set[str] = set()
        given = values(partial(_note, chars))
        if chars.isdisjoint(self._first_chars):
            (plain,) = yield from _render([given], frame, is_answered=is_answered)
            return self._tokenizer.encode_control(plain)
        marks = self._free_marks(chars)
        # Control tokens still spelled out in the marked text are the template's own.
        table = {ord(char): mark for char, mark in marks.items()}
        pair = [given, values(lambda text: text.translate(table))]
        plain, marked = yield from _render(pair, frame, is_answered=is_answered)
        unmark = {mark: char for char, mark in marks.items()}
        if _unmark(marked, unmark) != plain:
            # Marks have changed the input of a template that looks into it (`'</think>' in ...`):
            # mark only the beginnings of control tokens.
            few = values(partial(self._mark_controls, marks=marks))
            (marked,) = yield from _render([few], frame, is_answered=is_answered)
        if self._spells_control(plain) == self._spells_control(marked):
            return self._tokenizer.encode_control(plain)
        return self._encode_marked(marked, unmark)

    def _spells_control(self, text: str) -> list[str]:
        return self._tokenizer.special_pattern.findall(text)

    def _free_marks(self, used: Collection[str]) -> dict[str, str]:
        """Choose, for each first character of a control token, a character that no text
        contains."""
        free = [mark for mark in _NONCHARACTERS if mark not in used]
        if len(free) < len(self._first_chars):
            raise TokenizeFailed("the text uses too many noncharacters", param="input")
        return dict(zip(sorted(self._first_chars), free, strict=False))

    def _mark_controls(self, content: str, marks: dict[str, str]) -> str:
        """Mark where a control token begins, or could begin once other text follows."""

        def begins_control(index: int) -> bool:
            rest = content[index : index + longest]
            return any(
                rest.startswith(text) or text.startswith(rest) for text in self._special_tokens
            )

        longest = max(map(len, self._special_tokens))
        chars = [
            marks[char] if char in marks and begins_control(index) else char
            for index, char in enumerate(content)
        ]
        return "".join(chars)

    def _encode_marked(self, marked: str, marks: dict[str, str]) -> list[int]:
        """Encode the text between the template's control tokens; parts with marks are user
        content."""
        ids: list[int] = []
        clean_start = 0
        controls = list(self._tokenizer.special_pattern.finditer(marked))
        starts = [0, *(control.end() for control in controls)]
        ends = [*(control.start() for control in controls), len(marked)]
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            stretch = marked[start:end]
            if _unmark(stretch, marks) == stretch:
                continue  # without marks: encoded together with its control tokens below
            if index > 0 and self._special_tokens[controls[index - 1].group()].rstrip:
                stretch = stretch.lstrip()
            if index < len(controls) and self._special_tokens[controls[index].group()].lstrip:
                stretch = stretch.rstrip()
            ids += self._tokenizer.encode_control(marked[clean_start:start])
            ids += self._tokenizer.encode_content(_unmark(stretch, marks))
            clean_start = end
        return ids + self._tokenizer.encode_control(marked[clean_start:])


def _render(
    conversations: Sequence[Conversation], frame: RenderFrame, *, is_answered: bool
) -> Rendering[list[str]]:
    """Render conversations; of those that begin with the placeholder answer, what follows it."""
    texts = yield RenderJob.of(conversations, frame)
    if not is_answered:
        return texts
    deltas = []
    for text in texts:
        # Split at the first match: a later message may quote the placeholder, the dummy history
        # cannot.
        _, found, delta = text.partition(ANSWER)
        if not found:
            raise TokenizeFailed("the chat template dropped the answer", param="input")
        deltas.append(delta)
    return deltas


def _note(chars: set[str], text: str) -> str:
    """Note the characters of a text."""
    chars.update(text)
    return text


def _unmark(text: str, marks: dict[str, str]) -> str:
    """Replace every mark in `text` by the character it stands for."""
    return text.translate({ord(mark): char for mark, char in marks.items()})


def check_roles(messages: Sequence[Message]) -> None:
    """Reject roles outside `ROLES`.

    Raises:
        InvalidRequest: naming the roles there are.
    """
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            names = ", ".join(sorted(ROLES))
            raise InvalidRequest(f"role must be one of {names}", param=f"input[{index}].role")
