"""`Batch` and `StepResult`: what one forward computes and what it gave.

This module is the whole contract between the engine and the runner. Everything the engine sends is
frozen ints and int32 numpy arrays on the host; a runner never writes to them. The one exception is
a compiled grammar, which the engine was given and does not look into.

Order. The runner executes batches in launch order on one stream, and results come back in that
order. It applies the `table_writes` of a batch before it computes the rows. A page that is freed
while an earlier forward still reads it can be given out at once: a later forward writes it next.

Overlap. With two forwards in flight, the engine launches forward n+1 before it has the result of
forward n. Where the input of a row is the token that forward n samples, the row has `tokens=None`,
and the runner uses the id that it sampled last for that `row`. A turn whose drafts are in flight is
not launched again before their result: only the result says how many tokens it has.

The structs are made anew in every step; as `msgspec` structs they cost a tenth of frozen
dataclasses.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from cache.types import RowId, StateMoves, TableWrite, Tokens, TurnId
from session_server.core.errors import SessionServerError
from session_server.core.sampling import Grammar, SamplingParams, TokenLogprob


class CompiledGrammar(Protocol):
    """Stand for a grammar that was compiled for the runner. The engine only passes it on."""

    @property
    def num_tokens(self) -> int:
        """Return how many tokens a mask covers."""


class CompileRequest(msgspec.Struct, frozen=True, gc=False):
    """Ask for the grammar of a turn to be compiled, which takes longer than a step may."""

    turn_id: TurnId
    grammar: Grammar


class CompileResult(msgspec.Struct, frozen=True, gc=False):
    """Answer a `CompileRequest` with the compiled grammar, or with why there is none."""

    turn_id: TurnId
    outcome: CompiledGrammar | SessionServerError


class SamplingStart(msgspec.Struct, frozen=True, gc=False):
    """Start the sampler state of a row: sent with the first row of an attempt of a turn.

    The state lives until the next `SamplingStart` of the same `BatchRow.row`, or until
    `Batch.ended` names the row: a session at rest keeps its row, but no such state.

    Attributes:
        params: how tokens are chosen.
        seed: with a position it alone decides the randomness of a token.
        prompt_len: position of the turn's first output token. A position alone then says how many
            outputs precede it.
        context: int32 [prompt_len], the tokens that penalties count as prompt; [0] without
            penalties.
        outputs: int32 [n], the tokens generated before this attempt, which penalties count as
            output and a grammar has matched; [0] without either.
        grammar: what the output must match, compiled; None for anything.
    """

    params: SamplingParams
    seed: int
    prompt_len: int
    context: Tokens
    outputs: Tokens
    grammar: CompiledGrammar | None = None


class PromptLogprobRange(msgspec.Struct, frozen=True, gc=False):
    """Request logprobs of prompt tokens.

    The logits at position `start + i` give the logprob of `targets[i]`, which is the token at
    position `start + i + 1`.

    Attributes:
        start: first position whose logits are used. All n positions lie inside the row's
            [start, start + num_tokens).
        targets: int32 [n].
        num_top: alternatives to return beside each target.
    """

    start: int
    targets: Tokens
    num_top: int


class BatchRow(msgspec.Struct, frozen=True, gc=False):
    """Compute positions [start, start + num_tokens) of one turn.

    The last `num_drafts` positions hold drafts that this forward verifies; the tokens before them
    are certain. With `sample`, one token is chosen from the logits of the last certain position and
    from those of each draft: the token at position p from the logits at p - 1, its randomness from
    (seed, p) alone. A draft is accepted when it equals the token chosen for its position, so drafts
    change no answer, greedy or sampled. Tokens chosen behind a rejected draft are dropped.

    Attributes:
        turn_id: the turn, for the engine; a runner does not use it.
        attempt: counts admissions and retries of the turn. The engine drops results of an older
            attempt.
        row: row of the page tables, and of the runner's sampler state.
        start: first position; KV before it is in the pages of `row`.
        num_tokens: positions, drafts included; at least 1.
        tokens: int32 [num_tokens - num_drafts], the certain input ids. None if there is exactly
            one, which the forward before sampled for this `row` and the host has not seen yet.
        sample: whether to choose tokens; always set on a row with drafts.
        sampling: sampler state to start from; None to continue with the state of `row`, and for a
            row whose turn never samples.
        prompt_logprobs: request for logprobs of prompt tokens, if any.
        num_drafts: drafts at the end of the row.
        drafts: int32 [num_drafts]. None without drafts, and when the runner's draft model makes
            them.
        states: where the recurrent state comes from and goes to; None if no layer has one.
    """

    turn_id: TurnId
    attempt: int
    row: RowId
    start: int
    num_tokens: int
    tokens: Tokens | None
    sample: bool
    sampling: SamplingStart | None
    prompt_logprobs: PromptLogprobRange | None = None
    num_drafts: int = 0
    drafts: Tokens | None = None
    states: StateMoves | None = None


@dataclass(slots=True, eq=False)
class DecodeRows:
    """Compute one position each of several turns, and sample one token each.

    Columns in place of a `BatchRow` per turn, each [n] in the order of the rows; `rows` makes those
    for whoever wants them.

    Attributes:
        turn_ids, attempts: for the engine, as in `BatchRow`.
        table_rows: int32, row of the page tables and of the sampler state.
        starts: int32, the position of each.
        tokens: the input ids; None if the forward before sampled them for these rows and the host
            has not seen them yet.
    """

    turn_ids: tuple[TurnId, ...]
    attempts: tuple[int, ...]
    table_rows: Tokens
    starts: Tokens
    tokens: tuple[int, ...] | None
    _rows: tuple[BatchRow, ...] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.turn_ids)

    @property
    def rows(self) -> tuple[BatchRow, ...]:
        """Return the same as rows, made once."""
        if self._rows is None:
            num_rows = len(self)
            tokens: Sequence[Tokens | None] = [None] * num_rows
            if self.tokens is not None:
                tokens = np.array(self.tokens, dtype=np.int32).reshape(num_rows, 1)  # type: ignore[assignment]
            columns = self.turn_ids, self.attempts, self.table_rows.tolist(), self.starts.tolist()
            self._rows = tuple(
                BatchRow(turn_id, attempt, row, start, 1, given, sample=True, sampling=None)
                for turn_id, attempt, row, start, given in zip(*columns, tokens, strict=True)
            )
        return self._rows


class Probe(msgspec.Struct, frozen=True, gc=False):
    """Check that a page of a parked session holds the KV of its tokens.

    The runner computes positions [start, start + n) of `row` again, from the KV before them, into
    the padding page, and compares both pages. It writes no page but the padding page.

    Attributes:
        row: row of the page tables.
        start: a multiple of page_size.
        tokens: int32 [n], 0 < n <= page_size.
        states: the recurrent state to start from. Its target is the page to compare with, unless
            that is the padding page. None if no layer has a state.
    """

    row: RowId
    start: int
    tokens: Tokens
    states: StateMoves | None = None


class Batch(msgspec.Struct, frozen=True, gc=False):
    """Describe one forward.

    Attributes:
        step: number of the forward, counted from 1 in launch order.
        listed: rows; none where `decoding` has them.
        table_writes: page table changes to apply before the rows, in order.
        probe: a page to check; a batch with a probe has no rows.
        decoding: the rows of a forward in which every turn computes one position and samples.
        ended: rows whose turn has ended or was retracted since the batch before. Their sampler
            state is dropped before `listed` starts others.
    """

    step: int
    listed: tuple[BatchRow, ...]
    table_writes: tuple[TableWrite, ...]
    probe: Probe | None = None
    decoding: DecodeRows | None = None
    ended: tuple[RowId, ...] = ()

    @property
    def rows(self) -> tuple[BatchRow, ...]:
        """Return all rows, no two with the same `BatchRow.row`, except the padding row."""
        return self.listed if self.decoding is None else self.decoding.rows


class RowResult(msgspec.Struct, frozen=True, gc=False):
    """Hold what one row gave.

    Attributes:
        token_ids: for a row with `sample` the accepted drafts and one token more, so 1 to
            1 + num_drafts ids; empty for any other row, and when `finite` is False. The KV written
            is valid up to and including the last accepted draft.
        logprobs: one per token id, or empty if the turn asks for none.
        prompt_logprobs: one per target of `BatchRow.prompt_logprobs`, in order.
        finite: False if the row's logits held NaN or Inf, or its last hidden state if it has no
            logits. The other rows of the forward are not affected.
        failure: why the row's grammar could not say what comes next; None if it could.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    finite: bool
    failure: str | None = None


class GraphUse(enum.Enum):
    """Say how a forward was computed where CUDA graphs are captured: replayed, or launched kernel
    by kernel because a row has too many tokens, the batch too many rows, or the smallest graph
    that holds it many more tokens."""

    REPLAYED = "replayed"
    MANY_TOKENS = "many_tokens"
    MANY_ROWS = "many_rows"
    MUCH_PADDING = "much_padding"


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """Hold the result of one forward.

    Attributes:
        step: that of the batch.
        rows: one per row of the batch, in its order; empty with an `error` and with `tokens`.
        forward_s: duration of the forward, in seconds.
        error: why the device failed; then nothing of the batch can be trusted, KV included.
        probe_holds: whether the page of the batch's probe holds the KV of its tokens; None without
            a probe.
        tokens: for a batch with `decoding` only: the token of each row, where every row is finite
            and has nothing else to tell.
        graph_use: whether a CUDA graph computed it; None where there are none.
    """

    step: int
    rows: tuple[RowResult, ...]
    forward_s: float
    error: str | None = None
    probe_holds: bool | None = None
    tokens: tuple[int, ...] | None = None
    graph_use: GraphUse | None = None

    def decoded(self) -> tuple[int, ...] | None:
        """Return the token of each row, where every row gave just one; None elsewhere."""
        if self.tokens is not None:
            return self.tokens
        for row in self.rows:
            is_plain = row.finite and row.failure is None and len(row.token_ids) == 1
            if not is_plain or row.logprobs or row.prompt_logprobs:
                return None
        return tuple([row.token_ids[0] for row in self.rows]) or None

    def row_results(self) -> tuple[RowResult, ...]:
        """Return one result per row of the batch, in its order."""
        if self.tokens is None:
            return self.rows
        return tuple([RowResult((token,), (), (), finite=True) for token in self.tokens])


class PendingStep(Protocol):
    """Stand for a forward that was launched."""

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""

    def wait(self) -> StepResult:
        """Block until the device has finished, and return the result. Called once.

        A forward that the device refuses is a result with an `error`. A lost device raises.
        """


class Runner(Protocol):
    """Execute batches strictly in launch order."""

    def launch(self, batch: Batch) -> PendingStep:
        """Start one forward without waiting for it. Called from one thread.

        A CPU runner computes the forward here and returns a finished step. A forward that the
        device refuses is a result with an `error`; what raises here or in `wait` ends the engine.
        """
