"""Blocks of GGUF mean, bit for bit, what the gguf package says that they mean."""

from __future__ import annotations

import warnings

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from session_server.models.gguf.types import TENSOR_TYPES
from session_server.runner.gguf_blocks import block_weight, dequantize, has_block_codes

BLOCK_TYPES = {number: kind for number, kind in TENSOR_TYPES.items() if kind.block > 1}


@pytest.mark.parametrize("number", BLOCK_TYPES, ids=lambda number: BLOCK_TYPES[number].name)
def test_blocks_of_any_bytes_mean_the_same(number: int) -> None:
    kind = BLOCK_TYPES[number]
    rng = np.random.default_rng(number)
    packed = rng.integers(0, 256, (7, 3 * kind.block_bytes), dtype=np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some scales are infinite, or no numbers
        expected = gguf.quants.dequantize(packed, GGMLQuantizationType(number))
    blocks = torch.from_numpy(packed).view(7, 3, kind.block_bytes)
    numbers = dequantize(kind.name, blocks)
    assert numbers.dtype == torch.float32
    assert np.array_equal(numbers.numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_quantized_numbers_are_those_that_were_stored(name: str) -> None:
    kind = GGMLQuantizationType[name]
    numbers = np.random.default_rng(0).standard_normal((5, 96), np.float32)
    packed = gguf.quants.quantize(numbers, kind)
    blocks = torch.from_numpy(packed).view(5, 3, -1)
    weight = block_weight(name, blocks, torch.float32)
    assert weight.shape == (5, 96)
    assert weight.num_bits == (4 if name.startswith("Q4") else 8)
    assert np.array_equal(weight.dequantize().numpy(), gguf.quants.dequantize(packed, kind))


def test_types_whose_codes_do_not_fit_into_blocks_of_32_have_none() -> None:
    assert [kind.name for kind in BLOCK_TYPES.values() if not has_block_codes(kind.name)] == [
        "Q5_1",
        "Q5_K",
        "Q6_K",
    ]
