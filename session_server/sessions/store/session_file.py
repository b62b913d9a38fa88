"""A session as a file: everything that a store has of it, to read and to move to another one."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np

from session_server.core.session_events import ConversationItem
from session_server.sessions.history_change import AnswersChange, HistoryChange, ItemsChange
from session_server.sessions.store.records import (
    EndRecord,
    LogEntry,
    SessionRow,
    StoredSettings,
    decode_settings,
)
from session_server.sessions.transcript import Transcript
from session_server.sessions.views import HistoryModes

MAX_FILE_BYTES: Final = 1 << 30
"""A session of a hundred million tokens."""


class UnusableFile(Exception):
    """Report a file that holds no session; the message says why."""


class SessionFile(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Hold a session. `model`: its `ModelText.fingerprint`. `settings`, `answer_ends`,
    `answer_len`, `is_end_replaced`, `num_open`, `num_made`, `ended_turns`: as the store has
    them."""

    format: Literal["session-server.session"]
    version: Literal[1]
    session_id: str
    model: bytes
    settings: StoredSettings
    token_ids: list[int]
    items: tuple[ConversationItem, ...]
    tools: tuple[str, ...]
    answer_ends: tuple[tuple[int, int], ...]
    answer_len: int
    is_end_replaced: bool
    num_open: int
    num_made: int
    ended_turns: tuple[EndRecord, ...]


def file_of(row: SessionRow, entries: list[LogEntry]) -> SessionFile:
    """Return a session as a file. Raises Damaged; ValueError if its entries do not follow each
    other."""
    settings = decode_settings(row.settings)
    said = Transcript(
        HistoryModes("append", "append"), (), now=datetime.fromtimestamp(settings.now_s)
    )
    for entry in entries:
        said.apply(entry.change)
    said.forget_taken()
    whole = said.take_change()
    # The last record of a turn counts, where one was written twice.
    ended = {turn.key: turn for entry in entries for turn in entry.turns}
    return SessionFile(
        format="session-server.session",
        version=1,
        session_id=row.session_id,
        model=row.model,
        settings=settings,
        token_ids=np.frombuffer(whole.tokens, "<i4").tolist(),
        items=whole.items.added,
        tools=whole.tools or (),
        answer_ends=tuple(zip(whole.answers.indexes, whole.answers.ends, strict=True)),
        answer_len=whole.answer_len,
        is_end_replaced=whole.is_end_replaced,
        num_open=whole.num_open,
        num_made=whole.items.num_made,
        ended_turns=tuple(ended.values()),
    )


def entry_of(file: SessionFile) -> LogEntry:
    """Return what a store keeps of a session in a file. Raises UnusableFile."""
    num_tokens, num_items = len(file.token_ids), len(file.items)
    indexes = tuple(index for index, _ in file.answer_ends)
    ends = tuple(end for _, end in file.answer_ends)
    is_whole = (
        0 <= file.answer_len <= num_tokens
        and 0 <= file.num_open <= num_items
        and list(indexes) == sorted({index for index in indexes if 0 <= index < num_items})
        and all(0 <= max(end, ~end) <= num_tokens for end in ends)
        and all(0 <= token < 1 << 31 for token in file.token_ids)
    )
    if not is_whole:
        raise UnusableFile("its parts do not fit each other")
    change = HistoryChange(
        0,
        np.asarray(file.token_ids, "<i4").tobytes(),
        ItemsChange(0, file.items, file.num_made),
        AnswersChange(0, indexes, ends),
        file.tools,
        file.answer_len,
        file.is_end_replaced,
        file.num_open,
    )
    return LogEntry(change, file.ended_turns)


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
        raise UnusableFile(f"{path} holds no session of this version: {error}") from error
