"""Turn the tokenizer in a GGUF file's metadata into a `tokenizer.json`.

The keys are those of llama.cpp (`gguf/constants.py`). Two kinds are read: `gpt2`, a byte-level BPE
with its merges, and `llama`, a SentencePiece BPE, whose merges follow from its tokens' scores.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final

from session_server.models.errors import CheckpointError, UnsupportedModel, shortened
from session_server.models.gguf.reader import GgufFile
from session_server.text.gguf_pre_tokenizers import (
    BYTE_LEVEL,
    COMPOSED,
    PATTERNS,
    WHOLE_WORDS,
    pre_tokenizer,
)

MAX_TOKEN_CHARS: Final = 1024
"""Characters of a token's text: each place in it may part it in two that merge."""

MAX_ADDED_TOKENS: Final = 1 << 18
"""Tokens that are not of the model's own vocabulary: each is described by an object."""

MAX_MERGE_CHARS: Final = 1 << 24
"""Characters of all merges that follow from scores; Gemma's 580,000 have 4 million."""

SPACE: Final = "\u2581"
"""What SentencePiece writes for a space."""

TURN_ENDS: Final = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<|return|>",
        "<|call|>",
    }
)
"""Control tokens that end an answer, whether a file says so or not: it names one end token, and the
`generation_config.json` that it was made from often has several."""


class TokenType(IntEnum):
    """Say what a token is (`llama_token_type`)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_ADDED: Final = {
    TokenType.UNKNOWN: True,
    TokenType.CONTROL: True,
    TokenType.USER_DEFINED: False,
}
"""Whether tokens are special, of the types that are listed beside the vocabulary."""


class GgufTokens:
    """Read the tokens of a file."""

    def __init__(self, file: GgufFile) -> None:
        """Check the lists of tokens.

        Raises:
            CheckpointError: a list is missing, or is not what it should be.
        """
        self._path = file.path
        self._metadata = file.metadata
        self._kind = file.word("tokenizer.ggml.model")
        self._pre = file.word("tokenizer.ggml.pre", "default")
        self.texts: Sequence[str] = self._list("tokens", str)
        from session_server.models.bounds import MAX_VOCAB_SIZE  # it loads numpy

        if len(self.texts) > MAX_VOCAB_SIZE:
            raise CheckpointError(
                f"{file.path}: {len(self.texts):,} tokens, more than {MAX_VOCAB_SIZE:,}"
            )
        longest = max(map(len, self.texts), default=0)
        if longest > MAX_TOKEN_CHARS:
            raise CheckpointError(
                f"{file.path}: a token of {longest:,} characters, more than {MAX_TOKEN_CHARS:,}"
            )
        types = self._list("token_type", int) if self.get("token_type") is not None else []
        self.types: Sequence[int] = types or [TokenType.NORMAL] * len(self.texts)
        if len(self.types) != len(self.texts):
            raise CheckpointError(
                f"{file.path}: {len(self.types)} types of {len(self.texts)} tokens"
            )
        num_added = sum(kind in _ADDED for kind in self.types)
        if num_added > MAX_ADDED_TOKENS:
            raise CheckpointError(
                f"{file.path}: {num_added:,} control and user-defined tokens, more than "
                f"{MAX_ADDED_TOKENS:,}"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of the tokenizer."""
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def named(self) -> dict[str, str]:
        """Return the texts of bos_token, eos_token and the like."""
        keys = {
            "bos_token": "bos_token_id",
            "eos_token": "eos_token_id",
            "unk_token": "unknown_token_id",
            "pad_token": "padding_token_id",
        }
        texts = {name: self._text_of(self.get(key)) for name, key in keys.items()}
        return {name: text for name, text in texts.items() if text is not None}

    def end_ids(self) -> frozenset[int]:
        """Return the ids of all tokens that end an answer."""
        given = [self.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
        known = {
            token_id
            for token_id, (text, kind) in enumerate(zip(self.texts, self.types, strict=True))
            if kind == TokenType.CONTROL and text in TURN_ENDS
        }
        return frozenset(known | {end for end in given if self._text_of(end) is not None})

    def tokenizer_json(self) -> str:
        """Return the contents of a `tokenizer.json`.

        Raises:
            CheckpointError: a list is missing, or is not what it should be.
            UnsupportedModel: a kind of tokenizer or pre-tokenizer that is not known.
        """
        if self._kind not in {"gpt2", "llama"}:
            raise UnsupportedModel(
                f"{self._path}: the tokenizer {shortened(self._kind)!r} is not implemented; known: "
                "gpt2, llama"
            )
        parts = self._byte_level() if self._kind == "gpt2" else self._sentence_piece()
        content = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added_tokens(),
            "post_processor": self._post_processor(),
            **parts,
        }
        return json.dumps(content)

    def _byte_level(self) -> dict[str, Any]:
        name = self._pre
        if name not in PATTERNS:
            raise UnsupportedModel(
                f"{self._path}: the pre-tokenizer {shortened(name)!r} is not implemented; known: "
                f"{', '.join(PATTERNS)}"
            )
        return {
            "normalizer": {"type": "NFC"} if name in COMPOSED else None,
            "pre_tokenizer": pre_tokenizer(name),
            "decoder": BYTE_LEVEL,
            "model": {
                "type": "BPE",
                "ignore_merges": name in WHOLE_WORDS,
                "vocab": self._vocabulary(),
                "merges": list(self._list("merges", str)),
            },
        }

    def _sentence_piece(self) -> dict[str, Any]:
        """Describe the pipeline that transformers makes of SentencePiece's BPE."""
        vocabulary = self._vocabulary()
        begins_with_space = bool(self.get("add_space_prefix", True))
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        prepend = [{"type": "Prepend", "prepend": SPACE}] if begins_with_space else []
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if begins_with_space:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE",
                "unk_token": self.named().get("unk_token"),
                "fuse_unk": True,
                "byte_fallback": True,
                "ignore_merges": False,
                "vocab": vocabulary,
                "merges": self._merges(vocabulary),
            },
        }

    def _merges(self, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
        """Return all pairs that make up a token, the token of the highest score first.

        Their texts are those of the tokens, so a pair takes the same memory however long it is.
        """
        scores = self._list("scores", float)
        if len(scores) != len(self.texts):
            raise CheckpointError(f"{self._path}: {len(scores)} scores of {len(self.texts)} tokens")
        normal = [token_id for token_id, kind in enumerate(self.types) if kind == TokenType.NORMAL]
        merges: list[tuple[str, str]] = []
        num_chars = 0
        for token_id in sorted(normal, key=lambda token_id: -scores[token_id]):
            text = self.texts[token_id]
            for pair in self._pairs(text, vocabulary):
                num_chars += len(text)
                if num_chars > MAX_MERGE_CHARS:
                    raise CheckpointError(
                        f"{self._path}: the merges of its tokens have more than "
                        f"{MAX_MERGE_CHARS:,} characters"
                    )
                merges.append(pair)
        return merges

    def _pairs(self, text: str, vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        for end in range(1, len(text)):
            first = vocabulary.get(text[:end])
            second = vocabulary.get(text[end:]) if first is not None else None
            if first is not None and second is not None:
                yield self.texts[first], self.texts[second]

    def _vocabulary(self) -> dict[str, int]:
        kinds = zip(self.texts, self.types, strict=True)
        return {text: i for i, (text, kind) in enumerate(kinds) if kind != TokenType.UNUSED}

    def _added_tokens(self) -> list[dict[str, Any]]:
        return [
            {
                "id": token_id,
                "content": text,
                "special": _ADDED[TokenType(kind)],
                "normalized": False,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
            }
            for token_id, (text, kind) in enumerate(zip(self.texts, self.types, strict=True))
            if kind in _ADDED and text
        ]

    def _post_processor(self) -> dict[str, Any] | None:
        """Return what adds the BOS. An EOS behind a prompt would end it: none is added."""
        adds_by_default = self._kind == "llama" or self._pre in WHOLE_WORDS
        bos = self.named().get("bos_token")
        if bos is None or not self.get("add_bos_token", adds_by_default):
            return None
        start = {"SpecialToken": {"id": bos, "type_id": 0}}
        first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        token = {"id": bos, "ids": [self.get("bos_token_id")], "tokens": [bos]}
        return {
            "type": "TemplateProcessing",
            "single": [start, first],
            "pair": [start, first, second],
            "special_tokens": {bos: token},
        }

    def _text_of(self, token_id: object) -> str | None:
        if not isinstance(token_id, int) or not 0 <= token_id < len(self.texts):
            return None
        return self.texts[token_id]

    def _list(self, key: str, kind: type) -> Sequence[Any]:
        values = self.get(key)
        if isinstance(values, array) and kind is (float if values.typecode in "fd" else int):
            return values
        if isinstance(values, list) and all(isinstance(value, kind) for value in values):
            return values
        raise CheckpointError(
            f"{self._path}: the metadata lacks the list tokenizer.ggml.{key}; convert or "
            "download the file again"
        )
