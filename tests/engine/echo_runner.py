"""A runner whose answer is a function of the KV it reads: the oracle of the engine's tests.

Each cell of the fake pool holds a hash of the tokens up to its position; a forward reads through
the page table, and the "sampled" token is a hash of everything it read, of the seed its sampler
was given, and of its position. Aliased pages, stale tails, wrong prefixes, late writes or a
sampler that was not told of a new turn change the text, and the text is compared with a
straight-line replay of the conversation.

Nothing happens at launch: a launch is executed later, at a moment the test chooses, from the
frozen batch alone. Whatever the host does in between must not matter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cache.types import RowId, TurnId
from session_server.core.batch import Batch, BatchRow, RowResult, StepResult
from session_server.core.sampling import TokenLogprob

VOCAB_SIZE = 32
EOS = 0
_MASK = (1 << 64) - 1
GARBAGE = 0xDEADBEEF


def mix(*values: int) -> int:
    """A 64-bit hash of some integers (splitmix64 finaliser over a running sum)."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def salt_value(salt: str) -> int:
    """A tenant's salt as the root of its chains."""
    return mix(*salt.encode())


def sampled_token(total: int, position: int, seed: int) -> int:
    """What a sampler with `seed` says at `position` after reading cells that sum to `total`."""
    return mix(total, position, seed) % VOCAB_SIZE


def score_of(cell: int, target: int) -> float:
    """The "logprob" of a target after the cell of the position before it."""
    return -float(mix(cell, target) % 1000) / 100.0


@dataclass
class Sampler:
    """What the device remembers of the turn in one row."""

    seed: int
    last_token: int | None = None


@dataclass
class Faults:
    """What goes wrong on purpose. Turn ids are removed once they have struck."""

    nan_turns: set[TurnId] = field(default_factory=set)
    poison_turns: set[TurnId] = field(default_factory=set)
    fail_steps: set[int] = field(default_factory=set)


class EchoRunner:
    """Executes launches strictly in order, when told to."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_rows: int,
        row_pages: int,
        salt_of: Callable[[TurnId], str],
    ) -> None:
        self._cells = np.full(num_pages * page_size, GARBAGE, dtype=np.uint64)
        self._table = np.zeros((num_rows + 1, row_pages), dtype=np.int64)
        self._offsets = np.arange(page_size)
        self._page_size = page_size
        self._samplers: dict[RowId, Sampler] = {}
        self._salt_of = salt_of
        self._queue: deque[Batch] = deque()
        self.faults = Faults()
        self.num_prompt_positions = 0

    def __len__(self) -> int:
        return len(self._queue)

    def assume_salt(self, salt: str) -> None:
        """Take every turn for one of this tenant: a live engine does not say whose it is."""
        self._salt_of = lambda _: salt

    def launch(self, batch: Batch) -> None:
        """Queue a launch; it has no effect yet."""
        assert all(row.row != 0 for row in batch.rows), "the padding row is nobody's"
        assert len({row.row for row in batch.rows}) == len(batch.rows)
        self._queue.append(batch)

    def execute(self) -> StepResult:
        """Carry out the oldest launch."""
        batch = self._queue.popleft()
        for write in batch.table_writes:
            self._table[write.row, write.start : write.start + len(write.pages)] = write.pages
        turns = {row.turn_id for row in batch.rows}
        poison = sorted(turns & self.faults.poison_turns)
        if batch.step in self.faults.fail_steps or poison:
            for row in batch.rows:
                self._scribble(row)
            return StepResult(batch.step, (), 1e-3, error="injected")
        rows = tuple(self._run(row) for row in batch.rows)
        return StepResult(batch.step, rows, 1e-3)

    def _run(self, row: BatchRow) -> RowResult:
        if row.sampling is not None:
            self._samplers[row.row] = Sampler(row.sampling.seed)
        sampler = self._samplers[row.row]
        if row.turn_id in self.faults.nan_turns:
            self.faults.nan_turns.discard(row.turn_id)
            self._scribble(row)
            return RowResult((), (), (), finite=False)
        end = row.start + row.num_tokens
        cells = self._addresses(row.row, end)
        for position, token in enumerate(self._inputs(row, sampler), row.start):
            self._write(row, cells, position, token)
        scores: tuple[TokenLogprob, ...] = ()
        if row.score is not None:
            scores = tuple(
                TokenLogprob(
                    int(target), score_of(int(self._cells[cells[row.score.start + i]]), int(target))
                )
                for i, target in enumerate(row.score.targets)
            )
        if not row.sample:
            return RowResult((), (), scores, finite=True)
        chosen = self._choose(row, cells, sampler.seed)
        sampler.last_token = chosen[-1]
        return RowResult(tuple(chosen), (), scores, finite=True)

    def _choose(self, row: BatchRow, cells: np.ndarray, seed: int) -> list[int]:
        """The next token, and those behind drafts that were right. Wrong drafts are written too,
        as a forward does before it can know.
        """
        chosen, is_right = list[int](), True
        end = row.start + row.num_tokens
        for position in range(end - row.num_drafts, end + 1):
            total = int(self._cells[cells[:position]].sum())
            choice = sampled_token(total, position, seed)
            if is_right:
                chosen.append(choice)
            if position < end:
                draft = choice if total % 3 else (choice + 1) % VOCAB_SIZE
                if row.drafts is not None:
                    draft = int(row.drafts[position - end + row.num_drafts])
                is_right &= draft == choice
                self._write(row, cells, position, draft)
        return chosen

    def _write(self, row: BatchRow, cells: np.ndarray, position: int, token: int) -> None:
        before = int(self._cells[cells[position - 1]]) if position else self._root(row)
        self._cells[cells[position]] = mix(before, token, position)

    def _inputs(self, row: BatchRow, sampler: Sampler) -> Sequence[int]:
        if row.tokens is not None:
            assert len(row.tokens) == row.num_tokens - row.num_drafts
            return [int(token) for token in row.tokens]
        assert sampler.last_token is not None, "a token not yet seen was sampled by this row"
        return [sampler.last_token]

    def _root(self, row: BatchRow) -> int:
        return salt_value(self._salt_of(row.turn_id))

    def _addresses(self, row: RowId, end: int) -> np.ndarray:
        """Flat cell indices of positions [0, end) of a row."""
        pages = self._table[row, : -(-end // self._page_size)]
        assert pages.all(), "a forward reads the padding page"
        cells = (pages[:, None] * self._page_size + self._offsets).ravel()
        return cells[:end]

    def _scribble(self, row: BatchRow) -> None:
        """A forward that failed may have written anything where it was to write, and its row's
        sampler remembers nothing of use to the launch behind it.
        """
        self._samplers[row.row] = Sampler(seed=GARBAGE, last_token=1)
        end = row.start + row.num_tokens
        self._cells[self._addresses(row.row, end)[row.start :]] = GARBAGE


def replay(salt: str, prompt: Sequence[int], *, seed: int, max_new: int) -> list[int]:
    """The first `max_new` outputs of a lone turn on an infinite machine, stopping at nothing."""
    chain, total, outputs = salt_value(salt), 0, list[int]()
    for position, token in enumerate(prompt):
        chain = mix(chain, token, position)
        total = (total + chain) & _MASK
    for position in range(len(prompt), len(prompt) + max_new):
        token = sampled_token(total, position, seed)
        outputs.append(token)
        chain = mix(chain, token, position)
        total = (total + chain) & _MASK
    return outputs


def replay_scores(salt: str, prompt: Sequence[int], start: int) -> list[TokenLogprob]:
    """Prompt logprobs from position `start` on, as a lone turn would have them."""
    chain, scores = salt_value(salt), list[TokenLogprob]()
    for position, token in enumerate(prompt):
        if position >= start:
            scores.append(TokenLogprob(token, score_of(chain, token) if position else None))
        chain = mix(chain, token, position)
    return scores
