"""Run multi-head latent attention: projections, norms, rotation, and the backend."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from session_server.attention.mla import MlaPlan
from session_server.models.config import MlaConfig
from session_server.models.layers.linear import Linear
from session_server.models.layers.norm import RmsNorm
from session_server.models.layers.rope import Rope


@dataclass(frozen=True, slots=True)
class QueryUp:
    """Project the queries' latent up: a norm, then [q_lora_rank] -> [heads * (nope + rope)]."""

    norm: RmsNorm
    up: Linear


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """Hold the weights of one latent attention layer.

    `down`: [hidden] -> queries, or their latent, then [kv_lora_rank + rope], rotary pairs adjacent.
    `query`: None if `down` gives queries directly. `norm`: of the latent. `up`: [heads, nope +
    value, kv_lora_rank], projects a latent to K and V. `output`: [heads * value] -> [hidden].
    """

    down: Linear
    query: QueryUp | None
    norm: RmsNorm
    up: Tensor
    output: Linear


@dataclass(frozen=True, slots=True)
class MlaMixer:
    """Compute multi-head latent attention (DeepSeek-AI 2024) with fused down projections.

    `layer`: index within its pool.
    """

    config: MlaConfig
    layer: int
    weights: MlaWeights

    def __call__(self, x: Tensor, phases: Tensor, attention: MlaPlan) -> Tensor:
        """Mix tokens with the tokens before them: [tokens, hidden] -> [tokens, hidden].

        Writes the latent and rotary key of every token to the pool before it reads.
        """
        config, weights = self.config, self.weights
        projected = weights.down(x)
        # The row to store follows the queries; it is normalized and rotated in place.
        split = projected.shape[-1] - config.kv_lora_rank - config.qk_rope_head_dim
        q, rows = projected[:, :split], projected[:, split:]
        if weights.query is not None:
            q = weights.query.up(weights.query.norm(q))
        q = q.view(len(x), config.num_heads, -1)
        weights.norm.apply_(rows[:, : config.kv_lora_rank])
        self.rotate_(q[..., config.qk_nope_head_dim :], rows[:, config.kv_lora_rank :], phases)
        return weights.output(attention.attend(self.layer, q, rows, weights.up))

    def rotate_(self, q: Tensor, keys: Tensor, phases: Tensor) -> None:
        """Rotate in place: `q` [tokens, heads, rope], and `keys` [tokens, rope]."""
        Rope.rotate_(q, phases)
        Rope.rotate_(keys[:, None], phases)
