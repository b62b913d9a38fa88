"""Plan where the recurrent states of a forward are read and written.

Once per step the rows' `StateMoves` become a `RecurrentPlan`: index tensors for work that all rows
share in one call, and segments for the rest, row by row. A forward never writes a state that it
reads, so earlier states stay intact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from cache.pool.recurrent import StatePool
from cache.pool.upload import upload, upload_values
from cache.types import NULL_PAGE, NULL_ROW, StateMoves
from session_server.attention.base import AttentionMeta, Recurrence, Span

CHUNK: Final = 64
"""Tokens of a row that one call of a recurrence processes. The cost within a chunk is quadratic;
from chunk to chunk only the state is passed."""


@dataclass(frozen=True, slots=True)
class StateSegment:
    """Describe tokens [offset, offset + num_tokens) of a batch, all of one row.

    The state before them is in page `source` (zero if that is the padding page); the state after
    them is written to page `target`. Segments of a row follow each other.
    """

    offset: int
    num_tokens: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Sources:
    """Locate the states that rows start from: `pages`, int64 [rows].

    `fresh`: int64 [n], indices of the rows that start a session; None if there are none.
    """

    pages: Tensor
    fresh: Tensor | None

    def read(self, states: Tensor) -> Tensor:
        """Copy one part [pages, *shape] to [rows, *shape]; rows that start a session get zeros."""
        past = states.index_select(0, self.pages)
        return past if self.fresh is None else past.index_fill_(0, self.fresh, 0.0)


@dataclass(frozen=True, slots=True)
class Steps:
    """Describe the rows of one token, which come first in a batch.

    `targets`: pages, int64 [rows].
    """

    num_rows: int
    sources: Sources
    targets: Tensor


@dataclass(frozen=True, slots=True)
class Rounds:
    """Describe rows that leave a state after every token, as rows with drafts do.

    Round i takes token i of all such rows at once. `tokens`: indices of each round's tokens in the
    batch, int64 [rows]; `targets`: pages, int64 [rows]. `order`: int64 [tokens of the batch], maps
    the computed order (steps, rounds, segments) back to that of the batch.
    """

    tokens: tuple[Tensor, ...]
    sources: tuple[Sources, ...]
    targets: tuple[Tensor, ...]
    order: Tensor


@dataclass(frozen=True, slots=True)
class Padded:
    """Describe a batch in which each row is preceded by its last convolution inputs.

    `length`: tokens of the whole. `targets`: pages, int64 [targets of all rows]. int64 positions in
    the whole: `past`, those of the preceding inputs, row after row; `tokens`, those of the batch's
    tokens; `before[i]`, the inputs i + 1 before each token; `tails`, the last inputs of every
    target.
    """

    length: int
    sources: Sources
    targets: Tensor
    past: Tensor
    tokens: Tensor
    before: tuple[Tensor, ...]
    tails: Tensor


@dataclass(frozen=True, slots=True)
class TorchRecurrentPlan:
    """Read and write one forward's states; implements `RecurrentPlan`.

    `rounds`: None if no row has drafts. `padded`: None if every row has one token.
    """

    pool: StatePool
    steps: Steps
    rounds: Rounds | None
    segments: tuple[StateSegment, ...]
    padded: Padded | None

    def convolve(self, layer: int, x: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve every channel; implements `RecurrentPlan.convolve`."""
        convolve = self._convolve_steps if self.padded is None else self._convolve_padded
        y = convolve(layer, x, taps)
        return y if bias is None else y.add_(bias)

    def recur(self, layer: int, recurrence: Recurrence, *inputs: Tensor) -> Tensor:
        """Advance the states; implements `RecurrentPlan.recur`."""
        states, num_steps = self.pool.parts[layer][1], self.steps.num_rows
        outputs = []
        if num_steps:
            past = self.steps.sources.read(states)
            out, after = recurrence.step(past, *(of_all[:num_steps] for of_all in inputs))
            states.index_copy_(0, self.steps.targets, after)
            outputs.append(out)
        if (rounds := self.rounds) is not None:
            each = zip(rounds.tokens, rounds.sources, rounds.targets, strict=True)
            for tokens, sources, targets in each:
                of_round = (of_all.index_select(0, tokens) for of_all in inputs)
                out, after = recurrence.step(sources.read(states), *of_round)
                states.index_copy_(0, targets, after)
                outputs.append(out)
        for segment in self.segments:
            state = states[segment.source]
            if segment.source == NULL_PAGE:
                state = torch.zeros_like(state)
            of_segment = (of_all.narrow(0, segment.offset, segment.num_tokens) for of_all in inputs)
            for chunk in zip(*(torch.split(side, CHUNK) for side in of_segment), strict=True):
                out, state = recurrence.chunk(state, *chunk)
                outputs.append(out)
            states[segment.target] = state
        if rounds is not None:
            return torch.cat(outputs).index_select(0, rounds.order)
        return torch.cat(outputs) if self.segments else outputs[0]

    def _convolve_steps(self, layer: int, x: Tensor, taps: Tensor) -> Tensor:
        history = self.pool.parts[layer][0]
        seen = torch.cat((self.steps.sources.read(history), x.unsqueeze(1)), dim=1)
        history.index_copy_(0, self.steps.targets, seen[:, 1:])
        return (seen * taps).sum(dim=1).to(x.dtype)

    def _convolve_padded(self, layer: int, x: Tensor, taps: Tensor) -> Tensor:
        padded, history = self.padded, self.pool.parts[layer][0]
        assert padded is not None
        past = padded.sources.read(history)
        inputs = past.new_empty((padded.length, x.shape[1]))
        inputs.index_copy_(0, padded.past, past.flatten(0, 1))
        inputs.index_copy_(0, padded.tokens, x.float())
        y = x * taps[-1]
        for index, before in enumerate(padded.before, 2):
            y.addcmul_(inputs.index_select(0, before).to(x.dtype), taps[-index])
        tails = inputs.index_select(0, padded.tails).view(-1, *history.shape[1:])
        history.index_copy_(0, padded.targets, tails)
        return y


@dataclass(frozen=True, slots=True)
class RecurrentBackend:
    """Plan forwards over one pool of states."""

    pool: StatePool

    def plan(self, meta: AttentionMeta) -> TorchRecurrentPlan:
        """Prepare one forward."""
        spans = meta.spans
        moves = [moves_of(span) for span in spans]
        num_steps = sum(span.num_tokens == 1 for span in spans)
        rest = list(zip(spans[num_steps:], moves[num_steps:], strict=True))
        verified = [row for row in rest if len(row[1].targets) == row[0].num_tokens]
        segments = [each for row in rest if row not in verified for each in _segments(*row)]
        return TorchRecurrentPlan(
            self.pool,
            self._steps(moves[:num_steps]),
            rounds=self._rounds(num_steps, verified, segments) if verified else None,
            segments=tuple(segments),
            padded=self._padded(spans, moves) if rest else None,
        )

    def _rounds(
        self, num_steps: int, rows: list[tuple[Span, StateMoves]], segments: list[StateSegment]
    ) -> Rounds:
        taken, tokens, sources, targets = list(range(num_steps)), [], [], []
        for index in range(max(span.num_tokens for span, _ in rows)):
            continuing = [row for row in rows if row[0].num_tokens > index]
            at = [span.offset + index for span, _ in continuing]
            taken += at
            tokens.append(self._ints(at))
            sources.append(self._sources([_source_of(moves, index) for _, moves in continuing]))
            targets.append(self._ints([moves.targets[index][1] for _, moves in continuing]))
        for segment in segments:
            taken += range(segment.offset, segment.offset + segment.num_tokens)
        order = upload(torch.tensor(taken).argsort(), self.pool.device)
        return Rounds(tuple(tokens), tuple(sources), tuple(targets), order)

    def _steps(self, moves: list[StateMoves]) -> Steps:
        targets = self._ints([of_row.targets[-1][1] for of_row in moves])
        return Steps(len(moves), self._sources([of_row.source for of_row in moves]), targets)

    def _padded(self, spans: tuple[Span, ...], moves: list[StateMoves]) -> Padded:
        num_past = self.pool.parts[0][0].shape[1]
        past: list[int] = []
        tokens: list[int] = []
        tails: list[int] = []
        end = 0
        for span, of_span in zip(spans, moves, strict=True):
            begin = end + num_past
            past += range(end, begin)
            end = begin + span.num_tokens
            tokens += range(begin, end)
            for length, _ in of_span.targets:
                after = begin + length - span.start
                tails += range(after - num_past, after)
        at = self._ints(tokens)
        return Padded(
            length=end,
            sources=self._sources([of_span.source for of_span in moves]),
            targets=self._ints([page for of_span in moves for _, page in of_span.targets]),
            past=self._ints(past),
            tokens=at,
            before=tuple(at - back for back in range(1, num_past + 1)),
            tails=self._ints(tails),
        )

    def _sources(self, pages: list[int]) -> Sources:
        fresh = [index for index, page in enumerate(pages) if page == NULL_PAGE]
        return Sources(self._ints(pages), self._ints(fresh) if fresh else None)

    def _ints(self, values: list[int]) -> Tensor:
        return upload_values(values, torch.int64, self.pool.device)


def moves_of(span: Span) -> StateMoves:
    """Return which states a row reads and writes; for padding, which has none, the padding page."""
    if span.states is not None:
        return span.states
    assert span.row == NULL_ROW, "only padding has no state"
    return StateMoves(NULL_PAGE, ((span.end, NULL_PAGE),))


def _source_of(moves: StateMoves, index: int) -> int:
    """Return the page of the state before token `index` of a row with a state after each token."""
    return moves.targets[index - 1][1] if index else moves.source


def _segments(span: Span, moves: StateMoves) -> list[StateSegment]:
    segments, start, source = [], span.start, moves.source
    for length, target in moves.targets:
        offset = span.offset + start - span.start
        segments.append(StateSegment(offset, length - start, source, target))
        start, source = length, target
    return segments
