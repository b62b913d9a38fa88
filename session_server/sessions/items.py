"""Keep the items of a conversation, and count their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from msgspec import structs

from session_server.core.session_events import ConversationItem, Message, Outcome
from session_server.sessions.footprint import item_bytes
from session_server.sessions.history_change import ItemsChange


class Items:
    """Hold what was said, oldest first. Ids count up and are never used twice in one session."""

    def __init__(self) -> None:
        self._items: list[ConversationItem] = []
        self._num_made = 0
        self._num_kept = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[ConversationItem]:
        return iter(self._items)

    def __getitem__(self, index: int) -> ConversationItem:
        return self._items[index]

    def new_id(self) -> str:
        """Return an id for the next item."""
        self._num_made += 1
        return f"i_{self._num_made}"

    def append(
        self, turn_id: str, message: Message, end_len: int, *, item_id: str | None = None
    ) -> None:
        """Add a message at the end; None makes an id for it."""
        item = ConversationItem(
            id=item_id or self.new_id(),
            turn_id=turn_id,
            role=message.role,
            content=message.content,
            end_len=end_len,
            tool_calls=message.tool_calls,
            tool_call_id=message.tool_call_id,
            reasoning=message.reasoning,
        )
        self._items.append(item)
        self.num_bytes += item_bytes(turn_id, message)

    def move_end(self, index: int, end_len: int) -> None:
        """Set where an item ends in the history."""
        self._items[index] = structs.replace(self._items[index], end_len=end_len)
        self._num_kept = min(self._num_kept, index)

    def cut(self, num_items: int) -> None:
        """Keep the first items alone."""
        dropped = self._items[num_items:]
        self.num_bytes -= sum(item_bytes(item.turn_id, message_of(item)) for item in dropped)
        del self._items[num_items:]
        self._num_kept = min(self._num_kept, num_items)

    def forget_taken(self) -> None:
        """Have the next `take_change` return all there is."""
        self._num_kept = 0

    def take_change(self) -> ItemsChange:
        """Return what has changed since the last call, or since there were none."""
        num_kept, self._num_kept = self._num_kept, len(self._items)
        return ItemsChange(num_kept, tuple(self._items[num_kept:]), self._num_made)

    def apply(self, change: ItemsChange) -> None:
        """Change as others have that were equal. Raises ValueError if there are too few items."""
        if change.num_kept > len(self._items):
            raise ValueError(f"{change.num_kept} items stay of {len(self._items)}")
        self.cut(change.num_kept)
        self._items += change.added
        self.num_bytes += sum(item_bytes(item.turn_id, message_of(item)) for item in change.added)
        self._num_made, self._num_kept = change.num_made, len(self._items)

    def copy(self) -> Self:
        """Return an equal object of its own."""
        copy = type(self)()
        copy._items, copy._num_made, copy.num_bytes = self._items[:], self._num_made, self.num_bytes
        return copy

    def messages(self, start: int = 0, end: int | None = None) -> tuple[Message, ...]:
        """Return the items [start, end) as messages."""
        return tuple(map(message_of, self._items[start:end]))

    def first_raw(self) -> int | None:
        """Return the index of the first raw input, None if all are messages."""
        roles = (index for index, item in enumerate(self._items) if item.role == "raw")
        return next(roles, None)


def message_of(item: ConversationItem) -> Message:
    """Return what was said as a message."""
    return Message(item.role, item.content, item.tool_calls, item.tool_call_id, item.reasoning)


def message_of_answer(outcome: Outcome) -> Message:
    """Return what a turn has said as a message."""
    calls, reasoning = outcome.tool_calls, outcome.reasoning
    return Message("assistant", outcome.text, tool_calls=calls, reasoning=reasoning)
