"""Hold the codes of a quantized matrix as its file has them: blocks of 32 inputs share a scale.

Small formats differ in how they lay out bits; what they say is one thing, `w = scale * q - minimum`
(GGML's block quantization, llama.cpp, `ggml-common.h`; AWQ, Lin et al. 2023; GPTQ, Frantar et al.
2022). Kernels choose their own layout of it, so nothing is rounded a second time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import torch
from torch import Tensor

BLOCK: Final = 32
"""Consecutive inputs of one output that share a scale and a minimum."""

FP8_BLOCK: Final = 128
"""Consecutive inputs of one output that share the scale of 8-bit floats."""

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


class CodedWeight(ABC):
    """Hold a matrix [outputs, inputs] in codes, whose scales are of blocks of inputs."""

    __slots__ = ()
    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Return outputs and inputs."""
        return self.codes.shape[0], self.codes.shape[1]

    @abstractmethod
    def dequantize(self) -> Tensor:
        """Return the numbers, float32 [outputs, inputs]."""

    @property
    @abstractmethod
    def kind(self) -> tuple[object, ...]:
        """Return what is equal for weights that can be joined."""

    def dense(self) -> Tensor:
        """Return the numbers in `dtype` [outputs, inputs], rounded once."""
        outputs, inputs = self.shape
        numbers = torch.empty(self.shape, dtype=self.dtype, device=self.codes.device)
        if numbers.is_meta:
            return numbers
        step = max(1, CHUNK_ELEMENTS // inputs)
        for start in range(0, outputs, step):
            numbers[start : start + step] = self.rows(slice(start, start + step)).dequantize()
        return numbers

    def rows(self, chosen: slice | Tensor) -> Self:
        """Return the outputs `chosen`, in the order of an index; their numbers are the same."""
        return self._with({name: _chosen(of, chosen) for name, of in self._tensors().items()})

    def to(self, device: torch.device) -> Self:
        """Return the same weight on a device."""
        return self._with({name: of.to(device) for name, of in self._tensors().items()})

    @staticmethod
    def can_join(parts: Sequence[CodedWeight]) -> bool:
        """Return whether the outputs of all parts fit into one weight."""
        return len({part.kind for part in parts}) == 1

    @staticmethod
    def join(parts: Sequence[CodedWeight]) -> CodedWeight:
        """Return the outputs of all parts, one after the other; `can_join` must hold."""
        assert CodedWeight.can_join(parts)
        each = [part._tensors() for part in parts]
        return parts[0]._with({name: concatenate([of[name] for of in each]) for name in each[0]})

    @abstractmethod
    def _with(self, tensors: dict[str, Tensor]) -> Self:
        """Return the same with other tensors, by the names of fields."""

    @abstractmethod
    def _tensors(self) -> dict[str, Tensor]:
        """Return all tensors, outputs first, by the names of fields."""


@dataclass(frozen=True, slots=True)
class BlockWeight(CodedWeight):
    """Describe a matrix [outputs, inputs] whose element is `scale * code - minimum`.

    `codes`: int8 (8 bits) or uint8 in 0..15 (4 bits) [outputs, inputs], one to a byte. `scales`:
    float32 [outputs, inputs / 32]. `minimums`: the same shape, None for zeros. `num_bits`: 4 or 8;
    8 have no minimums. `dtype`: that of the activations, and of a dense copy. `rounds_inputs`: its
    inputs should be rounded to 8 bits too, token by token, where kernels do (W8A8); an output's
    scales are one then.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None
    num_bits: int
    dtype: torch.dtype = torch.float32
    rounds_inputs: bool = False

    def __post_init__(self) -> None:
        outputs, inputs = self.codes.shape
        assert self.num_bits in (4, 8)
        assert self.num_bits == 8 or not self.rounds_inputs
        assert self.codes.dtype == (torch.uint8 if self.num_bits == 4 else torch.int8)
        assert inputs % BLOCK == 0, "blocks are whole"
        assert self.scales.shape == (outputs, inputs // BLOCK)
        assert self.minimums is None or self.num_bits == 4
        assert self.minimums is None or self.minimums.shape == self.scales.shape

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what is equal for weights that can be joined."""
        integers = self.num_bits, self.minimums is None, self.rounds_inputs
        return BlockWeight, *integers, self.dtype, self.shape[1]

    def dequantize(self) -> Tensor:
        """Return the numbers, float32 [outputs, inputs]."""
        outputs, inputs = self.shape
        blocks = self.codes.view(outputs, inputs // BLOCK, BLOCK).to(torch.float32)
        blocks = blocks.mul_(self.scales.unsqueeze(2))
        if self.minimums is not None:
            blocks = blocks.sub_(self.minimums.unsqueeze(2))
        return blocks.view(outputs, inputs)

    def _with(self, tensors: dict[str, Tensor]) -> BlockWeight:
        codes, scales = tensors["codes"], tensors["scales"]
        return replace(self, codes=codes, scales=scales, minimums=tensors.get("minimums"))

    def _tensors(self) -> dict[str, Tensor]:
        minimums = {} if self.minimums is None else {"minimums": self.minimums}
        return {"codes": self.codes, "scales": self.scales, **minimums}


@dataclass(frozen=True, slots=True)
class Fp8Weight(CodedWeight):
    """Describe a matrix [outputs, inputs] whose element is `scale * number`.

    `codes`: the bits of 8-bit floats (E4M3), uint8 [outputs, inputs]. `scales`: float32 [outputs,
    inputs / 128], rounded up. Files have a scale for 128 outputs together (DeepSeek-AI 2024, V3
    report, section 3.3), which may be apart here. `dtype`: as in `BlockWeight`.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        outputs, inputs = self.codes.shape
        assert self.codes.dtype == torch.uint8
        assert self.scales.shape == (outputs, -(-inputs // FP8_BLOCK))

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what is equal for weights that can be joined."""
        return Fp8Weight, self.dtype, self.shape[1]

    def dequantize(self) -> Tensor:
        """Return the numbers, float32 [outputs, inputs]."""
        by_input = self.scales.repeat_interleave(FP8_BLOCK, dim=1)[:, : self.shape[1]]
        return self.codes.view(torch.float8_e4m3fn).float().mul_(by_input)

    def _with(self, tensors: dict[str, Tensor]) -> Fp8Weight:
        return replace(self, codes=tensors["codes"], scales=tensors["scales"])

    def _tensors(self) -> dict[str, Tensor]:
        return {"codes": self.codes, "scales": self.scales}


def _chosen(rows: Tensor, chosen: slice | Tensor) -> Tensor:
    """Index the first dimension; see `concatenate` for meta tensors."""
    if rows.is_meta and isinstance(chosen, Tensor):
        return rows.new_empty((len(chosen), *rows.shape[1:]))
    return rows[chosen]


Weight = Tensor | CodedWeight
"""A matrix [outputs, inputs]: dense, in the model's dtype, or codes."""
