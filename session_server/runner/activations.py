"""Measure what the largest forward takes beside weights and KV, before KV is planned.

As vLLM's profile run does (`Worker.determine_available_memory`): the forward is computed over KV
memory of its own, and the peak of the allocator is kept free for it. All rows are in the padding
page, which a table without writes names everywhere, so one page serves any length of history.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from cache.spec import CacheSpec, Capacity, LayerKind
from cache.types import RowId, StateMoves, Tokens, TurnId
from session_server.core.batch import Batch, BatchRow, PromptLogprobRange, Runner, SamplingStart
from session_server.core.sampling import MAX_TOP_LOGPROBS, SamplingParams
from session_server.runner.capacity import LargestForward, free_bytes, says_out_of_memory

RunnerMaker = Callable[[Capacity], Runner]
"""Allocate KV for a model that is loaded, and return what runs it."""

COSTLIEST_SAMPLING: Final = SamplingParams(
    top_p=0.9, repetition_penalty=1.1, logprobs=True, top_logprobs=MAX_TOP_LOGPROBS
)
"""Penalties keep counts of each row, top-p sorts the vocabulary, logprobs are of all of it."""

_NO_TOKENS: Final = np.empty(0, np.int32)


def measure_activations(
    largest: LargestForward,
    make_runner: RunnerMaker,
    stored: CacheSpec,
    *,
    device: torch.device,
    max_context_len: int,
) -> int:
    """Return the bytes that the largest forwards take of an accelerator at their peak.

    `stored`: KV of all models. Histories are as long as the context, and as KV could be if it had
    all that is free.

    Raises:
        ValueError: they take more than there is.
        RuntimeError: the model does not run.
    """
    free = free_bytes(device)
    held_len = free // max(1, stored.bytes_per_page) * stored.page_size
    longest = min(max_context_len, max(held_len, largest.chunk_tokens))
    kinds = {group.pool: group.kind for group in stored.groups}
    pools = [pool for pool, kind in kinds.items() if kind is not LayerKind.RECURRENT]
    capacity = Capacity(dict.fromkeys(pools, 1), largest.num_turns, longest, num_states=1)
    # Latents are expanded block by block, so their history takes no memory, and much time.
    has_history = LayerKind.LATENT not in kinds.values()
    try:
        runner = make_runner(capacity)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        for batch in largest_batches(largest, longest, has_history=has_history):
            if (error := runner.launch(batch).wait().error) is not None:
                raise RuntimeError(f"the model does not run: {error}")
        return torch.cuda.max_memory_allocated(device) - before
    except Exception as error:
        if not says_out_of_memory(str(error)):
            raise
        raise ValueError(
            f"a forward of {largest.chunk_tokens} tokens of prompts and {largest.num_turns} turns "
            f"does not fit into {free / 2**30:.3g} GiB free memory: lower --chunked-prefill-size, "
            "--max-running-requests or --context-length"
        ) from error


def largest_batches(
    largest: LargestForward, longest: int, *, has_history: bool
) -> tuple[Batch, ...]:
    """Return the forward with the most tokens, and with drafts the one that samples most.

    Every row samples. The chunk's row asks for the logprobs of its prompt, and ends at position
    `longest` if it `has_history`; so does the first of the others.
    """
    num_others, num_chunk = largest.num_turns - 1, min(largest.chunk_tokens, longest)
    chunk = _row(1, longest - num_chunk if has_history else 0, num_chunk)
    others = [_row(2 + i, 0 if i else longest - 1) for i in range(num_others)]
    batches = [Batch(0, (chunk, *others), ())]
    if num_drafts := min(largest.num_drafts, longest - 1):
        left, drafting = num_chunk, []
        for row in range(1, 1 + largest.num_turns):
            own = min(num_drafts, left)
            left -= own
            drafts = None if largest.makes_drafts or not own else np.zeros(own, np.int32)
            start = longest - 1 - own if row == 1 else 0
            drafting.append(_row(row, start, num_drafts=own, drafts=drafts))
        batches.append(Batch(0, tuple(drafting), ()))
    return tuple(batches)


def _row(
    row: int,
    start: int,
    num_tokens: int = 1,
    *,
    num_drafts: int = 0,
    drafts: Tokens | None = None,
) -> BatchRow:
    """Return a row of `num_tokens` certain tokens, and of drafts behind them."""
    targets = np.zeros(num_tokens, np.int32)
    asked = PromptLogprobRange(start, targets, MAX_TOP_LOGPROBS) if num_tokens > 1 else None
    return BatchRow(
        turn_id=TurnId("largest"),
        attempt=0,
        row=RowId(row),
        start=start,
        num_tokens=num_tokens + num_drafts,
        tokens=targets,
        sample=True,
        sampling=SamplingStart(COSTLIEST_SAMPLING, 0, start + 1, _NO_TOKENS, _NO_TOKENS),
        prompt_logprobs=asked,
        num_drafts=num_drafts,
        drafts=drafts,
        states=StateMoves(0, tuple((start + num_tokens + i, 0) for i in range(1 + num_drafts))),
    )
