"""Load the recurrent mixer of one layer."""

from __future__ import annotations

import torch
from torch import Tensor

from session_server.models.config import (
    GatedDeltaConfig,
    Mamba2Config,
    ModelConfig,
    ShortConvConfig,
)
from session_server.models.layers.gated_delta import GatedDeltaWeights
from session_server.models.layers.mamba2 import Mamba2Weights
from session_server.models.layers.norm import RmsNorm
from session_server.models.layers.short_conv import ShortConvWeights
from session_server.runner.checkpoint import WeightSource
from session_server.runner.weight_rows import join_rows


def take_short_conv(
    mixer: ShortConvConfig, config: ModelConfig, tensors: WeightSource, prefix: str
) -> ShortConvWeights:
    """Load a short convolution; `prefix` begins its tensors' names."""
    hidden, size = config.hidden_size, mixer.channels

    def bias(name: str, length: int) -> Tensor | None:
        return tensors.take(f"{prefix}{name}.bias", length) if mixer.bias else None

    inputs = tensors.take_linear(f"{prefix}in_proj.weight", 3 * size, hidden)
    output = tensors.take_linear(f"{prefix}out_proj.weight", hidden, size)
    return ShortConvWeights(
        inputs=tensors.linear(inputs, bias("in_proj", 3 * size)),
        taps=_taps(tensors, f"{prefix}conv", size, mixer.conv_kernel_size),
        bias=bias("conv", size),
        output=tensors.linear(output, bias("out_proj", hidden)),
    )


def take_mamba2(
    mixer: Mamba2Config, config: ModelConfig, tensors: WeightSource, prefix: str
) -> Mamba2Weights:
    """Load a Mamba2 mixer; `prefix` begins its tensors' names."""
    hidden, inner, heads = config.hidden_size, mixer.inner_size, mixer.num_heads

    def bias(name: str, length: int, *, is_there: bool) -> Tensor | None:
        return tensors.take(f"{prefix}{name}.bias", length) if is_there else None

    num_inputs = inner + mixer.conv_size + heads
    inputs = tensors.take_linear(f"{prefix}in_proj.weight", num_inputs, hidden)
    output = tensors.take_linear(f"{prefix}out_proj.weight", hidden, inner)
    gain = tensors.take(f"{prefix}norm.weight", inner)
    return Mamba2Weights(
        inputs=tensors.linear(inputs, bias("in_proj", num_inputs, is_there=mixer.bias)),
        taps=_taps(tensors, f"{prefix}conv1d", mixer.conv_size, mixer.conv_kernel_size),
        conv_bias=bias("conv1d", mixer.conv_size, is_there=mixer.conv_bias),
        step_bias=tensors.take_as(torch.float32, f"{prefix}dt_bias", heads),
        rates=_rates(tensors, prefix, heads),
        skip=tensors.take_as(torch.float32, f"{prefix}D", heads),
        norm=RmsNorm(gain.view(mixer.n_groups, -1), config.norm.rms_norm_eps),
        output=tensors.linear(output, bias("out_proj", hidden, is_there=mixer.bias)),
    )


def take_gated_delta(
    mixer: GatedDeltaConfig, config: ModelConfig, tensors: WeightSource, prefix: str
) -> GatedDeltaWeights:
    """Load a gated delta mixer; `prefix` begins its tensors' names."""
    hidden, heads = config.hidden_size, mixer.linear_num_value_heads
    sizes = {"qkv": mixer.conv_size, "z": mixer.values_size, "b": heads, "a": heads}
    inputs = [
        tensors.take_linear(f"{prefix}in_proj_{name}.weight", size, hidden)
        for name, size in sizes.items()
    ]
    output = tensors.take_linear(f"{prefix}out_proj.weight", hidden, mixer.values_size)
    gain = tensors.take(f"{prefix}norm.weight", mixer.linear_value_head_dim)
    return GatedDeltaWeights(
        inputs=tensors.linear(join_rows(inputs)),
        taps=_taps(tensors, f"{prefix}conv1d", mixer.conv_size, mixer.linear_conv_kernel_dim),
        step_bias=tensors.take_as(torch.float32, f"{prefix}dt_bias", heads),
        rates=_rates(tensors, prefix, heads),
        norm=RmsNorm(gain, config.norm.rms_norm_eps),
        output=tensors.linear(output),
    )


def _taps(tensors: WeightSource, name: str, channels: int, width: int) -> Tensor:
    """Load a depthwise convolution: [width, channels], the newest token last."""
    return tensors.take(f"{name}.weight", channels, 1, width).squeeze(1).t().contiguous()


def _rates(tensors: WeightSource, prefix: str, num_heads: int) -> Tensor:
    """Load the negative rates of decay; skip `exp_` on the meta device: it loads the compiler."""
    logs = tensors.take_as(torch.float32, f"{prefix}A_log", num_heads)
    return logs if logs.is_meta else logs.exp_().neg_()
