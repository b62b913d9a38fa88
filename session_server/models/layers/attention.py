"""Run grouped-query attention: projections, QK-norm, rotation, KV write, and the backend."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from session_server.attention.base import AttentionPlan
from session_server.models.config import AttentionConfig
from session_server.models.layers.linear import Linear
from session_server.models.layers.norm import ProjectionNorm, RmsNorm
from session_server.models.layers.rope import Rope


@dataclass(frozen=True, slots=True)
class GqaWeights:
    """Hold the weights of one attention layer.

    `qkv`: [hidden] -> [(q_heads + 2 * kv_heads) * head_dim], rotary pairs adjacent, followed by the
    gates of `q_heads` if the layer is gated. `output`: [q_heads * head_dim] -> [hidden]. `qk_norm`:
    of Q and K heads together, by head (weight [q_heads + kv_heads, head_dim]) or over whole
    projections. `sinks`: [q_heads].
    """

    qkv: Linear
    output: Linear
    qk_norm: RmsNorm | ProjectionNorm | None
    sinks: Tensor | None


@dataclass(frozen=True, slots=True)
class GqaMixer:
    """Compute grouped-query attention (Ainslie et al. 2023) with fused Q, K and V projections.

    `layer`: index within its pool.
    """

    config: AttentionConfig
    layer: int
    weights: GqaWeights

    def __call__(self, x: Tensor, phases: Tensor, attention: AttentionPlan) -> Tensor:
        """Mix tokens with the tokens before them: [tokens, hidden] -> [tokens, hidden].

        Writes the K and V of every token to the pool before it reads.
        """
        config, weights, rope = self.config, self.weights, self.config.rope
        num_heads, num_rotated = config.num_heads, config.num_heads + config.num_kv_heads
        qkv = weights.qkv(x).view(x.shape[0], -1, config.head_dim)
        rotated = qkv[:, :num_rotated]
        if weights.qk_norm is not None:
            weights.qk_norm.apply_(rotated)
        if rope is not None:
            # Slicing is not free, so whole heads are not sliced.
            part = rotated if rope.rotary_dim is None else rotated[..., : rope.rotary_dim]
            Rope.rotate_(part, phases)
        num_stored = num_rotated + config.num_kv_heads
        q, kv = qkv[:, :num_heads], qkv[:, num_heads:num_stored]
        mixed = attention.attend(self.layer, q, kv, weights.sinks)
        if config.is_gated:
            mixed = mixed * qkv[:, num_stored:].flatten(1).sigmoid()
        return weights.output(mixed)
