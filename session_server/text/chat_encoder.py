"""Encode messages as token ids that are appended to a history which is never rendered again.

Two guarantees. *Token-exact append*: what a new turn adds is the part of a render that follows a
placeholder for the last answer, so the answer keeps the ids that were sampled. *User text is never
control*: where a message's text looks like a control token, that part is encoded with special
tokens off; everything else gets exactly the ids of the joint render.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Final, get_args

from msgspec import structs

from session_server.core.errors import InvalidRequest, TokenizeFailed
from session_server.core.session_events import Message, Role
from session_server.text.chat_template import RenderFrame, RenderJob
from session_server.text.rendering import Rendering, TemplateRenderer
from session_server.text.tokenizer import Tokenizer

ROLES: Final = frozenset(get_args(Role))

_ANSWER: Final = "zq5Answer7Stand9In3qz"
_HISTORY: Final = (Message("user", "Hello."),)
_OTHER_HISTORIES: Final = (
    (
        Message("user", "One, two."),
        Message("assistant", "Three."),
        Message("user", "Four, five?"),
    ),
    (
        Message("user", "Six."),
        Message("assistant", "<think>\nSo seven.\n</think>\n\nSeven."),
        Message("user", "And?"),
    ),
    (Message("system", "Be brief."), Message("user", "Nine.")),
)
_PROBE: Final = (Message("user", "Ten?"),)
_NONCHARACTERS: Final = tuple(chr(code) for code in range(0xFDD0, 0xFDF0)) + tuple(
    chr(code) for code in range(0xF0000, 0xF0100)
)


class ChatEncoder:
    """Encode conversations with a chat template and its tokenizer.

    `can_append`: what a new turn adds does not depend on the history before it; `check_append`
    tests this with different histories. If it is False, every turn needs `encode_all`. Methods that
    need rendered text are generators of render jobs: see `rendering`.
    """

    def __init__(self, tokenizer: Tokenizer, renderer: TemplateRenderer) -> None:
        self.renderer = renderer
        self.can_append = False
        self._tokenizer = tokenizer
        self._special_tokens = tokenizer.special_tokens
        self._first_chars = frozenset(text[0] for text in self._special_tokens)

    def check_append(self) -> Rendering[str | None]:
        """Set `can_append` by rendering a few conversations.

        Returns:
            Why not even a plain conversation can be rendered, None if it can.
        """
        frame = RenderFrame(datetime(2024, 7, 26, 12))
        try:
            yield from self._render((), [_PROBE], frame)
        except TokenizeFailed as error:
            return error.message
        self.can_append = yield from self._deltas_are_equal(frame)
        return None

    def encode_all(self, messages: Sequence[Message], frame: RenderFrame) -> Rendering[list[int]]:
        """Encode a whole conversation.

        Raises:
            InvalidRequest: a role outside `ROLES`.
            TokenizeFailed: the template or the tokenizer refused.
        """
        check_roles(messages)
        return (yield from self._encode((), messages, frame))

    def encode_after_answer(
        self, messages: Sequence[Message], frame: RenderFrame
    ) -> Rendering[list[int]]:
        """Encode what follows an assistant's answer: the end of its turn, then `messages`.

        Only for a template that `can_append`. Raises like `encode_all`.
        """
        check_roles(messages)
        assert self.can_append, "this template's turns depend on their history"
        answered = (*_HISTORY, Message("assistant", _ANSWER))
        return (yield from self._encode(answered, messages, frame))

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

    def _deltas_are_equal(self, frame: RenderFrame) -> Rendering[bool]:
        """Return whether different histories give the same delta."""
        try:
            expected = yield from self._render_after(_HISTORY, frame)
        except TokenizeFailed:
            return False
        for history in _OTHER_HISTORIES:
            try:
                yield from self._render((), [history], frame)
            except TokenizeFailed:
                continue  # e.g. a template without system messages: such a history cannot occur
            try:
                delta = yield from self._render_after(history, frame)
            except TokenizeFailed:
                return False
            if delta != expected:
                return False
        return expected is not None

    def _render_after(
        self, history: Sequence[Message], frame: RenderFrame
    ) -> Rendering[str | None]:
        conversation = (*history, Message("assistant", _ANSWER), *_PROBE)
        (rendered,) = yield from self._render((), [conversation], frame)
        return rendered.rpartition(_ANSWER)[2] if rendered.count(_ANSWER) == 1 else None

    def _encode(
        self, before: Sequence[Message], messages: Sequence[Message], frame: RenderFrame
    ) -> Rendering[list[int]]:
        if not any(self._first_chars.intersection(message.content) for message in messages):
            (plain,) = yield from self._render(before, [messages], frame)
            return self._tokenizer.encode_control(plain)
        marks = self._free_marks(messages)
        plain, marked = yield from self._render_marked(before, messages, frame, marks=marks)
        if self._spells_control(plain) == self._spells_control(marked):
            return self._tokenizer.encode_control(plain)
        return self._encode_marked(marked, {mark: char for char, mark in marks.items()})

    def _render(
        self,
        before: Sequence[Message],
        conversations: Sequence[Sequence[Message]],
        frame: RenderFrame,
    ) -> Rendering[list[str]]:
        """Render what each conversation adds to `before`, which ends in the placeholder answer."""
        texts = yield RenderJob.of([(*before, *messages) for messages in conversations], frame)
        if not before:
            return texts
        deltas = []
        for text in texts:
            # Split at the first match: a later message may quote the placeholder, the dummy history
            # cannot.
            _, found, delta = text.partition(_ANSWER)
            if not found:
                raise TokenizeFailed("the chat template dropped the answer", param="input")
            deltas.append(delta)
        return deltas

    def _spells_control(self, text: str) -> list[str]:
        return self._tokenizer.special_pattern.findall(text)

    def _render_marked(
        self,
        before: Sequence[Message],
        messages: Sequence[Message],
        frame: RenderFrame,
        *,
        marks: dict[str, str],
    ) -> Rendering[tuple[str, str]]:
        """Render without and with marks in place of message characters that could begin a control
        token. Control tokens still spelled out in the marked text are the template's own.

        Marking changes the input of a template that inspects its messages (`'</think>' in ...`).
        Where that changes the output, only the beginnings of control tokens are marked.

        Returns:
            The text without and with marks.
        """
        to_marks = {ord(char): mark for char, mark in marks.items()}
        every = [structs.replace(m, content=m.content.translate(to_marks)) for m in messages]
        plain, marked = yield from self._render(before, [messages, every], frame)
        if _unmark(marked, {mark: char for char, mark in marks.items()}) != plain:
            few = [
                structs.replace(message, content=self._mark_controls(message.content, marks))
                for message in messages
            ]
            (marked,) = yield from self._render(before, [few], frame)
        return plain, marked

    def _free_marks(self, messages: Sequence[Message]) -> dict[str, str]:
        """Choose, for each first character of a control token, a character that no message
        contains."""
        used = set().union(*(message.content for message in messages))
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
