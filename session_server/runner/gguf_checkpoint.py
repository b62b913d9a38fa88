"""Read the weights of a GGUF file, tensor by tensor, under Hugging Face's names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from session_server.models.gguf.config import head_counts
from session_server.models.gguf.names import StoredPart, stored_parts
from session_server.models.gguf.reader import read_gguf, read_range
from session_server.models.layers.block_weight import CHUNK_ELEMENTS, Weight
from session_server.runner.checkpoint import CheckpointReader, Shape, check_shapes
from session_server.runner.gguf_blocks import block_weight, code_bits, dequantize, has_block_codes
from session_server.runner.weight_rows import reorder_rows

_PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufCheckpoint:
    """Hold the header of a file. `num_bytes`: of the file."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            ModelError: see `models.gguf.reader.read_gguf` and `models.gguf.names.stored_parts`.
        """
        file = read_gguf(path)
        self.path = path
        self.num_bytes = file.num_bytes
        self.tensors = stored_parts(file, head_counts(file))

    def check(self, expected: Mapping[str, Shape], ignorable: set[str]) -> None:
        """Compare names and shapes before any tensor is used.

        Raises:
            CheckpointError: they differ; the message names the differences.
        """
        shapes = {name: part.shape for name, part in self.tensors.items()}
        check_shapes(self.path, shapes, expected, ignorable)

    def code_bits(self, name: str, shape: Shape) -> int:
        """Return the bits of a matrix's codes, 0 if it is read as numbers. A `CodeBits`."""
        del shape
        return code_bits(self.tensors[name].tensor.type.name)

    def is_fp8(self, name: str) -> bool:
        """Return whether a tensor is stored in 8-bit floats: GGUF has none. An `IsFp8`."""
        del name
        return False

    def reader(self, *, device: torch.device, dtype: torch.dtype) -> GgufReader:
        """Return a reader of a checked checkpoint."""
        return GgufReader(self, device=device, dtype=dtype)


class GgufReader(CheckpointReader):
    """Copy tensors out of a GGUF file, with the order of rows that Hugging Face's have."""

    def __init__(
        self, checkpoint: GgufCheckpoint, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Create a reader of a checked checkpoint; `take` returns copies of `dtype` on `device`."""
        super().__init__(device=device, dtype=dtype)
        self._path = checkpoint.path
        self._parts = checkpoint.tensors

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor of that name."""
        return name in self._parts

    def take_as(self, dtype: torch.dtype, name: str, *shape: int) -> Tensor:
        """Return a copy of a tensor in the given dtype; block types are dequantized."""
        del shape  # `check` has compared all shapes
        part = self._parts[name]
        numbers = _unpaired(part, self._dense(part, dtype))
        assert isinstance(numbers, Tensor)
        self.count_read()
        return numbers.to(self.device)

    def take_linear(self, name: str, outputs: int, inputs: int) -> Weight:
        """Return a matrix, as codes if its type has blocks that `BlockWeight` describes."""
        part = self._parts[name]
        if not has_block_codes(part.tensor.type.name):
            return self.take(name, outputs, inputs)
        weight = block_weight(part.tensor.type.name, self._blocks(part), self.dtype)
        self.count_read()
        return _unpaired(part, weight.to(self.device))

    def has_codes(self, name: str) -> bool:
        """Return whether a matrix is stored as codes that kernels take."""
        return has_block_codes(self._parts[name].tensor.type.name)

    def _dense(self, part: StoredPart, dtype: torch.dtype) -> Tensor:
        kind = part.tensor.type.name
        if kind in _PLAIN:
            # A tensor of its own even if the dtype is the same: `content` would be shared else.
            return self._content(part).view(_PLAIN[kind]).view(part.shape).to(dtype)
        blocks = self._blocks(part)
        numbers = torch.empty(part.shape, dtype=dtype)
        rows = numbers.view(-1, part.shape[-1])
        step = max(1, CHUNK_ELEMENTS // part.shape[-1])
        for start in range(0, len(rows), step):
            rows[start : start + step] = dequantize(kind, blocks[start : start + step])
        return numbers

    def _blocks(self, part: StoredPart) -> Tensor:
        """Return the blocks of a part, uint8 [rows, blocks, bytes of a block]."""
        kind = part.tensor.type
        num_blocks = part.shape[-1] // kind.block
        return self._content(part).view(-1, num_blocks, kind.block_bytes)

    def _content(self, part: StoredPart) -> Tensor:
        """Return the bytes of a part, uint8."""
        kind = part.tensor.type
        num_bytes = math.prod(part.shape) // kind.block * kind.block_bytes
        start = part.tensor.start + num_bytes * (part.index or 0)
        return torch.frombuffer(read_range(self._path, start, num_bytes), dtype=torch.uint8)


def _unpaired(part: StoredPart, weight: Weight) -> Weight:
    """Return the rows in Hugging Face's order: of a head, the halves of its pairs apart."""
    if part.num_paired_heads == 0:
        return weight

    def reorder(rows: Tensor) -> Tensor:
        pairs = rows.reshape(part.num_paired_heads, -1, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)

    return reorder_rows(weight, reorder)
