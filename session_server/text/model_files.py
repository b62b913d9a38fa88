"""What a checkpoint directory says about text: special tokens, end tokens, template, sampling.

Hugging Face layout. Only the files named here are read, and nothing in them is executed but the
chat template, in a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from session_server.core.sampling import MAX_OUTPUT_TOKENS, SamplingParams

MAX_CONFIG_BYTES: Final = 64 << 20
"""Bound of one JSON file (`tokenizer_config.json` may list thousands of tokens)."""

MAX_TEMPLATE_BYTES: Final = 1 << 20
"""Bound of a chat template; those of the hub have up to 40 kB."""

_NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token")


class ModelFilesError(Exception):
    """The checkpoint lacks a file or a file does not say what it must."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The text side of a checkpoint.

    `named_tokens`: bos_token, eos_token and the like, as the template sees them. `special_tokens`:
    strings declared special outside tokenizer.json. `eos_token_ids`: those of the generation
    config (or the model config when it has none). `chat_template`: Jinja source, None without.
    """

    tokenizer_path: Path
    named_tokens: Mapping[str, str]
    special_tokens: frozenset[str]
    eos_token_ids: frozenset[int]
    chat_template: str | None
    default_sampling: SamplingParams


def read_model_files(model_dir: Path) -> ModelFiles:
    """Read what `model_dir` holds; only tokenizer.json must be there.

    Raises:
        ModelFilesError: tokenizer.json is missing, or a file is malformed.
    """
    tokenizer_path = model_dir / "tokenizer.json"
    if not tokenizer_path.is_file():
        raise ModelFilesError(
            f"{model_dir} has no tokenizer.json; fetch it from where the checkpoint came from"
        )
    tokenizer_config = _read_json(model_dir / "tokenizer_config.json")
    generation_config = _read_json(model_dir / "generation_config.json")
    eos = generation_config.get("eos_token_id")
    if eos is None:
        eos = _read_json(model_dir / "config.json").get("eos_token_id")
    return ModelFiles(
        tokenizer_path=tokenizer_path,
        named_tokens=_named_tokens(tokenizer_config),
        special_tokens=_special_tokens(tokenizer_config),
        eos_token_ids=_token_ids(eos),
        chat_template=_chat_template(model_dir, tokenizer_config),
        default_sampling=_default_sampling(generation_config),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_bounded(path))
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path.name} is not a JSON object")
    return value


def _read_bounded(path: Path) -> str:
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ModelFilesError(f"{path.name} is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelFilesError(f"{path.name} is not UTF-8") from error


def _token_text(value: object) -> str | None:
    """A token is given as its text or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {name: _token_text(config.get(name)) for name in _NAMED_TOKENS}
    return {name: text for name, text in named.items() if text is not None}


def _special_tokens(config: Mapping[str, Any]) -> frozenset[str]:
    texts = set(_named_tokens(config).values())
    for name in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(name)
        tokens = list(extra.values()) if isinstance(extra, dict) else extra
        if isinstance(tokens, list):
            texts.update(filter(None, map(_token_text, tokens)))
    added = config.get("added_tokens_decoder")
    if isinstance(added, dict):
        for entry in added.values():
            text = _token_text(entry)
            if text is not None and isinstance(entry, dict) and entry.get("special"):
                texts.add(text)
    return frozenset(texts)


def _token_ids(value: object) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(item for item in values if type(item) is int and item >= 0)


def _chat_template(model_dir: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja wins; then the config's: one string, or a list of named ones."""
    path = model_dir / "chat_template.jinja"
    source = _read_bounded(path) if path.is_file() else _named_template(config)
    if source is not None and len(source.encode(errors="replace")) > MAX_TEMPLATE_BYTES:
        raise ModelFilesError(f"the chat template is larger than {MAX_TEMPLATE_BYTES} bytes")
    return source


def _named_template(config: Mapping[str, Any]) -> str | None:
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {
            entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)
        }
        value = named.get("default", next(iter(named.values()), None))
    if value is not None and not isinstance(value, str):
        raise ModelFilesError("chat_template is neither a string nor a list of named ones")
    return value


def _default_sampling(config: Mapping[str, Any]) -> SamplingParams:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    values: dict[str, Any] = {
        name: config[name] for name in names if isinstance(config.get(name), int | float)
    }
    if config.get("do_sample") is False:
        values["temperature"] = 0.0
    max_tokens = config.get("max_new_tokens")
    if isinstance(max_tokens, int) and max_tokens > 0:
        values["max_tokens"] = min(max_tokens, MAX_OUTPUT_TOKENS)
    try:
        return msgspec.convert(values, SamplingParams)
    except msgspec.ValidationError as error:
        raise ModelFilesError(f"generation_config.json: {error}") from error
