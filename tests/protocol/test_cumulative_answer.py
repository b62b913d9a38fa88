"""SGLang's cumulative answers: the same JSON as if all of it were encoded each time."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from session_server.core.sampling import SamplingParams, TokenLogprob
from session_server.core.session_events import (
    Outcome,
    SessionEntry,
    TextInput,
    TokenUsage,
    TurnCancelled,
    TurnCompleted,
    TurnDelta,
    TurnEnd,
    TurnFailedEntry,
    TurnProgress,
    TurnRequest,
)
from session_server.protocol.cumulative_answer import (
    MAX_UNPACED_BYTES,
    PACED_PARTS,
    CumulativeAnswer,
    finish_reason,
)
from session_server.protocol.growing_json import SLICE_LENGTH
from session_server.protocol.sglang import Generation

NOTHING = Outcome("i", "", (), TokenUsage(9, 3, 0), None)


def job(*, logprobs: bool = True, top: int = 0, has_text: bool = False) -> Generation:
    sampling = SamplingParams(logprobs=logprobs, top_logprobs=top)
    return Generation(
        rid="r",
        request=TurnRequest("t", TextInput("a"), sampling),
        session=None,
        stream=True,
        return_logprob=logprobs,
        text_in_logprobs=has_text,
    )


def answer_of(generation: Generation) -> CumulativeAnswer:
    return CumulativeAnswer(generation, lambda token_id: f"<{token_id}>")


def taken(answer: CumulativeAnswer, entry: SessionEntry) -> int:
    """Add an entry; in how many steps."""
    return 1 + sum(1 for _ in answer.add(entry))


def sent(content: dict[str, Any]) -> Any:
    return json.loads(msgspec.json.encode(content))


def score(chance: random.Random, num_top: int) -> TokenLogprob:
    top = tuple((chance.randrange(99), -chance.random()) for _ in range(num_top))
    logprob = None if chance.random() < 0.1 else -chance.random()
    return TokenLogprob(chance.randrange(99), logprob, top if chance.random() < 0.9 else ())


def written(scores: tuple[TokenLogprob, ...], has_text: bool) -> tuple[list[Any], list[Any]]:
    """What SGLang sends for these, and for their alternatives, all encoded at once."""

    def text(token_id: int) -> str | None:
        return f"<{token_id}>" if has_text else None

    chosen = [[s.logprob, s.token_id, text(s.token_id)] for s in scores]
    top = [[[value, i, text(i)] for i, value in s.top] if s.top else None for s in scores]
    return chosen, top


def test_outcomes_have_sglangs_finish_reasons() -> None:
    done = Outcome("i", "ab", (1, 2), TokenUsage(9, 3, 2), None)
    stop = finish_reason(TurnCompleted("t", "stop", 2, done))
    assert stop == {"type": "stop", "matched": 2}
    assert finish_reason(TurnCompleted("t", "length", None, done)) == {
        "type": "length",
        "length": 2,
    }
    aborted = finish_reason(TurnCancelled("t", False, "client_cancelled", NOTHING))
    assert aborted["type"] == "abort"
    failed = finish_reason(TurnFailedEntry("t", "engine_restarting", "gone", True, NOTHING))
    assert (failed["type"], failed["status_code"]) == ("abort", 503)


def test_an_answer_grows_and_an_abort_keeps_what_was_said() -> None:
    answer = answer_of(job(top=1, has_text=True))
    taken(answer, TurnProgress("t", 3, 3, 9))
    taken(answer, TurnDelta("t", "i", "a", (1,), (TokenLogprob(1, -0.1, ((1, -0.1),)),)))
    taken(answer, TurnDelta("t", "i", "b", (2,), (TokenLogprob(2, -0.2),)))
    current_body = sent(answer.current_body())
    assert (current_body["text"], current_body["output_ids"]) == ("ab", [1, 2])
    meta = current_body["meta_info"]
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (9, 3, 2)
    assert meta["output_token_logprobs"] == [[-0.1, 1, "<1>"], [-0.2, 2, "<2>"]]
    assert meta["output_top_logprobs"] == [[[-0.1, 1, "<1>"]], None]
    assert meta["input_token_logprobs"] == meta["input_top_logprobs"] == []

    cancelled = TurnCancelled("t", False, "client_cancelled", NOTHING)
    taken(answer, cancelled)
    end = sent(answer.end(cancelled, latency_s=0.5))
    assert (end["text"], end["output_ids"]) == ("ab", [1, 2])
    assert end["meta_info"]["completion_tokens"] == 2
    assert end["meta_info"]["e2e_latency"] == 0.5
    assert end["meta_info"]["output_token_logprobs"] == []


@pytest.mark.parametrize("seed", range(12))
def test_every_chunk_is_what_it_would_be_if_all_were_encoded_each_time(seed: int) -> None:
    chance = random.Random(seed)
    num_top, has_text = chance.choice((0, 1, 3)), chance.random() < 0.5
    answer = answer_of(job(top=num_top, has_text=has_text))
    text, ids, scores = "", [], ()
    for _ in range(chance.randrange(1, 40)):
        piece = "".join(chance.choices('aé\u4f60\U0001f600"\\\n\u2028', k=chance.randrange(4)))
        values = tuple(score(chance, num_top) for _ in range(chance.randrange(5)))
        tokens = tuple(value.token_id for value in values)
        text, ids, scores = text + piece, [*ids, *tokens], scores + values
        taken(answer, TurnDelta("t", "i", piece, tokens, values))
        current_body = sent(answer.current_body())
        assert (current_body["text"], current_body["output_ids"]) == (text, ids)
        chosen, top = written(scores, has_text)
        assert current_body["meta_info"]["output_token_logprobs"] == chosen
        assert current_body["meta_info"].get("output_top_logprobs", top) == top
        assert ("output_top_logprobs" in current_body["meta_info"]) == (num_top > 0)
    prompt = tuple(score(chance, num_top) for _ in range(chance.randrange(200)))
    # A reader that the journal has overtaken has not seen all of it.
    missed = tuple(score(chance, num_top) for _ in range(chance.choice((0, 3))))
    usage = TokenUsage(9, 3, len(ids) + len(missed))
    outcome = Outcome("i", text, (*ids, *(m.token_id for m in missed)), usage, None)
    outcome = outcome_with(outcome, scores + missed, prompt)
    done: TurnEnd = TurnCompleted("t", "length", None, outcome)
    taken(answer, done)
    end = sent(answer.end(done, latency_s=1.0))
    meta = end["meta_info"]
    assert (end["text"], end["output_ids"]) == (text, list(outcome.token_ids))
    chosen, top = written(scores + missed, has_text)
    assert meta["output_token_logprobs"] == chosen
    assert meta.get("output_top_logprobs", top) == top
    chosen, top = written(prompt, has_text)
    assert meta["input_token_logprobs"] == chosen
    assert meta.get("input_top_logprobs", top) == top


def outcome_with(
    outcome: Outcome, scores: tuple[TokenLogprob, ...], prompt: tuple[TokenLogprob, ...]
) -> Outcome:
    return Outcome(
        outcome.item_id,
        outcome.text,
        outcome.token_ids,
        outcome.usage,
        None,
        logprobs=scores,
        prompt_logprobs=prompt,
    )


def test_a_score_is_encoded_once_and_many_in_slices() -> None:
    encoded: list[int] = []

    def text(token_id: int) -> str:
        encoded.append(token_id)
        return "x"

    answer = CumulativeAnswer(job(has_text=True), text)
    scores = tuple(TokenLogprob(number, -1.0) for number in range(300))
    for value in scores[:100]:
        assert taken(answer, TurnDelta("t", "i", "a", (value.token_id,), (value,))) == 1
        answer.current_body()
    steps = taken(answer, TurnDelta("t", "i", "a", tuple(range(100, 300)), scores[100:]))
    assert steps == -(-200 // SLICE_LENGTH)
    outcome = Outcome("i", "a", tuple(range(300)), TokenUsage(9, 3, 300), None, scores, scores)
    taken(answer, TurnCompleted("t", "length", None, outcome))
    assert encoded == [*range(300), *range(300)], "the answer's, then the prompt's"


def test_a_long_answer_is_sent_when_it_has_grown_and_not_with_every_token() -> None:
    answer = answer_of(job(logprobs=False))
    num_sent_bytes, last, num_unpaced = 0, 0, 0
    for _ in range(3000):
        taken(answer, TurnDelta("t", "i", "x" * 100, (1,)))
        if answer.is_due:
            content = answer.current_body()
            size = len(bytes(content["text"])) + len(bytes(content["output_ids"])) - 2
            if size <= MAX_UNPACED_BYTES:
                num_unpaced += 1
            else:
                assert last <= MAX_UNPACED_BYTES or 0 <= size - last - last / PACED_PARTS < 103
            num_sent_bytes, last = num_sent_bytes + size, size
    assert num_unpaced == MAX_UNPACED_BYTES // 102
    assert last > 300_000 * PACED_PARTS / (PACED_PARTS + 1)
    short = num_unpaced * MAX_UNPACED_BYTES
    assert num_sent_bytes < short + last * (PACED_PARTS + 1)


def test_scores_that_nobody_is_sent_before_the_end_are_encoded_there() -> None:
    answer = CumulativeAnswer(replace(job(), stream=False), str)
    scores = tuple(TokenLogprob(number, -1.0) for number in range(3))
    for value in scores:
        taken(answer, TurnDelta("t", "i", "a", (value.token_id,), (value,)))
    assert sent(answer.current_body())["meta_info"]["output_token_logprobs"] == []
    done = TurnCompleted("t", "length", None, outcome_with(NOTHING, scores, ()))
    taken(answer, done)
    written_at_end = sent(answer.end(done, latency_s=1.0))["meta_info"]["output_token_logprobs"]
    assert written_at_end == written(scores, False)[0]


def test_without_logprobs_none_are_sent() -> None:
    answer = answer_of(job(logprobs=False))
    taken(answer, TurnDelta("t", "i", "a", (1,)))
    assert set(answer.current_body()["meta_info"]) == {
        "id",
        "finish_reason",
        "prompt_tokens",
        "weight_version",
        "completion_tokens",
        "cached_tokens",
    }
