"""Keep the conversations that clients of OpenAI's Responses open by themselves.

A conversation is a list of items, which its client may change at any time, and a session that is
brought to say the same with each response.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from session_server.core.errors import ConversationNotFound, ItemNotFound, QuotaExceeded
from session_server.core.owner import Owner
from session_server.core.session_events import Message
from session_server.sessions.footprint import message_bytes, metadata_bytes, text_bytes
from session_server.sessions.kept import KeptRecords
from session_server.sessions.quotas import Quotas

MAX_KEPT_ITEMS: Final = 16_384
"""Items of one conversation to which its client may add others; a response reads all of them."""

CONVERSATION_BYTES: Final = 1024
"""Host memory of one conversation without its items."""

ENTRY_BYTES: Final = 128
"""Host memory of one entry without its texts."""


@dataclass(frozen=True, slots=True)
class ConversationEntry:
    """Hold one item. Adjacent ones of the model are parts of one message."""

    id: str
    message: Message


class ConversationEntries:
    """Hold the items of a conversation in order, and find each by its id without a look at the
    others."""

    def __init__(self) -> None:
        self._num_made = 0
        self._numbers = array("q")
        """Of each item, in order: they count up, and none is used twice."""
        self._messages: list[Message] = []
        self._ids: list[str] = []
        self._number_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> ConversationEntry:
        return ConversationEntry(self._ids[index], self._messages[index])

    def messages(self) -> Iterator[Message]:
        """Yield what the items say."""
        return iter(self._messages)

    def index_of(self, item_id: str) -> int | None:
        """Return the index of an item, None if there is none of this id."""
        number = self._number_of.get(item_id)
        return None if number is None else bisect_left(self._numbers, number)

    def append(self, entry: ConversationEntry) -> None:
        """Add an item at the end."""
        assert entry.id not in self._number_of, "two items of one id"
        self._number_of[entry.id] = self._num_made
        self._numbers.append(self._num_made)
        self._ids.append(entry.id)
        self._messages.append(entry.message)
        self._num_made += 1

    def pop(self, index: int) -> ConversationEntry:
        """Remove an item and return it."""
        entry = ConversationEntry(self._ids.pop(index), self._messages.pop(index))
        del self._numbers[index], self._number_of[entry.id]
        return entry


@dataclass(slots=True, eq=False)
class KeptConversation:
    """Hold one conversation.

    `session_id` and `epoch` name the session that said the same when the last response ended; ""
    before the first. `running`: the response that runs now.
    """

    conversation_id: str
    owner: Owner
    created_s: int
    metadata: dict[str, str]
    entries: ConversationEntries = field(default_factory=ConversationEntries)
    session_id: str = ""
    epoch: str = ""
    running: str | None = None
    entry_bytes: int = 0
    counted_bytes: int = 0

    @property
    def key(self) -> str:
        """Return its id."""
        return self.conversation_id

    @property
    def num_bytes(self) -> int:
        """Return the host memory of all of it."""
        return CONVERSATION_BYTES + metadata_bytes(self.metadata) + self.entry_bytes


class KeptConversations:
    """Hold the conversations of all owners; the one unused for longest goes first."""

    def __init__(self, quotas: Quotas) -> None:
        self.records = KeptRecords[KeptConversation](
            quotas, "kept conversations", on_dropped=lambda _: None
        )

    def find(self, owner: Owner, conversation_id: str) -> KeptConversation:
        """Return a conversation. Raises ConversationNotFound."""
        found = self.records.get(owner, conversation_id)
        if found is None:
            raise ConversationNotFound(
                f"Conversation with id '{conversation_id}' not found.", param="conversation"
            )
        return found

    def add(self, conversation: KeptConversation, entries: Sequence[ConversationEntry]) -> None:
        """Keep a new conversation with its first items. Raises QuotaExceeded, ServerBusy."""
        _append(conversation, entries)
        self.records.add(conversation)

    def append(self, conversation: KeptConversation, entries: Sequence[ConversationEntry]) -> None:
        """Append items. Raises QuotaExceeded, ServerBusy, with nothing changed."""
        if len(conversation.entries) + len(entries) > MAX_KEPT_ITEMS:
            raise QuotaExceeded(f"A conversation has at most {MAX_KEPT_ITEMS} items.")
        self.records.check(conversation.owner, conversation.num_bytes + _bytes_of(entries))
        self.append_said(conversation, entries)

    def append_said(
        self, conversation: KeptConversation, entries: Sequence[ConversationEntry]
    ) -> None:
        """Append what was said; where there is no room for it, others go, and at last all of it."""
        _append(conversation, entries)
        self.records.recount(conversation)

    def delete_item(self, conversation: KeptConversation, item_id: str) -> None:
        """Delete an item. Raises ItemNotFound."""
        index = conversation.entries.index_of(item_id)
        if index is None:
            raise ItemNotFound("There is no such item.", param="item_id")
        conversation.entry_bytes -= _bytes_of((conversation.entries.pop(index),))
        self.records.recount(conversation)

    def update(self, conversation: KeptConversation, metadata: dict[str, str]) -> None:
        """Replace the metadata. Raises QuotaExceeded, ServerBusy, with nothing changed."""
        self.records.check(conversation.owner, conversation.num_bytes + metadata_bytes(metadata))
        conversation.metadata = metadata
        self.records.recount(conversation)


def _append(conversation: KeptConversation, entries: Sequence[ConversationEntry]) -> None:
    for entry in entries:
        conversation.entries.append(entry)
    conversation.entry_bytes += _bytes_of(entries)


def _bytes_of(entries: Sequence[ConversationEntry]) -> int:
    return sum(ENTRY_BYTES + text_bytes(e.id) + message_bytes(e.message) for e in entries)
