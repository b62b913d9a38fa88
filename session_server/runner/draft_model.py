"""Propose drafts with a small model.

The draft model has KV memory of its own under the target's page ids and page tables, and every
forward of the target runs through it too. So its KV is valid wherever the target's is, and needs no
bookkeeping: a page that is shared, published, cooled or moved covers both.

It samples with the target's sampler, rules and noise (see `verification`): the closer its
distribution is to the target's, the more drafts are accepted, sampled or greedy.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from msgspec.structs import replace
from torch import Tensor

from cache.pool.page_table import PageTable
from cache.pool.upload import upload_values
from cache.types import PoolName
from session_server.core.batch import Batch, BatchRow
from session_server.runner.inputs import ForwardInputs, InputBuilder
from session_server.runner.paged_decoder import PagedDecoder
from session_server.runner.sampler import Sampler
from session_server.runner.verification import SampleSpan


class DraftModel:
    """Propose drafts for the rows that have drafts but do not bring them."""

    def __init__(
        self,
        model: PagedDecoder,
        tables: Mapping[PoolName, PageTable],
        sampler: Sampler,
        *,
        num_rows: int,
    ) -> None:
        """Create the draft model; `tables` and `sampler` are the target's, as is the vocabulary.

        `num_rows`: rows of the tables, the padding row excluded.
        """
        self.model = model
        self._sampler = sampler
        device = model.decoder.device
        self._last_drafts = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self._steps = InputBuilder(tables, page_size=model.page_size, last_tokens=self._last_drafts)

    def reserve(self, num_tokens: int) -> int:
        """Allocate what its forwards work in; see `PagedDecoder.reserve`."""
        return self.model.reserve(num_tokens)

    def use_graphs(self) -> None:
        """Replay what was captured: forwards of one token a row."""
        self._steps.max_row_tokens = 1

    def propose(self, certain: ForwardInputs, batch: Batch) -> Tensor | None:
        """Compute a forward's certain tokens, then propose drafts for rows started in the sampler.

        `certain`: the inputs of `batch` without the drafts that are still missing.

        Returns:
            int64 [n, most drafts of a row], as `InputBuilder.build` takes them; None if no row
            needs any.
        """
        drafting = [row for row in batch.rows if needs_drafts(row)]
        ends = {span.row: span.offset + span.num_tokens - 1 for span in certain.attention.spans}
        last = [ends[row.row] for row in drafting]
        at = upload_values(last, torch.int64, certain.token_ids.device)
        hidden = self.model.forward(certain, at)
        return self._decode_drafts(drafting, hidden) if drafting else None

    def _decode_drafts(self, rows: list[BatchRow], hidden: Tensor) -> Tensor:
        """Decode one position after the other.

        `hidden`: [n, hidden], of the last certain tokens. The KV of the last draft is computed too:
        if all drafts are accepted, it is part of the history.
        """
        num_steps, device = max(row.num_drafts for row in rows), hidden.device
        drafts = torch.zeros((len(rows), num_steps), dtype=torch.int64, device=device)
        counted: list[tuple[list[SampleSpan], Tensor]] = []
        active = list(range(len(rows)))
        for step in range(num_steps):
            if step:
                continuing = [i for i, index in enumerate(active) if rows[index].num_drafts > step]
                active = [active[i] for i in continuing]
                hidden = hidden.index_select(0, upload_values(continuing, torch.int64, device))
            draft_rows = [_draft_row(rows[index], step) for index in active]
            spans = [SampleSpan(row.row, row.start) for row in draft_rows]
            tokens = self._sampler.sample(self.model.logits(hidden), spans)
            self._sampler.count_outputs(spans, tokens)
            counted.append((spans, tokens))
            drafts[:, step].index_copy_(0, upload_values(active, torch.int64, device), tokens)
            of_rows = upload_values([row.row for row in draft_rows], torch.int64, device)
            self._last_drafts.index_copy_(0, of_rows, tokens)
            inputs = self._steps.build(Batch(0, tuple(draft_rows), ()))
            hidden = self.model.forward(inputs, inputs.logits_indices)
        for spans, tokens in counted:
            # Drafts are not output: the target counts what it samples.
            self._sampler.uncount_outputs(spans, tokens)
        return drafts


def needs_drafts(row: BatchRow) -> bool:
    """Return whether the row's drafts are still missing."""
    return row.num_drafts > 0 and row.drafts is None


def without_missing_drafts(batch: Batch) -> Batch:
    """Return the batch without the positions whose draft is still missing."""
    rows = (
        replace(row, num_tokens=row.num_tokens - row.num_drafts, num_drafts=0)
        if needs_drafts(row)
        else row
        for row in batch.listed
    )
    return replace(batch, listed=tuple(rows))


def _draft_row(row: BatchRow, step: int) -> BatchRow:
    """Return the position of a row's draft number `step`; only the device knows its token."""
    return replace(
        row,
        start=row.start + row.num_tokens - row.num_drafts + step,
        num_tokens=1,
        tokens=None,
        sample=True,
        sampling=None,
        prompt_logprobs=None,
        num_drafts=0,
    )
