"""Advance recurrent states with kernels of our own in Triton: the `triton` backend.

A layer is one launch for its convolution and one for its recurrence, two where a batch has chunks
and rows with few tokens. All that a launch needs besides inputs and states is the table of pieces
of rows, made once per step and copied to the device at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import triton
from torch import Tensor

from cache.pool.recurrent import StatePool
from cache.pool.upload import upload
from cache.types import NULL_PAGE, NULL_ROW, PoolName
from session_server.attention.base import (
    AttentionMeta,
    DeviceRows,
    Recurrence,
    RecurrenceRule,
    RecurrentPlan,
    Span,
)
from session_server.attention.triton import launching
from session_server.attention.triton.pieces import (
    CHUNK,
    MAX_STEPS,
    NO_PAGE,
    PIECE_COLUMNS,
    Pieces,
    cut_graph,
    cut_rows,
)
from session_server.attention.triton.recurrent_kernels import (
    advance_delta_rule,
    advance_state_space,
    convolve_pieces,
)

CONVOLVED_TOKENS: Final = 8
CONVOLVED_CHANNELS: Final = 256
"""What a program convolves at once."""

STEPPED_PART: Final = 32
"""Rows or columns of a head's state that a program has which goes from token to token."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Say how a recurrence is launched.

    `value`: which of its inputs is [tokens, heads, ...]. `key`: which is shared by consecutive
    heads. `cut_axis`: the axis of a head's state that programs share, the one the outputs have.
    `chunked_part`: what a program has of it that takes chunks, as much as registers allow.
    """

    kernel: Any
    value: int
    key: int
    cut_axis: int
    chunked_part: int


RULES: Final[Mapping[RecurrenceRule, Rule]] = {
    "state space": Rule(advance_state_space, value=0, key=2, cut_axis=0, chunked_part=32),
    "delta rule": Rule(advance_delta_rule, value=2, key=0, cut_axis=1, chunked_part=16),
}


def convolution_constants(channels: int, width: int, *, has_bias: bool) -> dict[str, Any]:
    """Return what of a layer is compiled into its convolution."""
    return {
        "CHANNELS": channels,
        "WIDTH": width,
        "HAS_BIAS": has_bias,
        "BLOCK_T": CONVOLVED_TOKENS,
        "BLOCK_C": min(triton.next_power_of_2(channels), CONVOLVED_CHANNELS),
        "BLOCK_W": triton.next_power_of_2(width - 1),
    }


def recurrence_constants(
    rule: Rule, shape: tuple[int, ...], group: int, *, is_chunked: bool
) -> dict[str, Any]:
    """Return what of a layer is compiled into its recurrence.

    `shape`: heads, rows and columns of a state. `group`: heads that share a key.
    """
    blocks = [max(16, triton.next_power_of_2(size)) for size in shape[1:]]
    part = rule.chunked_part if is_chunked else STEPPED_PART
    blocks[rule.cut_axis] = min(blocks[rule.cut_axis], part)
    return {
        "NUM_HEADS": shape[0],
        "GROUP": group,
        "ROWS": shape[1],
        "COLUMNS": shape[2],
        "BLOCK_R": blocks[0],
        "BLOCK_C": blocks[1],
        "BLOCK_T": CHUNK if is_chunked else 1,
    }


@dataclass(frozen=True, slots=True)
class TritonRecurrentPlan:
    """Read and write one forward's states; implements `RecurrentPlan`.

    `pieces`, `rows`: see `Pieces`, on the device.
    """

    pool: StatePool
    pieces: Tensor
    rows: Tensor
    num_stepped: int

    def convolve(self, layer: int, x: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve every channel; implements `RecurrentPlan.convolve`."""
        (width, channels), out = taps.shape, x.new_empty(x.shape)
        constants = convolution_constants(channels, width, has_bias=bias is not None)
        launching.run(
            convolve_pieces,
            (len(self.pieces), triton.cdiv(channels, constants["BLOCK_C"])),
            x,
            taps,
            taps if bias is None else bias,
            self.pool.parts[layer][0],
            out,
            self.pieces,
            _stride(x),
            **constants,
        )
        return out

    def recur(self, layer: int, recurrence: Recurrence, *inputs: Tensor) -> Tensor:
        """Advance the states; implements `RecurrentPlan.recur`."""
        rule, states = RULES[recurrence.rule], self.pool.parts[layer][1]
        _, num_heads, *sizes = states.shape
        num_parts = sizes[rule.cut_axis]
        out = inputs[0].new_empty((len(inputs[0]), num_heads, num_parts))
        group = num_heads // inputs[rule.key].shape[1]
        for is_chunked in (False, True):
            rows = self.rows[self.num_stepped :] if is_chunked else self.rows[: self.num_stepped]
            if not len(rows):
                continue
            constants = recurrence_constants(
                rule, (num_heads, *sizes), group, is_chunked=is_chunked
            )
            block = constants["BLOCK_C" if rule.cut_axis else "BLOCK_R"]
            launching.run(
                rule.kernel,
                (len(rows), num_heads, triton.cdiv(num_parts, block)),
                *inputs,
                out,
                states,
                self.pieces,
                rows,
                *map(_stride, inputs),
                **constants,
            )
        return out


class TritonRecurrentGraphPlan(TritonRecurrentPlan):
    """Advance the states of rows that are told on the device; implements `GraphPlan`."""

    __slots__ = ()

    def refresh(self, rows: DeviceRows) -> None:
        """Go on from other states from now on; implements `GraphPlan.refresh`."""
        targets = rows.targets
        indices = torch.arange(targets.shape[1], device=targets.device)
        is_token = indices < rows.lengths[:, None]
        table, offsets = self.pieces.view(*targets.shape, PIECE_COLUMNS), rows.offsets[:, None]
        table[:, :, 0] = offsets
        table[:, :, 1] = offsets + indices
        table[:, :, 2] = offsets + indices + is_token
        table[:, :, 3] = rows.sources[:, None]
        table[:, :, 4] = targets.where(is_token & (targets != NULL_PAGE), NO_PAGE)

    def plan(self, slot_mapping: Mapping[PoolName, Tensor]) -> TritonRecurrentPlan:
        """Return itself; implements `GraphPlan.plan`."""
        del slot_mapping
        return self


@dataclass(frozen=True, slots=True)
class TritonRecurrentBackend:
    """Plan forwards over one pool of states of a model that computes in `dtype`."""

    pool: StatePool
    dtype: torch.dtype

    def plan(self, meta: AttentionMeta) -> TritonRecurrentPlan:
        """Cut the rows into pieces, and take them to the device."""
        # Products of chunks are rounded, which fp32 is asked for to avoid; the interpreter takes
        # what is served.
        is_exact = self.dtype == torch.float32 and not launching.IS_INTERPRETED
        max_steps = sys.maxsize if is_exact else MAX_STEPS
        return TritonRecurrentPlan(self.pool, *self._uploaded(cut_rows(meta.spans, max_steps)))

    def plan_graph(
        self, num_rows: int, max_row_tokens: int, longest: int
    ) -> TritonRecurrentGraphPlan:
        """Prepare forwards of so many rows, of up to `max_row_tokens` tokens each, which may leave
        a state after every token. `longest` is nothing to a state."""
        del longest
        pieces = cut_graph(num_rows, max_row_tokens)
        return TritonRecurrentGraphPlan(self.pool, *self._uploaded(pieces))

    def compile_all(self, mix: Callable[[int, RecurrentPlan], object]) -> None:
        """Compile what forwards may launch, by launching it on padding.

        `mix`: run a layer of this pool on so many tokens.
        """
        token, chunk = Span(NULL_ROW, 0, 1, 0), Span(NULL_ROW, 0, MAX_STEPS + 1, 1)
        # torch gives other strides to a token that is alone.
        for spans in ((token,), (token, chunk)):
            num_tokens = sum(span.num_tokens for span in spans)
            mix(num_tokens, self.plan(AttentionMeta(spans, {})))

    def _uploaded(self, pieces: Pieces) -> tuple[Tensor, Tensor, int]:
        host, size = np.concatenate((pieces.table, pieces.rows), axis=None), pieces.table.size
        both = upload(torch.from_numpy(host), self.pool.device)
        return both[:size].view(-1, PIECE_COLUMNS), both[size:].view(-1, 2), pieces.num_stepped


def _stride(of_tokens: Tensor) -> int:
    """Return the elements from one token to the next. Those of a token follow each other."""
    assert of_tokens[:1].is_contiguous(), "what a token has is in one piece"
    return of_tokens.stride(0)
