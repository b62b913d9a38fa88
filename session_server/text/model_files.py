"""Read the text files of a checkpoint: special tokens, end tokens, chat template, sampling
defaults.

The layout is Hugging Face's, or everything is in the metadata of a GGUF file. Only the files named
here are read, and nothing in them is executed except the chat template, which runs in a sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from session_server.core.sampling import MAX_OUTPUT_TOKENS, SamplingParams
from session_server.models.errors import ModelError
from session_server.models.files import (
    MAX_CONFIG_BYTES,
    MAX_JSON_BYTES,
    MAX_TOKENIZER_BYTES,
    find_file,
    read_object,
    read_text,
)
from session_server.models.gguf.reader import read_gguf
from session_server.text.gguf_tokenizer import GgufTokens

_NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token")


class ModelFilesError(ModelError):
    """Report a text file of a checkpoint that is missing or invalid."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Hold the text files of a checkpoint.

    `tokenizer`: path of tokenizer.json, or its contents. `named_tokens`: bos_token, eos_token and
    the like, as the template sees them. `special_tokens`: strings declared special outside
    tokenizer.json. `eos_token_ids`: those of the generation config (or the model config when it has
    none). `chat_template`: Jinja source, None without.
    """

    tokenizer: Path | str
    named_tokens: Mapping[str, str]
    special_tokens: frozenset[str]
    eos_token_ids: frozenset[int]
    chat_template: str | None
    default_sampling: SamplingParams


def read_model_files(model_dir: Path) -> ModelFiles:
    """Read the text files in `model_dir`, or a GGUF file; only tokenizer.json is required.

    Raises:
        ModelError: tokenizer.json is missing, a file is malformed, is too large, or is no regular
            file of the directory.
    """
    if model_dir.is_file():
        return _gguf_files(model_dir)
    tokenizer_path = find_file(model_dir, "tokenizer.json")
    if tokenizer_path is None:
        raise ModelFilesError(
            f"{model_dir} has no tokenizer.json; fetch it from where the checkpoint came from"
        )
    if tokenizer_path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise ModelFilesError(f"{tokenizer_path} is larger than {MAX_TOKENIZER_BYTES:,} bytes")
    tokenizer_config = read_object(model_dir, "tokenizer_config.json", MAX_JSON_BYTES) or {}
    generation_config = read_object(model_dir, "generation_config.json", MAX_CONFIG_BYTES) or {}
    eos = generation_config.get("eos_token_id")
    if eos is None:
        # The generation config has precedence; the model config is the fallback.
        config = read_object(model_dir, "config.json", MAX_CONFIG_BYTES) or {}
        eos = config.get("eos_token_id")
    return ModelFiles(
        tokenizer=tokenizer_path,
        named_tokens=_named_tokens(tokenizer_config),
        special_tokens=_special_tokens(tokenizer_config),
        eos_token_ids=_token_ids(eos),
        chat_template=_chat_template(model_dir, tokenizer_config),
        default_sampling=_default_sampling(generation_config),
    )


def _gguf_files(path: Path) -> ModelFiles:
    file = read_gguf(path)
    tokens = GgufTokens(file)
    template = file.metadata.get("tokenizer.chat_template")
    sampling = {
        "temperature": "temp",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "repetition_penalty": "penalty_repeat",
    }
    given = {name: file.metadata.get(f"general.sampling.{key}") for name, key in sampling.items()}
    return ModelFiles(
        tokenizer=tokens.tokenizer_json(),
        named_tokens=tokens.named(),
        special_tokens=frozenset(),
        eos_token_ids=tokens.end_ids(),
        chat_template=_checked_template(_named_template({"chat_template": template})),
        default_sampling=_default_sampling(given),
    )


def _token_text(value: object) -> str | None:
    """Return the text of a token that is given as a string or as an object with `content`."""
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
    """Return the chat template: chat_template.jinja, else the config's string or list of named
    ones."""
    source = read_text(model_dir, "chat_template.jinja", MAX_CONFIG_BYTES)
    if source is None:
        source = _named_template(config)
    return _checked_template(source)


def _checked_template(source: str | None) -> str | None:
    if source is not None and len(source.encode(errors="replace")) > MAX_CONFIG_BYTES:
        raise ModelFilesError(f"the chat template is larger than {MAX_CONFIG_BYTES:,} bytes")
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
