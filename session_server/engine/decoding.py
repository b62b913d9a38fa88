"""`DecodeGroup`: all running turns, while each only computes a position and samples a token.

That is nearly every step. Its plan is known without asking each turn, its batch and its result are
columns, and the books of all turns are changed together: what a turn has launched and settled is a
number of its own plus that of the `Pace` it shares. Every other step goes turn by turn, and finds
each length where it would be otherwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

import numpy as np

from cache.lockstep import Lockstep
from cache.types import TurnId
from session_server.core.batch import Batch, BatchRow, DecodeRows
from session_server.engine.context import EngineContext
from session_server.engine.scheduler import Scheduler
from session_server.engine.scheduler_view import Load
from session_server.engine.turn import Pace, Turn
from session_server.engine.view import supply_of

_COLUMNS: Final = attrgetter("turn_id", "attempt", "start")
_IDLE: Final = Load()


class DecodeGroup:
    """Launch and settle forwards of all running turns, oldest first, one token each.

    `stop_ids`: every id that may end one of them.
    """

    def __init__(
        self, turns: Sequence[Turn], lockstep: Lockstep, *, eos_token_ids: Sequence[int]
    ) -> None:
        admissions = [turn.current_admission for turn in turns]
        self.turns, self.lockstep = tuple(turns), lockstep
        self._outputs = [turn.outputs for turn in turns]
        self._first = DecodeRows(
            turn_ids=tuple([turn.turn_id for turn in turns]),
            attempts=tuple([each.attempt for each in admissions]),
            table_rows=np.array([each.loan.row for each in admissions], np.int32),
            starts=np.array([each.launched_len for each in admissions], np.int32),
            tokens=tuple([outputs[-1] for outputs in self._outputs]),
        )
        self._last_tokens = self._first.tokens
        self._num_unseen = admissions[0].num_sampling
        self._num_launches = min([turn.num_launches for turn in turns])
        self._num_outputs = min([turn.max_new - len(turn.outputs) for turn in turns])
        stop_ids = [turn.request.sampling.stop_token_ids for turn in turns]
        self.stop_ids = frozenset(eos_token_ids).union(*stop_ids)
        self._pace = Pace()
        for turn in turns:
            turn.keep_pace(self._pace)

    @property
    def turn_ids(self) -> tuple[TurnId, ...]:
        """Return the ids of its turns, in order."""
        return self._first.turn_ids

    @property
    def num_unseen(self) -> int:
        """Return how many forwards are in flight; the host has not seen their tokens."""
        return self._num_unseen + self._pace.num_launched - self._pace.num_settled

    @property
    def can_launch(self) -> bool:
        """Return whether every turn has a position left to compute."""
        return self._pace.num_launched < self._num_launches

    @property
    def is_complete(self) -> bool:
        """Return whether a turn has all the outputs it may have."""
        return self._pace.num_settled >= self._num_outputs

    def launch(self) -> DecodeRows:
        """Return the rows of the next forward, and count them as launched."""
        tokens = None if self.num_unseen else self._last_tokens
        first, starts = self._first, self._first.starts + self._pace.num_launched
        self._pace.num_launched += 1
        return DecodeRows(first.turn_ids, first.attempts, first.table_rows, starts, tokens)

    def covers(self, batch: Batch) -> bool:
        """Return whether a batch in flight is a forward of exactly these turns, one token each,
        whoever launched it."""
        mine, rows = self._first, batch.decoding
        if rows is not None:
            turns, start = (rows.turn_ids, rows.attempts), int(rows.starts[0])
        elif len(batch.listed) == len(self.turns) and all(map(_is_plain, batch.listed)):
            turn_ids, attempts, starts = zip(*map(_COLUMNS, batch.listed), strict=True)
            turns, start = (turn_ids, attempts), starts[0]
        else:
            return False
        if turns != (mine.turn_ids, mine.attempts):
            return False
        settled_len = int(mine.starts[0]) - self._num_unseen + self._pace.num_settled
        assert start == settled_len, "rows settle in the order of positions"
        return True

    def settle(self, tokens: Sequence[int], forward_s: float) -> None:
        """Record the next token of each turn, in order."""
        deque(map(list.append, self._outputs, tokens), maxlen=0)
        self.lockstep.record(tokens)
        self._pace.num_settled += 1
        self._pace.forward_s += forward_s
        self._last_tokens = tuple(tokens)


class Decoding:
    """Make the group of the running turns, and say for which steps it serves."""

    def __init__(self, context: EngineContext, scheduler: Scheduler) -> None:
        self._config, self._cache, self._outbox = context.config, context.cache, context.outbox
        self._scheduler = scheduler
        self._group: DecodeGroup | None = None

    @property
    def group(self) -> DecodeGroup | None:
        """Return the group; None once anything else has changed one of its turns."""
        if self._group is not None and not self._group.lockstep.is_current:
            self._group = None
        return self._group

    def drop(self) -> None:
        """Forget the group: one of its turns has ended."""
        self._group = None

    def launch(self) -> DecodeRows | None:
        """Return the rows of the next forward, with their pages; None, with nothing changed, where
        it has to be planned turn by turn."""
        if self._may_admit() or self._config.speculation.num_drafts:
            return None
        group = self.group or self._make_group()
        if group is None or not group.can_launch:
            return None
        writes = group.lockstep.grow(group.num_unseen)
        if writes is None:
            return None
        self._outbox.write(writes)
        return group.launch()

    def _may_admit(self) -> bool:
        """Return whether a plan might admit a waiting turn, or has to know what the last found."""
        waiting, num_running = self._scheduler.waiting, len(self._scheduler.running)
        if waiting.load != _IDLE:
            return True
        if not waiting or num_running >= self._config.max_running:
            return False
        is_denied = waiting.has_denial and waiting.known_denial(num_running, supply_of(self._cache))
        return not is_denied

    def _make_group(self) -> DecodeGroup | None:
        turns = self._scheduler.running
        if not turns:
            return None
        num_unseen = turns[0].current_admission.num_sampling
        # The youngest first: it is the one that may still have its prompt to compute.
        if not all(turn.is_plainly_decoding(num_unseen) for turn in reversed(turns)):
            return None
        lockstep = self._cache.step_together([turn.turn_id for turn in turns])
        if lockstep is not None:
            eos_token_ids = self._config.eos_token_ids
            self._group = DecodeGroup(turns, lockstep, eos_token_ids=eos_token_ids)
        return self._group


def _is_plain(row: BatchRow) -> bool:
    """Return whether a row computes one position and samples one token."""
    return row.sample and row.num_tokens == 1 and row.prompt_logprobs is None
