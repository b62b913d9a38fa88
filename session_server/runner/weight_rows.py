"""Fuse and reorder the outputs of matrices, dense or as codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from session_server.models.layers.block_weight import CodedWeight, Weight, concatenate


def reorder_rows(weight: Weight, reorder: Callable[[Tensor], Tensor]) -> Weight:
    """Apply `reorder`, which chooses and permutes along the first dimension and does nothing else.

    It is applied to a dense weight, or to the indices of the outputs of codes.
    """
    if isinstance(weight, Tensor):
        return reorder(weight)
    indices = torch.empty(weight.shape[0], dtype=torch.int64, device=weight.codes.device)
    # For meta tensors `arange` would import torch's compiler, see `concatenate`.
    return weight.rows(
        reorder(indices if indices.is_meta else torch.arange(len(indices), out=indices))
    )


def join_rows(parts: Sequence[Weight]) -> Weight:
    """Concatenate outputs. Codes of several kinds, or beside dense parts, become dense."""
    codes = [part for part in parts if isinstance(part, CodedWeight)]
    if len(codes) == len(parts) and CodedWeight.can_join(codes):
        return CodedWeight.join(codes)
    return concatenate([as_dense(part) for part in parts])


def as_dense(weight: Weight) -> Tensor:
    """Return the numbers of a weight, in the model's dtype."""
    return weight if isinstance(weight, Tensor) else weight.dense()
