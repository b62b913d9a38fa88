"""A device whose answer is a function of the KV it reads: the oracle of the simulator.

Each cell of its pool holds the tag of a chain (namespace, tokens so far, position). A forward reads
through the page table, and the token it says is a function of everything it read, of the seed its
sampler was given, and of the position. Aliased pages, stale tails, wrong prefixes, late writes or a
sampler that was not told of a new turn change the text. Given the `Truth` of a turn, every cell is
also compared with what belongs there, so that the first wrong one is named.

Every pool holds the same tags, and each is read as far as its layers see: one that keeps everything
gives the text, and the others are compared with it. A recurrent state is the last tag of those it
stands for.

Nothing happens at launch: a forward is executed later, at a moment of the caller's choosing, from
the frozen batch alone. Whatever the host does in between must not matter.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from cache.types import NULL_PAGE, PoolName, RowId, TableWrite, TurnId
from session_server.core.batch import Batch, BatchRow, Probe, RowResult, StepResult
from session_server.core.sampling import TokenLogprob
from tests.sim.draws import name_value, scramble
from tests.sim.echo import EchoModel, Truth, score_of, tag_after
from tests.sim.padding import GraphPlaces
from tests.sim.state_memory import GARBAGE, StateMemory

_FORWARD_S: Final = 1e-3


class ContentMismatch(Exception):
    """A forward read KV that is not what its turn's tokens give."""


@dataclass(slots=True)
class Sampler:
    """What the device remembers of the turn in one row. `seed`: GARBAGE once it remembers nothing.
    `root`: where its namespace begins."""

    seed: int
    root: int
    last_token: int | None = None


@dataclass(slots=True)
class Faults:
    """What goes wrong on purpose. Turn ids of `nan_turns` are removed once they have struck;
    `refused_alone` are turns whose forward failed when nobody else was in it."""

    nan_turns: set[TurnId] = field(default_factory=set)
    poison_turns: set[TurnId] = field(default_factory=set)
    fail_steps: set[int] = field(default_factory=set)
    refused_alone: set[TurnId] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Sizes of one pool; `num_pages` counts the padding page, `num_rows` does not count the padding
    row. `row_pages`: entries of a row of the page table. `window`: positions that a query sees, its
    own included, at least 2; 0 for all."""

    num_pages: int
    page_size: int
    num_rows: int
    row_pages: int
    window: int = 0


class EchoMemory:
    """One pool and its mirror of the page table. What is not named is not touched."""

    __slots__ = ("_cells", "_page_size", "_table", "_window")

    def __init__(self, shape: PoolShape) -> None:
        assert shape.window != 1, "a cell is made from the one before it"
        self._window = shape.window
        self._page_size = shape.page_size
        self._cells = [[GARBAGE] * shape.page_size for _ in range(shape.num_pages)]
        self._table = [[0] * shape.row_pages for _ in range(shape.num_rows + 1)]

    def point(self, write: TableWrite) -> None:
        """Apply a delta of the page table."""
        end = write.start + len(write.pages)
        self._table[write.row][write.start : end] = write.pages.tolist()

    def page_of(self, row: RowId, position: int) -> int:
        """The page that holds a position."""
        return self._table[row][position // self._page_size]

    def is_page_start(self, position: int) -> bool:
        """Whether a page begins here."""
        return position % self._page_size == 0

    def cell(self, row: RowId, position: int) -> int:
        """One cell."""
        return self._cells[self.page_of(row, position)][position % self._page_size]

    def first_read(self, start: int) -> int:
        """The first position that a query at `start` sees."""
        return max(0, start - self._window + 1) if self._window else 0

    def read(self, row: RowId, start: int, end: int) -> list[int]:
        """The cells that queries at [start, end) see: from `first_read` to the last of them."""
        first = self.first_read(start)
        begin = first // self._page_size
        pages = self._table[row][begin : -(-end // self._page_size)]
        assert 0 not in pages, "a forward reads the padding page"
        values = list(chain.from_iterable(map(self._cells.__getitem__, pages)))
        del values[end - begin * self._page_size :]
        return values[first - begin * self._page_size :] if first else values

    def put(self, row: RowId, position: int, value: int) -> None:
        """Write one cell."""
        self._cells[self.page_of(row, position)][position % self._page_size] = value

    def put_chain(self, row: RowId, start: int, tokens: Sequence[int], *, root: int) -> None:
        """Write the cells of tokens from `start` on, after the cell before; `root` is before 0."""
        cells, pages, page_size = self._cells, self._table[row], self._page_size
        tag = self.cell(row, start - 1) if start else root
        for position, token in enumerate(tokens, start):
            tag = tag_after(tag, token, position)
            page = pages[position // page_size]
            assert page != 0, "a forward writes the padding page"
            cells[page][position % page_size] = tag

    def copy_out(self, page: int) -> list[int]:
        """The cells of a page, as a copy beside the forwards reads them."""
        return list(self._cells[page])

    def copy_in(self, page: int, cells: Sequence[int]) -> None:
        """Write a page as a copy beside the forwards does."""
        assert page != NULL_PAGE, "nothing is copied to the padding page"
        self._cells[page] = list(cells)

    def damage(self, page: int) -> None:
        """Overwrite a page behind everybody's back: what a probe is there to find."""
        self._cells[page] = [GARBAGE] * self._page_size


class EchoRunner:
    """Executes forwards strictly in order, when told to.

    `states`: the recurrent pool, None where there is none. `salt_of`: the tenant's salt of a turn.
    `truth_of`: what a turn's cells must hold; without it the text alone tells. `draft_skill`: how
    often in a thousand its draft model is right. `reached` counts what speculation came to.
    """

    def __init__(
        self,
        shapes: Mapping[PoolName, PoolShape],
        *,
        salt_of: Callable[[TurnId], str],
        num_states: int = 0,
        model: EchoModel | None = None,
        truth_of: Callable[[TurnId], Truth] | None = None,
        draft_skill: int = 700,
    ) -> None:
        self.memories = {pool: EchoMemory(shape) for pool, shape in shapes.items()}
        self.states = StateMemory(num_states) if num_states else None
        self._samplers: dict[RowId, Sampler] = {}
        self._spoilt: set[tuple[TurnId, int]] = set()
        self._salt_of = salt_of
        self._truth_of = truth_of
        self._draft_skill = draft_skill
        self._queue: deque[Batch] = deque()
        self.model = model or EchoModel()
        self.faults = Faults()
        self.reached: Counter[str] = Counter()
        self._graphs = GraphPlaces()

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def memory(self) -> EchoMemory:
        """The first pool, which gives the text."""
        return next(iter(self.memories.values()))

    @property
    def num_samplers(self) -> int:
        """How many rows have the sampler state of a turn."""
        return sum(sampler.seed != GARBAGE for sampler in self._samplers.values())

    def assume_salt(self, salt: str) -> None:
        """Take every turn for one of this tenant: a live engine does not say whose it is."""
        self._salt_of = lambda _: salt

    def launch(self, batch: Batch) -> None:
        """Queue a forward; it has no effect yet."""
        assert all(row.row != 0 for row in batch.rows), "the padding row is nobody's"
        assert len({row.row for row in batch.rows}) == len(batch.rows), "a row appears once"
        assert not (batch.rows and batch.probe), "a probe goes alone"
        self._queue.append(batch)

    def next_batch(self) -> Batch | None:
        """The batch that `execute` will carry out."""
        return self._queue[0] if self._queue else None

    def is_queued(self, turn_id: TurnId) -> bool:
        """Whether a forward that was not carried out has a row of this turn."""
        return any(row.turn_id == turn_id for batch in self._queue for row in batch.rows)

    def execute(self) -> StepResult:
        """Carry out the oldest forward.

        Raises:
            ContentMismatch: it read what does not belong to one of its turns.
        """
        batch = self._queue.popleft()
        for ended in batch.ended:
            if ended in self._samplers:  # else none of its rows were carried out
                self._samplers[ended] = Sampler(GARBAGE, self._samplers[ended].root)
        for write in batch.table_writes:
            self.memories[write.pool].point(write)
        turns = {row.turn_id for row in batch.rows}
        if batch.step in self.faults.fail_steps or turns & self.faults.poison_turns:
            for row in batch.rows:
                self._scribble(row)
            if len(turns) == 1:
                self.faults.refused_alone |= turns
            return StepResult(batch.step, (), _FORWARD_S, error="injected")
        if batch.probe is not None:
            self.reached["probe"] += 1
            holds = self._probe(batch.probe)
            return StepResult(batch.step, (), _FORWARD_S, probe_holds=holds)
        results = tuple(map(self._run, batch.rows))
        # Beside the rows' own, in no order: what comes later must find their cells all the same.
        for row_id, position in self._graphs.padding_of(batch, self.reached):
            for memory in self.memories.values():
                memory.put(row_id, position, GARBAGE)
        result = StepResult(batch.step, results, _FORWARD_S)
        # As a runner may, of a forward in which every turn decodes; this one does it now and then.
        if batch.decoding is None or batch.step % 2 or (tokens := result.decoded()) is None:
            return result
        self.reached["tokens alone"] += 1
        return StepResult(batch.step, (), _FORWARD_S, tokens=tokens)

    def _run(self, row: BatchRow) -> RowResult:
        root = name_value(self._salt_of(row.turn_id))
        if row.sampling is not None:
            self._samplers[row.row] = Sampler(row.sampling.seed, root)
        # A chunk of a draft samples nothing, and so starts no sampler.
        sampler = self._samplers.setdefault(row.row, Sampler(GARBAGE, root))
        sampler.root = root
        if row.turn_id in self.faults.nan_turns:
            self.faults.nan_turns.discard(row.turn_id)
            self._scribble(row)
            return RowResult((), (), (), finite=False)
        tokens = self._inputs(row, sampler)
        for memory in self.memories.values():
            memory.put_chain(row.row, row.start, tokens, root=root)
        values = self.memory.read(row.row, row.start, row.start + len(tokens))
        token_ids: tuple[int, ...] = ()
        if row.sample:
            token_ids = self._sample(row, values, last=tokens[-1])
            sampler.last_token = token_ids[-1]
        self._compare(row, values)
        if self.states is not None:
            self._recur(self.states, row, root, values)
        return RowResult(token_ids, (), self._prompt_logprobs(row, values), finite=True)

    def _recur(self, states: StateMemory, row: BatchRow, root: int, values: list[int]) -> None:
        """Go on from the state that the row names, which is that of the cells before it."""
        moves, start = row.states, row.start
        assert moves is not None, "every row of a recurrent model says where its state lies"
        if (moves.source == NULL_PAGE) != (start == 0):
            raise ContentMismatch(f"turn {row.turn_id} reads page {moves.source} at {start}")
        if states.read(moves.source, root) == (values[start - 1] if start else root):
            end = start + row.num_tokens
            wrong = [self.memory.cell(row.row, at) for at in range(len(values), end)]
            states.leave(moves, start, values + wrong)
            self.reached["state left by a wrong draft"] += len(wrong)
            self.reached["state left at a page's end"] += len(moves.targets) > 1 + row.num_drafts
        elif (row.turn_id, row.attempt) in self._spoilt:
            states.spoil(moves)
        else:
            raise ContentMismatch(
                f"turn {row.turn_id} in row {row.row} goes on at position {start} from a state "
                f"(page {moves.source}) that its tokens do not give"
            )

    def _sample(self, row: BatchRow, values: list[int], *, last: int) -> tuple[int, ...]:
        """Choose; then verify drafts one by one. `values` grows by the cells of right drafts."""
        model, seed = self.model, self._samplers[row.row].seed
        position, choose = row.start + row.num_tokens - row.num_drafts, model.choose
        total = model.total(values)
        token_ids = [choose(total, position, seed, last)]
        if row.num_drafts == 0:
            return tuple(token_ids)
        drafts = self._drafts(row, values, last=last)
        for memory in self.memories.values():
            memory.put_chain(row.row, position, drafts, root=0)
        for draft in drafts:
            if draft != token_ids[-1]:
                break
            total -= model.passed(values)
            values.append(self.memory.cell(row.row, position))
            total += values[-1]
            position += 1
            token_ids.append(choose(total, position, seed, draft))
        self._count_drafts(row, len(token_ids) - 1)
        return tuple(token_ids)

    def _drafts(self, row: BatchRow, values: list[int], *, last: int) -> list[int]:
        """The drafts of a row: those it brings, or those of the draft model."""
        if row.drafts is not None:
            drafts: list[int] = row.drafts.tolist()
            assert len(drafts) == row.num_drafts, "every draft is given"
            return drafts
        seed, model, seen, drafts = self._samplers[row.row].seed, self.model, list(values), []
        total, end = model.total(seen), row.start + row.num_tokens
        for at in range(end - row.num_drafts, end):
            last = model.choose(total, at, seed, last)
            if scramble(total) % 1000 >= self._draft_skill:
                last = model.alphabet[model.alphabet.index(last) - 1]
            drafts.append(last)
            total -= model.passed(seen)
            seen.append(tag_after(seen[-1], last, at))
            total += seen[-1]
        return drafts

    def _count_drafts(self, row: BatchRow, num_right: int) -> None:
        self.reached["draft accepted"] += num_right
        self.reached["draft rejected"] += row.num_drafts - num_right
        first = row.start + row.num_tokens - row.num_drafts
        starts = map(self.memory.is_page_start, range(first, first + num_right))
        self.reached["drafts accepted across pages"] += any(starts)

    def _prompt_logprobs(self, row: BatchRow, values: list[int]) -> tuple[TokenLogprob, ...]:
        if (wanted := row.prompt_logprobs) is None:
            return ()
        first = self.memory.first_read(row.start)
        return tuple(
            TokenLogprob(target, score_of(values[at - first], target))
            for at, target in enumerate(wanted.targets.tolist(), wanted.start)
        )

    def _inputs(self, row: BatchRow, sampler: Sampler) -> list[int]:
        """The certain tokens of a row."""
        num_sure = row.num_tokens - row.num_drafts
        if row.tokens is None:
            assert sampler.last_token is not None, "a token not yet seen was sampled by this row"
            tokens = [sampler.last_token]
        else:
            tokens = row.tokens.tolist()
        assert len(tokens) == num_sure, "a row brings as many tokens as it says"
        return tokens

    def _compare(self, row: BatchRow, values: list[int]) -> None:
        """Everything a row read against what belongs there."""
        if (row.turn_id, row.attempt) in self._spoilt:
            return
        first, expected = self.memory.first_read(row.start), values
        end = first + len(values)
        if self._truth_of is not None:
            truth = self._truth_of(row.turn_id)
            truth.reach(end)
            expected = truth.tags
            expected = expected if len(expected) == len(values) else expected[first:end]
            if values != expected:
                raise self._mismatch(self.memory, row, values, expected)
        for memory in self.memories.values():
            if memory is self.memory:
                continue
            seen, past = memory.read(row.row, row.start, end), memory.first_read(row.start) - first
            if seen != expected[past:]:
                raise self._mismatch(memory, row, seen, expected[past:])

    @staticmethod
    def _mismatch(
        memory: EchoMemory, row: BatchRow, values: list[int], expected: list[int]
    ) -> ContentMismatch:
        first = next(i for i, value in enumerate(values) if value != expected[i])
        at = memory.first_read(row.start) + first
        page = memory.page_of(row.row, at)
        what = "read" if at < row.start else "wrote"
        return ContentMismatch(
            f"turn {row.turn_id} in row {row.row} {what} position {at} (page {page}) with content "
            f"that its tokens do not give; the forward covers [{row.start}, "
            f"{row.start + row.num_tokens})"
        )

    def _scribble(self, row: BatchRow) -> None:
        """A forward that failed may have written anything where it was to write, and its row's
        sampler remembers nothing of use to the forward behind it.
        """
        root = name_value(self._salt_of(row.turn_id))
        self._samplers[row.row] = Sampler(seed=GARBAGE, root=root, last_token=1)
        self._spoilt.add((row.turn_id, row.attempt))
        for memory in self.memories.values():
            for position in range(row.start, row.start + row.num_tokens):
                memory.put(row.row, position, GARBAGE)
        if self.states is not None and row.states is not None:
            self.states.spoil(row.states)

    def _probe(self, probe: Probe) -> bool:
        """Whether cells hold what the cells before them and their tokens give."""
        assert self.memory.is_page_start(probe.start), "a probe looks at a page"
        if not all(self._holds(memory, probe) for memory in self.memories.values()):
            return False
        return self.states is None or self._state_holds(self.states, probe)

    def _state_holds(self, states: StateMemory, probe: Probe) -> bool:
        """Whether the cells of a page follow from the state before them, and the state after them,
        if there is one, from the cells."""
        row, start, moves = probe.row, probe.start, probe.states
        assert moves is not None, "a probe of a recurrent model says where its states lie"
        end, root = start + len(probe.tokens), self._samplers[row].root
        before = self.memory.cell(row, start - 1) if start else root
        ((length, kept),) = moves.targets
        assert length == end, "a probe looks at the state after its page"
        self.reached["probe of a state"] += kept != NULL_PAGE
        return states.read(moves.source, root) == before and (
            kept == NULL_PAGE or states.read(kept, root) == self.memory.cell(row, end - 1)
        )

    def _holds(self, memory: EchoMemory, probe: Probe) -> bool:
        row, start = probe.row, probe.start
        tag = memory.cell(row, start - 1) if start else self._samplers[row].root
        for position, token in enumerate(probe.tokens.tolist(), start):
            tag = tag_after(tag, token, position)
            if memory.cell(row, position) != tag:
                return False
        return True
