"""Cut what changes in a conversation into pieces, so that others are served while it is read.

A session that is written whole would else be one entry of megabytes. Its pieces are entries like
any other, on disk together or not at all: tokens come first, then items, answers and turns, and
what the next prompt depends on with the last one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import msgspec
from msgspec import structs

from session_server.sessions.history_change import AnswersChange, HistoryChange, ItemsChange
from session_server.sessions.store.records import LogEntry, encode_entry

MAX_ENTRY_BYTES: Final = 1 << 16
"""Bytes of an entry; one with a single item, or with tools, may exceed it."""

_PIECE_BYTES: Final = MAX_ENTRY_BYTES - 1024
"""Of what is cut, besides the fields that every entry has."""

_TOKEN_BYTES: Final = 4
_LEAST_BYTES: Final = 16
"""Of an item or a turn."""

_T = TypeVar("_T")


def encode_pieces(entry: LogEntry) -> list[bytes]:
    """Return an entry as bytes, of itself or of pieces that have the same effect in order."""
    num_values = len(entry.change.items.added) + len(entry.turns)
    if len(entry.change.tokens) + num_values * _LEAST_BYTES <= MAX_ENTRY_BYTES:
        whole = encode_entry(entry)
        if len(whole) <= MAX_ENTRY_BYTES:
            return [whole]
    return [encode_entry(piece) for piece in _pieces_of(entry)]


class LargeEntry:
    """Hold an entry that the thread encodes which writes it, so that nobody waits for that. `made`:
    its pieces, from then on. `num_bytes`: of all of them at most."""

    def __init__(self, entry: LogEntry, num_bytes: int) -> None:
        self._entry: LogEntry | None = entry
        self.num_bytes = num_bytes
        self.made: list[bytes] = []

    def pieces(self) -> list[bytes]:
        """Return its pieces, which are made once; other threads go on between any two."""
        if self._entry is not None:
            made = []
            for piece in _pieces_of(self._entry):
                made.append(encode_entry(piece))
                time.sleep(0)
            self.made += made
            self._entry = None
        return self.made


def first_rows(rows: Iterable[Any], column: int, max_bytes: int | None) -> list[Any]:
    """Return rows up to the one with which a column has so many bytes; None: all."""
    found, num_bytes = list[Any](), 0
    for row in rows:
        found.append(row)
        num_bytes += len(row[column])
        if max_bytes is not None and num_bytes >= max_bytes:
            break
    return found


def _pieces_of(entry: LogEntry) -> Iterator[LogEntry]:
    """Yield pieces: the first one cuts, and each of the others keeps all that is there."""
    change = entry.change
    items, answers = change.items, change.answers
    num_tokens, num_items, num_answers = change.num_kept, items.num_kept, answers.num_kept
    no_items, no_answers = items.added[:0], answers.ends[:0]

    def piece(tokens: bytes = b"") -> HistoryChange:
        return HistoryChange(
            num_kept=num_tokens,
            tokens=tokens,
            items=ItemsChange(num_items, no_items, items.num_made),
            answers=AnswersChange(num_answers, no_answers, no_answers),
            tools=None,
            answer_len=0,
            is_end_replaced=False,
            num_open=0,
        )

    step = _PIECE_BYTES // _TOKEN_BYTES * _TOKEN_BYTES
    for start in range(0, len(change.tokens), step):
        tokens = change.tokens[start : start + step]
        yield LogEntry(piece(tokens))
        num_tokens += len(tokens) // _TOKEN_BYTES
    for added in _cut(items.added):
        made = piece()
        yield LogEntry(structs.replace(made, items=structs.replace(made.items, added=tuple(added))))
        num_items += len(added)
    for pairs in _cut(tuple(zip(answers.indexes, answers.ends, strict=True))):
        indexes, ends = zip(*pairs, strict=True)
        made = piece()
        yield LogEntry(structs.replace(made, answers=AnswersChange(num_answers, indexes, ends)))
        num_answers += len(pairs)
    for turns in _cut(entry.turns):
        yield LogEntry(piece(), tuple(turns))
    yield LogEntry(
        structs.replace(
            piece(),
            tools=change.tools,
            answer_len=change.answer_len,
            is_end_replaced=change.is_end_replaced,
            num_open=change.num_open,
        )
    )


def _cut(values: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Yield values in groups of up to `_PIECE_BYTES`, or of a single one."""
    start, num_bytes = 0, 0
    for index, value in enumerate(values):
        size = len(msgspec.msgpack.encode(value))
        if index > start and num_bytes + size > _PIECE_BYTES:
            yield values[start:index]
            start, num_bytes = index, 0
        num_bytes += size
    if start < len(values):
        yield values[start:]
