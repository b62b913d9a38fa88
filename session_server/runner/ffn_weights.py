"""The feed-forward of one layer from a checkpoint: dense, or experts as families spell them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from session_server.models.config import ExpertLayout, MlpConfig, MoeConfig, Scoring
from session_server.models.layers.linear import make_linear
from session_server.models.layers.mlp import GatedMlp, make_gate
from session_server.models.layers.moe import MixtureOfExperts
from session_server.models.layers.routing import Router
from session_server.runner.checkpoint import Tensors, joined
from session_server.runner.mxfp4 import take_mxfp4


def take_ffn(
    ffn: MlpConfig | MoeConfig, hidden: int, tensors: Tensors, prefix: str
) -> GatedMlp | MixtureOfExperts:
    """Build one.

    Args:
        ffn: its description.
        hidden: size of what goes in and comes out.
        tensors: where the weights are.
        prefix: of their names.
    """
    if isinstance(ffn, MlpConfig):
        return _dense(ffn, hidden, tensors, prefix)
    router, experts = _LAYOUTS[ffn.layout]
    weight = tensors.take(f"{prefix}{router}.weight", ffn.num_experts, hidden)
    bias = tensors.take(f"{prefix}{router}.bias", ffn.num_experts) if ffn.router_bias else None
    correction = None
    if ffn.routing.scoring is Scoring.SIGMOID:
        name = f"{prefix}{router}.e_score_correction_bias"
        correction = tensors.take_as(torch.float32, name, ffn.num_experts)
    shared = None
    if ffn.shared is not None:
        shared = _dense(ffn.shared, hidden, tensors, f"{prefix}shared_experts.")
    return MixtureOfExperts(
        Router(make_linear(weight, bias), ffn, correction),
        list(experts(ffn, hidden, tensors, f"{prefix}experts.")),
        shared,
    )


def _dense(mlp: MlpConfig, hidden: int, tensors: Tensors, prefix: str) -> GatedMlp:
    inner = mlp.intermediate_size

    def fused(kind: str, *inputs: int) -> Tensor:
        sides = (tensors.take(f"{prefix}{s}_proj.{kind}", inner, *inputs) for s in ("gate", "up"))
        return joined(tuple(sides))

    gate_up = make_linear(fused("weight", hidden), fused("bias") if mlp.bias else None)
    weight = tensors.take(f"{prefix}down_proj.weight", hidden, inner)
    bias = tensors.take(f"{prefix}down_proj.bias", hidden) if mlp.bias else None
    return GatedMlp(gate_up, make_linear(weight, bias), make_gate(mlp.gate))


def _qwen_experts(moe: MoeConfig, hidden: int, tensors: Tensors, prefix: str) -> Iterator[GatedMlp]:
    """Hub checkpoints have every expert by itself; stacked ones are what v5 holds in memory."""
    if not tensors.has(f"{prefix}gate_up_proj"):
        for index in range(moe.num_experts):
            yield _dense(moe.expert, hidden, tensors, f"{prefix}{index}.")
        return
    inner = moe.expert.intermediate_size
    gate_up = tensors.take(f"{prefix}gate_up_proj", moe.num_experts, 2 * inner, hidden)
    down = tensors.take(f"{prefix}down_proj", moe.num_experts, hidden, inner)
    for of_gate_up, of_down in zip(gate_up, down, strict=True):
        yield GatedMlp(make_linear(of_gate_up), make_linear(of_down), make_gate(moe.expert.gate))


def _gpt_oss_experts(
    moe: MoeConfig, hidden: int, tensors: Tensors, prefix: str
) -> Iterator[GatedMlp]:
    num, inner, gate = moe.num_experts, moe.expert.intermediate_size, make_gate(moe.expert.gate)
    gate_up = _gpt_oss_matrices(tensors, f"{prefix}gate_up_proj", (num, 2 * inner, hidden))
    gate_up_bias = tensors.take(f"{prefix}gate_up_proj_bias", num, 2 * inner)
    down = _gpt_oss_matrices(tensors, f"{prefix}down_proj", (num, hidden, inner))
    down_bias = tensors.take(f"{prefix}down_proj_bias", num, hidden)
    for index in range(num):
        yield GatedMlp(
            make_linear(_gate_first(gate_up[index]), _gate_first(gate_up_bias[index])),
            make_linear(down[index], down_bias[index]),
            gate,
        )


def _gpt_oss_matrices(tensors: Tensors, name: str, shape: tuple[int, int, int]) -> Tensor:
    """[experts, outputs, inputs]."""
    if tensors.has(f"{name}_blocks"):
        return take_mxfp4(tensors, name, shape)
    num_experts, outputs, inputs = shape
    return tensors.take(name, num_experts, inputs, outputs).transpose(1, 2).contiguous()


def _gate_first(rows: Tensor) -> Tensor:
    """Gate and up take turns in the checkpoint; the gate's half comes first here."""
    return joined((rows[::2], rows[1::2]))


_TakeExperts = Callable[[MoeConfig, int, Tensors, str], Iterator[GatedMlp]]

_LAYOUTS: Final[Mapping[ExpertLayout, tuple[str, _TakeExperts]]] = MappingProxyType(
    {
        ExpertLayout.QWEN: ("gate", _qwen_experts),
        ExpertLayout.GPT_OSS: ("router", _gpt_oss_experts),
    }
)
"""What the router is called, and who reads the experts."""
