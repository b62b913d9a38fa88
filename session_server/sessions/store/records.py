"""What the store keeps, and how it is written.

A session is one row and its entries, in order. The row says what a list of sessions needs; an entry
holds what one turn, rewind or edit has changed. Any other record (a response, a conversation of
OpenAI's clients) is one row and its parts. Fields are only ever added at the end, with a default: a
later version reads what an earlier one wrote.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Annotated, Final, Generic, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, structs

from session_server.sessions.history_change import HistoryChange

_T = TypeVar("_T")

LAST_S: Final = 32_503_680_000
"""The year 3000: the last time that a session may tell of, in wall-clock seconds."""

Number = Annotated[int, Meta(ge=0, lt=1 << 32)]
"""What fits into the record of a turn. Whoever reads another one refuses it."""

_CHECKSUM_BYTES: Final = 4


class Damaged(Exception):
    """Report bytes in the store that nothing has written there."""


class StoredSettings(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Hold what a client chose; see `SessionConfig`. `history`: what it asked for, if anything.
    `now_s`: the time that its templates are told, wall-clock. `num_own_uses`: see `SessionLife`."""

    ttl_s: float
    metadata: dict[str, str]
    is_pinned: bool
    created_s: float
    request_digest: bytes
    history: Literal["append", "template"] | None
    now_s: float
    num_own_uses: int | None = None


class SessionRow(msgspec.Struct, frozen=True, gc=False):
    """Hold a session without its conversation.

    `number` orders the sessions of an owner. `model`: the `ModelText.fingerprint` that its
    token ids are of. `expires_s`: wall-clock seconds. `settings`: as `encode_settings` gives them.
    `num_entries` of `num_bytes` are there already. `epoch`: see `ownership`; 0 in a store of one
    server.
    """

    number: int
    owner_id: str
    session_id: str
    model: bytes
    expires_s: float
    settings: bytes
    num_tokens: int
    num_turns: int
    num_uses: int
    num_entries: int = 0
    num_bytes: int = 0
    epoch: int = 0

    @property
    def is_retired(self) -> bool:
        """Return whether it was deleted: it is there for the sake of its tokens, or a part of it
        is."""
        return self.expires_s <= 0

    @property
    def is_whole(self) -> bool:
        """Return whether all of it is there: a long session is deleted in parts."""
        return self.expires_s >= 0

    @property
    def name(self) -> str:
        """Return the id that its client gave it, or was given: see `Database.retire`."""
        return self.session_id.partition("/")[0]


class Holding(NamedTuple):
    """Say what an owner has: sessions that are not deleted, bytes of all, in a shared store those
    of records among them, and those of retired sessions."""

    owner_id: str
    num_sessions: int
    num_bytes: int
    num_retired: int


RESPONSES: Final = "responses"
CONVERSATIONS: Final = "kept conversations"
"""The kinds of records."""


class RecordRow(msgspec.Struct, frozen=True, gc=False):
    """Hold a record without its parts.

    `number` is its own for good; `used` counts up with every write, so that it orders records by
    their last one. `kind`: a word for those of one table. `session_id`: the session it was made in,
    "" for none. `num_bytes`: its host memory. `num_writes` were made before this one;
    the last of them has `used_last` as its `used`, which tells it from one of another replica that
    has made as many. 0: any.
    """

    number: int
    kind: str
    owner_id: str
    record_id: str
    session_id: str
    num_bytes: int
    used: int
    num_writes: int = 0
    used_last: int = 0


Parts = Sequence[tuple[int, bytes]]
"""Parts of a record by their numbers, which order them."""


class EndRecord(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Hold how a turn ended: what `EndedTurns` has of it, in words that every version knows.

    `kind`: "stop", "length", "kept", "dropped" or "failed". `detail`: why it was canceled, or the
    code of its error. `item`, `index`: the number of the answer, and its place among the items.
    """

    key: int
    fingerprint: bytes
    kind: str
    detail: str
    item: Number
    index: Number
    input_tokens: Number
    cached_tokens: Number
    output_tokens: Number
    drafted_tokens: Number
    retry_after_s: Number
    first_token_ms: Annotated[float, Meta(ge=-1, le=1e9)]


class LogEntry(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Hold one change of a conversation, and the turns that ended with it."""

    change: HistoryChange
    turns: tuple[EndRecord, ...] = ()


_encoder: Final = msgspec.msgpack.Encoder()
_entries: Final = msgspec.msgpack.Decoder(LogEntry)
_settings: Final = msgspec.msgpack.Decoder(StoredSettings)
_anything: Final = msgspec.msgpack.Decoder(object)


def encode_entry(entry: LogEntry) -> bytes:
    """Return an entry as bytes that begin with a checksum of the others."""
    return _checked(_encoder.encode(entry))


def decode_entry(data: bytes) -> LogEntry:
    """Return the entry that `encode_entry` wrote. Raises Damaged."""
    return _decoded(_entries, data, "an entry")


def encode_settings(settings: StoredSettings) -> bytes:
    """Return settings as bytes that begin with a checksum of the others."""
    return _checked(_encoder.encode(settings))


def decode_settings(data: bytes) -> StoredSettings:
    """Return the settings that `encode_settings` wrote. Times that no calendar has are the nearest
    that one has: they can be shown. Raises Damaged."""
    found = _decoded(_settings, data, "settings")
    times = {name: getattr(found, name) for name in ("ttl_s", "created_s", "now_s")}
    if all(0 <= time_s <= LAST_S for time_s in times.values()):
        return found
    bounded = {name: min(max(0.0, time_s), LAST_S) for name, time_s in times.items()}
    return structs.replace(found, **bounded)


class PartCodec(Generic[_T]):
    """Write one type of the parts of records, as bytes that begin with a checksum."""

    def __init__(self, kind: type[_T], noun: str) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._noun = noun

    def encode(self, part: _T) -> bytes:
        """Return a part as bytes."""
        return _checked(_encoder.encode(part))

    def decode(self, data: bytes) -> _T:
        """Return the part that `encode` wrote. Raises Damaged."""
        return _decoded(self._decoder, data, self._noun)


def check_part(data: bytes) -> None:
    """Raise Damaged for a part that no `PartCodec` wrote, of whatever type it is."""
    _decoded(_anything, data, "a part")


def _checked(payload: bytes) -> bytes:
    return zlib.crc32(payload).to_bytes(_CHECKSUM_BYTES, "little") + payload


def _decoded(decoder: msgspec.msgpack.Decoder[_T], data: bytes, noun: str) -> _T:
    payload = memoryview(data)[_CHECKSUM_BYTES:]
    if zlib.crc32(payload) != int.from_bytes(data[:_CHECKSUM_BYTES], "little"):
        raise Damaged(f"the checksum of {noun} does not match")
    try:
        return decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise Damaged(f"{noun} cannot be read: {error}") from error
