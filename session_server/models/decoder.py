"""Run the decoder: layers of mixer and ffn over a flat batch of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from cache.types import PoolName
from session_server.attention.base import AttentionPlan, RecurrentPlan
from session_server.attention.mla import MlaPlan
from session_server.models.config import DTypeName, ModelConfig
from session_server.models.layers.linear import Linear
from session_server.models.layers.norm import RmsNorm
from session_server.models.layers.rope import Rope

Mixer = Callable[[Tensor, Tensor, Any], Tensor]
"""Mix each token with the tokens before it in its row: [tokens, hidden] -> [tokens, hidden].

Takes the hidden states, the rotations of the positions (the positions themselves for layers without
rotary embeddings) and the plan of the layer's pool, of the type that this kind of layer needs."""


AfterNorm = Callable[[Tensor], Tensor] | None
"""A norm or a factor behind a mixer or an ffn; None where a family has none."""


@dataclass(frozen=True, slots=True)
class Norms:
    """Hold the norms before and after a mixer or an ffn; None where a family has none."""

    before: RmsNorm | None
    after: AfterNorm


AddAndNorm = Callable[[Tensor, Tensor | None, AfterNorm, RmsNorm | None], Tensor]
"""What `add_and_norm` is: on some devices one kernel."""


def add_and_norm(
    hidden: Tensor, y: Tensor | None, after: AfterNorm, before: RmsNorm | None
) -> Tensor:
    """Add what a mixer or an ffn computed to the hidden states, and normalize them for the next.

    `hidden`: [tokens, hidden], changed in place, and returned where no norm comes `before` the
    next. `y`: the same shape, to be normed by `after`; None in front of the first layer.
    """
    if y is not None:
        hidden.add_(y if after is None else after(y))
    return hidden if before is None else before(hidden)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Hold the weights of one layer, ready to run."""

    mixer_norms: Norms
    mixer: Mixer
    ffn_norms: Norms
    ffn: Callable[[Tensor], Tensor]


class Decoder:
    """Run a model's layers, final norm and LM head.

    Layers are plain callables, not `nn.Module`: Python overhead bounds a step of a small model.
    """

    __slots__ = (
        "add_and_norm",
        "config",
        "embed",
        "embedding",
        "embedding_scale",
        "head",
        "layers",
        "norm",
        "ropes",
    )

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        norm: RmsNorm,
        head: Linear,
    ) -> None:
        """Assign each layer its rotary embedding and its pool.

        `embedding`: [vocab, hidden]; decides device and dtype. `head`: [hidden] -> [vocab].
        """
        self.config = config
        self.embedding = embedding
        self.embed: Callable[[Tensor], Tensor] = partial(functional.embedding, weight=embedding)
        self.norm = norm
        self.head = head
        self.add_and_norm: AddAndNorm = add_and_norm
        # Rounded to the embedding's dtype: families are trained with the rounded factor.
        multiplier = torch.tensor(config.embedding_multiplier, dtype=embedding.dtype)
        self.embedding_scale: float = multiplier.item()
        mixers = [layer.mixer for layer in config.layers]
        rotated = [(m.rope, m.rotary_dim) for m in mixers if m.rope is not None]
        kinds = list(dict.fromkeys(rotated))
        self.ropes = tuple(Rope(rope, size, device=embedding.device) for rope, size in kinds)
        # Layers without rotary embeddings get index -1, where `forward` puts the positions.
        of_layers = [-1 if m.rope is None else kinds.index((m.rope, m.rotary_dim)) for m in mixers]
        pools = [mixer.pool for mixer in mixers]
        self.layers = tuple(zip(layers, of_layers, pools, strict=True))

    @property
    def device(self) -> torch.device:
        """Return the device that holds the weights."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of weights and activations."""
        return self.embedding.dtype

    @property
    def dtype_name(self) -> DTypeName:
        """Return the same dtype by its name in configurations."""
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
            positions: int64 [tokens], position of each token within its own row.
            attention: the attention plan of each pool, made for exactly these tokens.
            logits_indices: int64 [n], the tokens whose hidden state is returned; None for all.

        Returns:
            [n, hidden], normalized for the LM head.
        """
        hidden, add_and_norm = self.embed(token_ids), self.add_and_norm
        if self.embedding_scale != 1.0:
            hidden.mul_(self.embedding_scale)
        phases = [*[rope.phases(positions) for rope in self.ropes], positions]
        y, after = None, None
        for layer, rope, pool in self.layers:
            of_mixer, of_ffn = layer.mixer_norms, layer.ffn_norms
            x = add_and_norm(hidden, y, after, of_mixer.before)
            y = layer.mixer(x, phases[rope], attention[pool])
            x = add_and_norm(hidden, y, of_mixer.after, of_ffn.before)
            y, after = layer.ffn(x), of_ffn.after
        add_and_norm(hidden, y, after, None)
        if logits_indices is not None:
            hidden = hidden.index_select(0, logits_indices)
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the scores of the next token: [n, hidden] -> float32 [n, vocab]."""
        return capped(self.head(hidden).float(), self.config.final_logit_softcapping)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Bound logits to (-softcap, softcap) by a tanh, in place; None leaves them."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)
