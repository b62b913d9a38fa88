"""Choose how much of a linear a program computes, and among how many programs it is split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import triton
from torch import Tensor

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


Launch = Callable[[Tensor, Tensor, LinearTile, int], None]
"""Compute rows [rows, inputs] to a result [rows, outputs], both contiguous, by tiles of a shape,
the inputs of each split among so many programs."""


def apply_by_tiles(
    launch: Launch,
    x: Tensor,
    size: tuple[int, int],
    shapes: Sequence[LinearTile],
    *,
    num_blocks: int,
) -> Tensor:
    """Apply a linear to each row of `x` [..., inputs], by the tiles that suit so many rows.

    `size`: outputs and inputs. `shapes`: as for `tile_for`. `num_blocks`: of the inputs of a row,
    of which a program has some.
    """
    num_outputs, num_inputs = size
    rows = x.reshape(-1, num_inputs).contiguous()
    out = rows.new_empty((len(rows), num_outputs))
    if len(rows):
        shape = tile_for(len(rows), shapes)
        outputs, of_rows = shape.grid(len(rows), num_outputs)
        launch(rows, out, shape, num_splits(outputs * of_rows, num_blocks, x.device))
    return out.view(*x.shape[:-1], num_outputs)


def compile_tiles(
    launch: Launch, x: Tensor, num_outputs: int, shapes: Sequence[LinearTile]
) -> None:
    """Compile what `apply_by_tiles` may launch, by launching all of it on `x` [rows, inputs]."""
    out = x.new_zeros((len(x), num_outputs))
    for shape in shapes:
        for splits in (1, 2):
            launch(x, out, shape, splits)


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
