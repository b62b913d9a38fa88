"""What a row may say is its grammar's to decide: not drafts, launches ahead or neighbors do."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from msgspec import structs

from cache.types import RowId, Tokens
from session_server.core.batch import Batch
from session_server.core.grammar import CompiledMatcher, GrammarCompiler
from session_server.core.sampling import Grammar, SamplingParams
from session_server.models.decoder import Decoder
from session_server.runner.constraints import _words
from tests.oracle.checkpoints import write_checkpoint
from tests.runner.drafting import Request, Said, guesses, load, new_rows, random_prompt, run_turns
from tests.runner.rows import NO_TOKENS, Rows
from tests.text.embedded import EOS_TOKEN_IDS, TOKENIZER

VOCAB_SIZE = 1600
"""More than the tokenizer has: models pad their vocabulary."""

(EOS,) = EOS_TOKEN_IDS
NUM = 24
SAMPLED = SamplingParams(temperature=1.0)

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
REGEX = r"[a-f]{2,5}-[0-9]{3}(yes|no)?"
LARK = 'start: "(" start ")" | "x"+\n'


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory = tmp_path_factory.mktemp("constraints")
    return load(write_checkpoint("qwen3", directory, num_hidden_layers=2, vocab_size=VOCAB_SIZE))


@pytest.fixture(scope="module")
def small_decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory = tmp_path_factory.mktemp("draft")
    return load(write_checkpoint("qwen3", directory, num_hidden_layers=1, vocab_size=VOCAB_SIZE))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    source = TOKENIZER.backend_tokenizer.to_str()
    return GrammarCompiler(source, eos_token_ids=(EOS,), vocab_size=VOCAB_SIZE)


def rows_of(decoder: Decoder, **options: Decoder) -> Rows:
    return new_rows(decoder, eos=EOS, **options)


def everyone(compiler: GrammarCompiler) -> dict[int, Request]:
    """A turn of every kind of grammar, greedy and sampled, and one without."""
    schema, regex, lark = (
        compiler.compile(Grammar("json_schema", json.dumps(SCHEMA))),
        compiler.compile(Grammar("regex", REGEX)),
        compiler.compile(Grammar("lark", LARK)),
    )
    kinds = [
        (SAMPLED, schema),
        (SamplingParams(temperature=1.3, top_k=50, top_p=0.9, min_p=0.01), schema),
        (SamplingParams(temperature=0.0, repetition_penalty=1.4), regex),
        (SamplingParams(temperature=1.0, frequency_penalty=0.5, logprobs=True), regex),
        (SAMPLED, lark),
        (SAMPLED, None),
    ]
    return {
        row: Request(random_prompt(9 + row, row), params, seed=50 + row, grammar=grammar)
        for row, (params, grammar) in enumerate(kinds, 1)
    }


def answers(said: dict[int, Said]) -> dict[int, list[int]]:
    """The tokens of each turn up to its end."""
    return {row: until_end(one.tokens) for row, one in said.items()}


def until_end(tokens: Sequence[int]) -> list[int]:
    return [*tokens[: tokens.index(EOS)], EOS] if EOS in tokens else list(tokens)


@pytest.fixture(scope="module")
def plain(decoder: Decoder, compiler: GrammarCompiler) -> dict[int, list[int]]:
    return answers(run_turns(rows_of(decoder), everyone(compiler), num=NUM))


def test_every_answer_matches_and_ends_only_where_it_does(
    plain: dict[int, list[int]], compiler: GrammarCompiler
) -> None:
    texts = {row: TOKENIZER.decode(tokens) for row, tokens in plain.items()}
    for row, request in everyone(compiler).items():
        if request.grammar is None:
            continue
        assert isinstance(request.grammar, CompiledMatcher)
        matcher = request.grammar.matcher.deep_copy()
        tokens = plain[row]
        assert matcher.consume_tokens([token for token in tokens if token != EOS])
        assert matcher.is_accepting() or EOS not in tokens, "it ends only where it matches"
    assert re.fullmatch(REGEX, texts[3]), texts[3]
    assert EOS in plain[3]
    assert EOS in plain[4]


def test_a_neighbor_without_a_grammar_says_what_it_says_alone(
    decoder: Decoder, compiler: GrammarCompiler, plain: dict[int, list[int]]
) -> None:
    alone = {6: everyone(compiler)[6]}
    assert answers(run_turns(rows_of(decoder), alone, num=NUM)) == {6: plain[6]}


@pytest.mark.parametrize("quality", ["right", "wrong", "mixed"])
def test_drafts_change_no_answer(
    decoder: Decoder, compiler: GrammarCompiler, plain: dict[int, list[int]], quality: str
) -> None:
    guess = guesses(plain, quality, VOCAB_SIZE)
    said = run_turns(rows_of(decoder), everyone(compiler), num=NUM, guess=guess)
    assert answers(said) == plain
    num_accepted = sum(sum(one.accepted) for one in said.values())
    assert (num_accepted > 20) == (quality != "wrong"), num_accepted


def test_drafts_of_a_model_change_no_answer(
    decoder: Decoder,
    small_decoder: Decoder,
    compiler: GrammarCompiler,
    plain: dict[int, list[int]],
) -> None:
    rows = rows_of(decoder, draft=small_decoder)
    assert answers(run_turns(rows, everyone(compiler), num=NUM, guess=lambda *_: 3)) == plain


def test_launched_ahead_the_device_knows_the_token_before_the_host(
    decoder: Decoder, compiler: GrammarCompiler, plain: dict[int, list[int]]
) -> None:
    """Chunks of the prompt first, then rows whose input is not known to who launches."""
    rows, requests = rows_of(decoder), everyone(compiler)
    said = {row: list[int]() for row in requests}
    for row, request in requests.items():
        rows.run(
            rows.row(
                row,
                request.prompt[:4],
                params=request.params,
                seed=request.seed,
                sample=False,
                grammar=request.grammar,
            )
        )
    starts = dict.fromkeys(requests, 4)
    inputs: dict[int, Tokens | None] = {row: r.prompt[4:] for row, r in requests.items()}
    for _ in range(NUM):
        batch = rows.batch(
            *[rows.row(row, tokens, start=starts[row]) for row, tokens in inputs.items()]
        )
        result = rows.runner.launch(batch).wait()
        assert result.error is None
        for row, one in zip(inputs, result.rows, strict=True):
            said[row] += one.token_ids
            tokens = inputs[row]
            starts[row] += 1 if tokens is None else len(tokens)
        inputs = dict.fromkeys(inputs)
    assert {row: until_end(tokens) for row, tokens in said.items()} == plain


def test_a_turn_that_is_resumed_goes_on_where_it_stopped(
    decoder: Decoder, compiler: GrammarCompiler, plain: dict[int, list[int]]
) -> None:
    requests = everyone(compiler)
    for row, request in requests.items():
        if request.params.has_penalties:
            continue  # their counts are another test's
        half = np.array(plain[row][: len(plain[row]) // 2], dtype=np.int32)
        rows, said = rows_of(decoder), half.tolist()
        context = np.concatenate((request.prompt, half))
        first = rows.row(
            row,
            context,
            params=request.params,
            seed=request.seed,
            grammar=request.grammar,
            outputs=half if request.grammar else NO_TOKENS,
        )
        said += rows.run(first)[0].token_ids
        while len(said) < len(plain[row]):
            start = len(request.prompt) + len(said) - 1
            said += rows.run(rows.row(row, None, start=start))[0].token_ids
        assert said == plain[row]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, ignore_eos=True),
        SamplingParams(temperature=1.0, min_tokens=NUM),
        SamplingParams(temperature=1.0, min_tokens=NUM, stop_token_ids=(EOS,)),
    ],
)
def test_an_end_that_is_held_back_comes_when_nothing_else_can(
    decoder: Decoder, compiler: GrammarCompiler, params: SamplingParams
) -> None:
    request = Request(
        random_prompt(9, 1), params, grammar=compiler.compile(Grammar("regex", "(ab){1,6}"))
    )
    (said,) = answers(run_turns(rows_of(decoder), {1: request}, num=NUM)).values()
    assert TOKENIZER.decode(said) == "ab" * 6, "it could have ended after each pair"
    assert said[-1] == EOS


def test_a_grammar_that_gives_up_fails_its_row_alone_and_only_where_it_comes_to(
    decoder: Decoder,
) -> None:
    """A lexer that may build next to no state: it fails when something new is said."""
    tokenizer = LLTokenizer(TOKENIZER.backend_tokenizer.to_str(), VOCAB_SIZE, eos_token=EOS)
    fails = LLMatcher(
        tokenizer,
        LLMatcher.grammar_from_regex(r"x{3}(.*a.{20}|.*b.{19}c)"),
        log_level=0,
        limits=LLParserLimits(max_lexer_states=30),
    )
    fails.compute_bitmask()
    grammar = CompiledMatcher(fails, VOCAB_SIZE)
    (x,) = TOKENIZER.encode_content("x")
    rows = rows_of(decoder)
    prompt = random_prompt(9, 1)
    (first, other) = rows.run(
        rows.row(1, prompt, params=SAMPLED, grammar=grammar),
        rows.row(2, prompt, params=SAMPLED),
    )
    assert first.failure is None
    said = list(first.token_ids)
    while first.failure is None:
        assert len(said) < NUM
        tokens = np.array(said[-1:], dtype=np.int32)
        start = len(prompt) + len(said) - 1
        wrong = np.array([x] * 3, dtype=np.int32)
        first, other = rows.run(
            rows.row(1, tokens, start=start, drafts=wrong),
            rows.row(2, None, start=len(prompt) + len(said) - 1),
        )
        assert other.failure is None
        assert len(other.token_ids) == 1
        said += first.token_ids
    assert first.token_ids == ()
    assert "states" in first.failure or "fuel" in first.failure, first.failure


def test_a_row_keeps_no_matcher_once_its_turn_has_ended(
    decoder: Decoder, compiler: GrammarCompiler, plain: dict[int, list[int]]
) -> None:
    """And none of its penalties. The rows stay with their sessions, whose next turns start anew."""
    rows, requests = rows_of(decoder), everyone(compiler)
    run_turns(rows, requests, num=3)
    runner = rows.runner
    assert set(runner._sampler._rows) == set(requests)
    assert set(runner._constraints._rows) == {1, 2, 3, 4, 5}
    ended = tuple(RowId(row) for row in (1, 3, 6))
    assert runner.launch(Batch(100, (), (), ended=ended)).wait().error is None
    assert set(runner._sampler._rows) == {2, 4, 5}
    assert set(runner._constraints._rows) == {2, 4, 5}
    again = {row: requests[row] for row in ended}
    assert answers(run_turns(rows, again, num=NUM)) == {row: plain[row] for row in ended}


def test_a_start_behind_the_end_of_its_row_in_one_batch_holds(
    decoder: Decoder, compiler: GrammarCompiler, plain: dict[int, list[int]]
) -> None:
    rows, request = rows_of(decoder), everyone(compiler)[3]
    row = rows.row(
        3, request.prompt, params=request.params, seed=request.seed, grammar=request.grammar
    )
    batch = structs.replace(rows.batch(row), ended=(RowId(3),))
    (result,) = rows.runner.launch(batch).wait().rows
    assert list(result.token_ids) == plain[3][:1]
    assert set(rows.runner._constraints._rows) == {3}


def test_a_mask_covers_the_vocabulary_and_no_token_beyond() -> None:
    for num_tokens in (1, 31, 32, 33, 100):
        for chosen in (slice(0), slice(num_tokens // 2), slice(num_tokens), [0, num_tokens - 1]):
            bits = np.unpackbits(_words(chosen, num_tokens).view(np.uint8), bitorder="little")
            expected = np.zeros(len(bits), dtype=np.uint8)
            expected[chosen] = 1
            assert len(bits) % 32 == 0 <= len(bits) - num_tokens < 32
            assert np.array_equal(bits, expected)
