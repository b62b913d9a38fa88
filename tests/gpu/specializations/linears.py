"""What quantized checkpoints make of the kernels of linears: kinds of codes, dtypes and tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from session_server.runner.triton import integer_linear
from session_server.runner.triton.integer_kernels import (
    multiply_integers,
    round_rows,
    sum_integers,
)
from session_server.runner.triton.linear import tile_shapes
from session_server.runner.triton.linear_kernels import multiply_codes, sum_splits
from session_server.runner.triton.linear_tiles import SUMMED_OUTPUTS, LinearTile
from session_server.runner.triton.packing import BLOCK_K
from tests.gpu.compiled import TL, Specialization

DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KINDS: Final = ("int4", "int4 without minimums", "int8", "fp8")

SIZES: Final = ("num_outputs", "num_inputs", "width")
"""Multiples of 16 in every model of some size."""


def specializations() -> Iterator[Specialization]:
    """Every kind of codes by every shape of tile, with and without splits."""
    for dtype, torch_dtype in DTYPES.items():
        for kind in KINDS:
            for shape in tile_shapes(torch_dtype):
                for is_split in (False, True):
                    yield _multiply(kind, dtype, shape, is_split=is_split)
        yield _sum(dtype)
        yield _round(dtype)
        yield from (_multiply_integers(dtype, shape) for shape in integer_linear.SHAPES)
        yield _sum_integers(dtype)
    # Sums that are still to be summed have no dtype of activations.
    for shape in integer_linear.SHAPES:
        yield _multiply_integers("bf16", shape, is_split=True)


def _multiply(kind: str, dtype: str, shape: LinearTile, *, is_split: bool) -> Specialization:
    """`multiply_codes`, as `TritonLinear` has it compiled."""
    is_float = kind == "fp8"
    out = "fp32" if is_split else dtype
    return Specialization(
        multiply_codes,
        f"{kind}, {shape.num_rows} rows{', split' * is_split}",
        (dtype, "fp8e4nv") if is_float else (dtype,),
        pointers={
            "x": dtype,
            "codes": "fp8e4nv" if is_float else "u8",
            "scales": "fp32" if is_float else "fp16",
            "minimums": "fp32" if is_float else "fp16",
            "bias": dtype,
            "out": out,
        },
        constants={
            "FORMAT": kind,
            "HAS_BIAS": True,
            "IS_SPLIT": is_split,
            "DOT_DTYPE": TL[dtype],
            "BLOCK_M": shape.num_rows,
            "BLOCK_N": shape.num_outputs,
            "BLOCK_K": BLOCK_K,
        },
        multiples=lambda name: name in SIZES,
        options={"num_warps": shape.num_warps, "num_stages": shape.num_stages},
    )


def _sum(dtype: str) -> Specialization:
    """`sum_splits`, as `TritonLinear` has it compiled."""
    return Specialization(
        sum_splits,
        "sum of splits",
        (dtype,),
        pointers={"parts": "fp32", "bias": dtype, "out": dtype},
        constants={"HAS_BIAS": True, "BLOCK_N": SUMMED_OUTPUTS},
        multiples=lambda name: name in SIZES,
    )


def _round(dtype: str) -> Specialization:
    """`round_rows`, as `IntegerLinear` has it compiled."""
    return Specialization(
        round_rows,
        "integers, rounded rows",
        (dtype,),
        pointers={"x": dtype, "codes": "i8", "scales": "fp32"},
        constants={"BLOCK_K": integer_linear.ROUNDED_INPUTS},
        multiples=lambda name: name in SIZES,
        options={"num_warps": integer_linear.ROUNDING_WARPS},
    )


def _multiply_integers(dtype: str, shape: LinearTile, *, is_split: bool = False) -> Specialization:
    """`multiply_integers`, as `IntegerLinear` has it compiled."""
    return Specialization(
        multiply_integers,
        f"integers, {shape.num_rows} rows{', split' * is_split}",
        (dtype,),
        pointers={
            "x": "i8",
            "row_scales": "fp32",
            "codes": "i8",
            "scales": "fp32",
            "bias": dtype,
            "out": "i32" if is_split else dtype,
        },
        constants={
            "HAS_BIAS": True,
            "IS_SPLIT": is_split,
            "BLOCK_M": shape.num_rows,
            "BLOCK_N": shape.num_outputs,
            "BLOCK_K": integer_linear.BLOCK_K,
        },
        multiples=lambda name: name in SIZES,
        options={"num_warps": shape.num_warps, "num_stages": shape.num_stages},
    )


def _sum_integers(dtype: str) -> Specialization:
    """`sum_integers`, as `IntegerLinear` has it compiled."""
    return Specialization(
        sum_integers,
        "integers, sum of splits",
        (dtype,),
        pointers={
            "parts": "i32",
            "row_scales": "fp32",
            "scales": "fp32",
            "bias": dtype,
            "out": dtype,
        },
        constants={"HAS_BIAS": True, "BLOCK_N": SUMMED_OUTPUTS},
        multiples=lambda name: name in SIZES,
    )
