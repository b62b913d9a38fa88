"""Keep the token history of a session and the items that it came from.

Only `commit` changes it, when a turn has ended with something to keep. A running turn leaves no
trace here, so rolling it back needs no work.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from datetime import datetime

import numpy as np
from msgspec import structs

from session_server.core.session_events import ChatInput, ConversationItem, Message, TurnInput
from session_server.sessions.answer_ends import Answers
from session_server.sessions.footprint import MESSAGE_BYTES, item_bytes
from session_server.sessions.prompt import Prompt, PromptState
from session_server.sessions.views import HistoryMode


class Transcript:
    """Hold the tokens and items of one conversation."""

    def __init__(self, mode: HistoryMode, messages: tuple[Message, ...], *, now: datetime) -> None:
        self.mode: HistoryMode = mode
        self._now = now
        self._tokens = array("i")
        self._answer_len = 0
        self._is_end_replaced = False
        self._open = messages
        self._messages: list[Message] | None = list(messages) if mode == "template" else None
        self._items: list[ConversationItem] = []
        self._answers = Answers()
        self._num_items = 0
        self._item_bytes = 0
        self.attached_bytes = 0
        """Host memory of what a surface keeps with this conversation."""
        for message in messages:
            self._add_item("", message.role, message.content)

    def __len__(self) -> int:
        """Return the number of tokens of the history."""
        return len(self._tokens)

    @property
    def num_bytes(self) -> int:
        """Return the host memory of tokens, items, messages and attached data."""
        num_bytes = sys.getsizeof(self._tokens) + self._answers.num_bytes
        return num_bytes + self._item_bytes + self.attached_bytes

    @property
    def num_items(self) -> int:
        """Return the number of items of the conversation."""
        return len(self._items)

    @property
    def items(self) -> tuple[ConversationItem, ...]:
        """Return the conversation so far, oldest item first."""
        return tuple(self._items)

    def item(self, index: int) -> ConversationItem:
        """Return one item; the oldest has index 0."""
        return self._items[index]

    def index_of(self, item_id: str) -> int | None:
        """Return the index of an item, None if there is none of this id; the newest is found
        first."""
        indexes = range(len(self._items) - 1, -1, -1)
        return next((index for index in indexes if self._items[index].id == item_id), None)

    def answer_of(self, turn_id: str, index: int, item_id: str) -> ConversationItem | None:
        """Return the answer that a turn has left at `index`; None if it is gone, or was edited."""
        found = self._items[index] if index < len(self._items) else None
        is_same = found is not None and (found.id, found.turn_id) == (item_id, turn_id)
        return found if is_same else None

    def growth(self, prompt: Prompt, turn_id: str) -> int:
        """Return the bytes that the input of a turn will add to the conversation."""
        num_bytes = self._tokens.itemsize * len(prompt.tokens)
        if prompt.raw_text is not None:
            num_bytes += _item_bytes(turn_id, prompt.raw_text)
        return num_bytes + sum(_item_bytes(turn_id, m.content) for m in prompt.messages)

    def tokens(self, start: int = 0, end: int | None = None) -> tuple[int, ...]:
        """Return the token ids of positions [start, end)."""
        return tuple(self._tokens[start:end])

    def new_item_id(self) -> str:
        """Return an id for the next item; ids count up and are never reused in this session."""
        self._num_items += 1
        return f"i_{self._num_items}"

    def state(self, turn_input: TurnInput | None = None) -> PromptState:
        """Return what the next turn's prompt depends on, if that turn's input is this."""
        if isinstance(turn_input, ChatInput) and turn_input.is_whole:
            return self._state_where_agreed(turn_input.messages)
        answer_len = self._answer_len
        # If the template's end of turn replaced a sampled one, treat the answer as cut off before
        # it: the token that is now last must not be replaced as well.
        is_cut = answer_len == 0 or self._is_end_replaced
        return PromptState(
            mode=self.mode,
            num_tokens=len(self._tokens),
            answer_len=answer_len,
            last_id=-1 if is_cut else self._tokens[answer_len - 1],
            open_messages=self._open,
            messages=None if self._messages is None else tuple(self._messages),
            now=self._now,
        )

    def num_agreed(self, messages: Sequence[Message]) -> tuple[int, int]:
        """Compare the history with a whole conversation.

        Returns:
            How many leading messages say what the history holds, up to an answer; at least the last
            message is new. How many items stay: with those, messages that no answer follows.
        """
        num_equal = 0
        for item, message in zip(self._items, messages, strict=False):
            if item.role != message.role or item.content != message.content:
                break
            num_equal += 1
        num_agreed = self._answers.last_before(min(num_equal, len(messages) - 1))
        return num_agreed, min(num_equal, self._answers.first_from(num_agreed, default=num_equal))

    def _state_where_agreed(self, messages: tuple[Message, ...]) -> PromptState:
        """Return the state behind the last answer up to which the messages say what the history
        holds."""
        num_agreed, num_kept = self.num_agreed(messages)
        answer_len, last_id, is_template = 0, -1, self.mode == "template"
        if num_agreed and not is_template:
            answer_len, is_cut = self._answers.end_before(num_agreed)
            last_id = -1 if is_cut else self._tokens[answer_len - 1]
        return PromptState(
            mode=self.mode,
            num_tokens=answer_len,
            answer_len=answer_len,
            last_id=last_id,
            open_messages=(),
            messages=messages[:num_agreed] if is_template else None,
            now=self._now,
            num_agreed=num_agreed,
            num_kept=num_kept,
        )

    def common_len(self, prompt: Prompt) -> int:
        """Return the length of the longest common prefix of the history and the prompt's
        context."""
        old = np.frombuffer(self._tokens, dtype=np.int32)[prompt.keep_len :]
        new = np.asarray(prompt.tokens[: len(old)], dtype=np.int32)
        differs = np.flatnonzero(old[: len(new)] != new)
        return prompt.keep_len + (int(differs[0]) if len(differs) else len(new))

    def context(self, prompt: Prompt, start: int) -> tuple[int, ...]:
        """Return the token ids of the prompt's context from position `start` on."""
        if start >= prompt.keep_len:
            return prompt.tokens[start - prompt.keep_len :]
        return (*self._tokens[start : prompt.keep_len], *prompt.tokens)

    def commit(
        self, prompt: Prompt, turn_id: str, item_id: str, *, output: Sequence[int], text: str
    ) -> None:
        """Replace the history by the context of an ended turn and its `output`, whose text is
        `text`."""
        assert prompt.keep_len <= len(self._tokens), "a prompt was built on another history"
        if prompt.num_items is not None:
            self.cut(prompt.num_items)
        self._note_replaced_end(prompt)
        del self._tokens[prompt.keep_len :]
        self._tokens.extend(prompt.tokens)
        self._add_inputs(prompt, turn_id)
        is_chat = prompt.raw_text is None
        if is_chat and not prompt.generate:
            # In append mode the next turn renders these messages again, from the same place.
            self._is_end_replaced |= prompt.keep_len < self._answer_len
            self._answer_len = prompt.keep_len
            self._open = (*self._open, *prompt.messages)
            return
        self._tokens.extend(output)
        self._answer_len = len(self._tokens)
        self._is_end_replaced = False
        self._open = ()
        if not is_chat:
            self._messages = None
        if prompt.generate:
            self._answers.append(len(self._items), len(self._tokens))
            self._add_item(turn_id, "assistant", text, item_id=item_id)
            if self._messages is not None:
                self._messages.append(Message("assistant", text))

    def cut(self, num_items: int) -> None:
        """Keep the first items alone. Messages behind the last of them that has tokens of its own
        are rendered with the next turn."""
        dropped = self._items[num_items:]
        self._item_bytes -= sum(_item_bytes(item.turn_id, item.content) for item in dropped)
        del self._items[num_items:]
        self._answers.cut(num_items)
        self._answer_len, self._is_end_replaced = self._answers.end_before(num_items)
        first_open = self._answers.last_before(num_items)
        for index in range(num_items - 1, first_open - 1, -1):
            if self._items[index].role == "raw":
                self._answer_len, self._is_end_replaced = self._items[index].end_len, False
                first_open = index + 1
                break
        if self.mode == "template":
            is_chat = all(item.role != "raw" for item in self._items)
            self._messages = self._as_messages(0) if is_chat else None
            if is_chat:
                # Every turn renders all of it, and none of it is where it was.
                self._answer_len, first_open = 0, 0
        self._open = tuple(self._as_messages(first_open))
        del self._tokens[self._answer_len :]

    def add_open(self, role: str, content: str, *, item_id: str | None = None) -> None:
        """Append a message that is rendered with the next turn."""
        message = Message(role, content)
        self._open = (*self._open, message)
        if self._messages is not None:
            self._messages.append(message)
        self._add_item("", role, content, item_id=item_id)

    def fork(self, num_items: int) -> Transcript:
        """Return a conversation of its own with the first items of this one."""
        copy = Transcript(self.mode, (), now=self._now)
        copy._tokens = self._tokens[:]
        copy._answer_len, copy._is_end_replaced = self._answer_len, self._is_end_replaced
        copy._open = self._open
        copy._messages = None if self._messages is None else self._messages[:]
        copy._items, copy._item_bytes = self._items[:], self._item_bytes
        copy._answers = self._answers.copy()
        copy._num_items = self._num_items
        if num_items < len(self._items):
            copy.cut(num_items)
        return copy

    def _as_messages(self, start: int) -> list[Message]:
        return [Message(item.role, item.content) for item in self._items[start:]]

    def _note_replaced_end(self, prompt: Prompt) -> None:
        """Note that the prompt replaces the token which ended the last answer or raw input, if it
        does."""
        if self.mode == "template" or not self._items or prompt.keep_len >= self._answer_len:
            return
        index = self._answers.note_replaced(prompt.keep_len)
        if index is None:
            index = len(self._items) - 1
            if self._items[index].role != "raw":
                return
        self._items[index] = structs.replace(self._items[index], end_len=prompt.keep_len)

    def can_render(self, index: int) -> bool:
        """Return whether the next turn renders a message at `index`: not behind raw input where the
        template renders the whole conversation."""
        before = self._items[:index]
        return self.mode == "append" or all(item.role != "raw" for item in before)

    def _add_inputs(self, prompt: Prompt, turn_id: str) -> None:
        if prompt.raw_text is not None:
            self._add_item(turn_id, "raw", prompt.raw_text)
        for message in prompt.messages:
            self._add_item(turn_id, message.role, message.content)
        if self._messages is not None:
            self._messages.extend(prompt.messages)

    def _add_item(self, turn_id: str, role: str, text: str, *, item_id: str | None = None) -> None:
        item = ConversationItem(
            id=item_id or self.new_item_id(),
            turn_id=turn_id,
            role=role,
            content=text,
            end_len=len(self._tokens),
        )
        self._items.append(item)
        self._item_bytes += _item_bytes(turn_id, text)


def _item_bytes(turn_id: str, text: str) -> int:
    """Return the bytes of an item and the message beside it, which shares its text."""
    return item_bytes(turn_id, text) + MESSAGE_BYTES
