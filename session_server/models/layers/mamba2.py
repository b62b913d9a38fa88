"""Run the selective state space of Mamba2 (Dao and Gu 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from session_server.attention.base import RecurrentPlan
from session_server.models.config import Mamba2Config
from session_server.models.layers.linear import Linear
from session_server.models.layers.norm import RmsNorm


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """Hold the weights of one Mamba2 layer.

    `inputs`: [hidden] -> [inner + conv + heads]: the gate, the convolution's input and the
    discretization steps. `taps`: [width, conv], the newest token last; `conv_bias`: [conv] or None.
    float32 [heads]: `step_bias` of the discretization steps, `rates` of decay, all negative, and
    `skip`, the factor on the input that bypasses the state. `norm`: of [groups, inner / groups].
    `output`: [inner] -> [hidden].
    """

    inputs: Linear
    taps: Tensor
    conv_bias: Tensor | None
    step_bias: Tensor
    rates: Tensor
    skip: Tensor
    norm: RmsNorm
    output: Linear


@dataclass(frozen=True, slots=True)
class Mamba2Mixer:
    """Apply a convolution, a decaying state per head, a gate and a norm.

    `layer`: index within its pool.
    """

    config: Mamba2Config
    layer: int
    weights: Mamba2Weights

    def __call__(self, x: Tensor, phases: Tensor, attention: RecurrentPlan) -> Tensor:
        """Mix tokens with the tokens before them: [tokens, hidden] -> [tokens, hidden]."""
        del phases
        config, weights, num_tokens = self.config, self.weights, len(x)
        sizes = [config.inner_size, config.conv_size, config.num_heads]
        gate, mixed, steps = torch.split(weights.inputs(x), sizes, dim=-1)
        mixed = attention.convolve(self.layer, mixed, weights.taps, weights.conv_bias)
        written = config.n_groups * config.state_size
        sizes = [config.inner_size, written, written]
        heads, write, read = torch.split(functional.silu(mixed).float(), sizes, dim=-1)
        heads = heads.view(num_tokens, config.num_heads, config.head_dim)
        lengths = functional.softplus(steps.float() + weights.step_bias).clamp(
            *config.time_step_limit
        )
        out = attention.recur(
            self.layer,
            StateSpace(),
            heads * lengths.unsqueeze(-1),
            lengths * weights.rates,
            write.view(num_tokens, config.n_groups, config.state_size),
            read.view(num_tokens, config.n_groups, config.state_size),
        )
        out = out.addcmul_(heads, weights.skip.unsqueeze(-1))
        gated = out.view(num_tokens, -1).mul_(functional.silu(gate.float())).to(x.dtype)
        normed = weights.norm(gated.view(num_tokens, config.n_groups, -1))
        return weights.output(normed.view(num_tokens, -1))


class StateSpace:
    """Update states as `state = exp(decay) * state + x (outer) write`; a `Recurrence`.

    The output is `state . read`. A head's state is [head_dim, state_size]. Inputs, float32: `x` [n,
    heads, head_dim]; `decay` [n, heads], all <= 0; `write` and `read` [n, groups, state_size], each
    shared by consecutive heads.
    """

    __slots__ = ()
    rule: Final = "state space"

    def step(self, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Advance the state of n rows by one token each; implements `Recurrence.step`."""
        x, decay, write, read = inputs
        per_group = x.shape[1] // write.shape[1]
        write, read = (side.repeat_interleave(per_group, dim=1) for side in (write, read))
        state = state.mul_(decay.exp()[:, :, None, None])
        state = state.addcmul_(x.unsqueeze(-1), write.unsqueeze(-2))
        return torch.matmul(state, read.unsqueeze(-1)).squeeze(-1), state

    def chunk(self, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Advance the state of one row by a chunk; implements `Recurrence.chunk`.

        Uses the duality of state spaces and attention.
        """
        x, decay, write, read = inputs
        per_group = x.shape[1] // write.shape[1]
        # [heads, tokens, ...]
        x, decay = x.transpose(0, 1), decay.t()
        write, read = (
            side.repeat_interleave(per_group, dim=1).transpose(0, 1) for side in (write, read)
        )
        since_start = decay.cumsum(-1)
        between = (since_start.unsqueeze(-1) - since_start.unsqueeze(-2)).exp_().tril_()
        scores = torch.matmul(read, write.transpose(1, 2)).mul_(between)
        out = torch.matmul(scores, x)
        from_before = torch.matmul(read, state.transpose(1, 2))
        out = out.addcmul_(from_before, since_start.exp().unsqueeze(-1))
        to_end = (since_start[:, -1:] - since_start).exp_().unsqueeze(-1)
        state = state * since_start[:, -1].exp()[:, None, None]
        state = state + torch.matmul((x * to_end).transpose(1, 2), write)
        return out.transpose(0, 1), state
