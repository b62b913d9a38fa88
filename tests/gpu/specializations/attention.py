"""What models make of the kernels of attention: a family's layers, dtypes, and shapes of tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import triton

from session_server.attention.triton.kernels import attend_tiles, merge_splits
from session_server.attention.triton.tiles import MAX_SPLITS, TileShape, tile_shape
from tests.gpu.compiled import TL, Specialization


@dataclass(frozen=True)
class Layers:
    """What a family's layers are to a kernel."""

    num_heads: int
    num_kv_heads: int
    value_dim: int
    rope_dim: int = 0
    window: int = 0
    has_softcap: bool = False
    has_sinks: bool = False

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


FAMILIES: Final = {
    "llama 8b": Layers(32, 8, 128),
    "qwen 0.5b": Layers(14, 2, 64),
    "qwen 32b": Layers(64, 8, 128),
    "mistral": Layers(32, 8, 128, window=4096),
    "phi 3": Layers(32, 32, 96),
    "gemma 2": Layers(16, 8, 256, window=4096, has_softcap=True),
    "gemma 3": Layers(8, 4, 256, window=1024),
    "gpt-oss": Layers(64, 8, 64, window=128, has_sinks=True),
    "gpt-oss, global": Layers(64, 8, 64, has_sinks=True),
    "deepseek v2 lite": Layers(16, 1, 512, rope_dim=64),
    "deepseek v3": Layers(128, 1, 512, rope_dim=64),
}
DTYPES: Final = (
    ("bf16", "bf16"),
    ("fp16", "fp16"),
    ("fp32", "fp32"),
    ("bf16", "fp8e4nv"),
    ("bf16", "fp8e5"),
)
"""Of queries, and of pages."""

PAGE_SIZE: Final = 16


def specializations() -> Iterator[Specialization]:
    """Every family in every dtype, for each shape of tile it has."""
    for family, layers in FAMILIES.items():
        for queries, pages in DTYPES:
            shapes = {_shape_of(layers, n, queries): n for n in (512, 32, 5, 1)}
            for shape, num_tokens in shapes.items():
                for num_splits in (1, 8) if num_tokens <= 5 else (1,):
                    name = f"{family}, {num_tokens} tokens, {num_splits} splits"
                    yield _attend(name, layers, (queries, pages), shape, is_split=num_splits > 1)
    for value_dim, has_sinks in ((64, True), (128, False), (512, False)):
        yield _merge(value_dim, has_sinks=has_sinks)


def _shape_of(layers: Layers, num_tokens: int, queries: str) -> TileShape:
    """Return the tiles of spans of so many tokens."""
    itemsize = 4 if queries == "fp32" else 2
    return tile_shape(num_tokens * layers.group, layers.value_dim, itemsize)


def _attend(
    name: str, layers: Layers, dtypes: tuple[str, str], shape: TileShape, *, is_split: bool
) -> Specialization:
    """`attend_tiles`, as `PoolKernel.launch` has it compiled."""
    queries, pages = dtypes
    out = "fp32" if is_split else queries
    return Specialization(
        attend_tiles,
        name,
        dtypes,
        pointers={
            "q": queries,
            "kv_keys": pages,
            "kv_values": pages,
            "out": out,
            "lse": "fp32" if is_split else out,
            "sinks": queries,
            "table": "i32",
            "tiles": "i32",
        },
        constants={
            "NUM_HEADS": layers.num_heads,
            "GROUP": layers.group,
            "HEAD_DIM": layers.value_dim,
            "ROPE_DIM": layers.rope_dim,
            "PAGE_SIZE": PAGE_SIZE,
            "WINDOW": layers.window,
            "HAS_SOFTCAP": layers.has_softcap,
            "HAS_SINKS": layers.has_sinks,
            "VALUES_ARE_KEYS": layers.rope_dim > 0,
            "IS_SPLIT": is_split,
            "DOT_DTYPE": TL[queries],
            "BLOCK_M": shape.num_rows,
            "BLOCK_N": shape.num_keys,
            "BLOCK_D": max(16, triton.next_power_of_2(layers.value_dim)),
            "BLOCK_R": max(16, triton.next_power_of_2(layers.rope_dim)),
        },
        floats=("scale", "softcap"),
        unaligned=("tiles",),
        options={"num_warps": shape.num_warps, "num_stages": shape.num_stages},
    )


def _merge(value_dim: int, *, has_sinks: bool) -> Specialization:
    """`merge_splits` for the most splits."""
    return Specialization(
        merge_splits,
        f"merge of {value_dim}",
        ("bf16",),
        pointers={"parts": "fp32", "lse": "fp32", "out": "bf16", "sinks": "bf16"},
        constants={
            "NUM_HEADS": 32,
            "HEAD_DIM": value_dim,
            "HAS_SINKS": has_sinks,
            "NUM_SPLITS": MAX_SPLITS,
            "BLOCK_D": triton.next_power_of_2(value_dim),
        },
    )
