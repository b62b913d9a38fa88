"""Turn a Hugging Face `config.json` into a `ModelConfig`, by `model_type`.

`families` has a parser per family, `fields` what families have in common. A setting that is not
implemented is rejected by name: ignoring it would give wrong answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from session_server.models.bounds import check_fields, check_sizes
from session_server.models.config import ModelConfig
from session_server.models.errors import CheckpointError, UnsupportedModel
from session_server.models.families import (
    deepseek,
    dense,
    experts,
    gemma,
    granite,
    lfm2,
    olmo3,
    qwen3_5,
)
from session_server.models.fields import RawConfig
from session_server.models.files import MAX_CONFIG_BYTES, read_object
from session_server.models.gguf.config import adapt, raw_config
from session_server.models.gguf.reader import GgufFile, read_gguf
from session_server.models.quantization import PackedMethod, parse_quantization

FAMILIES: Final[Mapping[str, Callable[[RawConfig], ModelConfig]]] = {
    "deepseek_v2": deepseek.deepseek_v2,
    "deepseek_v3": deepseek.deepseek_v3,
    "gemma2": gemma.gemma2,
    "gemma3_text": gemma.gemma3,
    "gpt_oss": experts.gpt_oss,
    "granitemoehybrid": granite.granite,
    "lfm2": lfm2.lfm2,
    "llama": dense.llama,
    "mistral": dense.mistral,
    "olmo3": olmo3.olmo3,
    "qwen2": dense.qwen2,
    "qwen3": dense.qwen3,
    "qwen3_5_text": qwen3_5.qwen3_5,
    "qwen3_moe": experts.qwen3_moe,
}
"""Parser of every implemented `model_type`."""

QUANTIZATION_METHODS: Final[Mapping[str, str]] = {
    "deepseek_v3": "fp8",
    "gpt_oss": "mxfp4",
    "qwen3": "fp8",
    "qwen3_moe": "fp8",
}
"""The `quant_method` that a family's weights may have, in floats."""

FP8_BLOCK: Final = [128, 128]
"""Outputs and inputs that share a scale, of 8-bit floats."""

PACKED_METHODS: Final = frozenset(method.value for method in PackedMethod)

PACKED_FAMILIES: Final = frozenset(
    {"gemma2", "gemma3_text", "llama", "mistral", "olmo3", "qwen2", "qwen3", "qwen3_moe"}
)
"""Families whose matrices may be integers, packed by one of `PACKED_METHODS`."""


def load_config(directory: Path) -> ModelConfig:
    """Read `config.json` of a checkpoint, or the metadata of a GGUF file.

    Raises:
        CheckpointError: the file is missing, is no regular file, is not JSON or GGUF, lacks a field
            or has one that is out of its bounds.
        UnsupportedModel: the model type, or a setting of it, is not implemented.
    """
    if directory.is_file():
        return gguf_config(read_gguf(directory))
    raw = read_object(directory, "config.json", MAX_CONFIG_BYTES)
    if raw is None:
        raise CheckpointError(f"{directory} has no config.json: is it a checkpoint?")
    return parse_config(raw)


def gguf_config(file: GgufFile) -> ModelConfig:
    """Turn the metadata of a GGUF file into a `ModelConfig`.

    Raises:
        CheckpointError: a key is missing or has the wrong type.
        UnsupportedModel: the architecture, or a setting of it, is not implemented.
    """
    try:
        raw = raw_config(file)
    except (TypeError, ValueError, ArithmeticError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{file.path}: metadata of the wrong kind: {reason}") from error
    try:
        config = parse_config(raw)
    except CheckpointError as error:
        # Fields have other names in the file; those of `config.json` are close to them.
        reason = str(error).removeprefix("config.json: ")
        raise CheckpointError(f"{file.path}: its metadata gives {reason}") from error
    return adapt(config, file)


def parse_config(raw: RawConfig) -> ModelConfig:
    """Turn the contents of a `config.json` into a `ModelConfig`.

    Raises:
        CheckpointError: a field is missing or has the wrong type.
        UnsupportedModel: the model type, or a setting of it, is not implemented.
    """
    model_type = raw.get("model_type")
    describe = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if describe is None:
        raise UnsupportedModel(
            f"model_type {model_type!r} is not implemented; known: {', '.join(sorted(FAMILIES))}"
        )
    check_fields(raw)
    quantization = raw.get("quantization_config")
    method = (quantization or {}).get("quant_method")
    is_packed = method in PACKED_METHODS and model_type in PACKED_FAMILIES
    is_floats = method is not None and method == QUANTIZATION_METHODS.get(str(model_type))
    if quantization is not None and not (is_packed or is_floats):
        raise UnsupportedModel(
            f"quantization_config: {model_type} quantized with {method!r} is not implemented"
        )
    block = (quantization or {}).get("weight_block_size", FP8_BLOCK)
    if method == "fp8" and block != FP8_BLOCK:
        raise UnsupportedModel(f"weight_block_size {block} is not implemented; known: {FP8_BLOCK}")
    try:
        config = describe(raw)
        if is_packed:
            config = replace(config, quantization=parse_quantization(quantization or {}))
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"config.json: fields do not go together: {reason}") from error
    check_sizes(config)
    return config
