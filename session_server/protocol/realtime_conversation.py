"""Keep the items of a Realtime conversation in order."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, assert_never

from msgspec import structs

from session_server.core.errors import InvalidRequest
from session_server.core.session_events import ConversationItem, Message, ToolCall
from session_server.protocol.realtime_frames import (
    RealtimeAnyItem,
    RealtimeCall,
    RealtimeCallOutput,
    RealtimeMessage,
    RealtimePart,
)

UNTOLD: Final = 1 << 62
"""The number of the event that has told of an item, before there is one."""

ITEM_BYTES: Final = 512
"""An item without its texts."""

WIDE_CHAR_BYTES: Final = 6


_NOTHING_SAID: Final = Message("assistant", "")


@dataclass(slots=True)
class _Entry:
    """Hold an item and the number of the last event that told of it."""

    item: RealtimeAnyItem
    told: int = UNTOLD


class RealtimeConversation:
    """Hold the items that the next response answers. `num_bytes` is what they take."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._by_id: dict[str, _Entry] = {}
        self._said: tuple[str, tuple[Message, ...]] | None = None
        """Instructions and messages, until an item changes."""

        self.version = 0
        """Counts what `messages` has returned, each tuple once."""

        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, item_id: str) -> RealtimeAnyItem | None:
        """Return an item, None if there is none of this id."""
        entry = self._by_id.get(item_id)
        return None if entry is None else entry.item

    def has_call(self, call_id: str) -> bool:
        """Return whether an item is a call of this id; most are near the end."""
        calls = (entry.item for entry in reversed(self._entries))
        return any(isinstance(item, RealtimeCall) and item.call_id == call_id for item in calls)

    @property
    def last_id(self) -> str | None:
        """Return the id of the last item; None if there is none."""
        return self._entries[-1].item.id if self._entries else None

    def previous_id(self, item_id: str) -> str | None:
        """Return the id of the item before one; None for the first, and one that is gone."""
        index = self._index(item_id) if item_id in self._by_id else 0
        return self._entries[index - 1].item.id if index else None

    def insert(self, item: RealtimeAnyItem, *, after_id: str | None) -> None:
        """Add an item behind another; None: before all of them."""
        assert item.id not in self._by_id, "two items of one id"
        index = 0 if after_id is None else self._index(after_id) + 1
        entry, self._said = _Entry(item), None
        self._entries.insert(index, entry)
        self._by_id[item.id] = entry
        self.num_bytes += item_bytes(item)

    def replace(self, item: RealtimeAnyItem) -> None:
        """Put an item in the place of that of the same id."""
        entry = self._by_id[item.id]
        self.num_bytes += item_bytes(item) - item_bytes(entry.item)
        entry.item, self._said = item, None

    def remove(self, item_id: str) -> None:
        """Take an item out."""
        index, self._said = self._index(item_id), None
        del self._entries[index]
        self.num_bytes -= item_bytes(self._by_id.pop(item_id).item)

    def note_told(self, item_id: str, number: int) -> None:
        """Note the number of the last event about an item, unless it is gone."""
        if item_id in self._by_id:
            self._by_id[item_id].told = number

    def untold_since(
        self, number: int, *, besides: Container[str]
    ) -> Iterator[tuple[str | None, RealtimeAnyItem, bool]]:
        """Yield the items that a client does not know who has seen the events up to this number,
        and among them those that are told in another way (`besides`); each with the id of that
        before it, and whether its last event alone is missing. None counts as told before it is."""
        told: list[tuple[str | None, RealtimeAnyItem, bool]] = []
        previous_id = None
        for entry in self._entries:
            if entry.item.id in besides:
                told.append((previous_id, entry.item, False))
            elif entry.told > number:
                told.append((previous_id, entry.item, entry.told == number + 1))
                entry.told = UNTOLD
            previous_id = entry.item.id
        yield from told

    def messages(self, instructions: str) -> tuple[Message, ...]:
        """Return the conversation as a chat template takes it, without an answer that has not
        ended: the same tuple until something changes."""
        if self._said is None or self._said[0] != instructions:
            items = (entry.item for entry in self._entries if entry.item.status != "in_progress")
            self._said = instructions, messages_of(items, instructions)
            self.version += 1
        return self._said[1]

    def _index(self, item_id: str) -> int:
        """Return the index of an item; most are near the end."""
        entries = self._entries
        return next(
            index for index in range(len(entries) - 1, -1, -1) if entries[index].item.id == item_id
        )


def messages_of(items: Iterable[RealtimeAnyItem], instructions: str) -> tuple[Message, ...]:
    """Return items as a chat template takes them, behind the instructions if there are any. Calls
    are part of the answer that they follow."""
    said = [Message("system", instructions)] if instructions else []
    calls: list[ToolCall] = []
    for item in items:
        if calls and not isinstance(item, RealtimeCall):
            said[-1] = structs.replace(said[-1], tool_calls=tuple(calls))
            calls = []
        match item:
            case RealtimeMessage(role=role):
                said.append(Message(role, item.text))
            case RealtimeCall(call_id=call_id, name=name, arguments=arguments):
                if not said or said[-1].role != "assistant":
                    said.append(_NOTHING_SAID)
                calls.append(ToolCall(call_id, name, arguments))
            case RealtimeCallOutput(call_id=call_id, output=output):
                said.append(Message("tool", output, tool_call_id=call_id))
            case _:
                assert_never(item)
    if calls:
        said[-1] = structs.replace(said[-1], tool_calls=tuple(calls))
    return tuple(said)


def items_of(item: ConversationItem) -> Iterator[RealtimeAnyItem]:
    """Yield what an item of the session is in Realtime. Raises InvalidRequest."""
    match item.role:
        case "system" | "developer" | "user":
            role: Literal["system", "user"] = "user" if item.role == "user" else "system"
            part = RealtimePart(type="input_text", text=item.content)
            yield RealtimeMessage(id=item.id, role=role, content=(part,))
        case "assistant":
            if item.content or not item.tool_calls:
                part = RealtimePart(type="output_text", text=item.content)
                yield RealtimeMessage(id=item.id, role="assistant", content=(part,))
            for index, call in enumerate(item.tool_calls):
                call_id, name, arguments = call.id, call.name, call.arguments
                made_id = f"{item.id}_{index}"
                yield RealtimeCall(id=made_id, call_id=call_id, name=name, arguments=arguments)
        case "tool":
            yield RealtimeCallOutput(id=item.id, call_id=item.tool_call_id, output=item.content)
        case _:
            raise InvalidRequest("The session holds what no Realtime item can say.")


def item_bytes(item: RealtimeAnyItem) -> int:
    """Return the bytes of an item."""
    match item:
        case RealtimeMessage(content=content):
            texts = [part.text for part in content]
        case RealtimeCall(call_id=call_id, name=name, arguments=arguments):
            texts = [call_id, name, arguments]
        case RealtimeCallOutput(call_id=call_id, output=output):
            texts = [call_id, output]
        case _:
            assert_never(item)
    return ITEM_BYTES + sum(map(text_bytes, texts))


def text_bytes(text: str) -> int:
    """Return the bytes of a text: what the interpreter takes at most."""
    return len(text) * (1 if text.isascii() else WIDE_CHAR_BYTES)
