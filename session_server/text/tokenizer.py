"""Encode text as token ids: the template's text, which may contain control tokens, and user text,
which may not.

Both use the checkpoint's `tokenizers` pipeline. They differ only in `encode_special_tokens`, which
is a switch of the whole tokenizer object, so there are two objects.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken

from session_server.core.errors import InvalidRequest, TokenizeFailed
from session_server.text.model_files import ModelFilesError

LONG_TEXT_CHARS: Final = 4096
"""Longer texts take milliseconds to encode, which is worth a thread of its own."""


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """Describe a control token. `lstrip` / `rstrip`: it absorbs the white space beside it."""

    token_id: int
    lstrip: bool
    rstrip: bool


class Tokenizer:
    """Encode and decode; safe to share between threads, because nothing changes after
    construction."""

    def __init__(self, source: Path | str, *, special_texts: Collection[str] = ()) -> None:
        """Load tokenizer.json, a file or its contents.

        `special_texts` are declared special elsewhere (tokenizer_config).

        Raises:
            ModelFilesError: the file is not a tokenizer.
        """
        self._control = _load(source, special_texts)
        self._content = _load(source, special_texts)
        self._content.encode_special_tokens = True
        self._special = _special_tokens(self._control)
        self.special_ids = frozenset(token.token_id for token in self._special.values())
        self.special_pattern = _any_of(self._special)

    @property
    def special_tokens(self) -> dict[str, SpecialToken]:
        """Return a copy of the control tokens, keyed by their text."""
        return dict(self._special)

    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer:
        """Return the tokenizer to decode with; do not change it."""
        return self._control

    @property
    def vocabulary(self) -> dict[str, int]:
        """Return a copy of every token and its id, control tokens included."""
        return self._control.get_vocab(with_added_tokens=True)

    @property
    def fingerprint(self) -> bytes:
        """Return bytes that are equal for tokenizers that give and take the same token ids."""
        serialized = self._control.to_str().encode()
        return hashlib.blake2b(serialized, digest_size=16).digest()

    def token_to_id(self, text: str) -> int | None:
        """Return the id of the token with exactly this text, or None."""
        token_id = self._control.token_to_id(text)
        return None if token_id is None else int(token_id)

    def encode_control(self, text: str, *, add_bos: bool = False) -> list[int]:
        """Encode text that may contain control tokens: a rendered template, a raw prompt.

        `add_bos` runs the checkpoint's post-processor, which adds what it adds (mostly a BOS).

        Raises:
            TokenizeFailed: the text is not encodable (lone surrogates), or the tokenizer broke.
        """
        return _encode(self._control, text, add_bos=add_bos)

    def encode_content(self, text: str) -> list[int]:
        """Encode a user's text: no id is ever that of a control token.

        Raises:
            TokenizeFailed: the text is not encodable (lone surrogates), or the tokenizer broke.
        """
        return _encode(self._content, text, add_bos=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode ids; ids unknown to the tokenizer (a padded vocabulary) decode to nothing."""
        return str(self._control.decode(token_ids, skip_special_tokens=skip_special_tokens))


def check_token_ids(token_ids: Sequence[int], vocab_size: int, *, param: str = "input_ids") -> None:
    """Reject ids outside [0, vocab_size): one such id can corrupt a whole batch.

    Raises:
        InvalidRequest: naming the first that is wrong.
    """
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
    raise InvalidRequest(f"token id {wrong} is outside [0, {vocab_size})", param=param)


def _load(source: Path | str, special_texts: Collection[str]) -> tokenizers.Tokenizer:
    try:
        content = source if isinstance(source, str) else source.read_text(encoding="utf-8")
        tokenizer = tokenizers.Tokenizer.from_str(content)
        if _needs_flags(tokenizer, special_texts):
            described = json.loads(content)
            _set_flags(described, special_texts)
            tokenizer = tokenizers.Tokenizer.from_str(json.dumps(described))
    except Exception as error:
        name = "the file's metadata" if isinstance(source, str) else source.name
        raise ModelFilesError(f"{name} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for text in special_texts:
        # Adding a text outside the vocabulary would create an id that the model does not have.
        if text not in added and tokenizer.token_to_id(text) is not None:
            tokenizer.add_special_tokens([AddedToken(text, normalized=False)])
    return tokenizer


def _needs_flags(tokenizer: tokenizers.Tokenizer, special_texts: Collection[str]) -> bool:
    return any(
        (not token.special and token.content in special_texts)
        or (token.normalized and (token.special or token.content in special_texts))
        for token in tokenizer.get_added_tokens_decoder().values()
    )


def _set_flags(source: dict[str, Any], special_texts: Collection[str]) -> None:
    """Declare control tokens special, and match them in the text as it was written.

    Matching after normalization would let look-alikes (a full-width `<`) become control tokens.
    """
    for token in source["added_tokens"]:
        if token["special"] or token["content"] in special_texts:
            token["special"] = True
            token["normalized"] = False


def _special_tokens(tokenizer: tokenizers.Tokenizer) -> dict[str, SpecialToken]:
    return {
        token.content: SpecialToken(token_id, token.lstrip, token.rstrip)
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special and token.content
    }


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of `texts`, the longest where several begin; nothing if
    empty."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _encode(tokenizer: tokenizers.Tokenizer, text: str, *, add_bos: bool) -> list[int]:
    try:
        if len(text) < LONG_TEXT_CHARS:
            return list(tokenizer.encode(text, add_special_tokens=add_bos).ids)
        # Only the batch calls release the interpreter lock, so that the event loop keeps running.
        return list(tokenizer.encode_batch_fast([text], add_special_tokens=add_bos)[0].ids)
    except (TypeError, ValueError) as error:
        raise TokenizeFailed("the text is not valid Unicode", param="input") from error
    except BaseException as error:  # a panic in Rust is no `Exception`
        raise TokenizeFailed("the tokenizer failed", param="input") from error
