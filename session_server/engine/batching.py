"""Turn planned work into the rows of a `Batch`: ints and arrays only."""

from __future__ import annotations

from typing import Final

import numpy as np

from cache.session_cache import SessionAwareCache
from session_server.core.batch import (
    BatchRow,
    CompiledGrammar,
    PromptLogprobRange,
    SamplingStart,
)
from session_server.engine.turn import Turn

_NO_TOKENS: Final = np.empty(0, dtype=np.int32)


def make_row(
    cache: SessionAwareCache,
    turn: Turn,
    num_tokens: int,
    num_drafts: int,
    *,
    grammar: CompiledGrammar | None = None,
) -> BatchRow:
    """Return the row for the next `num_tokens` positions of a running turn and `num_drafts` drafts.

    Counts them as launched. `grammar`: that of the turn.
    """
    admission = turn.current_admission
    start, end = admission.launched_len, admission.launched_len + num_tokens
    is_unseen = start >= turn.known_len
    assert 0 < num_tokens <= turn.num_uncomputed
    assert not is_unseen or num_tokens == 1, "one token at a time is sampled"
    session_id, draft = turn.request.session_id, admission.draft
    drafts = None if draft is None or draft.tokens is None else draft.tokens[:num_drafts]
    row = BatchRow(
        turn_id=turn.turn_id,
        attempt=admission.attempt,
        row=admission.loan.row,
        start=start,
        num_tokens=num_tokens + num_drafts,
        tokens=None if is_unseen else cache.tokens(session_id, start, end),
        sample=turn.max_new > 0 and end == turn.expected_len,
        sampling=None if admission.is_sampler_started else _sampling_start(cache, turn, grammar),
        prompt_logprobs=_prompt_logprob_range(cache, turn, start, end),
        num_drafts=num_drafts,
        drafts=drafts if num_drafts else None,
        states=admission.loan.state_moves(start, end + num_drafts, num_drafts),
    )
    admission.is_sampler_started = True
    admission.launched_len = end + num_drafts
    admission.num_sampling += row.sample
    return row


def _sampling_start(
    cache: SessionAwareCache, turn: Turn, grammar: CompiledGrammar | None
) -> SamplingStart:
    sampling = turn.request.sampling
    assert sampling.seed is not None, "the server draws a seed"
    assert (grammar is None) == (sampling.grammar is None), "compiled before it runs"
    context, outputs = _NO_TOKENS, _NO_TOKENS
    if sampling.has_penalties:
        context = cache.tokens(turn.request.session_id, 0, turn.prompt_len)
    if sampling.has_penalties or grammar is not None:
        outputs = np.array(turn.outputs, dtype=np.int32)
    return SamplingStart(sampling, sampling.seed, turn.prompt_len, context, outputs, grammar)


def _prompt_logprob_range(
    cache: SessionAwareCache, turn: Turn, start: int, end: int
) -> PromptLogprobRange | None:
    """Return the positions in [start, end) whose logits give prompt logprobs; None without any.

    The last position of a chunk gives the logprob of the next chunk's first token. Logprobs
    computed before a retraction are not computed again.
    """
    next_position = turn.next_prompt_logprob_position()
    if next_position is None:
        return None
    first, last = max(start, next_position), min(end, turn.prompt_len - 1)
    if first >= last:
        return None
    targets = cache.tokens(turn.request.session_id, first + 1, last + 1)
    return PromptLogprobRange(first, targets, turn.request.sampling.top_logprobs)
