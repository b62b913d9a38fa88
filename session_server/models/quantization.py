"""Read how the matrices of a checkpoint were quantized: AWQ, GPTQ, compressed-tensors.

Matrices are stored as integers, whose scales (and zero points) are shared by groups of inputs. What
else `quantization_config` may ask for is refused by name: it would change what the integers mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from session_server.models.errors import CheckpointError, UnsupportedModel, shortened


class PackedMethod(Enum):
    """Name how integers are packed (`quant_method`)."""

    AWQ = "awq"
    GPTQ = "gptq"
    COMPRESSED_TENSORS = "compressed-tensors"


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """Describe quantized matrices.

    `num_bits`: 4 or 8. `group_size`: inputs of one output that share a scale; None for all of them.
    `zero_offset`: what is added to stored zero points (GPTQ's first format stores them minus one).
    `is_packed`: several integers to a word of 32 bits, or one to a byte. `needs_zeros`: a matrix
    without zero points is incomplete. `rounds_inputs`: what is multiplied by the matrices is
    rounded to 8 bits too, each token by a scale of its own (W8A8).
    """

    method: PackedMethod
    num_bits: int
    group_size: int | None
    zero_offset: int = 0
    is_packed: bool = True
    needs_zeros: bool = False
    rounds_inputs: bool = False


def parse_quantization(raw: Mapping[str, Any]) -> QuantizationConfig:
    """Read a `quantization_config` whose `quant_method` is one of `PackedMethod`.

    Raises:
        CheckpointError: a field is missing or out of bounds.
        UnsupportedModel: it asks for something that is not implemented.
    """
    return _PARSERS[PackedMethod(raw["quant_method"])](raw)


def _awq(raw: Mapping[str, Any]) -> QuantizationConfig:
    """AutoAWQ's `WQLinear_GEMM` (Lin et al. 2023)."""
    _require(raw, "version", "gemm", "GEMM")
    num_bits = _bits(raw.get("bits", raw.get("w_bit")), 4)
    size = _group_size(raw.get("group_size", raw.get("q_group_size")))
    return QuantizationConfig(PackedMethod.AWQ, num_bits, size)


def _gptq(raw: Mapping[str, Any]) -> QuantizationConfig:
    """AutoGPTQ's and GPTQModel's format (Frantar et al. 2022)."""
    form = raw.get("checkpoint_format") or raw.get("format") or "gptq"
    _require({"checkpoint_format": form}, "checkpoint_format", "gptq", "gptq_v2")
    _require(raw, "is_marlin_format", False)
    if raw.get("dynamic"):
        raise UnsupportedModel("quantization_config: 'dynamic' (settings by layer)")
    offset = 0 if form == "gptq_v2" else 1
    num_bits, size = _bits(raw.get("bits"), 4, 8), _group_size(raw.get("group_size"))
    return QuantizationConfig(PackedMethod.GPTQ, num_bits, size, offset)


def _compressed_tensors(raw: Mapping[str, Any]) -> QuantizationConfig:
    """The formats of llm-compressor that hold integers.

    Of the ways to round activations one is known, `_BY_TOKEN`, with 8-bit integers of one scale for
    each output; under all others activations stay as they are.
    """
    _require(raw, "format", "pack-quantized", "naive-quantized", "int-quantized")
    for name in ("kv_cache_scheme", "transform_config"):
        if raw.get(name):
            raise UnsupportedModel(f"quantization_config: {name!r} is not implemented")
    _require(raw.get("sparsity_config") or {}, "format", "dense")
    named = raw.get("config_groups") or {}
    if not isinstance(named, Mapping):
        raise UnsupportedModel("quantization_config: config_groups is no object")
    groups = list(named.values())
    if len(groups) != 1:
        raise UnsupportedModel(f"quantization_config: {len(groups)} config_groups, not 1")
    weights = groups[0].get("weights") or {}
    _require(weights, "type", "int")
    _require(weights, "dynamic", False)
    strategy = weights.get("strategy")
    if strategy not in {"group", "channel"}:
        raise UnsupportedModel(
            f"quantization_config: strategy {_shown(strategy)}; known: group, channel"
        )
    size = _group_size(weights.get("group_size")) if strategy == "group" else None
    num_bits = _bits(weights.get("num_bits"), 4, 8)
    is_packed = raw.get("format") == "pack-quantized"
    needs_zeros = weights.get("symmetric") is False
    is_by_output = num_bits == 8 and size is None and not needs_zeros
    inputs = groups[0].get("input_activations") or {}
    return QuantizationConfig(
        PackedMethod.COMPRESSED_TENSORS,
        num_bits,
        size,
        is_packed=is_packed,
        needs_zeros=needs_zeros,
        rounds_inputs=is_by_output and not is_packed and _BY_TOKEN.items() <= inputs.items(),
    )


def _require(raw: Mapping[str, Any], key: str, *known: object) -> None:
    """Reject a value of a field, if there is one, that is not `known`."""
    value = raw.get(key)
    if value is not None and value not in known:
        names = ", ".join(map(str, known))
        raise UnsupportedModel(f"quantization_config: {key} {_shown(value)}; known: {names}")


def _bits(value: object, *known: int) -> int:
    if value not in known or not isinstance(value, int):
        names = ", ".join(map(str, known))
        raise UnsupportedModel(f"quantization_config: {_shown(value)} bits; known: {names}")
    return value


def _group_size(value: object) -> int | None:
    """Return the inputs of a group; -1 stands for all of them."""
    if value == -1:
        return None
    if type(value) is not int or not 1 <= value <= _MAX_GROUP_SIZE:
        raise CheckpointError(
            f"config.json: group_size must be -1, or an integer from 1 to {_MAX_GROUP_SIZE}, it is "
            f"{_shown(value)}"
        )
    return value


def _shown(value: object) -> str:
    return shortened(repr(value))


_MAX_GROUP_SIZE: Final = 1 << 20

_BY_TOKEN: Final[Mapping[str, object]] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}
"""How llm-compressor's W8A8 rounds activations (`QuantizationArgs` of compressed-tensors)."""

_PARSERS: Final[Mapping[PackedMethod, Callable[[Mapping[str, Any]], QuantizationConfig]]] = {
    PackedMethod.AWQ: _awq,
    PackedMethod.GPTQ: _gptq,
    PackedMethod.COMPRESSED_TENSORS: _compressed_tensors,
}
