"""What models make of the kernels for norms, rotation, gates and sampling: sizes and dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
import triton

from session_server.runner.triton import fused_kernels as kernels
from session_server.runner.triton.blocks import NUM_ELEMENTS, block_of
from session_server.runner.triton.sampling import LARGEST_BLOCK
from tests.gpu.compiled import Specialization

DTYPES: Final = ("bf16", "fp16", "fp32")
HIDDEN: Final = (896, 4096, 5120, 7168)
INTERMEDIATE: Final = (2880, 14336)
GATES: Final = ("silu", "gelu_tanh", "clamped", "sigmoid")
VOCABULARIES: Final = (151936, 262144)
PAGES: Final = (*((dtype, dtype) for dtype in DTYPES), ("bf16", "fp8e4nv"), ("bf16", "fp8e5"))
LARGEST: Final = {
    "fp8e4nv": torch.finfo(torch.float8_e4m3fn).max,
    "fp8e5": torch.finfo(torch.float8_e5m2).max,
}
HEADS: Final = {
    "qwen3 8b": (32, 8, 128, 128, True),
    "llama 8b": (32, 8, 128, 128, False),
    "gpt-oss": (64, 8, 64, 64, False),
    "gemma 3": (8, 4, 256, 256, True),
    "qwen3.5": (16, 2, 256, 64, True),
    "phi 3": (32, 32, 96, 96, False),
    "without rope": (32, 8, 128, 0, False),
}
"""Heads of Q and of K, their size, how much of it is rotated, and whether they are normed."""


def specializations() -> Iterator[Specialization]:
    """Every kernel for sizes of known models."""
    for dtype in DTYPES:
        for size in HIDDEN:
            yield from _of_hidden(size, dtype)
        for groups, size in ((1, 512), (1, 1536), (8, 1024), (32, 128)):
            yield _norm(size, dtype, groups)
        for size in INTERMEDIATE:
            for kind in GATES:
                yield _gate(kind, size, dtype)
        for num_heads in (16, 128):
            yield _rotate_latent(num_heads, dtype)
    for name, heads in HEADS.items():
        for dtypes in PAGES:
            yield _norm_rotate_store(name, heads, dtypes)
    for vocab_size in VOCABULARIES:
        yield from _sampling(vocab_size)


def _specialization(
    kernel: Any, name: str, dtypes: tuple[str, ...], pointers: dict[str, str], **constants: Any
) -> Specialization:
    options = {"num_warps": constants.pop("num_warps")}
    floats = ("eps", "eps_after", "eps_before", "factor", "alpha", "limit")
    return Specialization(kernel, name, dtypes, pointers, constants, floats=floats, options=options)


def _of_hidden(size: int, dtype: str) -> Iterator[Specialization]:
    yield _norm(size, dtype, 1)
    for has_after, has_before in ((False, True), (True, True), (True, False), (False, False)):
        yield _specialization(
            kernels.add_and_norm_rows,
            f"add to {size}, normed before {has_after}, after {has_before}",
            (dtype,),
            dict.fromkeys(("hidden", "y", "after", "before", "out"), dtype),
            SIZE=size,
            HAS_AFTER=has_after,
            HAS_BEFORE=has_before,
            **block_of(size),
        )


def _norm(size: int, dtype: str, groups: int) -> Specialization:
    return _specialization(
        kernels.norm_rows,
        f"norm of {groups} x {size}",
        (dtype,),
        dict.fromkeys(("x", "weight", "out"), dtype),
        GROUPS=groups,
        SIZE=size,
        WEIGHT_BY_GROUP=groups > 1,
        **block_of(size),
    )


def _gate(kind: str, size: int, dtype: str) -> Specialization:
    return _specialization(
        kernels.gate_rows,
        f"{kind} of {size}",
        (dtype,),
        dict.fromkeys(("gate", "up", "out"), dtype),
        KIND=kind,
        SIZE=size,
        **block_of(size, NUM_ELEMENTS),
    )


def _rotate_latent(num_heads: int, dtype: str) -> Specialization:
    block = block_of(64)
    return _specialization(
        kernels.rotate_latent,
        f"rotation of {num_heads} latent heads",
        (dtype,),
        {"q": dtype, "keys": dtype, "phases": "fp32"},
        NUM_HEADS=num_heads,
        ROTARY_DIM=64,
        BLOCK_M=block["BLOCK_M"],
        BLOCK_D=block["BLOCK_N"],
        num_warps=block["num_warps"],
    )


def _norm_rotate_store(
    name: str, heads: tuple[int, int, int, int, bool], dtypes: tuple[str, str]
) -> Specialization:
    (dtype, pages), (num_heads, num_kv_heads, head_dim, rotary_dim, has_norm) = dtypes, heads
    block = block_of(head_dim)
    pointers = {"qkv": dtype, "weight": dtype, "phases": "fp32" if rotary_dim else dtype}
    return _specialization(
        kernels.norm_rotate_store,
        f"heads of {name}",
        dtypes,
        pointers | {"slots": "i64", "keys": pages, "values": pages},
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        HAS_NORM=has_norm,
        LARGEST=LARGEST.get(pages, 0.0),
        BLOCK_M=block["BLOCK_M"],
        BLOCK_D=block["BLOCK_N"],
        num_warps=block["num_warps"],
    )


def _sampling(vocab_size: int) -> Iterator[Specialization]:
    block, name = block_of(vocab_size, LARGEST_BLOCK), f"tokens of {vocab_size}"
    num_blocks = triton.cdiv(vocab_size, block["BLOCK_N"])
    of_blocks = block_of(num_blocks)
    sizes = {"VOCAB": vocab_size, "NUM_BLOCKS": num_blocks}
    best = {"ids": "i32", "finite": "i32"}
    yield _specialization(
        kernels.best_of_blocks,
        f"best {name}",
        ("fp32",),
        best | {"logits": "fp32", "tops": "fp32"},
        **sizes,
        **block,
    )
    yield _specialization(
        kernels.draw_of_blocks,
        f"drawn {name}",
        ("fp32",),
        {"ids": "i32", "keys": "i64"}
        | dict.fromkeys(("logits", "tops", "temperatures", "scores"), "fp32"),
        **sizes,
        BLOCKS=of_blocks["BLOCK_N"],
        IS_INTERPRETED=False,
        **block,
    )
    yield _specialization(
        kernels.best_of_rows,
        f"best {name}, of blocks",
        ("fp32",),
        best | {"scores": "fp32", "tokens": "i64", "is_finite": "i1"},
        **sizes,
        BLOCK_M=of_blocks["BLOCK_M"],
        BLOCKS=of_blocks["BLOCK_N"],
        num_warps=of_blocks["num_warps"],
    )
