"""Mix tokens by attention, with all that is between the projections and attention in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import triton
from torch import Tensor

from session_server.attention.base import AttentionPlan
from session_server.attention.triton import launching
from session_server.attention.triton.backend import TritonPlan
from session_server.models.layers.attention import GqaMixer
from session_server.models.layers.mla import MlaMixer
from session_server.models.layers.norm import RmsNorm
from session_server.runner.triton.blocks import block_of
from session_server.runner.triton.fused_kernels import norm_rotate_store, rotate_latent
from session_server.runner.triton.gates import SIGMOID_GATE


@dataclass(frozen=True, slots=True)
class TritonGqaMixer(GqaMixer):
    """Compute what `GqaMixer` does, over a `TritonPlan`."""

    def __call__(self, x: Tensor, phases: Tensor, attention: AttentionPlan) -> Tensor:
        """Mix tokens with the tokens before them: [tokens, hidden] -> [tokens, hidden]."""
        config, weights = self.config, self.weights
        plan = cast(TritonPlan, attention)
        num_heads, num_rotated = config.num_heads, config.num_heads + config.num_kv_heads
        qkv = weights.qkv(x).view(x.shape[0], -1, config.head_dim)
        norm = weights.qk_norm
        if norm is not None and not isinstance(norm, RmsNorm):  # all heads make one norm
            norm.apply_(qkv[:, :num_rotated])
            norm = None
        self._norm_rotate_store(qkv, norm, phases, plan)
        mixed = plan.attend_stored(self.layer, qkv[:, :num_heads], weights.sinks)
        if config.is_gated:
            mixed = SIGMOID_GATE(qkv[:, num_rotated + config.num_kv_heads :].flatten(1), mixed)
        return weights.output(mixed)

    def _norm_rotate_store(
        self, qkv: Tensor, norm: RmsNorm | None, phases: Tensor, plan: TritonPlan
    ) -> None:
        config = self.config
        keys, values = plan.pages(self.layer)
        is_8_bits = keys.dtype.itemsize == 1
        block = block_of(config.head_dim)
        num_heads = len(qkv) * (config.num_heads + 2 * config.num_kv_heads)
        launching.run(
            norm_rotate_store,
            (triton.cdiv(num_heads, block["BLOCK_M"]),),
            qkv,
            qkv if norm is None else norm.weight,
            qkv if config.rope is None else torch.view_as_real(phases),
            plan.slot_mapping,
            keys,
            values,
            len(qkv),
            qkv.stride(0),
            keys.stride(0),
            keys.stride(1),
            0.0 if norm is None else norm.eps,
            NUM_HEADS=config.num_heads,
            NUM_KV_HEADS=config.num_kv_heads,
            HEAD_DIM=config.head_dim,
            ROTARY_DIM=0 if config.rope is None else 2 * phases.shape[-1],
            HAS_NORM=norm is not None,
            LARGEST=torch.finfo(keys.dtype).max if is_8_bits else 0.0,
            BLOCK_M=block["BLOCK_M"],
            BLOCK_D=block["BLOCK_N"],
            num_warps=block["num_warps"],
        )


@dataclass(frozen=True, slots=True)
class TritonMlaMixer(MlaMixer):
    """Compute what `MlaMixer` does, with all rotations in one launch."""

    def rotate_(self, q: Tensor, keys: Tensor, phases: Tensor) -> None:
        """Rotate as `MlaMixer.rotate_` does."""
        size = 2 * phases.shape[-1]
        block = block_of(size)
        num_tokens, num_heads = q.shape[:2]
        launching.run(
            rotate_latent,
            (triton.cdiv(num_tokens * (num_heads + 1), block["BLOCK_M"]),),
            q,
            keys,
            torch.view_as_real(phases),
            num_tokens,
            q.stride(0),
            q.stride(1),
            keys.stride(0),
            NUM_HEADS=num_heads,
            ROTARY_DIM=size,
            BLOCK_M=block["BLOCK_M"],
            BLOCK_D=block["BLOCK_N"],
            num_warps=block["num_warps"],
        )
