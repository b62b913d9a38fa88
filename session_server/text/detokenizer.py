"""Decode tokens as they arrive; emit a character once all its bytes have arrived.

`DecodeStream` of `tokenizers` holds back an incomplete character. Each turn has its own stream, so
that no byte of an ended turn can reach the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from tokenizers.decoders import DecodeStream

from session_server.text.tokenizer import Tokenizer

MAX_HELD_TOKENS: Final = 16
"""A character has at most four bytes; more held tokens than this can only be invalid bytes."""


class Detokenizer:
    """Decode one answer incrementally; never raise, whatever the tokens are.

    The pieces joined are `tokenizer.decode` of all tokens whenever that is valid UTF-8.
    `kept_ids`: special tokens whose text is needed although they are skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        kept_ids: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._kept_ids = kept_ids
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._held: list[int] = []

    def feed(self, token_id: int) -> str:
        """Return the text that this token completes, possibly empty."""
        if self._skip and token_id in self._tokenizer.special_ids:
            if token_id in self._kept_ids:
                return self.flush() + self._tokenizer.decode([token_id], skip_special_tokens=False)
            return ""  # `DecodeStream` would keep it, and decode all that it keeps with each token
        try:
            text = self._stream.step(self._tokenizer.backend_tokenizer, token_id)
        except BaseException:  # noqa: BLE001 - `tokenizers` raises the bare class, or panics
            # With byte fallback an invalid byte turns preceding text, already emitted, into U+FFFD
            # (vllm#17448). Keep what was emitted and restart with the held tokens.
            self._held.append(token_id)
            return self.flush()
        if text is not None:
            self._held.clear()
            return str(text)
        self._held.append(token_id)
        return self.flush() if len(self._held) >= MAX_HELD_TOKENS else ""

    def go_on_from(self, token_ids: Sequence[int]) -> str:
        """Go on behind these last tokens of a text. Return what `flush` said for those of them that
        are no whole character yet: it is replaced by what comes."""
        for token_id in token_ids:
            self.feed(token_id)
        return self._tokenizer.decode(self._held, skip_special_tokens=self._skip)

    def flush(self) -> str:
        """Return the text held back, with U+FFFD for bytes that never became a character."""
        if not self._held:
            return ""
        try:
            text = self._tokenizer.decode(self._held, skip_special_tokens=self._skip)
        except BaseException:  # noqa: BLE001 - as above
            text = "\ufffd"
        self._held.clear()
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        return text
