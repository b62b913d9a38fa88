"""Turn integers with a scale and a zero point per group of inputs into a weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from session_server.models.layers.block_weight import BLOCK, CHUNK_ELEMENTS, BlockWeight, Weight


@dataclass(frozen=True, slots=True)
class GroupedCodes:
    """Describe a matrix whose element is `scale * (code - zero)`.

    `codes`: uint8 [outputs, inputs]. `scales`: float32 [outputs, groups]. `zeros`: of the same
    shape, integers of the range of codes. `groups`: the group of each input, int64 [inputs].
    `rounds_inputs`: see `BlockWeight`; there is one group then.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor
    num_bits: int
    rounds_inputs: bool = False

    def __post_init__(self) -> None:
        outputs, inputs = self.codes.shape
        assert len(self.groups) == inputs, "each input has a group"
        assert len(self.scales) == outputs, "each output has its scales"
        assert self.zeros.shape == self.scales.shape, "each scale has a zero point"
        assert self.scales.shape[1] == 1 or not self.rounds_inputs, "scales are of outputs"

    def weight(self, dtype: torch.dtype) -> Weight:
        """Return the codes of blocks, or numbers of `dtype` where they are not of that kind.

        Not of that kind are inputs whose groups change within 32 of them (an order by activations,
        small groups), and 8 bits around another zero than 128.
        """
        if not are_whole_blocks(self.groups):
            return self._numbers(dtype)
        first = self.groups[::BLOCK]
        scales = self.scales[:, first]
        if self.num_bits == 4:
            minimums = scales * self.zeros[:, first]
            return BlockWeight(self.codes, scales, minimums, 4, dtype)
        if not bool((self.zeros == 128).all()):
            return self._numbers(dtype)
        signed = (self.codes ^ 128).view(torch.int8)
        return BlockWeight(signed, scales, None, 8, dtype, self.rounds_inputs)

    def _numbers(self, dtype: torch.dtype) -> Tensor:
        numbers = torch.empty(self.codes.shape, dtype=dtype, device=self.codes.device)
        step = max(1, CHUNK_ELEMENTS // self.codes.shape[1])
        for start in range(0, len(numbers), step):
            rows = slice(start, start + step)
            offsets = self.codes[rows].float() - self.zeros[rows][:, self.groups]
            numbers[rows] = offsets * self.scales[rows][:, self.groups]
        return numbers


def are_whole_blocks(groups: Tensor) -> bool:
    """Return whether groups [inputs] change between blocks of inputs only."""
    if len(groups) % BLOCK:
        return False
    return groups.equal(groups[::BLOCK].repeat_interleave(BLOCK))


def unpack(words: Tensor, num_bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return the integers in words: int32 [rows, n] to uint8 [rows, n * 32 / num_bits].

    The lowest bits of a word are its first integer, or the one that `order` says.
    """
    places = range(32 // num_bits) if order is None else _inverse(order)
    mask = (1 << num_bits) - 1
    codes = [(words >> (place * num_bits) & mask).to(torch.uint8) for place in places]
    return torch.stack(codes, dim=-1).flatten(-2)


def regular_groups(inputs: int, group_size: int | None) -> Tensor:
    """Return the group of each input, int64 [inputs], for groups of consecutive inputs."""
    return torch.arange(inputs) // (group_size or inputs)


def _inverse(order: tuple[int, ...]) -> list[int]:
    return [order.index(place) for place in range(len(order))]
