"""Fuse and reorder the outputs of matrices, dense or as codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from session_server.models.layers.block_weight import BlockWeight, Weight
from session_server.runner.checkpoint import concatenate


def reorder_rows(weight: Weight, reorder: Callable[[Tensor], Tensor]) -> Weight:
    """Apply `reorder`, which chooses and permutes along the first dimension and does nothing else.

    It is applied to a dense weight, or to the indices of the outputs of codes.
    """
    if isinstance(weight, Tensor):
        return reorder(weight)
    return weight.rows(reorder(torch.arange(weight.shape[0], device=weight.codes.device)))


def join_rows(parts: Sequence[Weight]) -> Weight:
    """Concatenate outputs. Codes of several kinds, or beside dense parts, become dense."""
    codes = tuple(part for part in parts if isinstance(part, BlockWeight))
    if len(codes) == len(parts) and BlockWeight.can_join(codes):
        return BlockWeight.join(codes)
    return concatenate([as_dense(part) for part in parts])


def as_dense(weight: Weight) -> Tensor:
    """Return the numbers of a weight, in the model's dtype."""
    return weight if isinstance(weight, Tensor) else weight.dense()
