"""Turn a `Batch` of ids and arrays into the tensors of one forward.

The runner orders tokens itself: rows with few tokens come first, shortest context first among
equals, so that attention can take them in one call. Results are returned in the batch's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache.pool.page_table import PageTable
from cache.pool.upload import upload
from cache.types import PoolName, pages_for
from session_server.attention.base import AttentionMeta, Span
from session_server.core.batch import Batch, BatchRow, DecodeRows
from session_server.runner.verification import SampleSpan


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """Hold the tensors of a forward of few tokens a row, for a graph that computes it.

    `by_token`: int64 [2 + pools, tokens], token ids, positions and the slots of every pool.
    `by_row`: int64 [5 + max_row_tokens, rows], as `DeviceRows.of` takes it; [4, rows] of models
    without recurrent states. `max_row_tokens`: the most tokens of a row.
    """

    by_token: Tensor
    by_row: Tensor
    max_row_tokens: int

    @property
    def num_rows(self) -> int:
        """Return the number of rows."""
        return self.by_row.shape[1]


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """Hold the tensors of one forward, and which rows its results belong to.

    `token_ids`, `positions`: int64 [tokens]. `logits_indices`: int64 [n], the tokens whose hidden
    state is returned: first the sampled positions, in the order of `sample_spans`; then those of
    prompt logprobs, row after row of `prompt_rows`; then the last token of each row of `unsampled`,
    which shows whether the row's KV is finite. `sampled`, `prompt_rows`, `unsampled`: indices into
    the rows of the batch, the second of those that ask for prompt logprobs. `sample_spans`: the
    positions each row of `sampled` samples; `sample_rows`, int64 [sampled], their rows of the
    tables. `is_probe`: KV is written to the padding page.
    `packed`: the same for a graph; None if a row has more tokens than graphs take.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionMeta
    logits_indices: Tensor
    sampled: tuple[int, ...]
    prompt_rows: tuple[int, ...]
    unsampled: tuple[int, ...]
    sample_spans: tuple[SampleSpan, ...]
    sample_rows: Tensor
    is_probe: bool = False
    packed: PackedInputs | None = None

    @property
    def num_choices(self) -> int:
        """Return the number of tokens sampled; their positions come first in `logits_indices`."""
        return sum(span.num_tokens for span in self.sample_spans)


class InputBuilder:
    """Build inputs on the host and move them to the device in one copy."""

    def __init__(
        self, tables: Mapping[PoolName, PageTable], *, page_size: int, last_tokens: Tensor
    ) -> None:
        """Create the builder; `tables` already hold a batch's pages when `build` is called.

        `last_tokens`: int64 [rows + 1] on the device: what each row sampled last.
        """
        self._tables = tables
        self._page_size = page_size
        self._last_tokens = last_tokens
        self._device = last_tokens.device
        self.max_row_tokens = 0
        """Tokens of a row that graphs take; 0 without graphs."""

    def build(self, batch: Batch, drafts: Tensor | None = None) -> ForwardInputs:
        """Build the inputs of one forward.

        `drafts`: int64 [n, most drafts of a row], on the device, for the rows that have drafts but
        do not bring them, in the order of the batch.
        """
        if batch.decoding is not None:
            return self._build_decoding(batch.decoding)
        rows = batch.rows
        spans, offsets = _order_spans(rows)
        host, unseen = self._columns(rows, spans, are_made=drafts is not None)
        sampled = tuple(i for i, row in enumerate(rows) if row.sample)
        prompt_rows = tuple(i for i, row in enumerate(rows) if row.prompt_logprobs is not None)
        unsampled = tuple(i for i, row in enumerate(rows) if not row.sample)
        logits_indices = _logits_indices(
            rows, offsets, sampled=sampled, prompt_rows=prompt_rows, unsampled=unsampled
        )
        sample_rows = np.array([rows[i].row for i in sampled], dtype=np.int64)
        max_row_tokens = spans[-1][0].num_tokens
        is_packed = max_row_tokens <= self.max_row_tokens
        by_row = _by_row(spans) if is_packed else np.empty((0, 0), dtype=np.int64)
        by_token, rows_there, indices_there, sample_rows_there, unseen_there = self._upload(
            host, by_row, logits_indices, sample_rows, unseen
        )
        token_ids, positions, *slot_mappings = by_token.unbind(0)
        if unseen.size:
            where, whose = unseen_there.unbind(0)
            token_ids.index_copy_(0, where, self._last_tokens.index_select(0, whose))
        if drafts is not None:
            _scatter_drafts_(token_ids, drafts, rows, offsets)
        return ForwardInputs(
            token_ids=token_ids,
            positions=positions,
            attention=AttentionMeta(
                tuple(span for span, _ in spans),
                dict(zip(self._tables, slot_mappings, strict=True)),
            ),
            logits_indices=indices_there,
            sampled=sampled,
            prompt_rows=prompt_rows,
            unsampled=unsampled,
            sample_spans=tuple(_sample_span(rows[i]) for i in sampled),
            sample_rows=sample_rows_there,
            packed=PackedInputs(by_token, rows_there, max_row_tokens) if is_packed else None,
        )

    def _columns(
        self, rows: tuple[BatchRow, ...], spans: list[tuple[Span, int]], *, are_made: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return token ids, positions and the slots of every pool, [2 + pools, tokens]; and [2, n],
        for those tokens that only the device knows, where they are and in which row they were
        sampled. `are_made`: drafts that a row does not bring are written over these, by others."""
        host = np.empty((2 + len(self._tables), sum(row.num_tokens for row in rows)), np.int64)
        unseen: list[tuple[int, int]] = []
        for span, index in spans:
            row, end = rows[index], span.offset + span.num_tokens
            first_draft = end - row.num_drafts
            if row.tokens is None:
                unseen.append((span.offset, span.row))
                host[0, span.offset] = 0
            else:
                assert len(row.tokens) == row.num_tokens - row.num_drafts, "a row brings its tokens"
                host[0, span.offset : first_draft] = row.tokens
            if row.num_drafts:
                assert row.drafts is not None or are_made, "drafts are given or made"
                host[0, first_draft:end] = 0 if row.drafts is None else row.drafts
            if span.num_tokens > 1:
                self._write_positions(span, host[1:, span.offset : end])
        self._write_single_positions([span for span, _ in spans if span.num_tokens == 1], host[1:])
        return host, np.array(unseen, dtype=np.int64).reshape(-1, 2).T

    def _upload(self, *arrays: NDArray[np.int64]) -> Iterator[Tensor]:
        """Take arrays to the device in one copy."""
        flat = np.concatenate([array.reshape(-1) for array in arrays])
        there = upload(torch.from_numpy(flat), self._device)
        parts = torch.split(there, [array.size for array in arrays])
        return (part.view(array.shape) for part, array in zip(parts, arrays, strict=True))

    def _build_decoding(self, decoding: DecodeRows) -> ForwardInputs:
        """Build the inputs of rows with one position each from their columns."""
        num_rows = len(decoding)
        rows = decoding.table_rows.astype(np.int64)
        starts = decoding.starts.astype(np.int64)
        order = np.argsort(starts, kind="stable")
        num_pools = len(self._tables)
        # Rows of `host`: `PackedInputs.by_token` and `by_row`, `logits_indices`, `sample_rows`.
        host = np.empty((8 + num_pools, num_rows), dtype=np.int64)
        by_row, to = host[2 + num_pools : -2], np.arange(num_rows)
        host[0] = 0 if decoding.tokens is None else np.array(decoding.tokens)[order]
        host[1] = starts[order]
        by_row[0], by_row[1], by_row[2], by_row[3] = rows[order], host[1], 1, to
        self._write_slots(by_row[0], host[1], host[2 : 2 + num_pools])
        host[-2, order], host[-1] = to, rows
        block = upload(torch.from_numpy(host), self._device)
        by_token, device_rows = block[: 2 + num_pools], block[2 + num_pools : -2]
        token_ids, positions, *slot_mappings = by_token.unbind(0)
        if decoding.tokens is None:
            torch.index_select(self._last_tokens, 0, device_rows[0], out=token_ids)
        row_list, start_list = rows.tolist(), starts.tolist()
        spans = [Span(row_list[i], start_list[i], 1, at) for at, i in enumerate(order.tolist())]
        return ForwardInputs(
            token_ids=token_ids,
            positions=positions,
            attention=AttentionMeta(
                tuple(spans), dict(zip(self._tables, slot_mappings, strict=True))
            ),
            logits_indices=block[-2],
            sampled=tuple(range(num_rows)),
            prompt_rows=(),
            unsampled=(),
            sample_spans=tuple(
                [
                    SampleSpan(row, start + 1)
                    for row, start in zip(row_list, start_list, strict=True)
                ]
            ),
            sample_rows=block[-1],
            packed=PackedInputs(by_token, device_rows, 1),
        )

    def _write_positions(self, span: Span, out: NDArray[np.int64]) -> None:
        """Write positions and slots of one span to `out` [1 + pools, num_tokens]."""
        page_size = self._page_size
        num_pages = pages_for(span.end, page_size)
        positions = np.arange(span.start, span.end)
        out[0] = positions
        for of_pool, table in zip(out[1:], self._tables.values(), strict=True):
            pages = table.pages(span.row, num_pages)
            of_pages = pages[positions // page_size].astype(np.int64)
            of_pool[:] = of_pages * page_size + positions % page_size

    def _write_single_positions(self, spans: list[Span], out: NDArray[np.int64]) -> None:
        """Write positions and slots of spans of one token, which come first, all at once."""
        if not spans:
            return
        rows_starts = np.array([(span.row, span.start) for span in spans], dtype=np.int64)
        rows, positions = rows_starts.T
        out = out[:, : len(spans)]
        out[0] = positions
        self._write_slots(rows, positions, out[1:])

    def _write_slots(
        self, rows: NDArray[np.int64], positions: NDArray[np.int64], out: NDArray[np.int64]
    ) -> None:
        """Write the slots of one position of each row, both [n], to `out` [pools, n]."""
        pages, offsets = np.divmod(positions, self._page_size)
        for of_pool, table in zip(out, self._tables.values(), strict=True):
            # Pages are int32; slots of a large pool are not.
            of_pool[:] = table.host[rows, pages].astype(np.int64) * self._page_size + offsets


def _order_spans(rows: tuple[BatchRow, ...]) -> tuple[list[tuple[Span, int]], list[int]]:
    """Return spans in flat order with the index of their row, and each row's offset."""
    order = sorted(range(len(rows)), key=lambda i: (rows[i].num_tokens, rows[i].start))
    spans: list[tuple[Span, int]] = []
    offsets = [0] * len(rows)
    offset = 0
    for index in order:
        row = rows[index]
        assert row.num_tokens > 0, "a row computes something"
        spans.append((Span(row.row, row.start, row.num_tokens, offset, row.states), index))
        offsets[index] = offset
        offset += row.num_tokens
    return spans, offsets


def _by_row(spans: list[tuple[Span, int]]) -> NDArray[np.int64]:
    """Return `PackedInputs.by_row`."""
    described = [(span.row, span.start, span.num_tokens, span.offset) for span, _ in spans]
    by_row = np.array(described, dtype=np.int64).T
    if spans[0][0].states is None:
        return by_row
    states = np.zeros((1 + spans[-1][0].num_tokens, len(spans)), dtype=np.int64)
    for column, (span, _) in zip(states.T, spans, strict=True):
        assert span.states is not None, "all rows of a model have states"
        column[0] = span.states.source
        for length, page in span.states.targets:
            column[length - span.start] = page
    return np.concatenate((by_row, states))


def _sample_span(row: BatchRow) -> SampleSpan:
    return SampleSpan(row.row, row.start + row.num_tokens - row.num_drafts, 1 + row.num_drafts)


def _scatter_drafts_(
    token_ids: Tensor, drafts: Tensor, rows: tuple[BatchRow, ...], offsets: list[int]
) -> None:
    """Write drafts that only the device knows to their positions in the forward."""
    drafted = [i for i, row in enumerate(rows) if row.num_drafts and row.drafts is None]
    cells = [
        (offsets[index] + rows[index].num_tokens - rows[index].num_drafts + step, number, step)
        for number, index in enumerate(drafted)
        for step in range(rows[index].num_drafts)
    ]
    where, numbers, steps = upload(torch.tensor(cells, dtype=torch.int64), drafts.device).unbind(1)
    token_ids.index_copy_(0, where, drafts[numbers, steps])


def _logits_indices(
    rows: tuple[BatchRow, ...],
    offsets: list[int],
    *,
    sampled: tuple[int, ...],
    prompt_rows: tuple[int, ...],
    unsampled: tuple[int, ...],
) -> NDArray[np.int64]:
    last = [offset + row.num_tokens - 1 for offset, row in zip(offsets, rows, strict=True)]
    choices = [last[i] - behind for i in sampled for behind in range(rows[i].num_drafts, -1, -1)]
    parts = [np.array(choices, dtype=np.int64)]
    for index in prompt_rows:
        row, requested = rows[index], rows[index].prompt_logprobs
        assert requested is not None
        first = requested.start - row.start
        assert 0 <= first <= row.num_tokens - len(requested.targets), "they lie inside the row"
        parts.append(offsets[index] + first + np.arange(len(requested.targets)))
    if unsampled:
        parts.append(np.array([last[i] for i in unsampled], dtype=np.int64))
    return np.concatenate(parts) if len(parts) > 1 else parts[0]
