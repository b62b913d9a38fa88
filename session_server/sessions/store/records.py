"""What the store keeps of a session, and how it is written.

A session is one row and its entries, in order. The row says what a list of sessions needs; an entry
holds what one turn, rewind or edit has changed. Fields are only ever added at the end, with a
default: a later version reads what an earlier one wrote.
"""

from __future__ import annotations

import zlib
from typing import Final, Literal

import msgspec

from session_server.sessions.history_change import HistoryChange

_CHECKSUM_BYTES: Final = 4


class Damaged(Exception):
    """Report bytes in the store that nothing has written there."""


class StoredSettings(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Hold what a client chose; see `SessionConfig`. `history`: what it asked for, if anything.
    `now_s`: the time that its templates are told, wall-clock."""

    ttl_s: float
    metadata: dict[str, str]
    is_pinned: bool
    created_s: float
    request_digest: bytes
    history: Literal["append", "template"] | None
    now_s: float


class SessionRow(msgspec.Struct, frozen=True, gc=False):
    """Hold a session without its conversation.

    `number` orders the sessions of an owner. `model`: the fingerprint of the tokenizer that its
    token ids are of. `expires_s`: wall-clock seconds. `num_entries` are there already.
    """

    number: int
    owner_id: str
    session_id: str
    model: bytes
    expires_s: float
    settings: StoredSettings
    num_tokens: int
    num_turns: int
    num_uses: int
    num_entries: int = 0


class EndRecord(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Hold how a turn ended; see `EndedTurns`."""

    key: int
    record: bytes


class LogEntry(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Hold one change of a conversation, and the turns that ended with it."""

    change: HistoryChange
    turns: tuple[EndRecord, ...] = ()


_encoder: Final = msgspec.msgpack.Encoder()
_entries: Final = msgspec.msgpack.Decoder(LogEntry)
_settings: Final = msgspec.msgpack.Decoder(StoredSettings)


def encode_entry(entry: LogEntry) -> bytes:
    """Return an entry as bytes that begin with a checksum of the others."""
    payload = _encoder.encode(entry)
    return zlib.crc32(payload).to_bytes(_CHECKSUM_BYTES, "little") + payload


def decode_entry(data: bytes) -> LogEntry:
    """Return the entry that `encode_entry` wrote. Raises Damaged."""
    payload = memoryview(data)[_CHECKSUM_BYTES:]
    if zlib.crc32(payload) != int.from_bytes(data[:_CHECKSUM_BYTES], "little"):
        raise Damaged("the checksum of an entry does not match")
    try:
        return _entries.decode(payload)
    except msgspec.MsgspecError as error:
        raise Damaged(f"an entry cannot be read: {error}") from error


def encode_settings(settings: StoredSettings) -> bytes:
    """Return settings as bytes."""
    return _encoder.encode(settings)


def decode_settings(data: bytes) -> StoredSettings:
    """Return the settings that `encode_settings` wrote. Raises Damaged."""
    try:
        return _settings.decode(data)
    except msgspec.MsgspecError as error:
        raise Damaged(f"the settings of a session cannot be read: {error}") from error
