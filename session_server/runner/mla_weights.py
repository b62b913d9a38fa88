"""Load the latent attention of one layer."""

from __future__ import annotations

from typing import Final

from session_server.models.config import MlaConfig
from session_server.models.layers.block_weight import concatenate
from session_server.models.layers.linear import Linear
from session_server.models.layers.mla import MlaWeights, QueryUp
from session_server.models.layers.norm import RmsNorm
from session_server.runner.checkpoint import WeightSource
from session_server.runner.weight_rows import join_rows

NORM_EPS: Final = 1e-6
"""Epsilon of the norms of latents; `rms_norm_eps` does not apply to them."""


def take_mla(mixer: MlaConfig, hidden: int, tensors: WeightSource, prefix: str) -> MlaWeights:
    """Load the latent attention of a layer; `prefix` begins its tensors' names."""
    heads, width = mixer.num_heads, mixer.qk_nope_head_dim + mixer.v_head_dim
    up = tensors.take(f"{prefix}kv_b_proj.weight", heads * width, mixer.kv_lora_rank)
    output = tensors.take_linear(f"{prefix}o_proj.weight", hidden, heads * mixer.v_head_dim)
    output_bias = tensors.take(f"{prefix}o_proj.bias", hidden) if mixer.attention_bias else None
    return MlaWeights(
        down=_down(mixer, hidden, tensors, prefix),
        query=_query(mixer, tensors, prefix),
        norm=RmsNorm(tensors.take(f"{prefix}kv_a_layernorm.weight", mixer.kv_lora_rank), NORM_EPS),
        up=up.view(heads, width, mixer.kv_lora_rank),
        output=tensors.linear(output, output_bias),
    )


def _down(mixer: MlaConfig, hidden: int, tensors: WeightSource, prefix: str) -> Linear:
    """Fuse the projections to queries, or their latent, and to the stored row."""
    query = f"{prefix}q_proj" if mixer.q_lora_rank is None else f"{prefix}q_a_proj"
    query_size, stored = mixer.q_lora_rank or _query_size(mixer), f"{prefix}kv_a_proj_with_mqa"
    stored_size = mixer.kv_lora_rank + mixer.qk_rope_head_dim
    weights = (
        tensors.take_linear(f"{query}.weight", query_size, hidden),
        tensors.take_linear(f"{stored}.weight", stored_size, hidden),
    )
    if not mixer.attention_bias:
        return tensors.linear(join_rows(weights))
    stored_bias = tensors.take(f"{stored}.bias", stored_size)
    # No checkpoint has a bias on queries that are projected directly.
    query_bias = stored_bias.new_zeros(query_size)
    if mixer.q_lora_rank is not None:
        query_bias = tensors.take(f"{query}.bias", query_size)
    return tensors.linear(join_rows(weights), concatenate((query_bias, stored_bias)))


def _query(mixer: MlaConfig, tensors: WeightSource, prefix: str) -> QueryUp | None:
    if mixer.q_lora_rank is None:
        return None
    gain = tensors.take(f"{prefix}q_a_layernorm.weight", mixer.q_lora_rank)
    up = tensors.take_linear(f"{prefix}q_b_proj.weight", _query_size(mixer), mixer.q_lora_rank)
    return QueryUp(RmsNorm(gain, NORM_EPS), tensors.linear(up))


def _query_size(mixer: MlaConfig) -> int:
    return mixer.num_heads * (mixer.qk_nope_head_dim + mixer.qk_rope_head_dim)
