"""Define what a forward gives to attention, and what attention computes from it.

Once per step a backend turns `AttentionMeta` into an `AttentionPlan`, which holds everything that
does not depend on the layer: page runs, views, gather indices, masks. A layer then costs its
arithmetic and little else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from cache.pool.page_table import PageTable
from cache.pool.storage import KvPool
from cache.types import PoolName, StateMoves


@dataclass(frozen=True, slots=True)
class Span:
    """Describe one row's share of a flat batch: positions [start, start + num_tokens) of row `row`.

    They are tokens [offset, offset + num_tokens) of the batch. KV of positions before `start` is in
    the pool already. `states`: where the row's recurrent state is read and written; None if no
    layer has one, and for padding.
    """

    row: int
    start: int
    num_tokens: int
    offset: int
    states: StateMoves | None = None

    @property
    def end(self) -> int:
        """Return the context length after this forward."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """Describe the tokens of one forward to attention.

    `spans`: in flat order, without gaps; sorted by number of tokens, then by context length.
    `slot_mapping`: int64 [tokens], by pool, the slot that each token's K and V are written to.
    """

    spans: tuple[Span, ...]
    slot_mapping: Mapping[PoolName, Tensor]


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Describe how the layers of one pool attend.

    `num_heads`: query heads, a multiple of the pool's kv heads. `scale`: factor on the scores.
    `window`: positions a token attends to, its own included; None for all. `softcap`: scores `s`
    become `softcap * tanh(s / softcap)`.
    """

    num_heads: int
    scale: float
    window: int | None = None
    softcap: float | None = None

    def first_visible(self, position: int) -> int:
        """Return the first position that a token at `position` attends to."""
        return 0 if self.window is None else max(0, position - self.window + 1)


class AttentionPlan(Protocol):
    """Compute one forward's attention, for every layer of a pool."""

    def attend(self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor | None) -> Tensor:
        """Store the new K and V of one layer, then attend.

        Args:
            layer: index within the pool.
            q: [tokens, q_heads, head_dim], rotated.
            kv: [tokens, 2 * kv_heads, head_dim], K (rotated) before V.
            sinks: [q_heads], one more score per head that takes part in the softmax and has no
                value (Xiao et al. 2024, as gpt-oss learns it); None without.

        Returns:
            [tokens, q_heads * head_dim]. A token attends to its row's positions up to its own, as
            far back as the rule says.
        """
        ...


class AttentionBackend(Protocol):
    """Compute attention over one pool."""

    def plan(self, meta: AttentionMeta) -> AttentionPlan:
        """Prepare one forward. The page table must already hold the forward's pages.

        Entries before the first position that a span attends to are not read: they may be stale.
        """
        ...


RecurrenceRule = Literal["state space", "delta rule"]


class Recurrence(Protocol):
    """Update a state with tokens."""

    @property
    def rule(self) -> RecurrenceRule:
        """Return by which rule, of which there are kernels, too."""
        ...

    def step(self, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Advance the state of n rows by one token each, and return outputs and states.

        `state`: float32 [n, *shape], may be overwritten. Inputs and outputs are [n, ...].
        """
        ...

    def chunk(self, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Advance the state of one row by some tokens.

        `state`: [*shape], not modified; inputs and outputs are [tokens, ...].
        """
        ...


class RecurrentPlan(Protocol):
    """Read and write one forward's states, for every layer of a pool.

    The first part of a layer's state is the last inputs of its convolution: [pages, width - 1,
    channels], oldest first.
    """

    def convolve(self, layer: int, x: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve every channel of `x` [tokens, channels] by itself, causally, row by row.

        `layer`: index within the pool. `taps`: [width, channels], that of the token itself last.
        `bias`: [channels].
        """
        ...

    def recur(self, layer: int, recurrence: Recurrence, *inputs: Tensor) -> Tensor:
        """Advance the second part of a layer's state by the tokens of all rows.

        Inputs and outputs are [tokens, ...]. `layer`: index within the pool.
        """
        ...


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Describe the rows of a forward on the device, int64 [rows] each.

    As in `Span`: `rows` of the page tables, `starts`, `lengths` (tokens of this forward) and
    `offsets` in the flat batch. A row of length 0 is padding. Of models with recurrent states:
    `sources`, the page of each row's state, `NULL_PAGE` where that is zero; and `targets`, int64
    [rows, most tokens of a row], the page for the state after each token, `NULL_PAGE` to leave
    none.
    """

    rows: Tensor
    starts: Tensor
    lengths: Tensor
    offsets: Tensor
    sources: Tensor
    targets: Tensor

    @classmethod
    def of(cls, columns: Tensor) -> DeviceRows:
        """Return what the columns of a tensor say, int64 [5 + most tokens of a row, rows]: each of
        the fields, the targets last."""
        rows, starts, lengths, offsets, sources = columns[:5].unbind(0)
        return cls(rows, starts, lengths, offsets, sources, columns[5:].t())


class GraphPlan(Protocol):
    """Attention of a fixed number of rows over tensors that keep their place: it can be captured
    once and replayed."""

    def refresh(self, rows: DeviceRows) -> None:
        """Attend from other rows from now on. Reads nothing on the host, so it can be captured."""
        ...

    def plan(self, slot_mapping: Mapping[PoolName, Tensor]) -> Any:
        """Return the plan, of the type that layers of its pool need. `slot_mapping`: as in
        `AttentionMeta`, read at every replay."""
        ...


class CapturableBackend(Protocol):
    """A backend whose forwards of few tokens a row can be captured in graphs."""

    def compile_all(self, *, has_sinks: bool) -> None:
        """Compile every kernel that forwards may launch, so that none waits for it."""
        ...

    def plan_graph(self, num_rows: int, max_row_tokens: int, longest: int) -> GraphPlan:
        """Prepare forwards of so many rows, of up to `max_row_tokens` tokens and `longest`
        positions each."""
        ...


BackendFactory = Callable[[KvPool, PageTable, AttentionRule], AttentionBackend]
"""Create a backend from a pool, the pool's page table and the rule of its layers."""
