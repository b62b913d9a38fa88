"""Find and read quantized matrices of checkpoints: AWQ, GPTQ, compressed-tensors.

Each format stores several tensors in place of one `NAME.weight`. They are told by their names, so
matrices that were left as they are (`modules_to_not_convert`, `ignore`) need no list.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from session_server.models.errors import CheckpointError
from session_server.models.quantization import PackedMethod, QuantizationConfig
from session_server.runner.grouped_codes import (
    GroupedCodes,
    are_whole_blocks,
    regular_groups,
    unpack,
)

Read = Callable[[str], Tensor | None]
"""Returns a stored tensor by its name, None if there is none."""

WORDS: Final = frozenset({"I32"})
INDICES: Final = frozenset({"I32", "I64"})
BYTES: Final = frozenset({"I8"})
FLOATS: Final = frozenset({"F16", "BF16", "F32"})
"""Dtypes of safetensors' headers."""

WORD_BITS: Final = 32

AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs is in the lowest four bits of a word, which in the next (AutoAWQ)."""


@dataclass(frozen=True, slots=True)
class Part:
    """Describe a tensor that a format needs. `dtypes`: those that it may have."""

    shape: tuple[int, ...]
    dtypes: frozenset[str]


class PackedFormat(ABC):
    """Read the matrices of one format. Names are those of the whole matrix, `….weight`."""

    def __init__(self, config: QuantizationConfig) -> None:
        self.num_bits = config.num_bits
        self.group_size = config.group_size
        self.config = config
        self.per_word = WORD_BITS // config.num_bits

    @abstractmethod
    def holds(self, name: str, names: Collection[str]) -> bool:
        """Return whether a matrix is stored quantized, among the tensors `names`."""

    @abstractmethod
    def parts(self, name: str, shape: tuple[int, int], names: Collection[str]) -> dict[str, Part]:
        """Return the tensors that stand for a matrix [outputs, inputs]; it must be held.

        Raises:
            CheckpointError: the format cannot store a matrix of that shape.
        """

    @abstractmethod
    def codes(self, name: str, shape: tuple[int, int], read: Read) -> GroupedCodes:
        """Read a matrix [outputs, inputs]; it must be held, and its parts checked."""

    @abstractmethod
    def groups(self, name: str, inputs: int, read: Read) -> Tensor:
        """Return the group of each input, int64 [inputs]."""

    @abstractmethod
    def zeros(self, name: str, outputs: int, read: Read) -> Tensor | None:
        """Return zero points, uint8 [outputs, groups]; None if all are the middle."""

    def code_bits(self, name: str, shape: tuple[int, int], read: Read) -> int:
        """Return the bits of the blocks that `GroupedCodes.weight` makes, 0 for numbers."""
        if not are_whole_blocks(self.groups(name, shape[1], read)):
            return 0
        if self.num_bits == 8:
            zeros = self.zeros(name, shape[0], read)
            if zeros is not None and not bool((zeros == 128).all()):
                return 0
        return self.num_bits

    def num_groups(self, inputs: int) -> int:
        """Return the groups of a row."""
        return -(-inputs // (self.group_size or inputs))

    def num_words(self, name: str, count: int) -> int:
        """Return the words of so many outputs or inputs.

        Raises:
            CheckpointError: they do not fill the last one; no such format has words in part.
        """
        if count % self.per_word:
            raise CheckpointError(
                f"{name} has a side of {count}, and words of {self.per_word} codes hold multiples "
                "of that only; download the weights again"
            )
        return count // self.per_word


class Awq(PackedFormat):
    """Inputs before outputs; eight outputs to a word, in an order of their own."""

    def holds(self, name: str, names: Collection[str]) -> bool:
        """Return whether a matrix is stored quantized."""
        return f"{_stem(name)}.qweight" in names

    def parts(self, name: str, shape: tuple[int, int], names: Collection[str]) -> dict[str, Part]:
        """Return codes, zero points and scales."""
        (outputs, inputs), stem = shape, _stem(name)
        groups, words = self.num_groups(inputs), self.num_words(name, outputs)
        return {
            f"{stem}.qweight": Part((inputs, words), WORDS),
            f"{stem}.qzeros": Part((groups, words), WORDS),
            f"{stem}.scales": Part((groups, outputs), FLOATS),
        }

    def codes(self, name: str, shape: tuple[int, int], read: Read) -> GroupedCodes:
        """Read a matrix."""
        stem = _stem(name)
        codes, zeros = self._unpacked(f"{stem}.qweight", read), self.zeros(name, shape[0], read)
        scales = _required(f"{stem}.scales", read).float().t().contiguous()
        groups = self.groups(name, shape[1], read)
        return GroupedCodes(codes, scales, zeros, groups, self.num_bits)

    def groups(self, name: str, inputs: int, read: Read) -> Tensor:
        """Return the group of each input."""
        del name, read
        return regular_groups(inputs, self.group_size)

    def zeros(self, name: str, outputs: int, read: Read) -> Tensor:
        """Return zero points."""
        del outputs
        return self._unpacked(f"{_stem(name)}.qzeros", read)

    def _unpacked(self, part: str, read: Read) -> Tensor:
        return unpack(_required(part, read), self.num_bits, AWQ_ORDER).t().contiguous()


class Gptq(PackedFormat):
    """Inputs before outputs; several inputs to a word. `g_idx` is the group of each input."""

    def holds(self, name: str, names: Collection[str]) -> bool:
        """Return whether a matrix is stored quantized."""
        return f"{_stem(name)}.qweight" in names

    def parts(self, name: str, shape: tuple[int, int], names: Collection[str]) -> dict[str, Part]:
        """Return codes, zero points, scales and groups."""
        (outputs, inputs), stem = shape, _stem(name)
        groups = self.num_groups(inputs)
        parts = {
            f"{stem}.qweight": Part((self.num_words(name, inputs), outputs), WORDS),
            f"{stem}.qzeros": Part((groups, self.num_words(name, outputs)), WORDS),
            f"{stem}.scales": Part((groups, outputs), FLOATS),
        }
        if f"{stem}.g_idx" in names:
            parts[f"{stem}.g_idx"] = Part((inputs,), INDICES)
        return parts

    def codes(self, name: str, shape: tuple[int, int], read: Read) -> GroupedCodes:
        """Read a matrix."""
        stem = _stem(name)
        codes = unpack(_required(f"{stem}.qweight", read).t(), self.num_bits)
        scales = _required(f"{stem}.scales", read).float().t().contiguous()
        zeros, groups = self.zeros(name, shape[0], read), self.groups(name, shape[1], read)
        return GroupedCodes(codes, scales, zeros, groups, self.num_bits)

    def groups(self, name: str, inputs: int, read: Read) -> Tensor:
        """Return the group of each input."""
        return _groups(f"{_stem(name)}.g_idx", read, inputs, self)

    def zeros(self, name: str, outputs: int, read: Read) -> Tensor:
        """Return zero points."""
        del outputs
        # The first format subtracts one from whole words, so that a zero point of 0 borrows from
        # the next one (GPTQModel); the sum of words gives it back.
        ones = sum(1 << self.num_bits * place for place in range(self.per_word))
        words = _required(f"{_stem(name)}.qzeros", read) + self.config.zero_offset * ones
        return unpack(words, self.num_bits).t().contiguous()


class CompressedTensors(PackedFormat):
    """Outputs before inputs; several inputs to a word, or one to a byte. Integers are signed."""

    def holds(self, name: str, names: Collection[str]) -> bool:
        """Return whether a matrix is stored quantized."""
        return f"{name}_packed" in names or f"{name}_scale" in names

    def parts(self, name: str, shape: tuple[int, int], names: Collection[str]) -> dict[str, Part]:
        """Return codes, scales and, if there are any, zero points and groups."""
        (outputs, inputs), groups = shape, self.num_groups(shape[1])
        parts = {f"{name}_scale": Part((outputs, groups), FLOATS)}
        zeros = Part((outputs, groups), BYTES)
        if self.config.is_packed:
            parts[f"{name}_packed"] = Part((outputs, -(-inputs // self.per_word)), WORDS)
            parts[f"{name}_shape"] = Part((2,), INDICES)
            zeros = Part((-(-outputs // self.per_word), groups), WORDS)
        else:
            parts[name] = Part(shape, BYTES)
        if self.config.needs_zeros or f"{name}_zero_point" in names:
            parts[f"{name}_zero_point"] = zeros
        if f"{name}_g_idx" in names:
            parts[f"{name}_g_idx"] = Part((inputs,), INDICES)
        return parts

    def codes(self, name: str, shape: tuple[int, int], read: Read) -> GroupedCodes:
        """Read a matrix."""
        (outputs, inputs), middle = shape, 1 << (self.num_bits - 1)
        scales = _required(f"{name}_scale", read).float()
        if self.config.is_packed:
            codes = unpack(_required(f"{name}_packed", read), self.num_bits)[
                :, :inputs
            ].contiguous()
        else:
            codes = _unsigned(_required(name, read), middle)
        zeros = self.zeros(name, outputs, read)
        if zeros is None:
            zeros = torch.full(scales.shape, middle, dtype=torch.uint8)
        groups = self.groups(name, inputs, read)
        rounds_inputs = self.config.rounds_inputs
        return GroupedCodes(codes, scales, zeros, groups, self.num_bits, rounds_inputs)

    def groups(self, name: str, inputs: int, read: Read) -> Tensor:
        """Return the group of each input."""
        return _groups(f"{name}_g_idx", read, inputs, self)

    def zeros(self, name: str, outputs: int, read: Read) -> Tensor | None:
        """Return zero points, None if none are stored."""
        stored = read(f"{name}_zero_point")
        if stored is None:
            return None
        if self.config.is_packed:
            return unpack(stored.t(), self.num_bits)[:, :outputs].t().contiguous()
        return _unsigned(stored, 1 << (self.num_bits - 1))


def packed_format(config: QuantizationConfig | None) -> PackedFormat | None:
    """Return the format of a checkpoint, None if its matrices are not quantized this way."""
    if config is None:
        return None
    kinds: dict[PackedMethod, type[PackedFormat]] = {
        PackedMethod.AWQ: Awq,
        PackedMethod.GPTQ: Gptq,
        PackedMethod.COMPRESSED_TENSORS: CompressedTensors,
    }
    return kinds[config.method](config)


def _stem(name: str) -> str:
    return name.removesuffix(".weight")


def _required(name: str, read: Read) -> Tensor:
    tensor = read(name)
    assert tensor is not None, "the parts of a matrix were checked"
    return tensor


def _unsigned(signed: Tensor, middle: int) -> Tensor:
    """Return signed integers moved by half of their range: int8 to uint8."""
    return (signed.to(torch.int16) + middle).to(torch.uint8)


def _groups(name: str, read: Read, inputs: int, of: PackedFormat) -> Tensor:
    """Return the group of each input, as it is stored or, if it is not, consecutive inputs'.

    Raises:
        CheckpointError: a group does not exist.
    """
    stored = read(name)
    if stored is None:
        return regular_groups(inputs, of.group_size)
    groups = stored.long()
    if int(groups.min()) < 0 or int(groups.max()) >= of.num_groups(inputs):
        raise CheckpointError(f"{name} names groups that do not exist; download the weights again")
    return groups
