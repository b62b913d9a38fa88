"""Keep the token history of a session and the items that it came from.

Only `commit` changes it, when a turn has ended with something to keep. A running turn leaves no
trace here, so rolling it back needs no work.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from session_server.core.session_events import (
    ChatInput,
    ContinueInput,
    ConversationItem,
    Message,
    TurnInput,
)
from session_server.sessions.agreement import agrees
from session_server.sessions.answer_ends import Answers
from session_server.sessions.footprint import item_bytes, text_bytes
from session_server.sessions.history_change import HistoryChange, apply_tokens
from session_server.sessions.items import Items, message_of
from session_server.sessions.prompt import NUM_TAIL, Continued, Prompt, PromptState
from session_server.sessions.views import HistoryMode, HistoryModes


@dataclass(slots=True)
class _Taken:
    """Say what of a conversation is as it was when its last change was taken: the first `num_kept`
    tokens, and `tools` if they are equal. `is_wanted`: changes are taken at all."""

    num_kept: int = 0
    tools: tuple[str, ...] = ()
    is_wanted: bool = False


class Transcript:
    """Hold the tokens and items of one conversation, and the tools that it was rendered with."""

    def __init__(
        self, modes: HistoryModes, messages: tuple[Message, ...], *, now: datetime
    ) -> None:
        self._modes = modes
        self.now = now
        """The time that templates are told, the same in all turns."""

        self._tokens = array("i")
        self._tools: tuple[str, ...] = ()
        self._answer_len = 0
        self._is_end_replaced = False
        self._open = messages
        self._items = Items()
        self._answers = Answers()
        self._taken = _Taken()
        self.attached_bytes = 0
        """Host memory of what a surface keeps with this conversation."""
        for message in messages:
            self._add_item("", message)

    def __len__(self) -> int:
        """Return the number of tokens of the history."""
        return len(self._tokens)

    @property
    def mode(self) -> HistoryMode:
        """Return whether turns append, or render the whole conversation."""
        return self._modes.of(self._tools)

    @property
    def num_bytes(self) -> int:
        """Return the host memory of tokens, items, tools and attached data."""
        num_bytes = sys.getsizeof(self._tokens) + self._answers.num_bytes + self._items.num_bytes
        return num_bytes + sum(map(text_bytes, self._tools)) + self.attached_bytes

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

    def num_items_before(self, turn_id: str) -> int:
        """Return how many items there were before a turn; all, if it has left none."""
        indexes = range(len(self._items))
        of_turn = (index for index in indexes if self._items[index].turn_id == turn_id)
        return next(of_turn, len(self._items))

    def answer_of(self, turn_id: str, index: int, item_id: str) -> ConversationItem | None:
        """Return the answer that a turn has left at `index`; None if it is gone, or was edited."""
        found = self._items[index] if index < len(self._items) else None
        is_same = found is not None and (found.id, found.turn_id) == (item_id, turn_id)
        return found if is_same else None

    def growth(self, prompt: Prompt, turn_id: str) -> int:
        """Return the bytes that the input of a turn will add to the conversation."""
        num_bytes = self._tokens.itemsize * len(prompt.tokens)
        if prompt.tools != self._tools:
            num_bytes += sum(map(text_bytes, prompt.tools))
        return num_bytes + sum(item_bytes(turn_id, message) for message in prompt.inputs)

    def tokens(self, start: int = 0, end: int | None = None) -> tuple[int, ...]:
        """Return the token ids of positions [start, end)."""
        return tuple(self._tokens[start:end])

    def new_item_id(self) -> str:
        """Return an id for the next item; ids count up and are never reused in this session."""
        return self._items.new_id()

    def tools_of(self, turn_input: TurnInput) -> tuple[str, ...]:
        """Return the tools that an answer to this input may call."""
        match turn_input:
            case ChatInput(is_whole=is_whole, tools=tools):
                return tools if is_whole else tools or self._tools
            case ContinueInput():
                return self._tools
            case _:
                return ()

    def state(self, turn_input: TurnInput | None = None) -> PromptState:
        """Return what the next turn's prompt depends on, if that turn's input is this."""
        tools = self._tools
        if isinstance(turn_input, ChatInput):
            if turn_input.is_whole:
                return self._state_where_agreed(turn_input)
            if not self._tokens:
                tools = turn_input.tools or tools
        mode, answer_len = self._modes.of(tools), self._answer_len
        # If the template's end of turn replaced a sampled one, treat the answer as cut off before
        # it: the token that is now last must not be replaced as well.
        is_cut = answer_len == 0 or self._is_end_replaced
        has_messages = mode == "template" and self._items.first_raw() is None
        return PromptState(
            mode=mode,
            num_tokens=len(self._tokens),
            answer_len=answer_len,
            last_id=-1 if is_cut else self._tokens[answer_len - 1],
            open_messages=self._open,
            messages=self._items.messages() if has_messages else None,
            now=self.now,
            tools=tools,
            last=self._last_answer() if isinstance(turn_input, ContinueInput) else None,
        )

    def _last_answer(self) -> Continued | None:
        """Return the answer that the conversation ends with."""
        num_items = len(self._items)
        if num_items == 0 or self._items[-1].role != "assistant":
            return None
        item, start = self._items[-1], max(0, self._answer_len - NUM_TAIL)
        return Continued(
            item.id,
            message_of(item),
            tuple(self._tokens[start : self._answer_len]),
            is_rendered=not self._open and self._answers.last_before(num_items) == num_items,
            is_raw=num_items > 1 and self._items[-2].role == "raw",
        )

    def num_agreed(self, chat: ChatInput) -> tuple[int, int]:
        """Compare the history with a whole conversation.

        Returns:
            How many leading messages say what the history holds, up to an answer; at least the last
            message is new, and with other tools all of them are. How many items stay: with those,
            messages that no answer follows.
        """
        num_equal = 0
        for item, message in zip(self._items, chat.messages, strict=False):
            if not agrees(item, message):
                break
            num_equal += 1
        num_agreed = 0
        if chat.tools == self._tools:
            num_agreed = self._answers.last_before(min(num_equal, len(chat.messages) - 1))
        return num_agreed, min(num_equal, self._answers.first_from(num_agreed, default=num_equal))

    def last_answer_before(self, num_items: int) -> int:
        """Return how many items there are up to the last answer among the first ones."""
        return self._answers.last_before(min(num_items, len(self._items)))

    def _state_where_agreed(self, chat: ChatInput) -> PromptState:
        """Return the state behind the last answer up to which the messages say what the history
        holds."""
        num_agreed, num_kept = self.num_agreed(chat)
        mode = self._modes.of(chat.tools)
        answer_len, last_id, is_template = 0, -1, mode == "template"
        if num_agreed and not is_template:
            answer_len, is_cut = self._answers.end_before(num_agreed)
            last_id = -1 if is_cut else self._tokens[answer_len - 1]
        return PromptState(
            mode=mode,
            num_tokens=answer_len,
            answer_len=answer_len,
            last_id=last_id,
            open_messages=(),
            messages=self._items.messages(0, num_agreed) if is_template else None,
            now=self.now,
            tools=chat.tools,
            num_agreed=num_agreed,
            num_kept=num_kept,
        )

    def common_len(self, prompt: Prompt) -> int:
        """Return the length of the longest common prefix of the history and the prompt's
        context."""
        if prompt.keep_len == len(self._tokens):  # nearly every turn goes on behind all of it
            return prompt.keep_len
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
        self, prompt: Prompt, turn_id: str, item_id: str, *, output: Sequence[int], said: Message
    ) -> None:
        """Replace the history by the context of an ended turn and its `output`, which says
        `said`."""
        assert prompt.keep_len <= len(self._tokens), "a prompt was built on another history"
        if prompt.num_items is not None:
            self.cut(prompt.num_items)
        self._note_replaced_end(prompt)
        # Nobody compares a history that was rendered anew where nobody takes changes.
        same_len = self.common_len(prompt) if self._taken.is_wanted else prompt.keep_len
        self._taken.num_kept = min(self._taken.num_kept, same_len)
        del self._tokens[prompt.keep_len :]
        self._tokens.extend(prompt.tokens)
        self._tools = prompt.tools
        for message in prompt.inputs:
            self._add_item(turn_id, message)
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
        if prompt.continued is not None:
            self._answers.cut(len(self._items) - 1)
            self._items.cut(len(self._items) - 1)
        if prompt.generate:
            self._answers.append(len(self._items), len(self._tokens))
            self._add_item(turn_id, said, item_id=item_id)

    def cut(self, num_items: int) -> None:
        """Keep the first items alone. Messages behind the last of them that has tokens of its own
        are rendered with the next turn."""
        self._items.cut(num_items)
        self._answers.cut(num_items)
        self._answer_len, self._is_end_replaced = self._answers.end_before(num_items)
        first_open = self._answers.last_before(num_items)
        for index in range(num_items - 1, first_open - 1, -1):
            if self._items[index].role == "raw":
                self._answer_len, self._is_end_replaced = self._items[index].end_len, False
                first_open = index + 1
                break
        if self.mode == "template" and self._items.first_raw() is None:
            # Every turn renders all of it, and none of it is where it was.
            self._answer_len, first_open = 0, 0
        self._open = self._items.messages(first_open)
        self._taken.num_kept = min(self._taken.num_kept, self._answer_len)
        del self._tokens[self._answer_len :]

    def add_open(self, message: Message, *, item_id: str | None = None) -> None:
        """Append a message that is rendered with the next turn."""
        self._open = (*self._open, message)
        self._add_item("", message, item_id=item_id)

    def fork(self, num_items: int) -> Transcript:
        """Return a conversation of its own with the first items of this one."""
        copy = Transcript(self._modes, (), now=self.now)
        copy._tokens, copy._tools = self._tokens[:], self._tools
        copy._answer_len, copy._is_end_replaced = self._answer_len, self._is_end_replaced
        copy._open = self._open
        copy._items = self._items.copy()
        copy._answers = self._answers.copy()
        if num_items < len(self._items):
            copy.cut(num_items)
        return copy

    def forget_taken(self) -> None:
        """Have the next `take_change` return all there is."""
        self._taken = _Taken()
        self._items.forget_taken()
        self._answers.forget_taken()

    def take_change(self) -> HistoryChange:
        """Return what has changed since the last call, or since there was nothing.

        O(what has changed). A history that was rendered anew has changed from where it differs.
        """
        num_kept, taken_tools = self._taken.num_kept, self._taken.tools
        self._taken = _Taken(len(self._tokens), self._tools, is_wanted=True)
        return HistoryChange(
            num_kept,
            np.frombuffer(self._tokens, np.int32)[num_kept:].astype("<i4", copy=False).tobytes(),
            self._items.take_change(),
            self._answers.take_change(),
            None if self._tools == taken_tools else self._tools,
            self._answer_len,
            self._is_end_replaced,
            len(self._open),
        )

    def apply(self, change: HistoryChange) -> None:
        """Change as another conversation has that was equal.

        Raises:
            ValueError: it was another one, which had more than this one has.
        """
        apply_tokens(self._tokens, change)
        self._items.apply(change.items)
        self._answers.apply(change.answers)
        if change.tools is not None:
            self._tools = change.tools
        self._answer_len, self._is_end_replaced = change.answer_len, change.is_end_replaced
        num_items = len(self._items)
        if change.num_open > num_items or change.answer_len > len(self._tokens):
            raise ValueError(f"{change.num_open} items wait, {change.answer_len} tokens are said")
        self._open = self._items.messages(num_items - change.num_open)
        self._taken = _Taken(len(self._tokens), self._tools, is_wanted=True)

    def check_places(self) -> None:
        """Raise ValueError if something is said to be where nothing is."""
        num_tokens = len(self._tokens)
        for item in self._items:
            if item.role == "raw" and not 0 <= item.end_len <= num_tokens:
                raise ValueError(f"{item.id} ends at token {item.end_len} of {num_tokens}")
        # Where a template renders the answers anew, they end elsewhere.
        is_moved = self.mode == "template"
        self._answers.check(
            num_items=len(self._items), num_tokens=sys.maxsize if is_moved else self._answer_len
        )

    def has_only(self, vocab_size: int) -> bool:
        """Return whether all token ids are of a vocabulary of this size. O(tokens)."""
        tokens = np.frombuffer(self._tokens, np.int32)
        return not len(tokens) or (int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size)

    def _note_replaced_end(self, prompt: Prompt) -> None:
        """Note that the prompt replaces the token which ended the last answer or raw input, if it
        does."""
        is_template = self._modes.of(prompt.tools) == "template"
        if is_template or not self._items or prompt.keep_len >= self._answer_len:
            return
        index = self._answers.note_replaced(prompt.keep_len)
        if index is None:
            index = len(self._items) - 1
            if self._items[index].role != "raw":
                return
        self._items.move_end(index, prompt.keep_len)

    def can_render(self, index: int) -> bool:
        """Return whether the next turn renders a message at `index`: not behind raw input where the
        template renders the whole conversation."""
        first_raw = self._items.first_raw()
        return self.mode == "append" or first_raw is None or index <= first_raw

    def _add_item(self, turn_id: str, message: Message, *, item_id: str | None = None) -> None:
        self._items.append(turn_id, message, len(self._tokens), item_id=item_id)
