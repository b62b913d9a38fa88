"""Name the patterns by which byte-level tokenizers part a text before they merge.

A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`), and does not describe it. The patterns
are those of the `tokenizer.json` files that llama.cpp's converter takes the names from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_ENDINGS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2: Final = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
)
_QWEN2: Final = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
)
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
)
_GPT4O: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
)
_DIGITS: Final = (r"\p{N}", *_GPT2)
_DEFAULT: Final = (r"[\p{P}\$\+<=>\^~\|]+", *_GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
"""What llama.cpp does with files that name none, which were converted before names were given."""

PATTERNS: Final[Mapping[str, tuple[str, ...]]] = {
    "command-r": _DIGITS,
    "dbrx": _LLAMA3,
    "deepseek-r1-qwen": _QWEN2,
    "default": _DEFAULT,
    "falcon3": _LLAMA3,
    "gpt-2": _GPT2,
    "gpt-4o": _GPT4O,
    "lfm2": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "llama4": _GPT4O,
    "megrez": _QWEN2,
    "olmo": _GPT2,
    "pixtral": _LLAMA3,
    "qwen2": _QWEN2,
    "refact": _DIGITS,
    "smaug-bpe": _LLAMA3,
    "smollm": _DIGITS,
    "stablelm2": _QWEN2,
    "starcoder": _DIGITS,
    "tekken": _TEKKEN,
}
"""Patterns by name; each parts what the ones before it have left."""

WHOLE_WORDS: Final = frozenset(
    {"falcon3", "lfm2", "llama-bpe", "llama-v3", "llama3", "pixtral", "tekken"}
)
"""Those whose words are looked up in the vocabulary before they are merged. They add a BOS."""

COMPOSED: Final = frozenset({"deepseek-r1-qwen", "qwen2"})
"""Those that bring a text into Unicode's composed form first (NFC)."""


BYTE_LEVEL: Final[Mapping[str, Any]] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": False,
    "use_regex": False,
}
"""Writes bytes as characters; as a decoder, reads them."""


def pre_tokenizer(name: str) -> dict[str, Any]:
    """Return the `pre_tokenizer` of a `tokenizer.json`; `name` must be in `PATTERNS`."""
    splits: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in PATTERNS[name]
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, BYTE_LEVEL]}
