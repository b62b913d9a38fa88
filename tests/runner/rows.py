"""Batches by hand: rows with their own consecutive pages."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cache.types import Pages, RowId, StateMoves, TableWrite, Tokens, TurnId
from session_server.core.batch import (
    Batch,
    BatchRow,
    CompiledGrammar,
    PromptLogprobRange,
    RowResult,
    SamplingStart,
)
from session_server.core.sampling import SamplingParams
from session_server.runner.model_runner import ModelRunner

PAGES_PER_ROW = 20
NO_TOKENS: Tokens = np.zeros(0, dtype=np.int32)
GREEDY = SamplingParams(temperature=0.0)


class Rows:
    """Numbers batches and hands each row pages the first time it appears."""

    def __init__(
        self, runner: ModelRunner, page_size: int, pages_per_row: int = PAGES_PER_ROW
    ) -> None:
        self.runner = runner
        self.page_size = page_size
        self.pages_per_row = pages_per_row
        self._placed: set[int] = set()
        self._state: dict[int, int] = {}
        self._step = 0

    def row(
        self,
        row: int,
        tokens: Tokens | None,
        *,
        start: int = 0,
        params: SamplingParams = GREEDY,
        seed: int = 0,
        sample: bool = True,
        prompt_logprobs: PromptLogprobRange | None = None,
        drafts: Tokens | int = 0,
        grammar: CompiledGrammar | None = None,
        outputs: Tokens = NO_TOKENS,
    ) -> BatchRow:
        """Positions from `start`; None stands for the token sampled before. Begins a turn at 0.

        `drafts` stand behind the tokens, so many when the runner makes them; a turn's first output
        follows its first row, or `outputs` that end it.
        """
        begins = tokens is not None and start == 0
        num_drafts = drafts if isinstance(drafts, int) else len(drafts)
        num_certain = 1 if tokens is None else len(tokens)
        return BatchRow(
            turn_id=TurnId(f"turn-{row}"),
            attempt=0,
            row=RowId(row),
            start=start,
            num_tokens=num_certain + num_drafts,
            tokens=tokens,
            sample=sample,
            sampling=SamplingStart(
                params, seed, num_certain - len(outputs), NO_TOKENS, outputs, grammar
            )
            if begins
            else None,
            prompt_logprobs=prompt_logprobs,
            num_drafts=num_drafts,
            drafts=None if isinstance(drafts, int) else drafts,
            states=self._moves(row, start, start + num_certain + num_drafts),
        )

    def _moves(self, row: int, start: int, end: int) -> StateMoves | None:
        """Two pages of the recurrent pool that take turns."""
        if self.runner.states is None:
            return None
        source = self._state[row] if start else 0
        self._state[row] = 2 * row if source == 2 * row - 1 else 2 * row - 1
        return StateMoves(source, ((end, self._state[row]),))

    def batch(self, *rows: BatchRow, writes: tuple[TableWrite, ...] = ()) -> Batch:
        """The next batch, with the pages of rows that are new."""
        self._step += 1
        new = tuple(
            write for row in rows if row.row not in self._placed for write in self._pages(row.row)
        )
        self._placed.update(row.row for row in rows)
        return Batch(self._step, rows, (*new, *writes))

    def run(self, *rows: BatchRow) -> tuple[RowResult, ...]:
        """Launch and wait; the device must not fail."""
        result = self.runner.launch(self.batch(*rows)).wait()
        assert result.error is None, result.error
        return result.rows

    def compute(self, row: int, tokens: Tokens, chunks: Iterable[int]) -> None:
        """Run a row's tokens by themselves, in chunks of these sizes."""
        start = 0
        for size in chunks:
            self.run(self.row(row, tokens[start : start + size], start=start))
            start += size

    def _pages(self, row: int) -> list[TableWrite]:
        return [
            TableWrite(name, RowId(row), 0, self._of_row(row, pool.num_pages))
            for name, pool in self.runner.pools.items()
        ]

    def _of_row(self, row: int, num_pages: int) -> Pages:
        per_row = min(self.pages_per_row, (num_pages - 1) // 2)
        first = 1 + (row - 1) * per_row
        return np.arange(first, first + per_row, dtype=np.int32)
