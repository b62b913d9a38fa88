"""What a store keeps of a session that came in a file, if a server can have written that file.

A server trusts what it reads of its own store. So a file is read as a whole here, as a server reads
the store, and what no server writes is refused by its place in the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
from msgspec import structs

from session_server.core.errors import InvalidRequest
from session_server.core.session_events import ConversationItem
from session_server.sessions.ended_turns import EndedTurns, details_of, key_of
from session_server.sessions.history_change import AnswersChange, HistoryChange, ItemsChange
from session_server.sessions.quotas import SessionLimits
from session_server.sessions.store.records import EndRecord, LogEntry, StoredSettings
from session_server.sessions.store.session_file import (
    MAX_TTL_S,
    FileTurn,
    SessionFile,
    UnusableFile,
    conversation_of,
)
from session_server.sessions.validation import MAX_ID_CHARS, check_metadata, check_ttl
from session_server.sessions.views import HistoryMode
from session_server.text.chat_encoder import ROLES

MAX_MADE: Final = 1 << 30
"""Ids that items of an imported session have had: as many more fit into the log."""

_ITEM_ID: Final = re.compile(r"i_[1-9][0-9]{0,9}", re.ASCII)
_DIGEST_BYTES: Final = 16
_END_LENS: Final = 1 << 31


def entry_of(file: SessionFile) -> LogEntry:
    """Return what a store keeps of a session in a file. Raises UnusableFile with the place of what
    no server writes."""
    for fault in _faults(file):
        raise UnusableFile(fault)
    change = HistoryChange(
        0,
        np.asarray(file.token_ids, "<i4").tobytes(),
        ItemsChange(0, file.items, file.num_made),
        AnswersChange(
            0,
            tuple(answer.item for answer in file.answers),
            tuple(~answer.end if answer.is_end_replaced else answer.end for answer in file.answers),
        ),
        file.tools,
        file.answer_len,
        file.is_end_replaced,
        file.num_open,
    )
    entry = LogEntry(change, tuple(map(_end_record, file.ended_turns)))
    try:
        conversation_of(_history(file), [change])
        ended = EndedTurns()
        for turn in entry.turns:
            ended.restore(turn, is_durable=True)
    except ValueError as error:
        raise UnusableFile(f"its parts do not fit each other: {error}") from error
    return entry


def settings_of(file: SessionFile) -> StoredSettings:
    """Return the settings of a session in a file, which may be those that a client may choose.
    Raises UnusableFile."""
    chosen, limits = file.settings, SessionLimits(max_ttl_s=MAX_TTL_S)
    try:
        check_ttl(chosen.ttl_s, limits)
        check_metadata(chosen.metadata, limits)
    except InvalidRequest as error:
        raise UnusableFile(f"settings.{error.param}: {error.message}") from error
    # A key of the client is one of the server that it was sent to; who imports a session uses it.
    return StoredSettings(
        chosen.ttl_s,
        chosen.metadata,
        chosen.is_pinned,
        chosen.created_s,
        b"",
        _history(file),
        chosen.now_s,
    )


def _end_record(turn: FileTurn) -> EndRecord:
    digest, *others = structs.astuple(turn)
    return EndRecord(int(digest, 16), *others)


def _history(file: SessionFile) -> HistoryMode | None:
    """Return the `history` that a server reads a file with. Only one whose template renders all of
    it anew can have written what does not fit a history that grows; a server with another one would
    find it damaged."""
    history = file.settings.history
    if history is None and next(_faults_of_growth(file), None) is not None:
        return "template"
    return history


def _faults(file: SessionFile) -> Iterator[str]:
    """Yield what no server writes: the place in the file, and what must be there. O(file)."""
    yield from _faults_of_items(file)
    yield from _faults_of_tools(file)
    yield from _faults_of_answers(file)
    yield from _faults_of_rest(file)
    if file.settings.history == "append":
        yield from _faults_of_growth(file)
    else:
        roles = [item.role for item in file.items]
        # Where a template renders all of it anew, ends before raw input mean nothing.
        yield from _faults_of_ends(file, roles.index("raw") if "raw" in roles else len(roles))
    yield from _faults_of_turns(file)


def _faults_of_items(file: SessionFile) -> Iterator[str]:
    if file.num_made > MAX_MADE:
        yield f"num_made must be at most {MAX_MADE}"
    seen = set[str]()
    for index, item in enumerate(file.items):
        place = f"items[{index}]"
        if not _ITEM_ID.fullmatch(item.id) or int(item.id[2:]) > file.num_made:
            yield f"{place}.id must be i_ and a number from 1 to num_made, {file.num_made}"
        if item.id in seen:
            yield f"{place}.id must be that of no other item"
        seen.add(item.id)
        if len(item.turn_id) > MAX_ID_CHARS or not item.turn_id.isprintable():
            yield f"{place}.turn_id must have at most {MAX_ID_CHARS} characters, printable ones"
        if item.role != "raw" and item.role not in ROLES:
            yield f"{place}.role must be one of {', '.join(sorted(ROLES))}, raw"
        if not 0 <= item.end_len < _END_LENS:
            yield f"{place}.end_len must be from 0 to {_END_LENS - 1}"
        if (item.tool_calls or item.reasoning) and item.role != "assistant":
            yield f"{place} must have no tool_calls and no reasoning: its role is not assistant"
        if item.tool_call_id and item.role != "tool":
            yield f"{place} must have no tool_call_id: its role is not tool"


def _faults_of_tools(file: SessionFile) -> Iterator[str]:
    for index, tool in enumerate(file.tools):
        try:
            msgspec.json.decode(tool, type=dict)
        except msgspec.MsgspecError:
            yield f"tools[{index}] must be the JSON text of an object"


def _faults_of_answers(file: SessionFile) -> Iterator[str]:
    least = 0
    for number, answer in enumerate(file.answers):
        place = f"answers[{number}]"
        if not least <= answer.item < len(file.items):
            yield f"{place}.item must be from {least} to {len(file.items) - 1}"
        item = file.items[answer.item]
        if item.role != "assistant":
            yield f"{place}.item must be that of an assistant"
        if answer.end != item.end_len:
            yield f"{place}.end must be items[{answer.item}].end_len, {item.end_len}"
        least = answer.item + 1


def _faults_of_growth(file: SessionFile) -> Iterator[str]:
    """Yield what is in no history to which every turn appends."""
    yield from _faults_of_ends(file, 0)
    said = {answer.item for answer in file.answers}
    num_open = next(
        (
            number
            for number, index in enumerate(range(len(file.items) - 1, -1, -1))
            if index in said or file.items[index].role == "raw"
        ),
        len(file.items),
    )
    if file.num_open > num_open:
        yield f"num_open must be at most {num_open}: no turn renders what is before that"


def _faults_of_ends(file: SessionFile, first: int) -> Iterator[str]:
    """Yield where answers and raw inputs among the items from `first` on do not end in order. A
    rewind cuts the tokens there."""
    answers = {answer.item: number for number, answer in enumerate(file.answers)}
    least = 0
    for index in range(first, len(file.items)):
        item, number = file.items[index], answers.get(index)
        if number is not None:
            answer = file.answers[number]
            least = max(least, 0 if answer.is_end_replaced else 1)
            if not least <= answer.end <= file.answer_len:
                yield f"answers[{number}].end must be from {least} to {file.answer_len}, answer_len"
            least = answer.end
        elif item.role == "raw":
            if not least <= item.end_len <= len(file.token_ids):
                yield f"items[{index}].end_len must be from {least} to {len(file.token_ids)}"
            least = item.end_len


def _faults_of_rest(file: SessionFile) -> Iterator[str]:
    """Yield what no turn can go on from."""
    num_tokens, num_items = len(file.token_ids), len(file.items)
    if file.num_open > num_items:
        yield f"num_open must be at most {num_items}, the number of items"
    if any(item.role == "raw" for item in file.items[num_items - file.num_open :]):
        yield "num_open must count no raw items"
    if file.answer_len > num_tokens:
        yield f"answer_len must be at most {num_tokens}, the number of token_ids"
    if not file.num_open and file.answer_len != num_tokens:
        yield f"answer_len must be {num_tokens}, the number of token_ids, where num_open is 0"


def _digest(item: ConversationItem) -> str:
    return f"{key_of(item.turn_id):016x}"


def _faults_of_turns(file: SessionFile) -> Iterator[str]:
    places = {int(item.id[2:]): index for index, item in enumerate(file.items)}
    said = (file.items[answer.item] for answer in file.answers)
    newest = {_digest(item): int(item.id[2:]) for item in said}
    seen = set[str]()
    for number, turn in enumerate(file.ended_turns):
        place, least = f"ended_turns[{number}]", newest.get(turn.id_digest, 1)
        if turn.id_digest in seen:
            yield f"{place}.id_digest must be that of no other turn"
        seen.add(turn.id_digest)
        if len(turn.request_digest) != _DIGEST_BYTES:
            yield f"{place}.request_digest must have {_DIGEST_BYTES} bytes"
        if not least <= turn.item <= file.num_made:
            yield f"{place}.item must be from {least} to num_made, {file.num_made}"
        if turn.index >= file.num_made:
            yield f"{place}.index must be less than num_made, {file.num_made}"
        index = places.get(turn.item)
        # What goes on from an answer takes its id over, and who edits one takes its turn from it.
        if index is not None and (turn.index != index or file.items[index].role != "assistant"):
            yield f"{place} must name an answer: i_{turn.item} is items[{index}]"
        details = details_of(turn.kind)
        if turn.detail not in details and (turn.detail or turn.kind not in ("stop", "length")):
            yield f"{place}.detail must be one of {', '.join(details)}"
        if turn.output_tokens and turn.kind in ("dropped", "failed"):
            yield f"{place}.output_tokens must be 0: such a turn leaves nothing"
        if turn.cached_tokens > turn.input_tokens:
            yield f"{place}.cached_tokens must be at most input_tokens, {turn.input_tokens}"
