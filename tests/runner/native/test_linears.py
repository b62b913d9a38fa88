"""Linears of every format against arithmetic in 64 bits."""

from __future__ import annotations

from typing import Final

import numpy as np
import pytest
import torch
from torch import Tensor

from session_server.runner.native import WeightFormat, _native
from session_server.runner.native.linear import NativeLinear, pack

SHAPES: Final = ((1, 1), (15, 31), (16, 32), (17, 33), (100, 770), (129, 64))
"""Outputs and inputs: less than a panel or block, exactly one, one more, several with a rest."""

NUM_TOKENS: Final = (1, 2, 3, 5, 8, 9, 65, 97)
"""One, less than a tile, exactly one, one more, many, and more than a block of tokens."""

EPSILON: Final = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}
"""Rounding of a weight, and of an input where the kernel computes in the weight's dtype."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def blocks(x: Tensor) -> Tensor:
    """[rows, inputs] -> [rows, blocks, 32], padded with zeros."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))


def quantized(weight: Tensor, num_bits: int) -> Tensor:
    """The weight that the codes stand for, by the rules that docs/models.md gives."""
    of_blocks = blocks(weight)
    if num_bits == 8:
        scales = (of_blocks.abs().amax(-1, keepdim=True) / 127).half().float()
        minimums = torch.zeros_like(scales)
        lowest, highest = -127, 127
    else:
        least = of_blocks.amin(-1, keepdim=True).clamp_max(0)
        most = of_blocks.amax(-1, keepdim=True).clamp_min(0)
        scales, minimums = ((most - least) / 15).half().float(), (-least).half().float()
        lowest, highest = 0, 15
    codes = ((of_blocks + minimums) / scales).round().clamp(lowest, highest).nan_to_num()
    return (codes * scales - minimums).flatten(1)[:, : weight.shape[1]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("format", ["float32", "bfloat16", "float16"])
def test_a_linear_is_what_torch_computes(
    cpu: str, shape: tuple[int, int], num_tokens: int, format: WeightFormat
) -> None:
    outputs, inputs = shape
    weight, bias, x = random(outputs, inputs), random(outputs, seed=1), random(num_tokens, inputs)
    rounded = weight.to(getattr(torch, format))
    linear = NativeLinear(pack(rounded, format, bias))
    expected = x.double() @ rounded.double().T + bias.double()
    # Each product is off by the rounding of its input, and sums of n in 32 bits by a little more.
    bound = EPSILON[format] * (x.double().abs() @ rounded.double().abs().T) + 1e-6
    assert ((linear(x).double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_codes_stand_for_their_weights(
    cpu: str, shape: tuple[int, int], num_tokens: int, format: WeightFormat
) -> None:
    (outputs, inputs), num_bits = shape, int(format.removeprefix("int"))
    weight, x = random(outputs, inputs), random(num_tokens, inputs)
    rounded = quantized(weight, num_bits)
    linear = NativeLinear(pack(weight, format))
    # An input is off by half a step of its block, which has 127 of them, times the weights there.
    steps = blocks(x).abs().amax(-1) / 127
    bound = (steps @ blocks(rounded).abs().sum(-1).T) * 0.51 + 1e-4
    off = (linear(x) - x @ rounded.T).abs()
    assert (off <= bound).all()
    assert (rounded - weight).abs().max() <= blocks(weight).abs().max() * (
        0.005 if num_bits == 8 else 0.1
    )


@pytest.mark.parametrize("num_bits", [8, 4])
def test_given_codes_are_kept_exactly(cpu: str, num_bits: int) -> None:
    """One input at a time: its column, without any rounding but that of the scales."""
    rng = np.random.default_rng(0)
    outputs, inputs = 35, 96
    low, high, dtype = (-128, 128, np.int8) if num_bits == 8 else (0, 16, np.uint8)
    codes = rng.integers(low, high, (outputs, inputs)).astype(dtype)
    scales = rng.random((outputs, inputs // 32)).astype(np.float16).astype(np.float32)
    minimums = None
    if num_bits == 4:
        minimums = rng.random((outputs, inputs // 32)).astype(np.float16).astype(np.float32)
    linear = NativeLinear(_native.Linear.of_codes(codes, num_bits, scales, minimums))
    expected = codes.reshape(outputs, -1, 32).astype(np.float32) * scales[..., None]
    if minimums is not None:
        expected -= minimums[..., None]
    columns = linear(torch.eye(inputs)).numpy().T
    np.testing.assert_allclose(columns, expected.reshape(outputs, inputs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("format", ["float32", "bfloat16", "float16", "int8", "int4"])
def test_a_token_does_not_notice_the_others(cpu: str, threads: int, format: WeightFormat) -> None:
    linear = NativeLinear(pack(random(200, 1100), format))
    x = random(67, 1100)
    together = linear(x)
    for count in (1, 2, 5, 8, 33):
        for first in (0, 11, 67 - count):
            assert torch.equal(linear(x[first : first + count]), together[first : first + count])


@pytest.mark.parametrize("format", ["float32", "bfloat16", "float16", "int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_shows_and_stays_with_its_token(
    cpu: str, format: WeightFormat, value: float
) -> None:
    linear = NativeLinear(pack(random(20, 64).abs() + 0.1, format))
    x = random(3, 64)
    healthy = linear(x)
    x[1, 40] = value
    sick = linear(x)
    assert not sick[1].isfinite().any()
    assert torch.equal(sick[::2], healthy[::2])


def test_the_largest_is_found_and_the_first_of_equals(cpu: str, threads: int) -> None:
    for size in (1, 5, 16, 1000, 1537):
        logits = random(9, size)
        logits[3] = 0.0
        logits[4, size // 2 :] = logits.max()
        logits[5, size - 1] = float("nan")
        logits[6, 0] = float("-inf")
        tokens, is_finite = torch.empty(9, dtype=torch.int64), torch.empty(9, dtype=torch.bool)
        _native.argmax(logits.numpy(), tokens.numpy(), is_finite.numpy())
        assert is_finite.tolist() == logits.isfinite().all(1).tolist()
        best = [row.tolist().index(row.max()) for row in logits[is_finite]]
        assert tokens[is_finite].tolist() == best


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_has_no_code(cpu: str, format: WeightFormat, value: float) -> None:
    weight = random(20, 64)
    weight[3, 40] = value
    outputs, x = np.empty((1, 20), np.float32), np.ones((1, 64), np.float32)
    _native.Linear(weight, format).apply(x, outputs)
    assert np.isfinite(outputs).tolist() == [[output != 3 for output in range(20)]]
    x[0, 5] = value
    _native.Linear(random(20, 64), format).apply(x, outputs)
    assert not np.isfinite(outputs).any()


def test_codes_have_the_scales_of_their_blocks() -> None:
    codes, scales = np.zeros((4, 64), np.int8), np.zeros((4, 2), np.float32)
    _native.Linear.of_codes(codes, 8, scales)
    for wrong in (scales[:3], scales[:, :1].copy()):
        with pytest.raises(ValueError, match="scales by block"):
            _native.Linear.of_codes(codes, 8, wrong)
        with pytest.raises(ValueError, match="scales by block"):
            _native.Linear.of_codes(codes.view(np.uint8), 4, scales, wrong)
    with pytest.raises(ValueError, match=r"a bias is \[outputs\]"):
        _native.Linear.of_codes(codes, 8, scales, None, np.zeros(3, np.float32))


def test_what_is_no_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="no format of weights is named float64"):
        _native.Linear(random(4, 4), "float64")
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        _native.Linear(random(4, 4).double(), "float32")
    with pytest.raises(ValueError, match=r"\[outputs\]"):
        _native.Linear(random(4, 4), "float32", np.zeros(3, dtype=np.float32))
    with pytest.raises(ValueError, match="whole blocks"):
        _native.Linear.of_codes(np.zeros((4, 33), np.int8), 8, np.zeros((4, 2), np.float32))
    with pytest.raises(ValueError, match="no kernels named z80"):
        _native.use_cpu("z80")
