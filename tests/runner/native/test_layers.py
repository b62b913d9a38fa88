"""What a layer must be before a step computes with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
import torch

from session_server.models.bounds import MAX_CONV_WIDTH
from session_server.runner.native import WeightFormat, _native
from session_server.runner.native.linear import pack

SIZE: Final = 32
ONES: Final = torch.ones(1).numpy()


def linear(outputs: int, inputs: int = SIZE, format: WeightFormat = "float32") -> _native.Linear:
    return pack(torch.ones(outputs, inputs), format)


def short_conv(width: int) -> object:
    taps = torch.ones(width, SIZE).numpy()
    return _native.ShortConv(inputs=linear(3 * SIZE), output=linear(SIZE), taps=taps, bias=None)


def gated_delta(width: int) -> object:
    return _native.GatedDelta(
        inputs=linear(4 * SIZE + 2),
        output=linear(SIZE),
        taps=torch.ones(width, 3 * SIZE).numpy(),
        step_bias=ONES,
        rates=ONES,
        norm=_native.Norm(torch.ones(SIZE).numpy(), 1e-6),
        sizes=(1, 1, SIZE, SIZE),
    )


def mamba2(width: int) -> object:
    return _native.Mamba2(
        inputs=linear(4 * SIZE + 1),
        output=linear(SIZE),
        taps=torch.ones(width, 3 * SIZE).numpy(),
        conv_bias=None,
        of_heads=(ONES, ONES, ONES),
        norm=_native.Norm(torch.ones(1, SIZE).numpy(), 1e-6),
        sizes=(1, SIZE, 1, SIZE),
        limits=(0.0, 1.0),
    )


@pytest.mark.parametrize("mixer", [short_conv, gated_delta, mamba2])
def test_a_convolution_has_a_width_that_steps_have_memory_for(
    mixer: Callable[[int], object],
) -> None:
    mixer(1)
    mixer(MAX_CONV_WIDTH)
    for width in (0, MAX_CONV_WIDTH + 1, 1024):
        with pytest.raises(ValueError, match="1 to 16"):
            mixer(width)


def expert(
    gate_up: WeightFormat = "int8", down: WeightFormat = "int8", inner: int = SIZE
) -> _native.GatedMlp:
    matrices = linear(2 * inner, format=gate_up), linear(SIZE, inner, format=down)
    return _native.GatedMlp(*matrices, "silu", 1.0, 0.0)


def mixture(*experts: _native.GatedMlp) -> _native.Experts:
    return _native.Experts(
        router=linear(max(1, len(experts))),
        experts=experts,
        shared=None,
        num_experts_per_tok=1,
        sigmoid_and_norm=(False, False),
        groups=(1, 1),
        routed_scaling_factor=1.0,
        e_score_correction_bias=None,
    )


def test_experts_of_a_layer_are_alike() -> None:
    mixture(expert(), expert())
    mixture(*[expert("float32", "int8")] * 2)
    other = (
        expert(gate_up="float32"),
        expert(down="float32"),
        expert(gate_up="int4"),
        expert(inner=2 * SIZE),
    )
    for one in other:
        for experts in ((expert(), one), (one, expert())):
            with pytest.raises(ValueError, match="one format and one size"):
                mixture(*experts)
    with pytest.raises(ValueError, match="at least one"):
        mixture()
