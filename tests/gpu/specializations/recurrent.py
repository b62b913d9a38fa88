"""What models make of the kernels of recurrent states: sizes of layers, steps and chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from session_server.attention.base import RecurrenceRule
from session_server.attention.triton.recurrent import (
    RULES,
    convolution_constants,
    recurrence_constants,
)
from session_server.attention.triton.recurrent_kernels import convolve_pieces
from tests.gpu.compiled import Specialization


@dataclass(frozen=True)
class Convolution:
    """What a family convolves."""

    channels: int
    width: int
    has_bias: bool = False


@dataclass(frozen=True)
class States:
    """What the heads of a family's layers are: `shape` is that of a layer's state."""

    rule: RecurrenceRule
    shape: tuple[int, int, int]
    num_keys: int


CONVOLUTIONS: Final = {
    "lfm2 1.2b": Convolution(2048, 3),
    "granite 4 micro": Convolution(64 * 48 + 256, 4, has_bias=True),
    "granite 4 small": Convolution(64 * 128 + 256, 4, has_bias=True),
    "qwen 3.5": Convolution(2 * 16 * 128 + 32 * 128, 4),
}
STATES: Final = {
    "granite 4 micro": States("state space", (48, 64, 128), 1),
    "granite 4 tiny": States("state space", (64, 64, 128), 1),
    "granite 4 small": States("state space", (128, 64, 128), 1),
    "qwen 3.5": States("delta rule", (32, 128, 128), 16),
    "qwen 3.5, 48 heads": States("delta rule", (48, 128, 128), 16),
}


def specializations() -> Iterator[Specialization]:
    """Every family's convolution in every dtype, and its recurrence by steps and by chunks."""
    for family, convolution in CONVOLUTIONS.items():
        for dtype in ("bf16", "fp16", "fp32"):
            yield _convolve(family, convolution, dtype)
    for family, states in STATES.items():
        for is_chunked in (False, True):
            yield _recur(family, states, is_chunked=is_chunked)


def _convolve(family: str, of: Convolution, dtype: str) -> Specialization:
    """`convolve_pieces`, as `TritonRecurrentPlan.convolve` has it compiled."""
    return Specialization(
        convolve_pieces,
        f"{family}, convolution",
        (dtype,),
        pointers={
            **dict.fromkeys(("x", "taps", "bias", "out"), dtype),
            "history": "fp32",
            "pieces": "i32",
        },
        constants=convolution_constants(of.channels, of.width, has_bias=of.has_bias),
        unaligned=("pieces",),
    )


def _recur(family: str, of: States, *, is_chunked: bool) -> Specialization:
    """A recurrence, as `TritonRecurrentPlan.recur` has it compiled."""
    rule = RULES[of.rule]
    tables = ("pieces", "rows")
    constants = recurrence_constants(
        rule, of.shape, of.shape[0] // of.num_keys, is_chunked=is_chunked
    )
    return Specialization(
        rule.kernel,
        f"{family}, {'chunks' if is_chunked else 'steps'}",
        ("fp32",),
        pointers={
            name: "i32" if name in tables else "fp32"
            for name in rule.kernel.arg_names
            if name not in constants and not name.startswith("stride_")
        },
        constants=constants,
        unaligned=tables,
    )
