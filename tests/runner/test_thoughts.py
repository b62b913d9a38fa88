"""A thought is let through and what follows it is not, however the tokens came to be."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import pytest

from cache.types import Tokens
from session_server.core.grammar import GrammarCompiler
from session_server.core.sampling import Grammar, SamplingParams
from session_server.models.decoder import Decoder
from session_server.text.answer_format import Thinking
from session_server.text.model_text import ModelText
from session_server.text.thought_grammar import thought_rules
from tests.oracle.checkpoints import write_checkpoint
from tests.runner.drafting import Request, guesses, load, new_rows, random_prompt, run_turns
from tests.runner.rows import Rows
from tests.text.local_text import load_local_text
from tests.text.tiny_models import write_model

VOCAB_SIZE = 448
"""More than the tokenizer has: models pad their vocabulary."""

NUM = 56
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
WHERE = dict(enumerate((Thinking.OPEN, Thinking.OPEN, Thinking.POSSIBLE, Thinking.OVER), 1))
Answers = dict[int, list[int]]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory = tmp_path_factory.mktemp("thoughts")
    return load(write_checkpoint("qwen3", directory, num_hidden_layers=1, vocab_size=VOCAB_SIZE))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return load_local_text(write_model(tmp_path_factory.mktemp("text"), "thinking_tools"))


@pytest.fixture(scope="module")
def requests(model: ModelText) -> dict[int, Request]:
    """Turns that begin in a thought, before one and behind one, all likely to end it soon."""
    compiler = GrammarCompiler(
        model.tokenizer.backend_tokenizer.to_str(),
        eos_token_ids=model.eos_token_ids,
        vocab_size=VOCAB_SIZE,
    )
    start, end = (model.tokenizer.token_to_id(text) for text in ("<think>", "</think>"))
    assert start is not None
    assert end is not None
    params = SamplingParams(temperature=1.0, logit_bias=((start, 6.0), (end, 4.0)))
    return {
        row: Request(
            random_prompt(9 + row, row, VOCAB_SIZE),
            params,
            seed=70 + row,
            grammar=compiler.compile(
                Grammar("json_schema", json.dumps(SCHEMA), thought_rules(model, where))
            ),
        )
        for row, where in WHERE.items()
    }


@pytest.fixture(scope="module")
def plain(decoder: Decoder, model: ModelText, requests: dict[int, Request]) -> Answers:
    said = run_turns(rows_of(decoder, model), requests, num=NUM)
    return {row: until_end(model, one.tokens) for row, one in said.items()}


def rows_of(decoder: Decoder, model: ModelText) -> Rows:
    return new_rows(decoder, eos=max(model.eos_token_ids))


def until_end(model: ModelText, tokens: list[int]) -> list[int]:
    ends = [index for index, token in enumerate(tokens) if token in model.eos_token_ids]
    return tokens[: ends[0]] if ends else tokens


def test_what_follows_a_thought_fits_the_schema(model: ModelText, plain: Answers) -> None:
    for row, tokens in plain.items():
        parser = model.answer_format.parser(
            has_tools=False,
            starts_in_reasoning=WHERE[row] is Thinking.OPEN,
            new_call_id=lambda: "call",
        )
        said = model.tokenizer.decode(tokens, skip_special_tokens=False)
        pieces = (parser.feed(said), parser.finish())
        text, thought = ("".join(each) for each in list(zip(*pieces, strict=True))[:2])
        assert bool(thought) == (WHERE[row] is not Thinking.OVER), thought
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("quality", ["wrong", "mixed"])
def test_drafts_change_nothing(
    decoder: Decoder,
    model: ModelText,
    requests: dict[int, Request],
    plain: Answers,
    *,
    quality: str,
) -> None:
    guess = guesses(plain, quality, VOCAB_SIZE)
    said = run_turns(rows_of(decoder, model), requests, num=NUM, guess=guess)
    assert {row: until_end(model, one.tokens) for row, one in said.items()} == plain
    num_accepted = sum(sum(one.accepted) for one in said.values())
    assert (num_accepted > 10) == (quality != "wrong"), num_accepted


def test_launched_ahead_it_is_the_same(
    decoder: Decoder, model: ModelText, requests: dict[int, Request], plain: Answers
) -> None:
    rows = rows_of(decoder, model)
    said = {row: list[int]() for row in requests}
    inputs: dict[int, Tokens | None] = {row: each.prompt for row, each in requests.items()}
    starts = dict.fromkeys(requests, 0)
    for _ in range(NUM):
        batch = rows.batch(
            *[
                rows.row(
                    row,
                    tokens,
                    start=starts[row],
                    params=requests[row].params,
                    seed=requests[row].seed,
                    grammar=requests[row].grammar,
                )
                if tokens is not None
                else rows.row(row, None, start=starts[row])
                for row, tokens in inputs.items()
            ]
        )
        result = rows.runner.launch(batch).wait()
        assert result.error is None
        for row, one in zip(inputs, result.rows, strict=True):
            said[row] += one.token_ids
            tokens = inputs[row]
            starts[row] += 1 if tokens is None else len(tokens)
        inputs = dict.fromkeys(inputs)
    assert {row: until_end(model, tokens) for row, tokens in said.items()} == plain


def test_retracted_anywhere_it_goes_on_where_it_stopped(
    decoder: Decoder, model: ModelText, requests: dict[int, Request], plain: Answers
) -> None:
    for row, request in requests.items():
        for num_said in range(1, len(plain[row]), 17):
            before = np.array(plain[row][:num_said], dtype=np.int32)
            rows, said = rows_of(decoder, model), before.tolist()
            first = rows.row(
                row,
                np.concatenate((request.prompt, before)),
                params=request.params,
                seed=request.seed,
                grammar=request.grammar,
                outputs=before,
            )
            said += rows.run(first)[0].token_ids
            while len(said) < len(plain[row]):
                start = len(request.prompt) + len(said) - 1
                said += rows.run(rows.row(row, None, start=start))[0].token_ids
            assert said[: len(plain[row])] == plain[row]
