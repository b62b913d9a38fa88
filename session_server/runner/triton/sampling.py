"""Choose tokens on a GPU: the vocabulary is cut into blocks, whose best are compared."""

from __future__ import annotations

from typing import Final

import torch
import triton
from torch import Tensor

from session_server.attention.triton import launching
from session_server.runner.triton.blocks import block_of
from session_server.runner.triton.fused_kernels import best_of_blocks, best_of_rows, draw_of_blocks

LARGEST_BLOCK: Final = 4096
"""Tokens of a program: a vocabulary of 150,000 is 38 of them, 16 KiB of logits each."""


def most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens with the largest logits, and which rows are finite, as
    `greedy.most_likely` does, in one pass."""
    return _best_of_rows(logits, *_best_of_blocks(logits))


def draw(logits: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
    """Sample by Gumbel-max, with the noise of `TokenNoise`: the tokens are int64 [n].

    Args:
        logits: float32 [n, vocab].
        temperatures: float32 [n]; where one is 0, the most likely token is taken.
        keys: int64 [n], from `noise_key`.
    """
    tops, ids, finite = _best_of_blocks(logits)
    scores = torch.empty_like(tops)
    num_rows, vocab_size = logits.shape
    num_blocks = tops.shape[1]
    block = block_of(vocab_size, LARGEST_BLOCK)
    launching.run(
        draw_of_blocks,
        (triton.cdiv(num_rows, block["BLOCK_M"]), num_blocks),
        logits,
        tops,
        keys,
        temperatures,
        scores,
        ids,
        num_rows,
        logits.stride(0),
        VOCAB=vocab_size,
        NUM_BLOCKS=num_blocks,
        BLOCKS=triton.next_power_of_2(num_blocks),
        IS_INTERPRETED=launching.IS_INTERPRETED,
        **block,
    )
    return _best_of_rows(logits, scores, ids, finite)[0]


def _best_of_blocks(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, vocab_size = logits.shape
    block = block_of(vocab_size, LARGEST_BLOCK)
    num_blocks = triton.cdiv(vocab_size, block["BLOCK_N"])
    tops = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=logits.device)
    ids = torch.empty_like(tops, dtype=torch.int32)
    finite = torch.empty_like(ids)
    launching.run(
        best_of_blocks,
        (triton.cdiv(num_rows, block["BLOCK_M"]), num_blocks),
        logits,
        tops,
        ids,
        finite,
        num_rows,
        logits.stride(0),
        VOCAB=vocab_size,
        NUM_BLOCKS=num_blocks,
        **block,
    )
    return tops, ids, finite


def _best_of_rows(
    logits: Tensor, scores: Tensor, ids: Tensor, finite: Tensor
) -> tuple[Tensor, Tensor]:
    num_rows, num_blocks = scores.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    is_finite = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    block = block_of(num_blocks)
    launching.run(
        best_of_rows,
        (triton.cdiv(num_rows, block["BLOCK_M"]),),
        scores,
        ids,
        finite,
        tokens,
        is_finite,
        num_rows,
        VOCAB=logits.shape[1],
        NUM_BLOCKS=num_blocks,
        BLOCK_M=block["BLOCK_M"],
        BLOCKS=block["BLOCK_N"],
        num_warps=block["num_warps"],
    )
    return tokens, is_finite
