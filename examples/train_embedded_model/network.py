"""Define the training-side twin of Hugging Face's `Qwen3ForCausalLM`.

Small and fast: whole sequences without a cache, and logits only where there is a loss.
Parameter names equal those of the checkpoint, so exporting is saving the state dict.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

INITIAL_QK_GAIN: Final = 1.5


@dataclass(frozen=True)
class Shape:
    """Size the network; the defaults are the shipped model, 1.87 M parameters."""

    vocab_size: int = 1536
    hidden_size: int = 192
    num_layers: int = 4
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 512
    rope_theta: float = 1e6
    norm_eps: float = 1e-6


class Network(nn.Module):
    """Compute logits at chosen positions from token ids."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)

    def forward(self, token_ids: Tensor, chosen: Tensor) -> Tensor:
        """Compute logits where `chosen` is true.

        Args:
            token_ids: [rows, length], int64.
            chosen: [rows, length], bool.

        Returns:
            Logits [number of chosen positions, vocab_size]; the head is the embedding.
        """
        hidden: Tensor = self.model(token_ids)
        return functional.linear(hidden[chosen], self.model.embed_tokens.weight)


class Decoder(nn.Module):
    """Apply embedding, layers and final norm: [rows, length] -> [rows, length, hidden_size]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.05)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self._rotation = Rotation(shape.head_dim, shape.rope_theta)

    def forward(self, token_ids: Tensor) -> Tensor:
        hidden = self.embed_tokens(token_ids)
        cos, sin = self._rotation.tables(token_ids.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        normed: Tensor = self.norm(hidden)
        return normed


class Layer(nn.Module):
    """Add pre-norm attention and SwiGLU to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        added: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return added


class Attention(nn.Module):
    """Attend causally over grouped queries, with RMS-normed queries and keys.

    Normed queries and keys bound a score by gain_q * gain_k * sqrt(head_dim). Finding one
    token among 2,048 needs scores well above ln 2048 = 7.6, so the gains start above one.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        query_size = shape.num_heads * shape.head_dim
        kv_size = shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps)
        nn.init.zeros_(self.o_proj.weight)
        nn.init.constant_(self.q_norm.weight, INITIAL_QK_GAIN)
        nn.init.constant_(self.k_norm.weight, INITIAL_QK_GAIN)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        head_dim = self._shape.head_dim
        queries = self.q_norm(self.q_proj(hidden).unflatten(-1, (-1, head_dim)))
        keys = self.k_norm(self.k_proj(hidden).unflatten(-1, (-1, head_dim)))
        values = self.v_proj(hidden).unflatten(-1, (-1, head_dim))
        group = self._shape.num_heads // self._shape.num_kv_heads
        mixed = functional.scaled_dot_product_attention(
            rotate(queries, cos, sin).transpose(1, 2),
            rotate(keys, cos, sin).repeat_interleave(group, dim=2).transpose(1, 2),
            values.repeat_interleave(group, dim=2).transpose(1, 2),
            is_causal=True,
        )
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return projected


class FeedForward(nn.Module):
    """Apply SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        gated = functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden)
        projected: Tensor = self.down_proj(gated)
        return projected


class Rotation:
    """Compute cosines and sines of rotary positions (Su et al. 2021), cached per length."""

    def __init__(self, head_dim: int, theta: float) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self._frequencies = theta**-exponents
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def tables(self, length: int) -> tuple[Tensor, Tensor]:
        """Return tables [length, 1, head_dim]; the second half of a head repeats the first."""
        if length not in self._tables:
            angles = torch.outer(torch.arange(length, dtype=torch.float32), self._frequencies)
            doubled = torch.cat((angles, angles), dim=-1).unsqueeze(1)
            self._tables[length] = (doubled.cos(), doubled.sin())
        return self._tables[length]


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [rows, length, heads, head_dim], pairing dimension i with i + head_dim / 2."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin
