"""Record how every ended turn of a session ended, so that a repeated turn never runs twice.

While the journal still holds a turn's end, that end is the answer to a repeated turn. Afterwards a
record of at most `RECORD_BYTES` answers it: whether the request was the same, how the turn ended,
and its token counts. Records are dropped with their session, and counted as bytes of its
conversation.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from struct import Struct
from typing import Final, Literal, assert_never, get_args

from session_server.core.errors import INTERNAL_ERROR, WIRE_ERRORS
from session_server.core.session_events import (
    CancelReason,
    Message,
    Outcome,
    TokenUsage,
    TurnCancelled,
    TurnCompleted,
    TurnEnd,
    TurnFailedEntry,
)
from session_server.sessions.store.records import EndRecord
from session_server.sessions.turn import SessionTurn

RECORD_BYTES: Final = 208
"""Host memory of one record at most, its place in the table included."""

_RECORD: Final = Struct("<16sBBBQIIIIIIIIf")
"""Fingerprint, kind, reason or code, whether it is on disk, sequence number of the end, entries
since the beginning, number of the item, its index, tokens of the context, of it cached, generated,
drafted, the seconds after which what failed can succeed or 0, and the milliseconds to the first
token or -1. Packed, because a session keeps every one."""

_DURABLE_AT: Final = Struct("<16sBB").size
"""Where a record says whether it is on disk."""

_KINDS: Final = ("stop", "length", "kept", "dropped", "failed")
_REASONS: Final[tuple[CancelReason, ...]] = get_args(CancelReason)
_FORMS: Final = {wire.code: wire for wire in (*WIRE_ERRORS.values(), INTERNAL_ERROR)}
_CODES: Final = tuple(sorted(_FORMS))
_DURABLE: Final = (None, False, True)
_FAILED: Final = "The turn failed. What was said about it then is no longer kept."


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """Describe one ended turn. `answer_index` is where the answer `item_id` was among the items of
    the conversation, if it was kept; `retry_after_s` is 0 where no rate refused the turn."""

    fingerprint: bytes
    kind: str
    detail: int
    end_seq: int
    created_seq: int
    item_id: str
    answer_index: int
    usage: TokenUsage
    retry_after_s: int
    is_durable: bool | None

    @property
    def status(self) -> Literal["completed", "cancelled", "failed"]:
        """Return how the turn ended."""
        match self.kind:
            case "stop" | "length":
                return "completed"
            case "failed":
                return "failed"
            case _:
                return "cancelled"

    @property
    def may_run_again(self) -> bool:
        """Return whether the turn has left nothing in the history, by no fault and no wish of its
        client: then its id may be sent again, and runs."""
        if self.kind == "failed":
            return _FORMS[_CODES[self.detail]].retryable
        return self.kind == "dropped" and _REASONS[self.detail] == "draining"

    def short_end(self, turn_id: str, said: Message | None) -> TurnEnd:
        """Return the turn's end without what is no longer kept: token ids, logprobs, timings, the
        stop token or string that matched, the message of an error."""
        said = said or Message("assistant", "")
        outcome = Outcome(
            self.item_id,
            said.content,
            (),
            self.usage,
            None,
            reasoning=said.reasoning,
            tool_calls=said.tool_calls,
            is_durable=self.is_durable,
        )
        match self.kind:
            case "stop" | "length" as reason:
                return TurnCompleted(turn_id, reason, None, outcome)
            case "kept" | "dropped":
                return TurnCancelled(turn_id, self.kind == "kept", _REASONS[self.detail], outcome)
            case _:
                code = _CODES[self.detail]
                retryable, wait_s = _FORMS[code].retryable, self.retry_after_s or None
                return TurnFailedEntry(turn_id, code, _FAILED, retryable, outcome, wait_s)


class EndedTurns:
    """Hold the records of one session's ended turns, keyed by the client's turn id."""

    def __init__(self) -> None:
        self._records: dict[int, bytes] = {}
        self._unwritten: set[int] = set()
        """Keys of turns that were told not to be on disk."""

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_bytes(self) -> int:
        """Return the host memory of all records."""
        return RECORD_BYTES * len(self._records)

    def add(self, turn: SessionTurn, end: TurnEnd, *, end_seq: int, num_items: int) -> None:
        """Record a turn whose end is journal entry `end_seq`, in place of an earlier one that it
        ran again for.

        `num_items`: items of the conversation; an answer that was kept is the last of them.
        """
        record = record_of(turn, end, num_items=num_items)
        place = end_seq, end_seq - turn.created_seq
        packed = _packed(record, place, is_durable=end.outcome.is_durable)
        self._put(record.key, packed)
        if end.outcome.is_durable is False:
            self._unwritten.add(record.key)

    def note_written(self) -> None:
        """Note that all of them are on disk. O(those that were told not to be)."""
        while self._unwritten:
            key = self._unwritten.pop()
            head, tail = self._records[key][:_DURABLE_AT], self._records[key][_DURABLE_AT + 1 :]
            self._records[key] = head + bytes([_DURABLE.index(True)]) + tail

    def records(self) -> tuple[EndRecord, ...]:
        """Return all of them for another process, whose journals have none of these entries."""
        return tuple(_unpacked(key, packed) for key, packed in self._records.items())

    def restore(self, record: EndRecord, *, is_durable: bool) -> None:
        """Record a turn that has ended in another process."""
        self._put(record.key, _packed(record, (0, 0), is_durable=is_durable))

    def num_with(self, records: Iterable[EndRecord]) -> int:
        """Return how many turns there are with others that are about to be recorded."""
        new = {record.key for record in records if record.key not in self._records}
        return len(self._records) + len(new)

    def _put(self, key: int, packed: bytes) -> None:
        self._records.pop(key, None)  # the newest is the last
        self._unwritten.discard(key)
        self._records[key] = packed

    def measure(self, num_turns: int) -> tuple[int, int, list[float]]:
        """Return the tokens of the contexts of the last turns, how many of them were cached, and
        the milliseconds to the first token of those that had one."""
        num_input, num_cached, ttft_ms = 0, 0, []
        for record in islice(reversed(self._records.values()), num_turns):
            *_, tokens, cached, _, _, _, first_ms = _RECORD.unpack(record)
            num_input += tokens
            num_cached += cached
            if first_ms >= 0.0:
                ttft_ms.append(first_ms)
        return num_input, num_cached, ttft_ms

    def find(self, turn_id: str) -> EndedTurn | None:
        """Return the record of a turn, or None if no turn with that id has ended."""
        record = self._records.get(key_of(turn_id))
        if record is None:
            return None
        digest, kind, detail, durable, end_seq, length, item, index, *tokens, wait_s, _ = (
            _RECORD.unpack(record)
        )
        return EndedTurn(
            fingerprint=digest,
            kind=_KINDS[kind],
            detail=detail,
            end_seq=end_seq,
            created_seq=end_seq - length,
            item_id=f"i_{item}",
            answer_index=index,
            usage=TokenUsage(*tokens),
            retry_after_s=wait_s,
            is_durable=_DURABLE[durable],
        )


def record_of(turn: SessionTurn, end: TurnEnd, *, num_items: int) -> EndRecord:
    """Return what is kept of a turn; `num_items` as in `EndedTurns.add`."""
    kind, detail = _kind_of(end)
    usage, timings = end.outcome.usage, end.outcome.timings
    return EndRecord(
        key=key_of(turn.request.turn_id),
        fingerprint=turn.fingerprint,
        kind=kind,
        detail=detail,
        item=int(turn.item_id.removeprefix("i_")),
        index=max(0, num_items - 1),
        input_tokens=usage.input_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.output_tokens,
        drafted_tokens=usage.drafted_tokens,
        retry_after_s=_wait_of(end),
        first_token_ms=-1.0 if timings is None or not usage.output_tokens else timings.ttft_ms,
    )


def details_of(kind: str) -> tuple[str, ...]:
    """Return what the `detail` of a record of this kind may be; of a turn that completed it means
    nothing."""
    return _CODES if kind == "failed" else _REASONS


def key_of(turn_id: str) -> int:
    """Return 64 bits of a digest, so that the size of a record does not depend on the length of its
    id."""
    encoded = turn_id.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")


def _packed(record: EndRecord, place: tuple[int, int], *, is_durable: bool | None) -> bytes:
    names = details_of(record.kind)
    # A later version may have failed or canceled turns for reasons that this one does not know.
    default = INTERNAL_ERROR.code if record.kind == "failed" else _REASONS[0]
    detail = record.detail if record.detail in names else default
    return _RECORD.pack(
        record.fingerprint,
        _KINDS.index(record.kind),
        names.index(detail),
        _DURABLE.index(is_durable),
        *place,
        record.item,
        record.index,
        record.input_tokens,
        record.cached_tokens,
        record.output_tokens,
        record.drafted_tokens,
        record.retry_after_s,
        record.first_token_ms,
    )


def _unpacked(key: int, packed: bytes) -> EndRecord:
    digest, kind, detail, _, _, _, *others = _RECORD.unpack(packed)
    return EndRecord(key, digest, _KINDS[kind], details_of(_KINDS[kind])[detail], *others)


def _wait_of(end: TurnEnd) -> int:
    wait_s = end.retry_after_s if isinstance(end, TurnFailedEntry) else None
    return min(math.ceil(wait_s or 0.0), (1 << 32) - 1)


def _kind_of(end: TurnEnd) -> tuple[str, str]:
    match end:
        case TurnCompleted(reason=reason):
            return reason, ""
        case TurnCancelled(kept_partial=kept, reason=reason):
            return "kept" if kept else "dropped", reason
        case TurnFailedEntry(code=code):
            return "failed", code
        case _:
            assert_never(end)
