"""Rebuild a decoder of what the kernels compute."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

from session_server.models.decoder import Decoder
from session_server.models.layers.attention import GqaMixer
from session_server.models.layers.mla import MlaMixer
from session_server.models.layers.mlp import ClampedGate, gelu_tanh_gate, silu_gate
from session_server.models.layers.norm import RmsNorm
from session_server.runner.triton.gates import TritonGate
from session_server.runner.triton.mixers import TritonGqaMixer, TritonMlaMixer
from session_server.runner.triton.norms import TritonRmsNorm, add_and_norm


def fused(decoder: Decoder) -> Decoder:
    """Return the decoder with layers that launch kernels. It shares its weights."""
    made = copy.copy(decoder)
    made.layers = tuple((_fused(layer), rope, pool) for layer, rope, pool in decoder.layers)
    made.norm = _fused(decoder.norm)
    made.add_and_norm = add_and_norm
    return made


def _fused(part: Any) -> Any:
    """Return what computes the same by kernels; where there is none, the part itself, with what
    it is made of."""
    if isinstance(part, list | tuple):
        made = [_fused(each) for each in part]
        return made if any(new is not each for new, each in zip(made, part, strict=True)) else part
    if is_dataclass(part) and not isinstance(part, type):
        parts = {field.name: getattr(part, field.name) for field in fields(part)}
        changed = {name: new for name, each in parts.items() if (new := _fused(each)) is not each}
        part = replace(part, **changed) if changed else part
    match part:
        case RmsNorm():
            return TritonRmsNorm(part.weight, part.eps)
        case GqaMixer():
            return TritonGqaMixer(part.config, part.layer, part.weights)
        case MlaMixer():
            return TritonMlaMixer(part.config, part.layer, part.weights)
        case ClampedGate():
            return TritonGate("clamped", part.alpha, part.limit)
        case _ if part is silu_gate:
            return TritonGate("silu")
        case _ if part is gelu_tanh_gate:
            return TritonGate("gelu_tanh")
        case _:
            return part
