"""Collect the output of one turn: convert tokens to text and find stop strings."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from session_server.core.sampling import TokenLogprob
from session_server.core.session_events import TextOptions
from session_server.text.detokenizer import Detokenizer
from session_server.text.stops import StopMatcher
from session_server.text.tokenizer import Tokenizer


class Answer:
    """Collect the tokens and the text of an answer. The pieces that `feed` and `finish` return,
    joined, are `text`.

    `end_ids` are tokens that end the turn once `min_tokens` are generated; their text is
    emitted only with `options.keep_stop`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: TextOptions,
        *,
        end_ids: Collection[int],
        min_tokens: int,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=options.skip_special_tokens)
        self._stops = StopMatcher(options.stop, keep_stop=options.keep_stop)
        self._keep_stop = options.keep_stop
        self._end_ids = end_ids
        self._min_tokens = min_tokens
        self._pieces: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []

    @property
    def text(self) -> str:
        """Return the text emitted so far."""
        return "".join(self._pieces)

    @property
    def matched(self) -> str | None:
        """Return the stop string found; the last token fed completed it."""
        return self._stops.matched

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> tuple[str, int]:
        """Add output tokens up to the one that completes a stop string.

        Returns:
            The text to emit now, and how many of `token_ids` were taken.
        """
        assert self.matched is None, "tokens after a stop string"
        pieces: list[str] = []
        num_taken = 0
        for token_id in token_ids:
            num_taken += 1
            self.token_ids.append(token_id)
            pieces.append(self._text_of(token_id))
            if self.matched is not None:
                break
        self.logprobs.extend(logprobs[:num_taken])
        return self._emit("".join(pieces)), num_taken

    def finish(self) -> str:
        """Return the text held back, when the answer has ended."""
        if self.matched is not None:
            return ""
        text = self._stops.feed(self._detokenizer.flush())
        return self._emit(text + self._stops.flush())

    def _text_of(self, token_id: int) -> str:
        is_end = token_id in self._end_ids and len(self.token_ids) >= self._min_tokens
        if is_end and not self._keep_stop:
            return ""
        return self._stops.feed(self._detokenizer.feed(token_id))

    def _emit(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text
