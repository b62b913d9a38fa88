"""What models make of the kernels of experts: a layer's sizes, dtypes, and shapes of tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import triton

from session_server.models.config import GateConfig, GateKind
from session_server.models.layers.block_weight import BLOCK, FP8_BLOCK
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
    ExpertFormat,
    ExpertTile,
    every_shape,
)
from session_server.runner.triton.packing import BLOCK_K
from tests.gpu.compiled import TL, Specialization
from tests.gpu.specializations.linears import DTYPES

SILU: Final = GateConfig()
CLAMPED: Final = GateConfig(GateKind.CLAMPED, 1.702, 7.0)


@dataclass(frozen=True)
class Layers:
    """What a family's layers are to the kernels. `is_beside_codes`: of the two matrices of an
    expert the other is codes, which decide the tiles."""

    num_experts: int
    top_k: int
    hidden: int
    inner: int
    gate: GateConfig = SILU
    has_bias: bool = False
    format: ExpertFormat = "numbers"
    is_beside_codes: bool = False

    @property
    def is_coded(self) -> bool:
        """Whether weights are codes for `times_codes`."""
        return self.format not in ("numbers", "mxfp4")


FAMILIES: Final = {
    "qwen 3 30b": Layers(128, 8, 2048, 768),
    "deepseek v3": Layers(256, 8, 7168, 2048),
    "granite 4 small": Layers(72, 10, 4096, 768, GateConfig(GateKind.GELU_TANH)),
    "gpt-oss 20b": Layers(32, 4, 2880, 2880, CLAMPED, has_bias=True),
    "gpt-oss 20b in mxfp4": Layers(32, 4, 2880, 2880, CLAMPED, has_bias=True, format="mxfp4"),
    "qwen 3 30b beside codes": Layers(128, 8, 2048, 768, is_beside_codes=True),
    "qwen 3 30b in fp8": Layers(128, 8, 2048, 768, format="fp8"),
    "deepseek v3 in fp8": Layers(256, 8, 7168, 2048, format="fp8"),
    "qwen 3 30b in int4": Layers(128, 8, 2048, 768, format="int4"),
    "qwen 3 30b in int8": Layers(128, 8, 2048, 768, format="int8"),
    "gpt-oss 20b in int4": Layers(
        32, 4, 2880, 2880, CLAMPED, has_bias=True, format="int4 without minimums"
    ),
}
TILES: Final = {"choices": "i32", "experts": "i32"}


def specializations() -> Iterator[Specialization]:
    """Every family in every dtype it can be held in, for each shape of tile."""
    for family, layers in FAMILIES.items():
        for dtype in ("bf16",) if layers.format == "mxfp4" else DTYPES:
            is_coded = layers.is_coded or layers.is_beside_codes
            for shape in every_shape(DTYPES[dtype], is_coded=is_coded):
                name = f"{family}, tiles of {shape.num_rows}"
                yield _gate_up(name, layers, dtype, shape)
                yield _down(name, layers, dtype, shape)
            if layers.format == "numbers":
                yield _sum(family, layers, dtype)
        if layers.format == "numbers":
            for num_rows in sorted({shape.num_rows for shape in every_shape(DTYPES["bf16"])}):
                for block in (FEW_CHOICES, MANY_CHOICES):
                    yield _lay_out(f"{family}, tiles of {num_rows}", layers, num_rows, block)


def _constants(layers: Layers, dtype: str, shape: ExpertTile, inputs: int) -> dict[str, Any]:
    """What `ExpertStack` gives of a matrix of so many inputs, and its tiles' shape."""
    width, num_groups = inputs, 0
    if layers.is_coded:
        num_halves = 2 if layers.format.startswith("int4") else 1
        width = -(-inputs // num_halves // BLOCK_K) * BLOCK_K
        is_fp8 = layers.format == "fp8"
        num_groups = -(-inputs // FP8_BLOCK) if is_fp8 else width * num_halves // BLOCK
    elif layers.format == "mxfp4":
        width, num_groups = inputs // 2, inputs // BLOCK
    return {
        "HIDDEN": layers.hidden,
        "INNER": layers.inner,
        "HAS_BIAS": layers.has_bias,
        "FORMAT": layers.format,
        "WIDTH": width,
        "NUM_GROUPS": num_groups,
        "DOT_DTYPE": TL[dtype],
        "BLOCK_M": shape.num_rows,
        "BLOCK_K": shape.num_inputs,
    }


def _weights(layers: Layers, dtype: str) -> dict[str, str]:
    """The pointers that `ExpertStack` gives."""
    weights = {"numbers": dtype, "fp8": "fp8e4nv"}.get(layers.format, "u8")
    scales = {"fp8": "fp32"}.get(layers.format, "fp16") if layers.is_coded else weights
    return {
        "weights": weights,
        "scales": scales,
        "minimums": "fp16" if layers.format == "int4" else weights,
        "biases": dtype if layers.has_bias else weights,
    }


def _dtypes(layers: Layers, dtype: str) -> tuple[str, ...]:
    """What an architecture must have."""
    return (dtype, "fp8e4nv") if layers.format == "fp8" else (dtype,)


def _options(shape: ExpertTile) -> dict[str, int]:
    return {"num_warps": shape.num_warps, "num_stages": shape.num_stages}


def _gate_up(name: str, layers: Layers, dtype: str, shape: ExpertTile) -> Specialization:
    return Specialization(
        gate_up_experts,
        f"{name}, gate and up",
        _dtypes(layers, dtype),
        pointers={"x": dtype, "gated": dtype, **_weights(layers, dtype), **TILES},
        constants={
            **_constants(layers, dtype, shape, layers.hidden),
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
        _dtypes(layers, dtype),
        pointers={**pointers, **_weights(layers, dtype), **TILES},
        constants={
            **_constants(layers, dtype, shape, layers.inner),
            "BLOCK_N": shape.num_outputs,
        },
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
