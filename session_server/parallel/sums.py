"""Sum what ranks compute: of the embedding, and of each layer its mixer and its feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from session_server.models.config import LayerConfig, ModelConfig
from session_server.models.decoder import Decoder, DecoderLayer, Mixer
from session_server.models.layers.attention import GqaMixer
from session_server.models.layers.norm import ProjectionNorm
from session_server.parallel.group import RankGroup


@dataclass(frozen=True, slots=True)
class SummedEmbedding:
    """Look tokens up in a rank's rows of the embedding, and sum over ranks.

    `rows`: [vocab / ranks, hidden], those of rank 0 first.
    """

    rows: Tensor
    group: RankGroup

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Embed tokens: int64 [tokens] -> [tokens, hidden]."""
        own = token_ids - self.group.shard.rank * len(self.rows)
        is_elsewhere = (own < 0) | (own >= len(self.rows))
        hidden = functional.embedding(own.masked_fill(is_elsewhere, 0), self.rows)
        return self.group.sum_(hidden.masked_fill_(is_elsewhere.unsqueeze(1), 0.0))


@dataclass(frozen=True, slots=True)
class SummedMixer:
    """Compute a rank's heads or channels, and sum over ranks."""

    mixer: Mixer
    group: RankGroup

    def __call__(self, x: Tensor, phases: Tensor, attention: Any) -> Tensor:
        """Mix tokens with the tokens before them: [tokens, hidden] -> [tokens, hidden]."""
        return self.group.sum_(self.mixer(x, phases, attention))


@dataclass(frozen=True, slots=True)
class SummedFfn:
    """Compute a rank's part of a feed-forward, or of every expert, and sum over ranks."""

    ffn: Callable[[Tensor], Tensor]
    group: RankGroup

    def __call__(self, x: Tensor) -> Tensor:
        """Transform each token: [tokens, hidden] -> [tokens, hidden]."""
        return self.group.sum_(self.ffn(x))


@dataclass(frozen=True, slots=True)
class SummedProjectionNorm(ProjectionNorm):
    """Normalize the rank's heads of Q and K by the mean squares over the heads of all ranks."""

    group: RankGroup

    def apply_(self, heads: Tensor) -> None:
        """Normalize in place: [tokens, q_heads + kv_heads, head_dim], those of the rank."""
        sides = heads[:, : self.num_heads].flatten(1), heads[:, self.num_heads :].flatten(1)
        means = torch.stack([side.float().square().mean(1) for side in sides])
        # Each rank has equally many heads, and each KV head equally many copies.
        means = self.group.sum_(means) / self.group.shard.size
        for side, mean, norm in zip(sides, means, (self.q, self.k), strict=True):
            factor = torch.rsqrt(mean + norm.eps).unsqueeze(1)
            side.copy_(side.float() * factor).mul_(norm.weight)


def with_sums(decoder: Decoder, config: ModelConfig, group: RankGroup) -> Decoder:
    """Put sums behind the embedding, and behind the layers that a rank's decoder has a part of.

    `config`: of the whole model.
    """
    decoder.embed = SummedEmbedding(decoder.embedding, group)
    decoder.layers = tuple(
        (_summed(layer, whole, part, group), rope, pool)
        for (layer, rope, pool), whole, part in zip(
            decoder.layers, config.layers, decoder.config.layers, strict=True
        )
    )
    return decoder


def _summed(
    layer: DecoderLayer, whole: LayerConfig, part: LayerConfig, group: RankGroup
) -> DecoderLayer:
    mixer, ffn = layer.mixer, layer.ffn
    if whole.mixer != part.mixer:
        if isinstance(mixer, GqaMixer) and isinstance(mixer.weights.qk_norm, ProjectionNorm):
            norm = mixer.weights.qk_norm
            over_ranks = SummedProjectionNorm(norm.q, norm.k, norm.num_heads, group)
            mixer = replace(mixer, weights=replace(mixer.weights, qk_norm=over_ranks))
        mixer = SummedMixer(mixer, group)
    if whole.ffn != part.ffn:
        ffn = SummedFfn(ffn, group)
    return replace(layer, mixer=mixer, ffn=ffn)
