"""Hold the codes of a quantized matrix as its file has them: blocks of 32 inputs share a scale.

Small formats differ in how they lay out bits; what they say is one thing, `w = scale * q - minimum`
(GGML's block quantization, llama.cpp, `ggml-common.h`; AWQ, Lin et al. 2023; GPTQ, Frantar et al.
2022). Kernels choose their own layout of it, so nothing is rounded a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

BLOCK: Final = 32
"""Consecutive inputs of one output that share a scale and a minimum."""

CHUNK_ELEMENTS: Final = 1 << 20
"""Elements converted at a time: temporary tensors take a few times as many bytes."""


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate along the first dimension, as `torch.cat` does.

    For meta tensors `torch.cat` would import torch's compiler first, which takes two seconds.
    """
    first = parts[0]
    if first.is_meta:
        return first.new_empty((sum(map(len, parts)), *first.shape[1:]))
    return torch.cat(tuple(parts))


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """Describe a matrix [outputs, inputs] whose element is `scale * code - minimum`.

    `codes`: int8 (8 bits) or uint8 in 0..15 (4 bits) [outputs, inputs], one to a byte. `scales`:
    float32 [outputs, inputs / 32]. `minimums`: the same shape, None for zeros. `num_bits`: 4 or 8;
    8 have no minimums. `dtype`: that of the activations, and of a dense copy.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None
    num_bits: int
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        outputs, inputs = self.codes.shape
        assert self.num_bits in (4, 8)
        assert self.codes.dtype == (torch.uint8 if self.num_bits == 4 else torch.int8)
        assert inputs % BLOCK == 0, "blocks are whole"
        assert self.scales.shape == (outputs, inputs // BLOCK)
        assert self.minimums is None or self.num_bits == 4
        assert self.minimums is None or self.minimums.shape == self.scales.shape

    @property
    def shape(self) -> tuple[int, int]:
        """Return outputs and inputs."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> Tensor:
        """Return the numbers, float32 [outputs, inputs]."""
        outputs, inputs = self.shape
        blocks = self.codes.view(outputs, inputs // BLOCK, BLOCK).to(torch.float32)
        blocks = blocks.mul_(self.scales.unsqueeze(2))
        if self.minimums is not None:
            blocks = blocks.sub_(self.minimums.unsqueeze(2))
        return blocks.view(outputs, inputs)

    def dense(self) -> Tensor:
        """Return the numbers in `dtype` [outputs, inputs], rounded once."""
        outputs, inputs = self.shape
        numbers = torch.empty(self.shape, dtype=self.dtype, device=self.codes.device)
        if numbers.is_meta:
            return numbers
        step = max(1, CHUNK_ELEMENTS // inputs)
        for start in range(0, outputs, step):
            numbers[start : start + step] = self._part(slice(start, start + step)).dequantize()
        return numbers

    def rows(self, index: Tensor) -> BlockWeight:
        """Return the outputs `index` [chosen], in that order; their numbers are the same."""
        return self._part(index)

    def to(self, device: torch.device) -> BlockWeight:
        """Return the same weight on a device."""
        minimums = None if self.minimums is None else self.minimums.to(device)
        codes, scales = self.codes.to(device), self.scales.to(device)
        return replace(self, codes=codes, scales=scales, minimums=minimums)

    @staticmethod
    def can_join(parts: tuple[BlockWeight, ...]) -> bool:
        """Return whether the outputs of all parts fit into one weight."""
        return len({(p.num_bits, p.minimums is None, p.dtype, p.shape[1]) for p in parts}) == 1

    @staticmethod
    def join(parts: tuple[BlockWeight, ...]) -> BlockWeight:
        """Return the outputs of all parts, one after the other; `can_join` must hold."""
        assert BlockWeight.can_join(parts)
        minimums = [part.minimums for part in parts if part.minimums is not None]
        return replace(
            parts[0],
            codes=concatenate([part.codes for part in parts]),
            scales=concatenate([part.scales for part in parts]),
            minimums=concatenate(minimums) if minimums else None,
        )

    def _part(self, chosen: slice | Tensor) -> BlockWeight:
        minimums = None if self.minimums is None else _chosen(self.minimums, chosen)
        codes, scales = _chosen(self.codes, chosen), _chosen(self.scales, chosen)
        return replace(self, codes=codes, scales=scales, minimums=minimums)


def _chosen(rows: Tensor, chosen: slice | Tensor) -> Tensor:
    """Index the first dimension; see `concatenate` for meta tensors."""
    if rows.is_meta and isinstance(chosen, Tensor):
        return rows.new_empty((len(chosen), *rows.shape[1:]))
    return rows[chosen]


Weight = Tensor | BlockWeight
"""A matrix [outputs, inputs]: dense, in the model's dtype, or codes."""
