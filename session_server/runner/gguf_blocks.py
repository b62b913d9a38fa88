"""Decode the block types of GGUF tensors (llama.cpp, `ggml-common.h` and `ggml-quants.c`).

A row is a sequence of blocks, each with its scales before or behind its codes. Where 32 numbers
share a scale and a minimum and 4 or 8 bits hold their codes, these are kept; Q5_1 and Q5_K (5 bits
with minimums) and Q6_K (a scale for 16 numbers) become numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from session_server.models.layers.block_weight import BlockWeight

Codes = tuple[Tensor, Tensor, Tensor | None]
"""Codes [rows, blocks, 32], scales [rows, blocks] and minimums [rows, blocks]."""


def has_block_codes(type_name: str) -> bool:
    """Return whether `block_weight` decodes a type."""
    return type_name in _CODES


def code_bits(type_name: str) -> int:
    """Return the bits of the codes that `block_weight` makes of a type, 0 if it makes none."""
    if not has_block_codes(type_name):
        return 0
    return 4 if type_name.startswith("Q4") else 8


def block_weight(type_name: str, blocks: Tensor, dtype: torch.dtype) -> BlockWeight:
    """Return the codes of blocks, uint8 [rows, blocks, bytes of a block]."""
    codes, scales, minimums = _CODES[type_name](blocks)
    num_bits = 8 if codes.dtype == torch.int8 else 4
    return BlockWeight(codes.flatten(1), scales, minimums, num_bits, dtype)


def dequantize(type_name: str, blocks: Tensor) -> Tensor:
    """Return the numbers of blocks, uint8 [rows, blocks, bytes], as float32 [rows, inputs]."""
    if has_block_codes(type_name):
        return block_weight(type_name, blocks, torch.float32).dequantize()
    return _NUMBERS[type_name](blocks).flatten(1)


def _split(numbers: Tensor, *sizes: int) -> Tensor:
    """Return [..., n] as [..., sizes], a tensor of n numbers."""
    return numbers.reshape(*numbers.shape[:-1], *sizes)


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 at a byte of every block, as float32 [rows, blocks]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Return the low halves of bytes [..., n], then their high halves: [..., 2 n]."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _bits(packed: Tensor) -> Tensor:
    """Return the bits of bytes [..., n], the lowest of each first: [..., 8 n]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> shifts & 1).flatten(-2)


def _q4_0(blocks: Tensor) -> Codes:
    scales = _half(blocks, 0)
    return _nibbles(blocks[..., 2:]), scales, 8 * scales


def _q4_1(blocks: Tensor) -> Codes:
    return _nibbles(blocks[..., 4:]), _half(blocks, 0), -_half(blocks, 2)


def _q5_0(blocks: Tensor) -> Codes:
    codes = _nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return codes.to(torch.int8) - 16, _half(blocks, 0), None


def _q8_0(blocks: Tensor) -> Codes:
    return blocks[..., 2:].contiguous().view(torch.int8), _half(blocks, 0), None


def _q4_k(blocks: Tensor) -> Codes:
    scales, minimums = _k_scales(blocks)
    packed = _split(blocks[..., 16:], 4, 32)
    codes = torch.stack((packed & 15, packed >> 4), dim=-2)
    return codes.flatten(1, 3), scales.flatten(1), minimums.flatten(1)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minimums of 8 blocks of 32: float32 [rows, blocks, 8] each.

    They are products of a float16 with 6 bits, of which 12 bytes hold 16: the lower four pairs
    whole, the upper ones in four bits each and two more above the lower ones.
    """
    low, middle, high = _split(blocks[..., 4:16], 3, 4).unbind(-2)
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), dim=-1)
    minimums = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), dim=-1)
    return _half(blocks, 0).unsqueeze(-1) * scales, _half(blocks, 2).unsqueeze(-1) * minimums


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return codes * _half(blocks, 0).unsqueeze(-1) + _half(blocks, 2).unsqueeze(-1)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minimums = _k_scales(blocks)
    packed = _split(blocks[..., 48:], 4, 32)
    codes = torch.stack((packed & 15, packed >> 4), dim=-2).flatten(-3, -2)
    # Bit i of byte j is the fifth of code j in block i.
    fifth = _split(_bits(blocks[..., 16:48]), 32, 8).transpose(-1, -2)
    numbers = (codes | fifth << 4) * scales.unsqueeze(-1) - minimums.unsqueeze(-1)
    return numbers.flatten(-2)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _split(blocks[..., :128], 2, 1, 64)
    high = _split(blocks[..., 128:192], 2, 1, 32)
    low = torch.cat((low & 15, low >> 4), dim=-2).flatten(-2)
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=-2).flatten(-2)
    codes = (low | high << 4).flatten(-2).to(torch.int8) - 32
    of_16 = blocks[..., 192:208].contiguous().view(torch.int8)
    scales = _half(blocks, 208).unsqueeze(-1) * of_16
    return (_split(codes, 16, 16) * scales.unsqueeze(-1)).flatten(-2)


_CODES: Final[Mapping[str, Callable[[Tensor], Codes]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
}

_NUMBERS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "Q5_1": _q5_1,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""Numbers [rows, blocks, elements of a block]."""
