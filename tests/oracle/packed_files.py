"""Checkpoints in the formats of AWQ, GPTQ and compressed-tensors, written word by word.

A packer of plain Python, which shares nothing with what it tests: an integer is put into the bits
that the formats' documentation says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

Array = NDArray[Any]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Codes:
    """A matrix [outputs, inputs] of integers with scales and zero points per group."""

    codes: Array
    scales: Array
    zeros: Array
    groups: Array

    def numbers(self) -> Tensor:
        scales = self.scales.astype(np.float32)[:, self.groups]
        return torch.from_numpy(
            (self.codes - self.zeros[:, self.groups]).astype(np.float32) * scales
        )


def random_codes(shape: tuple[int, ...], seed: int, **options: Any) -> Codes:
    """Unsigned integers. Options: `num_bits`, `group_size`, `zero` (None: random), `order`."""
    rng = np.random.default_rng(seed)
    outputs, inputs = shape
    num_bits, size = options["num_bits"], options.get("group_size") or inputs
    codes = rng.integers(0, 1 << num_bits, shape)
    groups = np.arange(inputs) // size
    if options.get("order"):
        groups = rng.permutation(groups)
    num_groups = -(-inputs // size)
    spread = (1 << num_bits) / 3.5
    scales = (rng.uniform(0.5, 1.5, (outputs, num_groups)) * 0.12 / spread).astype(np.float16)
    zeros = rng.integers(0, 1 << num_bits, (outputs, num_groups))
    if options.get("zero") is not None:
        zeros[:] = options["zero"]
    else:
        middle = 1 << (num_bits - 1)
        zeros = np.clip(zeros // 4 + middle - middle // 4, 0, 2 * middle - 1)
        zeros[0, 0] = 0
    return Codes(codes, scales, zeros, groups)


def words(rows: Array, num_bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Put consecutive integers of a row into words of 32 bits, padded with zeros.

    `order`: which of the integers of a word has the lowest bits, which the next.
    """
    per_word = 32 // num_bits
    order = order or range(per_word)
    packed = []
    for numbers in rows.tolist():
        row = numbers + [0] * (-len(numbers) % per_word)
        of_row = []
        for start in range(0, len(row), per_word):
            word = sum(row[start + which] << num_bits * at for at, which in enumerate(order))
            of_row.append(word - (1 << 32) if word >= 1 << 31 else word)
        packed.append(of_row)
    return torch.tensor(packed, dtype=torch.int32)


def awq(stem: str, of: Codes, num_bits: int) -> Tensors:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        f"{stem}.qweight": words(of.codes.T, num_bits, order),
        f"{stem}.qzeros": words(of.zeros.T, num_bits, order),
        f"{stem}.scales": torch.from_numpy(of.scales.T.copy()),
    }


def gptq(stem: str, of: Codes, num_bits: int, *, offset: int = 1, index: bool = True) -> Tensors:
    ones = sum(1 << place for place in range(0, 32, num_bits))
    zeros = words(of.zeros.T, num_bits).long() - offset * ones
    tensors = {
        f"{stem}.qweight": words(of.codes, num_bits).T.contiguous(),
        f"{stem}.qzeros": zeros.to(torch.int32),
        f"{stem}.scales": torch.from_numpy(of.scales.T.copy()),
    }
    if index:
        tensors[f"{stem}.g_idx"] = torch.from_numpy(of.groups.astype(np.int32))
    return tensors


def packed(stem: str, of: Codes, num_bits: int, *, symmetric: bool, order: bool = False) -> Tensors:
    """compressed-tensors: integers are signed, and stored moved by half of their range."""
    tensors = {
        f"{stem}.weight_packed": words(of.codes, num_bits),
        f"{stem}.weight_scale": torch.from_numpy(of.scales),
        f"{stem}.weight_shape": torch.tensor(of.codes.shape),
    }
    if not symmetric:
        tensors[f"{stem}.weight_zero_point"] = words(of.zeros.T, num_bits).T.contiguous()
    if order:
        tensors[f"{stem}.weight_g_idx"] = torch.from_numpy(of.groups.astype(np.int32))
    return tensors


def naive(stem: str, of: Codes, num_bits: int, *, symmetric: bool) -> Tensors:
    middle = 1 << (num_bits - 1)
    tensors = {
        f"{stem}.weight": torch.from_numpy((of.codes - middle).astype(np.int8)),
        f"{stem}.weight_scale": torch.from_numpy(of.scales),
    }
    if not symmetric:
        tensors[f"{stem}.weight_zero_point"] = torch.from_numpy((of.zeros - middle).astype(np.int8))
    return tensors


def quantize_checkpoint(
    twin: Path,
    directory: Path,
    quantization: dict[str, Any],
    pack: Callable[[str, Codes], Tensors],
    **options: Any,
) -> Path:
    """Write a quantized checkpoint, and change `twin` to what its matrices stand for."""
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in load_file(twin / "model.safetensors").items():
        if "_proj" in name and name.endswith(".weight"):
            codes = random_codes(tuple(tensor.shape), len(stored), **options)
            stored |= pack(name.removesuffix(".weight"), codes)
            meant[name] = codes.numbers()
        else:
            stored[name] = meant[name] = tensor
    directory.mkdir()
    save_file(stored, directory / "model.safetensors")
    save_file(meant, twin / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((twin / "config.json").read_text())
    config["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(config))
    return directory
