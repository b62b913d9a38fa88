"""Weights in blocks of 4-bit floats: the numbers of the OCP Microscaling specification."""

from __future__ import annotations

import torch

from session_server.runner.mxfp4 import dequantize


def test_every_block_has_its_own_scale_and_the_low_half_of_a_byte_comes_first() -> None:
    scales = torch.tensor([[127, 128, 126], [130, 127, 120]], dtype=torch.uint8)
    blocks = torch.full((2, 3, 16), 0x21, dtype=torch.uint8)
    blocks[1, 2] = 0xF7
    weights = dequantize(blocks, scales)
    assert (weights.shape, weights.dtype) == ((2, 3, 32), torch.float32)
    first = weights[0, 0].tolist()
    assert first == [0.5, 1.0] * 16
    assert weights[..., 0].tolist() == [[0.5, 1.0, 0.25], [4.0, 0.5, 6.0 / 128]]
    assert weights[1, 2].tolist() == [6.0 / 128, -6.0 / 128] * 16
