"""The one decoder: layers of mixer and ffn over a flat batch of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional

from cache.types import PoolName
from session_server.attention.base import AttentionPlan
from session_server.attention.mla import MlaPlan
from session_server.attention.recurrent import RecurrentPlan
from session_server.models.config import DTypeName, ModelConfig
from session_server.models.layers.linear import Linear
from session_server.models.layers.norm import RmsNorm
from session_server.models.layers.rope import Rope


class Mixer(Protocol):
    """Mixes tokens with their past."""

    def __call__(self, x: Tensor, phases: Tensor, attention: Any) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden].

        `phases`: rotations of the positions, if it has any. `attention`: the plan of the pool that
        the layer stores to, in the form that its kind of layer asks.
        """
        ...


@dataclass(frozen=True, slots=True)
class Norms:
    """What stands around a mixer or an ffn; None where a family has nothing there."""

    before: RmsNorm | None
    after: Callable[[Tensor], Tensor] | None


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer, ready to run."""

    mixer_norms: Norms
    mixer: Mixer
    ffn_norms: Norms
    ffn: Callable[[Tensor], Tensor]


class Decoder:
    """Plain callables instead of `nn.Module`: a step of a small model is bound by Python."""

    __slots__ = ("_embedding", "_head", "_layers", "_norm", "_ropes", "_scale", "config")

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
        self._norm = norm
        self._head = head
        # Rounded as the embedding is: families are trained with the rounded factor.
        self._scale = torch.tensor(config.embedding_multiplier, dtype=embedding.dtype).item()
        mixers = [layer.mixer for layer in config.layers]
        rotated = [(m.rope, m.rotary_dim) for m in mixers if m.rope is not None]
        kinds = list(dict.fromkeys(rotated))
        self._ropes = tuple(Rope(rope, size, device=embedding.device) for rope, size in kinds)
        # Layers that rotate nothing are given the positions, which stand last.
        of_layers = [-1 if m.rope is None else kinds.index((m.rope, m.rotary_dim)) for m in mixers]
        pools = [mixer.pool for mixer in mixers]
        self._layers = tuple(zip(layers, of_layers, pools, strict=True))

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
        attention: Mapping[PoolName, AttentionPlan | MlaPlan | RecurrentPlan],
        logits_indices: Tensor | None,
    ) -> Tensor:
        """Run all layers, and write the KV of every token.

        Args:
            token_ids: int64 [tokens], rows of the batch one after the other.
            positions: int64 [tokens], position of each within its own row.
            attention: where each row's past lies, by pool; made for exactly these tokens.
            logits_indices: int64 [n], the tokens whose hidden state is asked for; None for all.

        Returns:
            [n, hidden], normed for the head.
        """
        hidden = functional.embedding(token_ids, self._embedding)
        if self._scale != 1.0:
            hidden.mul_(self._scale)
        phases = [*[rope.phases(positions) for rope in self._ropes], positions]
        for layer, rope, pool in self._layers:
            norms = layer.mixer_norms
            x = hidden if norms.before is None else norms.before(hidden)
            y = layer.mixer(x, phases[rope], attention[pool])
            hidden = hidden.add_(y if norms.after is None else norms.after(y))
            norms = layer.ffn_norms
            y = layer.ffn(hidden if norms.before is None else norms.before(hidden))
            hidden = hidden.add_(y if norms.after is None else norms.after(y))
        if logits_indices is not None:
            hidden = hidden.index_select(0, logits_indices)
        return self._norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token: [n, hidden] -> float32 [n, vocab]."""
        logits, softcap = self._head(hidden).float(), self.config.final_logit_softcapping
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)
