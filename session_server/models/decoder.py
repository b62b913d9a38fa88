"""The one decoder: pre-norm layers of mixer and ffn over a flat batch of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from session_server.attention.base import AttentionPlan
from session_server.models.config import DTypeName, ModelConfig
from session_server.models.layers.attention import GqaMixer
from session_server.models.layers.linear import Linear
from session_server.models.layers.mlp import SwiGlu
from session_server.models.layers.norm import RmsNorm
from session_server.models.layers.rope import Rope


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer, ready to run."""

    mixer_norm: RmsNorm
    mixer: GqaMixer
    ffn_norm: RmsNorm
    ffn: SwiGlu


class Decoder:
    """Plain callables instead of `nn.Module`: a step of a small model is bound by Python."""

    __slots__ = ("_embedding", "_head", "_layers", "_norm", "_rope", "config")

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        norm: RmsNorm,
        head: Linear,
    ) -> None:
        """Args:
        config: what was built.
        embedding: [vocab, hidden]; decides device and dtype.
        layers: first to last.
        norm: before the head.
        head: [hidden] -> [vocab].
        """
        self.config = config
        self._embedding = embedding
        self._layers = tuple(layers)
        self._norm = norm
        self._head = head
        head_dim = config.layers[0].mixer.head_dim
        self._rope = Rope(config.rope, head_dim, device=embedding.device)

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self._embedding.dtype

    @property
    def dtype_name(self) -> DTypeName:
        """The same, as configurations spell it."""
        return cast(DTypeName, str(self.dtype).removeprefix("torch."))

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        *,
        attention: AttentionPlan,
        wanted: Tensor | None,
    ) -> Tensor:
        """Run all layers, and write the KV of every token.

        Args:
            token_ids: int64 [tokens], rows of the batch one after the other.
            positions: int64 [tokens], position of each within its own row.
            attention: where each row's past lies; made for exactly these tokens.
            wanted: int64 [n], the tokens whose hidden state is asked for; None for all.

        Returns:
            [n, hidden], normed for the head.
        """
        hidden = functional.embedding(token_ids, self._embedding)
        phases = self._rope.phases(positions)
        for layer in self._layers:
            hidden = hidden.add_(layer.mixer(layer.mixer_norm(hidden), phases, attention))
            hidden = hidden.add_(layer.ffn(layer.ffn_norm(hidden)))
        if wanted is not None:
            hidden = hidden.index_select(0, wanted)
        return self._norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token: [n, hidden] -> float32 [n, vocab]."""
        return self._head(hidden).float()
