"""Guesses change how many tokens a forward gives, never which: host drafts of every quality."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cache.types import Tokens
from session_server.core.batch import Batch, PromptLogprobRange
from session_server.core.sampling import SamplingParams
from session_server.models.decoder import Decoder
from session_server.runner.outputs import SampledRows, StepOutputs
from session_server.runner.paged_decoder import BackendName
from session_server.runner.verification import SampleSpan
from tests.models.raw_configs import VOCAB_SIZE
from tests.oracle.checkpoints import write_checkpoint
from tests.runner.distribution import assert_distributed
from tests.runner.drafting import (
    EOS,
    Guess,
    Request,
    Said,
    assert_same,
    load,
    new_rows,
    random_prompt,
    run_turns,
)

NUM = 40
MAX_DRAFTS = 5

PLAIN = SamplingParams(temperature=0.0, logprobs=True, top_logprobs=3)
KINDS = {
    "greedy": PLAIN,
    "temperature": SamplingParams(temperature=1.1, logprobs=True),
    "top-k, top-p, min-p": SamplingParams(temperature=1.4, top_k=40, top_p=0.95, min_p=0.01),
    "bias": SamplingParams(temperature=0.8, logit_bias=((3, 2.5), (11, -9.0), (90, 4.0))),
    "repetition": SamplingParams(temperature=0.0, repetition_penalty=1.3, logprobs=True),
    "presence, frequency": SamplingParams(
        temperature=0.9, presence_penalty=0.7, frequency_penalty=0.4
    ),
    "stops held back": SamplingParams(
        temperature=0.0, min_tokens=23, logit_bias=((EOS, 30.0),), frequency_penalty=0.1
    ),
    "everything": SamplingParams(
        temperature=1.2,
        top_p=0.97,
        min_p=0.005,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        min_tokens=9,
        logit_bias=((EOS, 3.0),),
        logprobs=True,
        top_logprobs=2,
    ),
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory = tmp_path_factory.mktemp("speculation")
    return load(write_checkpoint("qwen3", directory, num_hidden_layers=2))


def everyone(prompt_len: int = 9) -> dict[int, Request]:
    """One turn of every kind, on rows of their own."""
    return {
        row: Request(random_prompt(prompt_len + row, row), params, seed=100 + row)
        for row, params in enumerate(KINDS.values(), 1)
    }


def wrong(token: int) -> int:
    return (token + 1) % VOCAB_SIZE


def partly_right(truth: Mapping[int, Said], random: Random) -> tuple[Guess, Counter[str]]:
    """Guesses whose first so many are right; counts what was guessed."""
    made: Counter[str] = Counter()

    def guess(row: int, num_said: int) -> Sequence[int]:
        coming = truth[row].tokens[num_said : num_said + random.randint(0, MAX_DRAFTS)]
        num_accepted = random.randint(0, len(coming))
        if coming:
            made[
                "right" if num_accepted == len(coming) else "part" if num_accepted else "wrong"
            ] += 1
        return coming[:num_accepted] + [wrong(token) for token in coming[num_accepted:]]

    return guess, made


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_guesses_of_any_quality_change_no_token_and_no_logprob(
    page_size: int, backend: BackendName, decoder: Decoder
) -> None:
    requests = everyone()
    plain = run_turns(new_rows(decoder, page_size=page_size, backend=backend), requests, num=NUM)
    made: Counter[str] = Counter()
    reached: Counter[int] = Counter()
    num_crossings = 0
    for seed in range(3):
        guess, guessed = partly_right(plain, Random(seed))
        rows = new_rows(decoder, page_size=page_size, backend=backend)
        said = run_turns(rows, requests, num=NUM, guess=guess)
        assert_same(said, plain)
        made += guessed
        for heard in said.values():
            reached.update(start % page_size for start in heard.starts)
            pairs = zip(heard.starts, heard.accepted, strict=True)
            num_crossings += sum(a // page_size < (a + n) // page_size for a, n in pairs)
    assert set(reached) == set(range(page_size))
    assert min(made[kind] for kind in ("right", "part", "wrong")) > 20
    assert num_crossings > 20


@pytest.mark.parametrize("num_accepted", range(MAX_DRAFTS + 1))
def test_the_longest_right_beginning_is_accepted_and_one_token_more(
    num_accepted: int, decoder: Decoder
) -> None:
    requests = everyone()
    plain = run_turns(new_rows(decoder), requests, num=NUM)

    def guess(row: int, num_said: int) -> Sequence[int]:
        coming = plain[row].tokens[num_said : num_said + MAX_DRAFTS]
        # A right guess behind a wrong one is void: the forward read the wrong one before it.
        return [t if i != num_accepted else wrong(t) for i, t in enumerate(coming)]

    said = run_turns(new_rows(decoder), requests, num=NUM, guess=guess)
    assert_same(said, plain)
    for heard in said.values():
        assert set(heard.accepted[:-1]) == {num_accepted}


def test_stops_are_held_back_until_min_tokens_however_many_were_accepted(decoder: Decoder) -> None:
    params = KINDS["stops held back"]
    requests = {1: Request(random_prompt(5, 1), params)}
    plain = run_turns(new_rows(decoder), requests, num=NUM)
    assert plain[1].tokens.index(EOS) == params.min_tokens
    guesses = {"eos": lambda *_: [EOS] * 4, "truth": lambda _, n: plain[1].tokens[n : n + 4]}
    for guess in guesses.values():
        assert_same(run_turns(new_rows(decoder), requests, num=NUM, guess=guess), plain)


def test_a_prompt_may_end_in_guesses(decoder: Decoder) -> None:
    """Certain tokens and drafts of one row in one forward, scores of the prompt beside them."""
    prompt = random_prompt(21, 4)
    plain = run_turns(new_rows(decoder, page_size=4), {1: Request(prompt)}, num=6)
    rows = new_rows(decoder, page_size=4)
    drafts = np.array([*plain[1].tokens[:3], wrong(plain[1].tokens[3])], dtype=np.int32)
    prompt_logprobs = PromptLogprobRange(0, prompt[1:], 0)
    (result,) = rows.run(rows.row(1, prompt, drafts=drafts, prompt_logprobs=prompt_logprobs))
    assert list(result.token_ids) == plain[1].tokens[:4]
    (scored,) = rows.run(rows.row(2, prompt, sample=False, prompt_logprobs=prompt_logprobs))
    expected = [s.logprob for s in scored.prompt_logprobs]
    assert [s.logprob for s in result.prompt_logprobs] == pytest.approx(expected, abs=1e-4)


def test_the_token_before_the_guesses_may_be_unseen(decoder: Decoder) -> None:
    # What is greedy and never said twice depends on the very last token.
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    request = Request(random_prompt(8, 5), params)
    plain = run_turns(new_rows(decoder), {1: request}, num=8)
    rows = new_rows(decoder)
    rows.run(rows.row(1, request.prompt, params=params))
    truth = np.array(plain[1].tokens, dtype=np.int32)
    assert len(set(plain[1].tokens)) == len(truth), "a repeated token would prove nothing"
    (first,) = rows.run(rows.row(1, None, start=8, drafts=truth[1:4]))
    assert list(first.token_ids) == plain[1].tokens[1:5]
    # What was accepted last is what a launch ahead goes on from.
    (second,) = rows.run(rows.row(1, None, start=12, drafts=truth[5:6]))
    assert list(second.token_ids) == plain[1].tokens[5:7]


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_chunks_plain_rows_and_guesses_share_a_forward(
    backend: BackendName, decoder: Decoder
) -> None:
    kinds = list(KINDS.values())
    requests = {
        row: Request(random_prompt(30 + row, row), kinds[row], seed=row) for row in range(1, 4)
    }
    plain = run_turns(new_rows(decoder, backend=backend), requests, num=NUM)
    rows = new_rows(decoder, backend=backend)
    rows.run(*(rows.row(n, r.prompt, params=r.params, seed=r.seed) for n, r in requests.items()))
    said = {row: plain[row].tokens[:1] for row in requests}
    other = random_prompt(60, 9)
    for step in range(6):
        batch = []
        for row, request in requests.items():
            start = len(request.prompt) + len(said[row]) - 1
            coming = plain[row].tokens[len(said[row]) : len(said[row]) + row - 1]
            drafts = np.array(coming, dtype=np.int32) if coming else 0
            last = np.array(said[row][-1:], dtype=np.int32)
            batch.append(rows.row(row, last, start=start, drafts=drafts))
        chunk = rows.row(4, other[step * 10 : step * 10 + 10], start=step * 10, sample=step == 5)
        results = rows.run(batch[0], chunk, *batch[1:])
        for row, result in zip(requests, (results[0], *results[2:]), strict=True):
            assert len(result.token_ids) == row
            said[row] += result.token_ids
    for row, tokens in said.items():
        assert tokens == plain[row].tokens[: len(tokens)]
    alone = new_rows(decoder, backend=backend)
    (expected,) = alone.run(alone.row(4, other))
    assert results[1] == expected


def test_nan_in_a_guess_fails_its_row_alone(tmp_path: Path) -> None:
    decoder = load(write_checkpoint("llama", tmp_path, num_hidden_layers=1))
    poison = 77
    decoder.embedding[poison] = float("nan")
    rows = new_rows(decoder, backend="cpu")
    prompts = {row: np.where(p == poison, 1, p) for row, p in _prompts(3).items()}
    rows.run(*(rows.row(row, prompt) for row, prompt in prompts.items()))
    healthy = [rows.row(row, prompts[row][:1], start=10) for row in (1, 3)]
    expected = rows.run(*healthy)
    drafts = np.array([3, poison, 4], dtype=np.int32)
    sick = rows.row(2, prompts[2][:1], start=10, drafts=drafts)
    first, failed, third = rows.run(healthy[0], sick, healthy[1])
    assert (first, third) == expected
    assert (failed.finite, failed.token_ids, failed.logprobs) == (False, (), ())


def test_one_choice_that_is_not_finite_fails_its_row_right_or_wrong(decoder: Decoder) -> None:
    """Attention spreads NaN over the whole row; an overflow behind it need not."""
    draws = (SampleSpan(1, 5, num_tokens=3), SampleSpan(2, 9, num_tokens=2))
    outputs = SampledRows(
        spans=draws,
        tokens=torch.tensor([4, 5, 6, 7, 8]),
        finite=torch.tensor([True, True, False, True, True]),
        wants_logprobs=[False, False],
        num_top=[0, 0],
        logprobs=None,
        num_accepted=torch.tensor([0, 1]),
    )
    rows = tuple(new_rows(decoder).row(draw.row, random_prompt(5, 1)) for draw in draws)
    batch = Batch(1, rows, ())
    sick, well = StepOutputs(batch, sampled=(0, 1), sampled_rows=outputs).results()
    assert (sick.finite, sick.token_ids) == (False, ())
    assert (well.finite, well.token_ids) == (True, (7, 8))


def _prompts(num: int) -> dict[int, Tokens]:
    return {row: random_prompt(10, row) for row in range(1, num + 1)}


class NoSync(TorchDispatchMode):
    """Refuses every operation that makes the host wait for values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        waiting = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"}
        assert func.name() not in waiting, f"{func.name()} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["greedy", "temperature", "presence, frequency", "bias"])
def test_nothing_waits_for_the_device_before_results_are_read(
    kind: str, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = new_rows(decoder)
    prompt = random_prompt(12, 1)
    rows.run(rows.row(1, prompt, params=KINDS[kind]))
    drafts = np.array([4, 5], dtype=np.int32)
    batch = rows.batch(rows.row(1, prompt[:1], start=12, drafts=drafts))

    def refuse(_: torch.Tensor) -> None:
        raise AssertionError("a list waits for the device")

    with monkeypatch.context() as patch, NoSync(), torch.inference_mode():
        patch.setattr(torch.Tensor, "tolist", refuse)
        outputs = rows.runner._execute(batch)
    assert len(outputs.results()) == 1


def test_a_row_without_drafts_costs_no_verification(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("verified without drafts")

    monkeypatch.setattr("session_server.runner.model_runner.verify", refuse)
    run_turns(new_rows(decoder), everyone(), num=3)


TINY_VOCAB = 12
NUM_SEEDS = 6000
ROWS_AT_ONCE = 200
FLAT = 3.0


def test_sampled_tokens_follow_the_models_distribution_behind_guesses_too(
    tmp_path: Path,
) -> None:
    """The first choice, and the second given that the guess before it was right."""
    decoder = load(write_checkpoint("qwen3", tmp_path, num_hidden_layers=1, vocab_size=TINY_VOCAB))
    prompt = random_prompt(4, 1, TINY_VOCAB)
    rows = new_rows(decoder, num_rows=ROWS_AT_ONCE)
    logits = rows.runner.logits(rows.batch(rows.row(1, prompt)))[0]
    guessed = int(logits.argmax())
    behind = rows.runner.logits(rows.batch(rows.row(1, np.append(prompt, np.int32(guessed)))))[0]
    drafts = np.array([guessed, guessed], dtype=np.int32)
    firsts: Counter[int] = Counter()
    seconds: Counter[int] = Counter()
    for seed in range(0, NUM_SEEDS, ROWS_AT_ONCE):
        batch = [
            rows.row(
                row, prompt, params=SamplingParams(temperature=FLAT), seed=seed + row, drafts=drafts
            )
            for row in range(1, ROWS_AT_ONCE + 1)
        ]
        for result in rows.run(*batch):
            firsts[result.token_ids[0]] += 1
            if len(result.token_ids) > 1:
                seconds[result.token_ids[1]] += 1
    assert firsts[guessed] == seconds.total() > 500
    assert_distributed(firsts, (logits / FLAT).softmax(-1).tolist())
    assert_distributed(seconds, (behind / FLAT).softmax(-1).tolist())
