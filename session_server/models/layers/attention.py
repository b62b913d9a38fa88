"""The attention mixer: projections, QK-norm, rotation, KV write, and the backend in the middle."""

from __future__ import annotations

from torch import Tensor

from session_server.attention.base import AttentionPlan
from session_server.models.config import AttentionConfig
from session_server.models.layers.linear import Linear
from session_server.models.layers.norm import RmsNorm
from session_server.models.layers.rope import Rope


class GqaMixer:
    """Grouped-query attention (Ainslie et al. 2023) with fused Q, K and V projections."""

    __slots__ = ("_config", "_layer", "_output", "_qk_norm", "_qkv")

    def __init__(
        self,
        config: AttentionConfig,
        layer: int,
        *,
        qkv: Linear,
        output: Linear,
        qk_norm: RmsNorm | None,
    ) -> None:
        """Args:
        config: head counts.
        layer: index of the layer within its pool.
        qkv: [hidden] -> [(q_heads + 2 * kv_heads) * head_dim], rotary pairs adjacent.
        output: [q_heads * head_dim] -> [hidden].
        qk_norm: of Q and K heads together, weight [q_heads + kv_heads, head_dim].
        """
        self._config = config
        self._layer = layer
        self._qkv = qkv
        self._output = output
        self._qk_norm = qk_norm

    def __call__(self, x: Tensor, phases: Tensor, attention: AttentionPlan) -> Tensor:
        """Mix tokens with their past: [tokens, hidden] -> [tokens, hidden].

        Writes the K and V of every token to the pool before it reads.
        """
        config = self._config
        num_heads, num_rotated = config.num_heads, config.num_heads + config.num_kv_heads
        qkv = self._qkv(x).view(x.shape[0], -1, config.head_dim)
        rotated = qkv[:, :num_rotated]
        if self._qk_norm is not None:
            self._qk_norm.apply_(rotated)
        Rope.rotate_(rotated, phases)
        mixed = attention.attend(self._layer, qkv[:, :num_heads], qkv[:, num_heads:])
        return self._output(mixed)
