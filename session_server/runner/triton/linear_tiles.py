"""Choose how much of a linear a program computes, and among how many programs it is split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import triton

from session_server.attention.triton import launching

MIN_SPLIT_BLOCKS: Final = 4
"""The fewest blocks of a split: below, summing costs more than the other programs save."""

SUMMED_OUTPUTS: Final = 512
"""Outputs of one row whose splits a program sums."""


@dataclass(frozen=True, slots=True)
class LinearTile:
    """Say how much a program computes at once: rows of x and outputs, and the threads it has."""

    num_rows: int
    num_outputs: int
    num_warps: int
    num_stages: int

    def grid(self, num_rows: int, num_outputs: int) -> tuple[int, int]:
        """Return the tiles of so many outputs, and of so many rows."""
        return triton.cdiv(num_outputs, self.num_outputs), triton.cdiv(num_rows, self.num_rows)


def tile_for(num_rows: int, shapes: Sequence[LinearTile]) -> LinearTile:
    """Return the shape of tiles for so many rows, of `shapes`, those of the fewest rows first."""
    return next((shape for shape in shapes if num_rows <= shape.num_rows), shapes[-1])


def num_splits(num_tiles: int, num_blocks: int, device: torch.device) -> int:
    """Return among how many programs the inputs of a tile are split: as many as fill a device
    twice, while each has enough to do. `num_blocks`: those of the inputs."""
    wanted = -(-2 * launching.num_sms(device) // num_tiles)
    return max(1, min(wanted, num_blocks // MIN_SPLIT_BLOCKS))


def are_multiples(num_outputs: int, num_inputs: int) -> tuple[bool, bool]:
    """Return whether outputs and inputs are multiples of 16, for which Triton compiles anew."""
    return num_outputs % 16 == 0, num_inputs % 16 == 0


def least_alike(num_outputs: int, num_inputs: int) -> tuple[int, int]:
    """Return the least outputs and inputs for which the same is compiled."""
    of_16, inputs_of_16 = are_multiples(num_outputs, num_inputs)
    return 16 if of_16 else 17, 32 if inputs_of_16 else 33
