"""Keep the conversations that clients of OpenAI's Responses open by themselves.

A conversation is a list of items, which its client may change at any time, and a session that is
brought to say the same with each response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from session_server.core.errors import ConversationNotFound, ItemNotFound
from session_server.core.owner import Owner
from session_server.core.session_events import Message
from session_server.sessions.footprint import message_bytes, metadata_bytes, text_bytes
from session_server.sessions.kept import KeptRecords
from session_server.sessions.quotas import Quotas

CONVERSATION_BYTES: Final = 1024
"""Host memory of one conversation without its items."""

ENTRY_BYTES: Final = 128
"""Host memory of one entry without its texts."""


@dataclass(frozen=True, slots=True)
class ConversationEntry:
    """Hold one item. Adjacent ones of the model are parts of one message."""

    id: str
    message: Message


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
    entries: dict[str, Message] = field(default_factory=dict)
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
        if item_id not in conversation.entries:
            raise ItemNotFound("There is no such item.", param="item_id")
        entry = ConversationEntry(item_id, conversation.entries.pop(item_id))
        conversation.entry_bytes -= _bytes_of((entry,))
        self.records.recount(conversation)

    def update(self, conversation: KeptConversation, metadata: dict[str, str]) -> None:
        """Replace the metadata. Raises QuotaExceeded, ServerBusy, with nothing changed."""
        self.records.check(conversation.owner, conversation.num_bytes + metadata_bytes(metadata))
        conversation.metadata = metadata
        self.records.recount(conversation)


def _append(conversation: KeptConversation, entries: Sequence[ConversationEntry]) -> None:
    conversation.entries |= {entry.id: entry.message for entry in entries}
    conversation.entry_bytes += _bytes_of(entries)


def _bytes_of(entries: Sequence[ConversationEntry]) -> int:
    return sum(ENTRY_BYTES + text_bytes(e.id) + message_bytes(e.message) for e in entries)
