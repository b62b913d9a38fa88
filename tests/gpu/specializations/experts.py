"""What models make of the kernels of experts: a layer's sizes, dtypes, and shapes of tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import triton

from session_server.models.config import GateConfig, GateKind
from session_server.runner.triton.expert_kernels import (
    down_experts,
    gate_up_experts,
    lay_out_choices,
    sum_choices,
)
from session_server.runner.triton.experts import (
    FEW_CHOICES,
    MANY_CHOICES,
    SUMMED,
    ExpertTile,
    every_shape,
)
from tests.gpu.compiled import TL, Specialization

SILU: Final = GateConfig()
CLAMPED: Final = GateConfig(GateKind.CLAMPED, 1.702, 7.0)


@dataclass(frozen=True)
class Layers:
    """What a family's layers are to the kernels."""

    num_experts: int
    top_k: int
    hidden: int
    inner: int
    gate: GateConfig = SILU
    has_bias: bool = False
    is_mxfp4: bool = False
    is_fp8: bool = False


FAMILIES: Final = {
    "qwen 3 30b": Layers(128, 8, 2048, 768),
    "deepseek v3": Layers(256, 8, 7168, 2048),
    "qwen 3 30b in fp8": Layers(128, 8, 2048, 768, is_fp8=True),
    "deepseek v3 in fp8": Layers(256, 8, 7168, 2048, is_fp8=True),
    "granite 4 small": Layers(72, 10, 4096, 768, GateConfig(GateKind.GELU_TANH)),
    "gpt-oss 20b": Layers(32, 4, 2880, 2880, CLAMPED, has_bias=True),
    "gpt-oss 20b in mxfp4": Layers(32, 4, 2880, 2880, CLAMPED, has_bias=True, is_mxfp4=True),
}
DTYPES: Final = ("bf16", "fp16", "fp32")
TILES: Final = {"choices": "i32", "experts": "i32"}


def specializations() -> Iterator[Specialization]:
    """Every family in every dtype it can be held in, for each shape of tile."""
    for family, layers in FAMILIES.items():
        is_coded = layers.is_mxfp4 or layers.is_fp8
        for dtype in ("bf16",) if is_coded else DTYPES:
            for shape in every_shape(4 if dtype == "fp32" else 2, is_fp8=layers.is_fp8):
                name = f"{family}, tiles of {shape.num_rows}"
                yield _gate_up(name, layers, dtype, shape)
                yield _down(name, layers, dtype, shape)
            if not is_coded:  # as of numbers
                yield _sum(family, layers, dtype)
        if not is_coded:
            for num_rows in sorted({shape.num_rows for shape in every_shape(2)}):
                for block in (FEW_CHOICES, MANY_CHOICES):
                    yield _lay_out(f"{family}, tiles of {num_rows}", layers, num_rows, block)


def _constants(layers: Layers, dtype: str, shape: ExpertTile) -> dict[str, Any]:
    return {
        "HIDDEN": layers.hidden,
        "INNER": layers.inner,
        "HAS_BIAS": layers.has_bias,
        "IS_MXFP4": layers.is_mxfp4,
        "IS_FP8": layers.is_fp8,
        "DOT_DTYPE": TL[dtype],
        "BLOCK_M": shape.num_rows,
        "BLOCK_K": shape.num_inputs,
    }


def _weights(layers: Layers, dtype: str) -> dict[str, str]:
    """The pointers that `ExpertStack` gives."""
    weights = "u8" if layers.is_mxfp4 else "fp8e4nv" if layers.is_fp8 else dtype
    return {
        "weights": weights,
        "scales": "fp32" if layers.is_fp8 else weights,
        "biases": dtype if layers.has_bias else weights,
    }


def _options(shape: ExpertTile) -> dict[str, int]:
    return {"num_warps": shape.num_warps, "num_stages": shape.num_stages}


def _gate_up(name: str, layers: Layers, dtype: str, shape: ExpertTile) -> Specialization:
    return Specialization(
        gate_up_experts,
        f"{name}, gate and up",
        (dtype, "fp8e4nv") if layers.is_fp8 else (dtype,),
        pointers={"x": dtype, "gated": dtype, **_weights(layers, dtype), **TILES},
        constants={
            **_constants(layers, dtype, shape),
            "TOP_K": layers.top_k,
            "GATE": layers.gate.kind.value,
            "ALPHA": layers.gate.alpha,
            "LIMIT": layers.gate.swiglu_limit,
            "BLOCK_N": shape.num_outputs // 2,
        },
        options=_options(shape),
    )


def _down(name: str, layers: Layers, dtype: str, shape: ExpertTile) -> Specialization:
    pointers = {"gated": dtype, "topk_weights": dtype, "out": dtype}
    return Specialization(
        down_experts,
        f"{name}, down",
        (dtype, "fp8e4nv") if layers.is_fp8 else (dtype,),
        pointers={**pointers, **_weights(layers, dtype), **TILES},
        constants={**_constants(layers, dtype, shape), "BLOCK_N": shape.num_outputs},
        options=_options(shape),
    )


def _sum(family: str, layers: Layers, dtype: str) -> Specialization:
    return Specialization(
        sum_choices,
        f"{family}, sum",
        (dtype,),
        pointers={"out": dtype, "mixed": dtype},
        constants={
            "HIDDEN": layers.hidden,
            "TOP_K": layers.top_k,
            "HAS_BESIDE": "deepseek" in family,
            "BLOCK_N": SUMMED,
        },
    )


def _lay_out(name: str, layers: Layers, num_rows: int, block: int) -> Specialization:
    return Specialization(
        lay_out_choices,
        f"{name}, lay out by {block}",
        ("i64",),
        pointers={"topk_ids": "i64", **TILES},
        constants={
            "NUM_EXPERTS": layers.num_experts,
            "BLOCK_M": num_rows,
            "BLOCK_E": triton.next_power_of_2(layers.num_experts),
            "BLOCK_N": block,
        },
    )
