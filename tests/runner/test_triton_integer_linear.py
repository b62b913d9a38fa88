"""Linears that round their inputs too are sums of integers, scaled once, whatever else is there."""

from __future__ import annotations

from typing import Final

import pytest
import torch
from torch import Tensor

from session_server.models.layers.block_weight import BlockWeight
from tests.depth import at_depth, cases
from tests.oracle.device import DEVICE

pytest.importorskip("triton", reason="triton has no wheel for this machine")

from session_server.runner.triton import linear_tiles
from session_server.runner.triton.integer_linear import (
    ROUNDED_INPUTS,
    SHAPES,
    IntegerLinear,
    integer_linear,
    rounded_rows,
)
from session_server.runner.triton.linear import TritonLinear, TritonLinears
from session_server.runner.triton.packing import MAX_SUMMED, are_integers, packed_bytes
from tests.runner.test_triton_linear import EPSILON, launched, random

WEIGHTS: Final = ((1, 32), (65, 33), (48, 1056), *at_depth((), proof=((130, 96), (33, 1100))))
"""Outputs and inputs: one block in part, odd numbers, splits with a rest."""

NUM_ROWS: Final = at_depth((1, 17, 140), proof=(1, 5, 16, 17, 32, 33, 64, 65, 128, 140))


def random_linear(outputs: int, inputs: int, *, has_bias: bool = True) -> IntegerLinear:
    """Codes of every value."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (outputs, inputs), generator=generator).to(torch.int8)
    scales = torch.rand(outputs, generator=generator)
    bias = random(outputs, seed=2) if has_bias else None
    return IntegerLinear(codes.to(DEVICE), scales.to(DEVICE), bias)


def block_weight(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> BlockWeight:
    """The same as a checkpoint has it."""
    linear = random_linear(outputs, inputs)
    scales = linear.scales[:, None].repeat(1, inputs // 32)
    return BlockWeight(linear.codes, scales, None, 8, dtype, rounds_inputs=True)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales as vLLM's `dynamic_scaled_int8_quant` has them, written out."""
    x = x.float()
    scales = x.abs().amax(1).clamp_min(2.0**-119) / 127
    return (x / scales[:, None]).round().to(torch.int8), scales


@pytest.mark.parametrize(
    ("shape", "num_rows", "dtype", "has_bias"), cases(WEIGHTS, NUM_ROWS, EPSILON, (True, False))
)
def test_sums_of_integers_are_exact_and_scaled_once(
    shape: tuple[int, int], num_rows: int, dtype: torch.dtype, *, has_bias: bool
) -> None:
    linear = random_linear(*shape, has_bias=has_bias)
    bias = torch.zeros(shape[0]).to(DEVICE) if linear.bias is None else linear.bias.to(dtype)
    linear = IntegerLinear(linear.codes, linear.scales, bias if has_bias else None)
    x = (3 * random(num_rows, shape[1])).to(dtype)
    y = linear(x)
    assert y.dtype == dtype
    codes, row_scales = rounded(x)
    sums = codes.double() @ linear.codes.double().T
    products = sums * linear.scales.double() * row_scales[:, None].double()
    bound = EPSILON[dtype] * (products.abs() + bias.double().abs())
    assert ((y.double() - products - bias.double()).abs() <= bound).all()


def test_rows_are_rounded_to_the_nearest_code_and_ties_to_the_even_one() -> None:
    x = random(8, ROUNDED_INPUTS + 33)
    x[0] = 0
    x[1, :6] = torch.tensor([127, 0.5, 1.5, 2.5, -0.5, -1.5])
    x[1, 6:] = 0
    x[2] *= 1e-42
    x[3] *= 1e30
    x[4, -1] = -torch.finfo(torch.float32).max
    x[5, -1] = 1e4
    codes, scales = rounded_rows(x)
    assert codes[1, :6].tolist() == [127, 0, 2, 2, 0, -2]
    assert codes[4, -1] == -127
    assert codes[5, :-1].abs().max() == 0
    expected, of_rows = rounded(x)
    assert codes.equal(expected)
    assert scales.equal(of_rows)


def test_a_row_of_zeros_gives_the_bias() -> None:
    linear = random_linear(65, 1056)
    x = random(3, 1056)
    x[1] = 0
    assert linear.bias is not None
    assert linear(x)[1].equal(linear.bias)


@pytest.mark.parametrize("sick", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("shape", [(20, 64), (65, 1056)])
def test_what_is_no_number_shows_and_stays_with_its_row(
    sick: float, shape: tuple[int, int]
) -> None:
    linear = random_linear(*shape)
    x = random(3, shape[1])
    healthy = linear(x)
    x[1, 40] = sick
    y = linear(x)
    assert y[1].isnan().all()
    assert y[::2].equal(healthy[::2])


def test_a_row_does_not_notice_the_others_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    linear = random_linear(65, 1056)
    x = random(140, 1056)
    together = linear(x)
    for splits in (1, 2, 4):
        monkeypatch.setattr(linear_tiles, "num_splits", lambda *_, splits=splits: splits)
        assert linear(x[:1]).equal(together[:1])
        assert linear(x[3:24]).equal(together[3:24])


def test_rows_may_be_none_and_of_any_layout() -> None:
    linear = random_linear(40, 64)
    x = random(3, 128)
    assert linear(x[:0, :64]).shape == (0, 40)
    assert linear(x[:, ::2]).equal(linear(x[:, ::2].contiguous()))
    assert linear(x[None, :, 64:]).equal(linear(x[:, 64:].contiguous())[None])


def test_the_largest_sum_fits_and_wider_weights_are_codes_as_others_are() -> None:
    codes = torch.full((1, MAX_SUMMED), -128, dtype=torch.int8, device=DEVICE)
    linear = IntegerLinear(codes, torch.ones(1, device=DEVICE), None)
    ones = torch.ones(1, MAX_SUMMED, device=DEVICE)
    assert linear(ones).item() == pytest.approx(-128 * MAX_SUMMED, rel=1e-6)
    widest = MAX_SUMMED // 32 * 32
    assert are_integers(meant := block_weight(1, widest))
    assert not are_integers(wider := block_weight(1, widest + 32))
    assert packed_bytes(wider) > packed_bytes(meant) + 32
    assert isinstance(TritonLinears()(wider), TritonLinear)


def test_codes_are_kept_and_not_copied() -> None:
    weight = block_weight(48, 96)
    linear = integer_linear(weight, None)
    assert linear.codes.data_ptr() == weight.codes.data_ptr()
    assert packed_bytes(weight) == linear.codes.nbytes + linear.scales.untyped_storage().nbytes()


def test_all_that_is_launched_was_compiled_with_the_first_weight_of_its_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, linears = launched(monkeypatch), TritonLinears()
    first = linears(block_weight(17, 1056, torch.bfloat16))
    compiled = {*seen}
    assert len(compiled) == 2 * len(SHAPES) + 2
    seen.clear()
    alike = linears(block_weight(65, 96, torch.bfloat16))
    assert isinstance(alike, IntegerLinear)
    assert not seen
    first(random(1, 1056).bfloat16())
    for num_rows in (1, 20, 40, 130):
        alike(random(num_rows, 96).bfloat16())
    assert {*seen} <= compiled
    seen.clear()
    linears(block_weight(48, 96, torch.bfloat16))
    assert seen
