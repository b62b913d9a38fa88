"""The tokenizer of a checkpoint as metadata of a GGUF file, as llama.cpp's converters write it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType


def describe_byte_level(writer: GGUFWriter, directory: Path, pre: str) -> None:
    """Write a byte-level BPE: texts, types, merges, named tokens and the chat template."""
    content = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    texts, types = texts_and_types(content)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(texts)
    writer.add_token_types(types)
    merges = content["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    describe_names(writer, directory, texts)


def describe_names(writer: GGUFWriter, directory: Path, texts: list[str]) -> None:
    """Write which tokens begin and end a text, and the chat template."""
    config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    for name in ("bos", "eos"):
        token = config.get(f"{name}_token")
        if token is not None:
            text = token["content"] if isinstance(token, dict) else token
            getattr(writer, f"add_{name}_token_id")(texts.index(text))
    template = directory / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text(encoding="utf-8"))


def texts_and_types(content: dict[str, Any]) -> tuple[list[str], list[int]]:
    """Every token's text and type, by id."""
    known = {token_id: text for text, token_id in content["model"]["vocab"].items()}
    added = {token["id"]: token for token in content["added_tokens"]}
    size = max([*known, *added]) + 1
    texts, types = [], []
    for token_id in range(size):
        token = added.get(token_id)
        text = token["content"] if token else known.get(token_id, f"[PAD{token_id}]")
        texts.append(text)
        if token:
            types.append(TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED)
        else:
            types.append(TokenType.NORMAL if token_id in known else TokenType.UNUSED)
    return texts, types
