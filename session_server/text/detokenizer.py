"""Text of tokens as they come: a character is given out once all its bytes are there.

`DecodeStream` of `tokenizers` holds back what ends in an incomplete character; one object serves
one turn, so that no byte of a turn that ended can reach the next one.
"""

from __future__ import annotations

from typing import Final

from tokenizers.decoders import DecodeStream

from session_server.text.tokenizer import Tokenizer

MAX_HELD_TOKENS: Final = 16
"""A character has at most four bytes; more held tokens than this can only be invalid bytes."""


class Detokenizer:
    """Incremental decoding of one answer; never raises, whatever the tokens are.

    The pieces joined are `tokenizer.decode` of all tokens whenever that is valid UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._held: list[int] = []

    def feed(self, token_id: int) -> str:
        """Text that this token completes, maybe none."""
        try:
            text = self._stream.step(self._tokenizer.backend_tokenizer, token_id)
        except BaseException:  # noqa: BLE001 - `tokenizers` raises the bare class, or panics
            # With byte fallback an invalid byte turns text before it, already given out, into
            # U+FFFD (vllm#17448). What was given stays; what was held begins anew.
            self._held.append(token_id)
            return self.flush()
        if text is not None:
            self._held.clear()
            return str(text)
        if not (self._skip and token_id in self._tokenizer.special_ids):
            self._held.append(token_id)
        return self.flush() if len(self._held) >= MAX_HELD_TOKENS else ""

    def flush(self) -> str:
        """What was held back, with U+FFFD for bytes that never became a character."""
        if not self._held:
            return ""
        try:
            text = self._tokenizer.decode(self._held, skip_special_tokens=self._skip)
        except BaseException:  # noqa: BLE001 - as above
            text = "\ufffd"
        self._held.clear()
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        return text
