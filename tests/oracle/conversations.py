"""Drives a `ModelRunner` through conversations, the way an engine would, without one.

Several sessions share every batch; each appends pieces of input and greedy answers, in chunks of
at most `chunk` tokens, on pages that are consecutive, scattered, or in runs of different length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from random import Random

import numpy as np
import torch
from torch import Tensor

from cache.spec import Capacity
from cache.types import PoolName, RowId, StateMoves, TableWrite, Tokens, TurnId, pages_for
from session_server.core.batch import Batch, BatchRow, PromptLogprobRange, SamplingStart
from session_server.core.sampling import SamplingParams
from session_server.models.config import STATE_POOL, ModelConfig
from session_server.runner.model_runner import ModelRunner

PIECES = (20, 1, 1, 18, 1, 19)
NUM_TURNS = 5
ANSWER_LEN = 4
STATES_PER_ROW = 3
MAX_LEN = 640
NUM_ROWS = 4

NO_TOKENS: Tokens = np.zeros(0, dtype=np.int32)


class Layout(Enum):
    """Where a row's pages lie."""

    CONSECUTIVE = auto()
    SCATTERED = auto()
    RUNS = auto()


def capacity(config: ModelConfig, page_size: int) -> Capacity:
    """Room for `NUM_ROWS` rows of `MAX_LEN` tokens in every pool."""
    num_pages = NUM_ROWS * pages_for(MAX_LEN, page_size) + 1
    num_states = NUM_ROWS * STATES_PER_ROW + 1
    return Capacity(dict.fromkeys(config.pools, num_pages), NUM_ROWS, MAX_LEN, num_states)


def pool_pages(
    config: ModelConfig, layout: Layout, page_size: int
) -> dict[PoolName, dict[int, list[int]]]:
    """Pages of every row in every pool but that of states; scattered, no two pools have them in the
    same order.
    """
    pools = [pool for pool in config.pools if pool != STATE_POOL]
    return {pool: row_pages(layout, page_size, seed=i) for i, pool in enumerate(pools)}


def row_pages(layout: Layout, page_size: int, *, seed: int = 0) -> dict[int, list[int]]:
    """Pages of every row; together they are all pages but the padding page."""
    per_row = pages_for(MAX_LEN, page_size)
    pages = list(range(1, NUM_ROWS * per_row + 1))
    if layout is Layout.SCATTERED:
        Random(seed).shuffle(pages)
    elif layout is Layout.RUNS:
        runs = [pages[i : i + 3] for i in range(0, len(pages), 3)]
        Random(seed).shuffle(runs)
        pages = [page for run in runs for page in run]
    return {row: pages[(row - 1) * per_row : row * per_row] for row in range(1, NUM_ROWS + 1)}


@dataclass
class Conversation:
    """One session. `answers` and `logits` are by position in `tokens`."""

    row: int
    pieces: list[list[int]]
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_owed: int = 0
    num_pages: int = 0
    answers: dict[int, int] = field(default_factory=dict)
    logits: dict[int, Tensor] = field(default_factory=dict)
    is_unseen: bool = False
    state: int = 0

    def next_piece(self) -> bool:
        """Append the next piece of input when the answer is complete; False at the end."""
        while self.num_owed == 0:
            if not self.pieces:
                return False
            self.tokens += self.pieces.pop(0)
            self.num_owed = ANSWER_LEN
        return True


def conversations(*, seed: int, vocab_size: int) -> list[Conversation]:
    """`NUM_ROWS` sessions of `NUM_TURNS` turns that never run in step."""
    random = Random(seed)
    made = []
    for row in range(1, NUM_ROWS + 1):
        lengths = [PIECES[(turn + row) % len(PIECES)] for turn in range(NUM_TURNS)]
        pieces = [[random.randrange(vocab_size) for _ in range(length)] for length in lengths]
        made.append(Conversation(row, pieces))
    return made


@dataclass
class Drive:
    """Runs conversations to their end; `steps` counts launches."""

    runner: ModelRunner
    page_size: int
    chunk: int
    pages: dict[PoolName, dict[int, list[int]]]
    steps: int = 0

    def run(self, sessions: list[Conversation]) -> None:
        """Answer every piece of every session."""
        while True:
            live = [session for session in sessions if session.next_piece()]
            if not live:
                return
            self._step(live)

    def _step(self, live: list[Conversation]) -> None:
        self.steps += 1
        writes: list[TableWrite] = []
        rows = [self._row(session, writes) for session in live]
        batch = Batch(self.steps, tuple(rows), tuple(writes))
        logits = self.runner.logits(batch)
        result = self.runner.launch(batch).wait()
        assert result.error is None, result.error
        num_sampled = sum(row.sample for row in rows)
        sampled, scored = logits[:num_sampled], logits[num_sampled:]
        for session, row, outcome in zip(live, rows, result.rows, strict=True):
            assert outcome.finite
            for position in range(row.start, row.start + row.num_tokens):
                session.logits[position] = scored[0]
                scored = scored[1:]
            session.num_computed += row.num_tokens
            if row.sample:
                # The row's last position was asked for twice: sampled and scored.
                torch.testing.assert_close(
                    sampled[0], session.logits[session.num_computed - 1], rtol=0, atol=1e-5
                )
                sampled = sampled[1:]
                (token,) = outcome.token_ids
                session.answers[len(session.tokens)] = token
                session.tokens.append(token)
                session.num_owed -= 1

    def _row(self, session: Conversation, writes: list[TableWrite]) -> BatchRow:
        start = session.num_computed
        num_tokens = min(self.chunk, len(session.tokens) - start)
        known = np.array(session.tokens[start : start + num_tokens], dtype=np.int32)
        is_last = start + num_tokens == len(session.tokens)
        needed = pages_for(start + num_tokens, self.page_size)
        if needed > session.num_pages:
            for pool, pages in self.pages.items():
                new = pages[session.row][session.num_pages : needed]
                write = np.array(new, dtype=np.int32)
                writes.append(TableWrite(pool, RowId(session.row), session.num_pages, write))
            session.num_pages = needed
        # A token the device sampled in the launch before is left for the device to fill in.
        is_unseen = session.is_unseen and num_tokens == 1 and is_last
        session.is_unseen = is_last
        end, before = start + num_tokens, session.state
        last_whole = end - end % self.page_size
        first = 1 + (session.row - 1) * STATES_PER_ROW
        unused = [page for page in range(first, first + STATES_PER_ROW) if page != before]
        lengths = (last_whole, end) if start < last_whole < end else (end,)
        moves = StateMoves(before, tuple(zip(lengths, unused, strict=False)))
        session.state = moves.targets[-1][1]
        greedy = SamplingStart(SamplingParams(temperature=0.0), 0, 0, NO_TOKENS, NO_TOKENS)
        return BatchRow(
            turn_id=TurnId(f"turn-{session.row}"),
            attempt=0,
            row=RowId(session.row),
            start=start,
            num_tokens=num_tokens,
            tokens=None if is_unseen and session.num_owed < ANSWER_LEN else known,
            sample=is_last,
            sampling=greedy if start == 0 else None,
            prompt_logprobs=PromptLogprobRange(start, np.zeros(num_tokens, dtype=np.int32), 0),
            states=moves,
        )
