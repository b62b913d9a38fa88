"""Build SGLang's answer to a generation, which is streamed as a whole with every new token.

Every part is encoded once: sending a chunk copies the encoded parts and encodes nothing again. A
long answer is sent less often than with every token, so that all its chunks together stay in
proportion to it. Each chunk holds the whole answer, so a client misses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, assert_never

from session_server.core.sampling import TokenLogprob
from session_server.core.session_events import (
    SessionEntry,
    TurnCancelled,
    TurnCompleted,
    TurnDelta,
    TurnEnd,
    TurnFailedEntry,
    TurnProgress,
)
from session_server.protocol.growing_json import GrowingArray, GrowingString
from session_server.protocol.sglang import Generation

ABORT_MESSAGE: Final = "Aborted"
MAX_UNPACED_BYTES: Final = 1 << 16
"""Bytes of an answer up to which every token sends it."""

PACED_PARTS: Final = 32
"""A longer answer is sent once it has grown by one of so many parts."""

TokenText = Callable[[int], str]
"""The text of one token id, for logprobs."""


class CumulativeAnswer:
    """Accumulate the answer of one generation."""

    def __init__(self, generation: Generation, token_text: TokenText) -> None:
        self._generation = generation
        self._token_text = token_text
        self._text = GrowingString()
        self._output_ids = GrowingArray()
        self._num_outputs = 0
        self._outputs = self._no_scores()
        self._inputs = self._no_scores()
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._sent_bytes = 0

    def add(self, entry: SessionEntry) -> Iterator[None]:
        """Add one more entry of the turn. Iterate to the end: each step is a slice of work."""
        match entry:
            case TurnProgress():
                self._prompt_tokens, self._cached_tokens = entry.total, entry.cached
            case TurnDelta():
                self._text.append(entry.text)
                self._output_ids.extend(entry.token_ids)
                self._num_outputs += len(entry.token_ids)
                if self._generation.stream:  # else the end brings all of them
                    yield from self._outputs.extend(entry.logprobs)
            case TurnCompleted() | TurnCancelled() | TurnFailedEntry():
                yield from self._take_scores(entry)
            case _:
                return

    @property
    def is_due(self) -> bool:
        """Return whether enough is new since the last `current_body` to send another one."""
        num_bytes = self._num_bytes
        grown_bytes = num_bytes - self._sent_bytes
        return num_bytes <= MAX_UNPACED_BYTES or grown_bytes * PACED_PARTS >= self._sent_bytes

    @property
    def _num_bytes(self) -> int:
        scores = len(self._outputs.chosen) + len(self._outputs.top)
        return len(self._text) + len(self._output_ids) + scores

    def current_body(self) -> dict[str, Any]:
        """Return the object to stream now; parts of it are already encoded."""
        self._sent_bytes = self._num_bytes
        meta: dict[str, Any] = {
            "id": self._generation.rid,
            "finish_reason": None,
            "prompt_tokens": self._prompt_tokens,
            "weight_version": "default",
            "completion_tokens": self._num_outputs,
            "cached_tokens": self._cached_tokens,
        }
        meta |= self._logprob_fields()
        return {
            "text": self._text.value(),
            "output_ids": self._output_ids.value(),
            "meta_info": meta,
        }

    def end(self, entry: TurnEnd, *, latency_s: float) -> dict[str, Any]:
        """Return the last object, after `add` has processed the same entry.

        `latency_s` counts from the arrival of the request.
        """
        outcome = entry.outcome
        meta: dict[str, Any] = {
            "id": self._generation.rid,
            "finish_reason": finish_reason(entry),
            "prompt_tokens": outcome.usage.input_tokens,
            "weight_version": "default",
            "completion_tokens": outcome.usage.output_tokens,
            "cached_tokens": outcome.usage.cached_tokens,
            "e2e_latency": latency_s,
        }
        if outcome.is_durable is not None:
            meta["durable"] = outcome.is_durable
        meta |= self._logprob_fields()
        text: Any = outcome.text
        output_ids: Any = outcome.token_ids
        if isinstance(entry, TurnCancelled) and not outcome.token_ids:
            # Nothing of an aborted turn stays in the session, but the caller still gets its output.
            text, output_ids = self._text.value(), self._output_ids.value()
            meta["completion_tokens"] = self._num_outputs
        return {"text": text, "output_ids": output_ids, "meta_info": meta}

    def _take_scores(self, end: TurnEnd) -> Iterator[None]:
        if not self._generation.return_logprob:
            return
        if len(end.outcome.logprobs) != self._outputs.num_tokens:
            # Some deltas were never read, or nothing of the turn stays: encode the whole outcome.
            self._outputs = self._no_scores()
            yield from self._outputs.extend(end.outcome.logprobs)
        yield from self._inputs.extend(end.outcome.prompt_logprobs)

    def _logprob_fields(self) -> dict[str, Any]:
        if not self._generation.return_logprob:
            return {}
        fields = {
            "input_token_logprobs": self._inputs.chosen.value(),
            "output_token_logprobs": self._outputs.chosen.value(),
        }
        if self._generation.request.sampling.top_logprobs:
            fields["input_top_logprobs"] = self._inputs.top.value()
            fields["output_top_logprobs"] = self._outputs.top.value()
        return fields

    def _no_scores(self) -> _Scores:
        has_text = self._generation.text_in_logprobs
        return _Scores(
            text_of=self._token_text if has_text else None,
            has_top=bool(self._generation.request.sampling.top_logprobs),
        )


class _Scores:
    """Encode logprobs as SGLang writes them: of the tokens, and of the most likely alternatives."""

    def __init__(self, *, text_of: TokenText | None, has_top: bool) -> None:
        self._text_of = text_of
        self._has_top = has_top
        self.num_tokens = 0
        self.chosen = GrowingArray()
        self.top = GrowingArray()

    def extend(self, values: tuple[TokenLogprob, ...]) -> Iterator[None]:
        """Encode further tokens, a slice per step."""
        self.num_tokens += len(values)
        yield from self.chosen.extend_in_slices(values, self._triple)
        if self._has_top:
            yield from self.top.extend_in_slices(values, self._top)

    def _triple(self, value: TokenLogprob) -> list[Any]:
        return [value.logprob, value.token_id, self._text(value.token_id)]

    def _top(self, value: TokenLogprob) -> list[list[Any]] | None:
        if not value.top:
            return None
        return [[logprob, token_id, self._text(token_id)] for token_id, logprob in value.top]

    def _text(self, token_id: int) -> str | None:
        return None if self._text_of is None else self._text_of(token_id)


def finish_reason(entry: TurnEnd) -> dict[str, Any]:
    """Return SGLang's `finish_reason` object for a turn's end."""
    match entry:
        case TurnCompleted(reason="stop"):
            return {"type": "stop", "matched": entry.matched}
        case TurnCompleted():
            return {"type": "length", "length": entry.outcome.usage.output_tokens}
        case TurnCancelled():
            return {
                "type": "abort",
                "message": ABORT_MESSAGE,
                "status_code": None,
                "err_type": None,
            }
        case TurnFailedEntry():
            return {
                "type": "abort",
                "message": entry.message,
                "status_code": 503 if entry.retryable else 500,
                "err_type": entry.code,
            }
        case _:
            assert_never(entry)
