"""`InputDrafts`: compute, when nobody else needs the forward, what next turns may be.

A session at rest has at most one: the newest. It is computed in chunks behind the history, as the
session's tail (`cache.tails`), and is no turn: it waits for nothing, holds nothing that others
need, and whatever takes its pages ends it. Its chunks are in a forward with turns only within a
share that these leave, and alone in one only while no turn waits or runs and nothing is in flight.
So a turn that comes waits for one chunk at most, however many sessions draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

import numpy as np

from cache.errors import OutOfPages, OutOfRows
from cache.types import SessionId, TurnId
from cache.views import TailView
from session_server.core.batch import BatchRow, RowResult
from session_server.core.commands import DraftInput
from session_server.core.events import InputDrafted
from session_server.engine.context import EngineContext
from session_server.engine.tiers.restoring import CopyEnd

MAX_DRAFT_ROWS: Final = 16
"""Drafts that one forward has chunks of. The next forward has those of others."""


@dataclass(slots=True)
class _Draft:
    """Hold a draft that is not computed to its end. `view` is None until its first chunk;
    `kept_len`: positions that were valid then."""

    command: DraftInput
    view: TailView | None = None
    kept_len: int = 0

    @property
    def total_len(self) -> int:
        return self.command.base_len + len(self.command.tokens)


class _Chunk(NamedTuple):
    """Describe positions in flight: those of a tail up to `end`."""

    session_id: SessionId
    view: TailView
    end: int


class InputDrafts:
    """Hold the drafts that are not computed to their end, in the order of their last chunk."""

    def __init__(self, context: EngineContext) -> None:
        self._cache, self._outbox, self._watch = context.cache, context.outbox, context.watch
        self._tallies, self._tiers = context.tallies, context.tiers
        self._pending: dict[SessionId, _Draft] = {}
        self._in_flight: dict[TurnId, _Chunk] = {}
        self._restoring: dict[SessionId, DraftInput] = {}
        """The newest draft of each session whose KV is copied back first."""

        self._busy: set[SessionId] = set()
        """Sessions with a chunk in flight. A newer draft of one waits for its result."""

    def __len__(self) -> int:
        return len(self._pending)

    def submit(self, command: DraftInput) -> None:
        """Take a draft in place of the one before it. The caller has checked it.

        Of a cold session whose KV lies outside of the pools, that is copied back first.
        """
        session_id = command.session_id
        is_first = session_id not in self._restoring
        self._restoring[session_id] = command
        if is_first and not self._restore(command):
            self._begin_pending(session_id)
        else:
            self._pending.pop(session_id, None)

    def refuse(self, command: DraftInput) -> None:
        """Answer a draft of which nothing will be computed."""
        self._report(_Draft(command), 0)

    def stop(self, session_id: SessionId) -> None:
        """Compute no more of a session's draft; what was computed stays for its next turn."""
        self._restoring.pop(session_id, None)
        self._pending.pop(session_id, None)

    def drop(self, session_id: SessionId) -> None:
        """Drop a session's draft and what was computed of it."""
        self.stop(session_id)
        self._tiers.note_draft(session_id)
        self._cache.tails.drop(session_id)
        self._watch.touch(session_id)

    def next_rows(self, num_tokens: int) -> list[BatchRow]:
        """Return chunks of at most `num_tokens` positions in all."""
        return list(self._next_rows(num_tokens)) if self._pending and num_tokens > 0 else []

    def settle(self, row: BatchRow, outcome: RowResult | None) -> bool:
        """Record the result of a row, None if its forward failed; return False if the row is no
        chunk of a draft."""
        chunk = self._in_flight.pop(row.turn_id, None)
        if chunk is None:
            return False
        session_id = chunk.session_id
        self._busy.remove(session_id)
        self._tallies.input_draft_tokens += row.num_tokens
        tails, draft = self._cache.tails, self._pending.get(session_id)
        if not tails.has(session_id, chunk.view.tail):
            return True  # a turn has taken what was settled of it, or it was dropped
        if outcome is None or not outcome.finite:
            tails.drop(session_id)
        else:
            tails.record(session_id, chunk.view.tail, chunk.end)
        self._watch.touch(session_id)
        if draft is not None and draft.view is not None:
            self._finish_if_done(draft, draft.view)
        return True

    def _restore(self, command: DraftInput) -> bool:
        session_id = command.session_id
        if not self._tiers.may_restore(session_id):
            return False
        history = self._cache.tokens(session_id, 0, command.base_len)
        tokens = np.concatenate((history, np.array(command.tokens, np.int32)))

        def begin(_end: CopyEnd) -> None:
            self._begin_pending(session_id)

        return self._tiers.restore(session_id, tokens, begin, is_ahead=True)

    def _begin_pending(self, session_id: SessionId) -> None:
        command = self._restoring.pop(session_id, None)
        if command is not None and session_id in self._cache:
            self._pending[session_id] = _Draft(command)  # in the place of the one before

    def _next_rows(self, num_left: int) -> Iterator[BatchRow]:
        num_rows = 0
        # Behind those in flight, which two forwards have, there are as many that can be launched.
        for session_id in list(islice(self._pending, 4 * MAX_DRAFT_ROWS)):
            if num_rows == MAX_DRAFT_ROWS or num_left == 0:
                return
            if session_id in self._busy:
                continue
            draft = self._pending[session_id]
            view = draft.view or self._begin(draft)
            if view is None or self._finish_if_done(draft, view):
                continue
            row = self._launch(draft, view, num_left)
            if row is not None:
                num_rows += 1
                num_left -= row.num_tokens
                yield row

    def _begin(self, draft: _Draft) -> TailView | None:
        command = draft.command
        self._tiers.note_draft(command.session_id)
        cut = self._tiers.cut_by(command.session_id, command.base_len)
        try:
            view = self._cache.tails.begin(command.session_id, command.base_len, command.tokens)
        except OutOfRows:
            self._end(draft, 0)
            return None
        self._tiers.note_cut(command.session_id, cut)
        self._outbox.write(view.table_writes)
        self._watch.touch(command.session_id)
        draft.view, draft.kept_len = view, view.computed_len
        return view

    def _launch(self, draft: _Draft, view: TailView, num_tokens: int) -> BatchRow | None:
        """Return the row of the next chunk; end the draft where no page is free for it."""
        command = draft.command
        session_id, start = command.session_id, view.computed_len
        end = min(draft.total_len, start + num_tokens)
        try:
            self._outbox.write(self._cache.tails.grow(session_id, end))
        except OutOfPages:
            self._end(draft, start)
            if self._cache.slot(session_id).tail_len == 0:
                self._cache.tails.drop(session_id)
            return None
        self._watch.touch(session_id)
        self._in_flight[command.draft_id] = _Chunk(session_id, view, end)
        self._busy.add(session_id)
        del self._pending[session_id]
        self._pending[session_id] = draft
        return BatchRow(
            turn_id=command.draft_id,
            attempt=0,
            row=view.row,
            start=start,
            num_tokens=end - start,
            tokens=self._cache.tokens(session_id, start, end),
            sample=False,
            sampling=None,
            states=view.state_moves(start, end),
        )

    def _finish_if_done(self, draft: _Draft, view: TailView) -> bool:
        """End a draft that is computed, or whose tail is gone; return whether it ended."""
        if not self._cache.tails.has(draft.command.session_id, view.tail):
            self._end(draft, 0)
            return True
        if view.computed_len < draft.total_len:
            return False
        self._end(draft, draft.total_len)
        return True

    def _end(self, draft: _Draft, computed_len: int) -> None:
        del self._pending[draft.command.session_id]
        self._report(draft, computed_len)

    def _report(self, draft: _Draft, computed_len: int) -> None:
        command = draft.command
        self._outbox.emit(
            InputDrafted(
                session_id=command.session_id,
                draft_id=command.draft_id,
                kept=min(draft.kept_len, computed_len),
                processed=computed_len,
                total=draft.total_len,
            )
        )
