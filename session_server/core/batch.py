"""What one forward computes, and what it gave: the only thing engine and runner share.

A `Batch` is frozen ints and arrays. Rows name their KV by (row, start, length); the page table
deltas the forward needs travel with it and are applied in launch order, so a page freed while an
earlier launch still reads it is first written by a later one.

These values are made anew in every step. As `msgspec` structs they cost a tenth of what frozen
dataclasses do.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from cache.types import RowId, StateMoves, TableWrite, Tokens, TurnId
from session_server.core.sampling import SamplingParams, TokenLogprob


class SamplingStart(msgspec.Struct, frozen=True, gc=False):
    """Sent with the first row of an admission: what the sampler must remember of a turn.

    `prompt_len`: position of the turn's first output, so that a position alone says how many
    outputs precede it. `context`: int32 [length], every token that penalties look at as prompt
    (empty without penalties); `outputs`: those generated before a retraction, counted as output.
    """

    params: SamplingParams
    seed: int
    prompt_len: int
    context: Tokens
    outputs: Tokens


class ScoreRange(msgspec.Struct, frozen=True, gc=False):
    """Wanted: logprobs of prompt tokens.

    The logits at position start + i score `targets[i]` (the token at start + i + 1). `targets`:
    int32 [n]; positions lie inside the row's [start, start + num_tokens). `num_top` alternatives.
    """

    start: int
    targets: Tokens
    num_top: int


class BatchRow(msgspec.Struct, frozen=True, gc=False):
    """One turn's share of a forward: positions [start, start + num_tokens).

    The last `num_drafts` of them hold guesses that this forward verifies; what comes before is
    certain. `tokens`: int32 [num_tokens - num_drafts], the certain input ids; or None when there is
    one, sampled for this row by the launch before, which the host has not seen yet. `drafts`: int32
    [num_drafts], the guesses; None without any, and when the runner's draft model makes them.

    `sample`: the logits of the last certain position and of every draft choose a token each, the
    one at position p from the logits at p - 1; (seed, p) alone decide its randomness. A draft is
    right when it is the token chosen for its position, so that guessing changes no answer,
    sampled or greedy; choices behind a wrong draft are void. A row with drafts samples, and its
    turn is launched again only when its result is known. Sampler state is kept per `row`: it lives
    from one `SamplingStart` to the next.
    `score`: prompt positions whose successor's logprob is wanted, None for none.
    `attempt` counts admissions of the turn; results of an older one are dropped.
    `states`: where its recurrent state comes from and goes to; None where no layer has one.
    """

    turn_id: TurnId
    attempt: int
    row: RowId
    start: int
    num_tokens: int
    tokens: Tokens | None
    sample: bool
    sampling: SamplingStart | None
    score: ScoreRange | None = None
    num_drafts: int = 0
    drafts: Tokens | None = None
    states: StateMoves | None = None


class Probe(msgspec.Struct, frozen=True, gc=False):
    """Wanted: is what a page of a parked session holds what its tokens give?

    The runner computes positions [start, start + len(tokens)) of `row` once more, from the KV
    before them, into the padding page, and compares. `tokens`: int32 [n], n <= page_size; `start`
    is a multiple of page_size. Nobody's KV is written. `states`: the recurrent state to begin with,
    and as its target the one that is compared, unless it is the padding page.
    """

    row: RowId
    start: int
    tokens: Tokens
    states: StateMoves | None = None


class Batch(msgspec.Struct, frozen=True, gc=False):
    """One forward. `step` numbers launches from 1; results come back in the same order.

    A batch with a `probe` has no rows.
    """

    step: int
    rows: tuple[BatchRow, ...]
    table_writes: tuple[TableWrite, ...]
    probe: Probe | None = None


class RowResult(msgspec.Struct, frozen=True, gc=False):
    """What one row gave. `token_ids`: for a sampled row the right drafts and one id more, so 1 to
    1 + num_drafts of them; none otherwise. KV is valid up to the last right draft. `logprobs`: one
    per token id, or empty.

    `finite` is False when the row's logits, or its last hidden state where it has no logits, held
    NaN or Inf; `token_ids` is then empty.
    `scores`: one per target of the row's `score`, in order.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    scores: tuple[TokenLogprob, ...]
    finite: bool


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """Outcome of one launch: `rows` in the order of the batch, `forward_s` its duration.

    `error` is set when the device failed and nothing of the batch may be trusted. `probe_holds`:
    whether the content that the batch's probe looked at is right; None without a probe.
    """

    step: int
    rows: tuple[RowResult, ...]
    forward_s: float
    error: str | None = None
    probe_holds: bool | None = None


class PendingStep(Protocol):
    """A launched forward."""

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> StepResult:
        """Block until the device has finished; called once."""
        ...


class Runner(Protocol):
    """Executes batches strictly in launch order."""

    def launch(self, batch: Batch) -> PendingStep:
        """Start one forward. A CPU runner computes here and returns a finished step."""
        ...
