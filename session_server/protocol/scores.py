"""Encode the logprobs of a turn's end. There may be a million of them, which takes most of a
second."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from session_server.core.sampling import TokenLogprob
from session_server.core.session_events import Outcome
from session_server.protocol.growing_json import GrowingArray

SCORES_AT_ONCE: Final = 256
"""Tokens whose logprobs are encoded together with the frame that holds them."""


class LogprobBody(msgspec.Struct, frozen=True, kw_only=True):
    """Logprob of one token and of the most likely alternatives."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class EncodedScores:
    """Encode the logprobs of one outcome in slices, before the frame that holds them."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._answer = GrowingArray()
        self._prompt = GrowingArray()

    @staticmethod
    def is_needed(outcome: Outcome) -> bool:
        """Return whether an outcome has too many logprobs to encode them at once."""
        return len(outcome.logprobs) + len(outcome.prompt_logprobs) > SCORES_AT_ONCE

    def encode(self) -> Iterator[None]:
        """Encode all logprobs, a slice per step."""
        yield from self._answer.extend_in_slices(self._outcome.logprobs, _body)
        yield from self._prompt.extend_in_slices(self._outcome.prompt_logprobs, _body)

    def answer(self) -> Any:
        """Return the encoded equivalent of `logprob_bodies` for the answer's tokens."""
        return self._answer.value() if self._outcome.logprobs else None

    def prompt(self) -> Any:
        """Return the encoded equivalent of `logprob_bodies` for the prompt's tokens."""
        return self._prompt.value() if self._outcome.prompt_logprobs else None


def logprob_bodies(values: tuple[TokenLogprob, ...]) -> tuple[LogprobBody, ...] | None:
    """Convert logprobs to their bodies; return None if there are none."""
    return tuple(_body(value) for value in values) if values else None


def _body(value: TokenLogprob) -> LogprobBody:
    return LogprobBody(token_id=value.token_id, logprob=value.logprob, top=value.top)
