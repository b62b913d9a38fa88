"""Run the gated delta rule (Yang, Kautz and Hatamizadeh 2025) of Qwen 3.5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from session_server.attention.base import RecurrentPlan
from session_server.models.config import GatedDeltaConfig
from session_server.models.layers.linear import Linear
from session_server.models.layers.norm import RmsNorm

_NORM_EPS: Final = 1e-6


@dataclass(frozen=True, slots=True)
class GatedDeltaWeights:
    """Hold the weights of one gated delta layer.

    `inputs`: [hidden] -> [conv + values + 2 * value_heads]: queries, keys and values, the gate, the
    write strength and the decay. `taps`: [width, conv], the newest token last. float32
    [value_heads]: `step_bias` and `rates` (negative) of the decay. `norm`: of [value_head_dim].
    `output`: [values] -> [hidden].
    """

    inputs: Linear
    taps: Tensor
    step_bias: Tensor
    rates: Tensor
    norm: RmsNorm
    output: Linear


@dataclass(frozen=True, slots=True)
class GatedDeltaMixer:
    """Apply a convolution, the delta rule on a state per head, a norm and a gate.

    `layer`: index within its pool.
    """

    config: GatedDeltaConfig
    layer: int
    weights: GatedDeltaWeights

    def __call__(self, x: Tensor, phases: Tensor, attention: RecurrentPlan) -> Tensor:
        """Mix tokens with the tokens before them: [tokens, hidden] -> [tokens, hidden]."""
        del phases
        config, weights, num_tokens = self.config, self.weights, len(x)
        heads = config.linear_num_value_heads
        sizes = [config.conv_size, config.values_size, heads, heads]
        mixed, gate, write, forget = torch.split(weights.inputs(x), sizes, dim=-1)
        mixed = functional.silu(attention.convolve(self.layer, mixed, weights.taps, None)).float()
        sizes = [config.keys_size, config.keys_size, config.values_size]
        q, k, v = torch.split(mixed, sizes, dim=-1)
        decay = functional.softplus(forget.float() + weights.step_bias) * weights.rates
        out = attention.recur(
            self.layer,
            DeltaRule(),
            _l2_normalize(q.view(num_tokens, config.linear_num_key_heads, -1))
            * config.linear_key_head_dim**-0.5,
            _l2_normalize(k.view(num_tokens, config.linear_num_key_heads, -1)),
            v.view(num_tokens, heads, -1),
            decay,
            write.float().sigmoid(),
        )
        gates = functional.silu(gate.float().view(num_tokens, heads, -1))
        gated = weights.norm(out.to(x.dtype)) * gates
        return weights.output(gated.to(x.dtype).view(num_tokens, -1))


class DeltaRule:
    """Update states by the gated delta rule (Yang et al. 2025); a `Recurrence`.

    `state = exp(decay) * state`, then `state += k (outer) write * (v - k . state)`, and `out = q .
    state`. A head's state is [key_head_dim, value_head_dim]. Inputs, float32: `q` and `k` are [n,
    key_heads, key_head_dim], each shared by consecutive value heads; `v` is [n, value_heads,
    value_head_dim]; `decay` (<= 0) and `write` are [n, value_heads].
    """

    __slots__ = ()
    rule: Final = "delta rule"

    def step(self, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Advance the state of n rows by one token each; implements `Recurrence.step`."""
        q, k, v, decay, write = inputs
        per_key = v.shape[1] // k.shape[1]
        q, k = (side.repeat_interleave(per_key, dim=1).unsqueeze(-2) for side in (q, k))
        state = state.mul_(decay.exp()[:, :, None, None])
        error = v.unsqueeze(-2) - torch.matmul(k, state)
        state = state.addcmul_(k.transpose(-1, -2), error * write[:, :, None, None])
        return torch.matmul(q, state).squeeze(-2), state

    def chunk(self, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Advance the state of one row by a chunk; implements `Recurrence.chunk`.

        Each correction depends on those before it, which is a triangular system (Yang et al. 2024).
        """
        q, k, v, decay, write = inputs
        per_key = v.shape[1] // k.shape[1]
        # [heads, tokens, ...]
        q, k = (side.repeat_interleave(per_key, dim=1).transpose(0, 1) for side in (q, k))
        v, write = v.transpose(0, 1), write.t().unsqueeze(-1)
        since_start = decay.t().cumsum(-1)
        between = (since_start.unsqueeze(-1) - since_start.unsqueeze(-2)).exp_().tril_()
        kept = since_start.exp().unsqueeze(-1)
        error = (v - torch.matmul(k, state) * kept) * write
        overlaps = torch.matmul(k, k.transpose(1, 2)) * between * write
        corrections = torch.linalg.solve_triangular(
            overlaps, error, upper=False, unitriangular=True
        )
        out = torch.matmul(q, state) * kept
        out += torch.matmul(torch.matmul(q, k.transpose(1, 2)) * between, corrections)
        to_end = (since_start[:, -1:] - since_start).exp().unsqueeze(-1)
        state = state * kept[:, -1:] + torch.matmul((k * to_end).transpose(1, 2), corrections)
        return out.transpose(0, 1), state


def _l2_normalize(x: Tensor) -> Tensor:
    """Scale vectors of the last dimension to length one."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)
