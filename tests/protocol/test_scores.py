"""Logprobs encoded before the frame that holds them give the same frame."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from session_server.core.sampling import TokenLogprob
from session_server.core.session_events import (
    Outcome,
    TokenUsage,
    TurnCancelled,
    TurnCompleted,
    TurnEnd,
)
from session_server.protocol.frames import AnyServerFrame, end_frame
from session_server.protocol.growing_json import SLICE_LENGTH
from session_server.protocol.scores import SCORES_AT_ONCE, EncodedScores


def scores(number: int) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            token_id, None if token_id == 0 else -0.5, ((token_id, -0.5),) * (token_id % 3)
        )
        for token_id in range(number)
    )


def outcome(num_answer: int, num_prompt: int) -> Outcome:
    ids = tuple(range(num_answer))
    usage = TokenUsage(num_prompt, 0, num_answer)
    return Outcome("i", "text", ids, usage, None, scores(num_answer), scores(num_prompt))


@pytest.mark.parametrize(("num_answer", "num_prompt"), [(0, 0), (3, 0), (0, 200), (130, 64)])
def test_a_frame_is_the_same_whether_its_scores_were_encoded_before(
    num_answer: int, num_prompt: int
) -> None:
    of_turn = outcome(num_answer, num_prompt)
    ends: tuple[TurnEnd, ...] = (
        TurnCompleted("t", "length", None, of_turn),
        TurnCancelled("t", True, "client_cancelled", of_turn),
    )
    for end in ends:
        encoded = EncodedScores(of_turn)
        num_steps = 1 + sum(1 for _ in encoded.encode())
        assert num_steps >= (num_answer + num_prompt) // SLICE_LENGTH
        before = msgspec.json.encode(end_frame(7, end, scores=encoded))
        assert value(before) == value(msgspec.json.encode(end_frame(7, end)))
        msgspec.json.decode(before, type=AnyServerFrame)


def test_few_scores_need_no_care() -> None:
    assert not EncodedScores.is_needed(outcome(SCORES_AT_ONCE - 1, 1))
    assert EncodedScores.is_needed(outcome(SCORES_AT_ONCE, 1))


def value(frame: bytes) -> Any:
    return json.loads(frame)
