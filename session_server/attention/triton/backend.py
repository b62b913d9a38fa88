"""Compute attention with kernels of our own in Triton: the `triton` backend.

A forward is a few launches a layer, whatever is in it: rows with few tokens and chunks have tiles
of different shapes, and each shape is a launch. All that a launch needs besides Q and KV is the
table of its tiles, made once per step and copied to the device in one piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from cache.pool.mla import MlaPool
from cache.pool.page_table import PageTable
from cache.pool.storage import KvPool
from cache.pool.upload import upload
from cache.types import PoolName
from session_server.attention.base import (
    AttentionMeta,
    AttentionPlan,
    AttentionRule,
    DeviceRows,
)
from session_server.attention.triton import launching
from session_server.attention.triton.kernels import attend_tiles, merge_splits
from session_server.attention.triton.tiles import (
    MAX_SPLITS,
    TILE_COLUMNS,
    Launch,
    Tiling,
    every_shape,
)


class TritonBackend:
    """Compute attention over one pool; implements `AttentionBackend`."""

    def __init__(self, pool: KvPool, table: PageTable, rule: AttentionRule) -> None:
        assert rule.num_heads % pool.num_kv_heads == 0, "query heads divide over kv heads"
        self.kernel = PoolKernel(pool, table.device_pages, rule)
        self.tiling = Tiling(
            rule,
            pool.num_kv_heads,
            self.kernel.value_dim,
            # The interpreter takes the tiles of halves, which are larger, and what is served.
            itemsize=2 if launching.IS_INTERPRETED else pool.read_dtype.itemsize,
            num_sms=launching.num_sms(pool.device),
        )

    def plan(self, meta: AttentionMeta) -> AttentionPlan:
        """Cut the spans into tiles, and take them to the device."""
        pool = self.kernel.pool
        table, launches = self.tiling.cut(meta.spans)
        tiles = upload(torch.from_numpy(table), pool.device)
        return TritonPlan(self.kernel, meta.slot_mapping[pool.name], tiles, launches)

    def compile_all(self, *, has_sinks: bool) -> None:
        """Compile what forwards may launch, by launching it on a tile without a token."""
        pool, kernel = self.kernel.pool, self.kernel
        heads = (1, kernel.rule.num_heads)
        q = torch.zeros((*heads, pool.head_dim), dtype=pool.read_dtype, device=pool.device)
        out, sinks = q.new_zeros((*heads, kernel.value_dim)), q[0, :, 0].contiguous()
        nothing = torch.zeros((1, TILE_COLUMNS), dtype=torch.int32, device=pool.device)
        of = Attended(q, out, sinks if has_sinks else None)
        tiling = self.tiling
        shapes = every_shape(tiling.group, tiling.value_dim, tiling.itemsize)
        for shape in shapes:
            kernel.launch(0, Launch(shape, 0, 1, 0, 1, 1), nothing, of)
        num_splits = 2
        while num_splits <= MAX_SPLITS:
            for shape in shapes if num_splits == 2 else shapes[:1]:
                kernel.launch(0, Launch(shape, 0, 1, 0, 1, num_splits), nothing, of)
            num_splits *= 2

    def plan_graph(self, num_rows: int, max_row_tokens: int, longest: int) -> TritonGraphPlan:
        """Prepare forwards of so many rows, of up to `max_row_tokens` tokens and `longest`
        positions each."""
        table, launch = self.tiling.cut_graph(num_rows, max_row_tokens, longest)
        tiles = upload(torch.from_numpy(table), self.kernel.pool.device)
        return TritonGraphPlan(self.kernel, tiles, launch, num_rows)


@dataclass(frozen=True, slots=True)
class TritonGraphPlan:
    """Attend from rows that are told on the device; implements `GraphPlan`."""

    kernel: PoolKernel
    tiles: Tensor
    launch: Launch
    num_rows: int

    def refresh(self, rows: DeviceRows) -> None:
        """Write what the rows are into the table of tiles; implements `GraphPlan.refresh`."""
        of_rows = self.tiles.view(self.num_rows, -1, TILE_COLUMNS)
        columns = (rows.rows, rows.starts, rows.lengths, rows.offsets)
        for index, column in enumerate(columns):
            of_rows[:, :, index] = column[:, None]

    def plan(self, slot_mapping: Mapping[PoolName, Tensor]) -> AttentionPlan:
        """Return the plan over this table; implements `GraphPlan.plan`."""
        slots = slot_mapping[self.kernel.pool.name]
        return TritonPlan(self.kernel, slots, self.tiles, (self.launch,))


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """Compute one forward's attention; implements `AttentionPlan`.

    `tiles`: int32 [tiles, 5] on the device, in the order of `launches`.
    """

    kernel: PoolKernel
    slot_mapping: Tensor
    tiles: Tensor
    launches: tuple[Launch, ...]

    def attend(self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor | None) -> Tensor:
        """Store the new K and V of one layer, then attend; implements `AttentionPlan.attend`.

        Over latents the result has the latent part only: [tokens, q_heads * kv_lora_rank].
        """
        self.kernel.pool.write(layer, self.slot_mapping, kv)
        return self.attend_stored(layer, q, sinks)

    def attend_stored(self, layer: int, q: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend as `attend` does; the new K and V are in the layer's `pages` already."""
        kernel = self.kernel
        out = q.new_empty((len(q), kernel.rule.num_heads, kernel.value_dim))
        sinks = None if sinks is None else sinks.contiguous()
        for launch in self.launches:
            tiles = self.tiles[launch.first : launch.end]
            kernel.launch(layer, launch, tiles, Attended(q, out, sinks))
        return out.flatten(1)

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return where a layer's K and V are stored, each [kv_heads, slots, head_dim]."""
        return self.kernel.keys[layer], self.kernel.values[layer]


@dataclass(frozen=True, slots=True)
class Attended:
    """Hold what a layer attends with and to where.

    `q`: [tokens, heads, head_dim]. `out`: [tokens, heads, value_dim], written. `sinks`: [heads].
    """

    q: Tensor
    out: Tensor
    sinks: Tensor | None


class PoolKernel:
    """Launch the kernels over one pool's pages, with what is the same for all of its layers."""

    def __init__(self, pool: KvPool, table: Tensor, rule: AttentionRule) -> None:
        """Create the launcher. `table`: int32 [rows, pages], on the pool's device."""
        self.pool = pool
        self.rule = rule
        self.value_dim = pool.kv_lora_rank if isinstance(pool, MlaPool) else pool.head_dim
        self._table = table
        keys_values = pool.run(0, pool.num_pages * pool.page_size)
        of_layers = [each[0] for each in keys_values]
        self.keys, self.values = of_layers[::2], of_layers[1::2]
        self._strides = (*self.keys[0].stride()[:2], table.stride(0))
        rope_dim = pool.head_dim - self.value_dim
        self._constants: dict[str, Any] = {
            "NUM_HEADS": rule.num_heads,
            "GROUP": rule.num_heads // pool.num_kv_heads,
            "HEAD_DIM": self.value_dim,
            "ROPE_DIM": rope_dim,
            "PAGE_SIZE": pool.page_size,
            "WINDOW": rule.window or 0,
            "HAS_SOFTCAP": rule.softcap is not None,
            "VALUES_ARE_KEYS": isinstance(pool, MlaPool),
            "BLOCK_D": max(16, triton.next_power_of_2(self.value_dim)),
            "BLOCK_R": max(16, triton.next_power_of_2(rope_dim)),
        }

    def launch(self, layer: int, launch: Launch, tiles: Tensor, of: Attended) -> None:
        """Attend from some tiles. K and V of all tokens are in the pool."""
        q, out, sinks = of.q, of.out, of.sinks
        num_splits, num_tokens = launch.num_splits, launch.end_token - launch.first_token
        parts = lse = out
        if num_splits > 1:
            parts = out.new_empty((num_splits, num_tokens, *out.shape[1:]), dtype=torch.float32)
            lse = parts.new_empty(parts.shape[:-1])
        launching.run(
            attend_tiles,
            (len(tiles), self.pool.num_kv_heads, num_splits),
            q,
            self.keys[layer],
            self.values[layer],
            parts,
            lse,
            out if sinks is None else sinks,
            self._table,
            tiles,
            launch.first_token if num_splits > 1 else 0,
            num_tokens,
            num_splits,
            q.stride(0),
            q.stride(1),
            *self._strides,
            self.rule.scale,
            self.rule.softcap or 0.0,
            **self._constants,
            HAS_SINKS=sinks is not None,
            IS_SPLIT=num_splits > 1,
            DOT_DTYPE=launching.dot_dtype(q.dtype),
            BLOCK_M=launch.shape.num_rows,
            BLOCK_N=launch.shape.num_keys,
            num_warps=launch.shape.num_warps,
            num_stages=launch.shape.num_stages,
        )
        if num_splits > 1:
            launching.run(
                merge_splits,
                (num_tokens, self.rule.num_heads),
                parts,
                lse,
                out[launch.first_token :],
                out if sinks is None else sinks,
                num_tokens,
                NUM_HEADS=self.rule.num_heads,
                HEAD_DIM=self.value_dim,
                HAS_SINKS=sinks is not None,
                NUM_SPLITS=num_splits,
                BLOCK_D=self._constants["BLOCK_D"],
            )
