"""Keep the conversations that clients of OpenAI's Responses open by themselves.

A conversation is a list of items, which its client may change at any time, and a session that is
brought to say the same with each response. On disk each item is a part of its own, so that a
response costs what it adds.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

import msgspec

from session_server.core.errors import (
    ConversationNotFound,
    ItemNotFound,
    QuotaExceeded,
    ServerBusy,
    SessionServerError,
)
from session_server.core.owner import Owner
from session_server.core.session_events import Message
from session_server.sessions.backlog import Backlog
from session_server.sessions.footprint import message_bytes, metadata_bytes, text_bytes
from session_server.sessions.kept import KeptRecords
from session_server.sessions.quotas import Quotas
from session_server.sessions.record_log import RecordLog
from session_server.sessions.responses import SaidIn
from session_server.sessions.store.database import Behind
from session_server.sessions.store.records import CONVERSATIONS, Damaged, PartCodec, Parts
from session_server.sessions.store.writer import Beside

MAX_KEPT_ITEMS: Final = 16_384
"""Items of one conversation to which its client may add others; a response reads all of them."""

MAX_CHANGES: Final = 8
"""How often one change of a conversation is tried that other replicas change at the same time."""

_logger: Final = logging.getLogger("session_server.store")

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
        """Of each item, in order: they count up, and none is used twice at a time."""
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

    def number(self, index: int) -> int:
        """Return the number of an item, by which it is filed."""
        return self._numbers[index]

    def append(self, entry: ConversationEntry, *, number: int | None = None) -> None:
        """Add an item at the end; None makes a number for it."""
        assert entry.id not in self._number_of, "two items of one id"
        number = self._num_made if number is None else number
        self._number_of[entry.id] = number
        self._numbers.append(number)
        self._ids.append(entry.id)
        self._messages.append(entry.message)
        self._num_made = number + 1

    def without_own(self, entries: Sequence[ConversationEntry]) -> list[ConversationEntry]:
        """Return those of some items that are not among these."""
        return [entry for entry in entries if entry.id not in self._number_of]

    def pop(self, index: int) -> ConversationEntry:
        """Remove an item and return it."""
        entry = ConversationEntry(self._ids.pop(index), self._messages.pop(index))
        del self._numbers[index], self._number_of[entry.id]
        return entry


@dataclass(slots=True, eq=False)
class KeptConversation:
    """Hold one conversation.

    `place`: the session that said the same when the last response ended. `running`: the response
    that runs now.
    """

    conversation_id: str
    owner: Owner
    created_s: int
    metadata: dict[str, str]
    entries: ConversationEntries = field(default_factory=ConversationEntries)
    place: SaidIn = field(default_factory=SaidIn)
    running: str | None = None
    entry_bytes: int = 0
    made_in: ClassVar = ""

    @property
    def key(self) -> str:
        """Return its id."""
        return self.conversation_id

    @property
    def num_bytes(self) -> int:
        """Return the host memory of all of it."""
        return CONVERSATION_BYTES + metadata_bytes(self.metadata) + self.entry_bytes


class _Head(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Hold what the store has of a conversation besides its items."""

    created_s: int
    metadata: dict[str, str]
    session_id: str
    session_number: int


class _Item(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Hold what the store has of an item."""

    id: str
    message: Message


_heads: Final = PartCodec(_Head, "a conversation")
_items: Final = PartCodec(_Item, "an item")


class ConversationForm:
    """Say how conversations are written: part 0 is the head, and each item is the part behind its
    number."""

    noun = CONVERSATIONS
    may_change = True

    def parts(self, record: KeptConversation) -> Parts:
        """Return all parts."""
        return [self.head(record), *self.items(record, 0)]

    def head(self, record: KeptConversation) -> tuple[int, bytes]:
        """Return the part that is no item."""
        place = record.place
        head = _Head(record.created_s, record.metadata, place.session_id, place.number)
        return 0, _heads.encode(head)

    def items(self, record: KeptConversation, start: int) -> Parts:
        """Return the parts of items from one on."""
        entries = record.entries
        found = ((entries.number(i), entries[i]) for i in range(start, len(entries)))
        return [(n + 1, _items.encode(_Item(entry.id, entry.message))) for n, entry in found]

    def read(self, owner: Owner, key: str, parts: Parts) -> KeptConversation:
        """Return a conversation with its first items. Raises Damaged."""
        if not parts or parts[0][0] != 0:
            raise Damaged("it has no head")
        head = _heads.decode(parts[0][1])
        place = SaidIn(head.session_id, head.session_number)
        found = KeptConversation(key, owner, head.created_s, head.metadata, place=place)
        self.read_on(found, parts[1:])
        return found

    def read_on(self, record: KeptConversation, parts: Parts) -> None:
        """Append items. Raises Damaged."""
        for position, data in parts:
            item = _items.decode(data)
            if record.entries.index_of(item.id) is not None:
                raise Damaged("two items have one id")
            entry = ConversationEntry(item.id, item.message)
            record.entries.append(entry, number=position - 1)
            record.entry_bytes += _bytes_of((entry,))


class KeptConversations:
    """Hold the conversations of all owners; the one unused for longest goes first."""

    def __init__(self, quotas: Quotas, log: RecordLog, backlog: Backlog) -> None:
        self._form, self._log = ConversationForm(), log
        self._tasks: set[asyncio.Task[None]] = set()
        self.records = KeptRecords[KeptConversation](quotas, self._form, log, backlog)

    async def load(self, owner: Owner, conversation_id: str) -> KeptConversation:
        """Return a conversation, which is read in slices if it is on disk alone. Raises what `find`
        raises."""
        await self.records.load(owner, conversation_id)
        return self.find(owner, conversation_id)

    def find(self, owner: Owner, conversation_id: str) -> KeptConversation:
        """Return a conversation. Raises ConversationNotFound, and what `KeptRecords.get` raises."""
        found = self.records.get(owner, conversation_id)
        if found is None:
            raise ConversationNotFound(
                f"Conversation with id '{conversation_id}' not found.", param="conversation"
            )
        return found

    async def change(
        self, owner: Owner, conversation_id: str, change: Callable[[KeptConversation], object]
    ) -> KeptConversation:
        """Change a conversation, and wait until that is on disk, or cannot be. Where another
        replica has changed it at the same moment what that one has written is read, and changed
        again.

        Raises:
            ServerBusy: others go on to change it, or the disk cannot be read.
            And what `find` and `change` raise.
        """
        for attempt in range(MAX_CHANGES):
            conversation = await self.load(owner, conversation_id)
            try:
                change(conversation)
            except ItemNotFound:
                if attempt == 0:
                    raise
                return conversation  # an earlier attempt, whose answer was lost, has deleted it
            if not self._log.has_store:
                return conversation
            await self._log.store.flush()
            if not self._log.is_shared or self.records.is_kept(conversation):
                return conversation
        raise ServerBusy("others change this conversation at the same time: ask again")

    def add(self, conversation: KeptConversation, entries: Sequence[ConversationEntry]) -> None:
        """Keep a new conversation with its first items. Raises QuotaExceeded, ServerBusy."""
        _append(conversation, entries)
        self.records.check_stored(conversation.owner, conversation.num_bytes)
        self.records.add(conversation)
        self.records.put(conversation)

    def append(self, conversation: KeptConversation, entries: Sequence[ConversationEntry]) -> None:
        """Append items, those that are not there. Raises QuotaExceeded, ServerBusy, with nothing
        changed."""
        entries = conversation.entries.without_own(entries)
        if len(conversation.entries) + len(entries) > MAX_KEPT_ITEMS:
            raise QuotaExceeded(f"A conversation has at most {MAX_KEPT_ITEMS} items.")
        self.records.check_stored(conversation.owner, conversation.num_bytes + _bytes_of(entries))
        num_before = len(conversation.entries)
        _append(conversation, entries)
        self.records.recount(conversation)
        self.records.change(conversation, self._form.items(conversation, num_before))

    def append_said(
        self, conversation: KeptConversation, entries: Sequence[ConversationEntry], place: SaidIn
    ) -> Beside | None:
        """Append what was said in a session, which says all of it now; return what is to be written
        then. Where there is no room for it, others go, and at last all of it. Where another replica
        has changed it meanwhile that fails, and is done again behind what that one has written."""

        def say_again() -> None:
            again = self._say_again(conversation, entries, place)
            task = asyncio.create_task(again, name="add to a conversation again")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        try:
            # What another replica has written may have been read in its place since.
            newest = self.find(conversation.owner, conversation.key)
        except ConversationNotFound:
            return None
        except ServerBusy:
            say_again()
            return None
        write = self._say(newest, entries, place)
        if write is None:
            return None

        def told(error: Exception | None) -> None:
            write.told(error)
            if isinstance(error, Behind) and self._log.is_shared:
                say_again()

        return write._replace(told=told)

    def _say(
        self, conversation: KeptConversation, entries: Sequence[ConversationEntry], place: SaidIn
    ) -> Beside | None:
        num_before = len(conversation.entries)
        conversation.place = place
        _append(conversation, conversation.entries.without_own(entries))
        self.records.recount(conversation)
        said = self._form.items(conversation, num_before)
        return self.records.change_of(conversation, [self._form.head(conversation), *said])

    async def _say_again(
        self, before: KeptConversation, entries: Sequence[ConversationEntry], place: SaidIn
    ) -> None:
        def say(conversation: KeptConversation) -> None:
            write = self._say(conversation, entries, place)
            if write is not None:
                self._log.ask(write)

        try:
            await self.change(before.owner, before.key, say)
        except SessionServerError as error:
            _logger.error("%s is without what was said last: %s", before.key, error)

    def delete_item(self, conversation: KeptConversation, item_id: str) -> None:
        """Delete an item. Raises ItemNotFound."""
        index = conversation.entries.index_of(item_id)
        if index is None:
            raise ItemNotFound("There is no such item.", param="item_id")
        number = conversation.entries.number(index)
        conversation.entry_bytes -= _bytes_of((conversation.entries.pop(index),))
        self.records.recount(conversation)
        self.records.change(conversation, (), [number + 1])

    def update(self, conversation: KeptConversation, metadata: dict[str, str]) -> None:
        """Replace the metadata. Raises QuotaExceeded, ServerBusy, with nothing changed."""
        num_bytes = conversation.num_bytes + metadata_bytes(metadata)
        self.records.check_stored(conversation.owner, num_bytes)
        conversation.metadata = metadata
        self.records.recount(conversation)
        self.records.change(conversation, [self._form.head(conversation)])


def _append(conversation: KeptConversation, entries: Sequence[ConversationEntry]) -> None:
    for entry in entries:
        conversation.entries.append(entry)
    conversation.entry_bytes += _bytes_of(entries)


def _bytes_of(entries: Sequence[ConversationEntry]) -> int:
    return sum(ENTRY_BYTES + text_bytes(e.id) + message_bytes(e.message) for e in entries)
