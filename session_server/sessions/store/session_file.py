"""A session as a file: everything that a store has of it, to read and to move to another one.

The file has a format of its own, in which every value has a name: the log may change its encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta, structs

from session_server.core.session_events import ConversationItem
from session_server.sessions.history_change import Count, HistoryChange
from session_server.sessions.store.records import (
    LAST_S,
    Damaged,
    EndRecord,
    Number,
    SessionRow,
    decode_entry,
    decode_settings,
)
from session_server.sessions.transcript import Transcript
from session_server.sessions.views import HistoryMode, HistoryModes

MAX_FILE_BYTES: Final = 1 << 30
"""A session of a hundred million tokens."""

MAX_TTL_S: Final = 30 * 86_400.0
"""The longest time to live that a server gives a session: the most of its --session-ttl."""

_FORMAT: Final = "session-server.session"
_VERSION: Final = 2

Second = Annotated[float, Meta(ge=0, le=LAST_S)]


class UnusableFile(Exception):
    """Report a file that holds no session; the message says why."""


class _Named(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Is written with the names of its fields, all of which a file must have."""


class FileSettings(_Named, frozen=True):
    """Hold what a client chose; see `StoredSettings`."""

    ttl_s: float
    metadata: dict[str, str]
    is_pinned: bool
    history: HistoryMode | None
    created_s: Second
    now_s: Second


class FileAnswer(_Named, frozen=True):
    """Say which item is an answer, how many tokens there are up to its `end`, and whether the
    template has replaced the token that ended it."""

    item: Count
    end: Count
    is_end_replaced: bool


class FileTurn(_Named, frozen=True):
    """Say how a turn has ended; see `EndRecord`. `id_digest`: its `key`, in hexadecimal digits,
    because many readers of JSON round such numbers."""

    id_digest: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    request_digest: bytes
    kind: Literal["stop", "length", "kept", "dropped", "failed"]
    detail: str
    item: Number
    index: Number
    input_tokens: Number
    cached_tokens: Number
    output_tokens: Number
    drafted_tokens: Number
    retry_after_s: Number
    first_token_ms: Annotated[float, Meta(ge=-1, le=1e9)]


class SessionFile(_Named, frozen=True):
    """Hold a session. `model`: its `ModelText.fingerprint`. `answer_len`, `is_end_replaced`,
    `num_open`: see `HistoryChange`. `num_made`: ids given to items so far."""

    format: Literal["session-server.session"]
    version: Literal[2]
    session_id: str
    model: bytes
    settings: FileSettings
    token_ids: list[Count]
    items: tuple[ConversationItem, ...]
    tools: tuple[str, ...]
    answers: tuple[FileAnswer, ...]
    answer_len: Count
    is_end_replaced: bool
    num_open: Count
    num_made: Count
    ended_turns: tuple[FileTurn, ...]


def file_of(row: SessionRow, log: Sequence[bytes]) -> SessionFile:
    """Return a session as a file. `log`: its entries, as they are in the store. Raises Damaged if
    they are not all that the row tells of."""
    if len(log) != row.num_entries:
        raise Damaged(f"{len(log)} entries of {row.num_entries}")
    settings = decode_settings(row.settings)
    entries = [decode_entry(data) for data in log]
    try:
        said = conversation_of(settings.history, [entry.change for entry in entries])
    except ValueError as error:
        raise Damaged(str(error)) from error
    said.forget_taken()
    whole = said.take_change()
    if len(said) != row.num_tokens:
        raise Damaged(f"{len(said)} tokens of {row.num_tokens}")
    # The last record of a turn counts, where one was written twice.
    ended = {turn.key: turn for entry in entries for turn in entry.turns}
    answers = zip(whole.answers.indexes, whole.answers.ends, strict=True)
    return SessionFile(
        format=_FORMAT,
        version=_VERSION,
        session_id=row.session_id,
        model=row.model,
        settings=FileSettings(
            ttl_s=settings.ttl_s,
            metadata=settings.metadata,
            is_pinned=settings.is_pinned,
            history=settings.history,
            created_s=settings.created_s,
            now_s=settings.now_s,
        ),
        token_ids=np.frombuffer(whole.tokens, "<i4").tolist(),
        items=whole.items.added,
        tools=whole.tools or (),
        answers=tuple(FileAnswer(index, max(end, ~end), end < 0) for index, end in answers),
        answer_len=whole.answer_len,
        is_end_replaced=whole.is_end_replaced,
        num_open=whole.num_open,
        num_made=whole.items.num_made,
        ended_turns=tuple(map(_file_turn, ended.values())),
    )


def conversation_of(history: HistoryMode | None, changes: Sequence[HistoryChange]) -> Transcript:
    """Return the conversation that changes leave. Raises ValueError if they do not follow each
    other, or places in it are none."""
    # Who asked for nothing may have a model whose template renders all of it anew.
    mode = history or "template"
    said = Transcript(HistoryModes(mode, mode), (), now=datetime.min)
    for change in changes:
        said.apply(change)
    said.check_places()
    return said


def _file_turn(record: EndRecord) -> FileTurn:
    key, *others = structs.astuple(record)
    return FileTurn(f"{key:016x}", *others)


def write_file(file: SessionFile) -> bytes:
    """Return a session as JSON."""
    return msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n"


def read_file(path: Path) -> SessionFile:
    """Read what `write_file` wrote. Raises UnusableFile, OSError."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise UnusableFile(f"{path} has more than {MAX_FILE_BYTES} bytes")
    try:
        return msgspec.json.decode(data, type=SessionFile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UnusableFile(f"{path} holds no session of version {_VERSION}: {error}") from error
