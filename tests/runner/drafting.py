"""Turns that run with guesses, beside the same turns without: the stage of speculation tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from cache.spec import Capacity
from cache.types import Tokens
from session_server.core.batch import CompiledGrammar, RowResult
from session_server.core.sampling import SamplingParams, TokenLogprob
from session_server.models.config import FULL_POOL
from session_server.models.decoder import Decoder
from session_server.models.registry import load_config
from session_server.runner.model_runner import ModelRunner
from session_server.runner.paged_decoder import BackendName
from session_server.runner.weights import load_decoder
from tests.models.raw_configs import VOCAB_SIZE
from tests.runner.rows import GREEDY, Rows

MAX_LEN = 128
EOS = 7

Guess = Callable[[int, int], Sequence[int] | int]
"""(row, tokens said so far) -> drafts of what follows, or how many the draft model is to make."""


@dataclass(frozen=True)
class Request:
    """One turn."""

    prompt: Tokens
    params: SamplingParams = GREEDY
    seed: int = 0
    grammar: CompiledGrammar | None = None


@dataclass
class Said:
    """What a turn gave. `starts`, `accepted`: of each forward with drafts, where it started and
    how many of them were right."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def hear(self, result: RowResult) -> None:
        """Take in what one forward gave."""
        assert result.finite
        self.tokens += result.token_ids
        self.logprobs += result.logprobs


def guesses(plain: Mapping[int, Sequence[int]], quality: str, vocab_size: int) -> Guess:
    """Drafts of what rows are known to say: all "right", all "wrong", or "mixed"."""
    rng = Random(quality)

    def guess(row: int, num_said: int) -> list[int]:
        drafts = list(plain[row][num_said : num_said + 4])
        for index in range(len(drafts)):
            if quality == "wrong" or (quality == "mixed" and rng.random() < 0.3):
                drafts[index] = rng.randrange(vocab_size)
        return drafts

    return guess


def load(directory: Path) -> Decoder:
    """A decoder on the CPU in full precision."""
    config = load_config(directory)
    return load_decoder(directory, config, device=torch.device("cpu"), dtype=torch.float32)


def new_rows(
    decoder: Decoder,
    *,
    page_size: int = 16,
    num_rows: int = 8,
    backend: BackendName = "torch",
    draft: Decoder | None = None,
    eos: int = EOS,
) -> Rows:
    """A runner with room for `num_rows` turns of `MAX_LEN` tokens."""
    pages_per_row = MAX_LEN // page_size
    capacity = Capacity({FULL_POOL: num_rows * pages_per_row + 1}, num_rows, MAX_LEN)
    runner = ModelRunner(
        decoder,
        decoder.config.cache_spec(page_size, "float32"),
        capacity,
        backend=backend,
        eos_token_ids=(eos,),
        draft=draft,
    )
    return Rows(runner, page_size, pages_per_row)


def random_prompt(length: int, seed: int, vocab_size: int = VOCAB_SIZE) -> Tokens:
    """Ids that any two seeds give differently."""
    ids = np.random.default_rng(seed).integers(0, vocab_size, length)
    return ids.astype(np.int32)


def run_turns(
    rows: Rows, requests: Mapping[int, Request], *, num: int, guess: Guess | None = None
) -> dict[int, Said]:
    """`num` tokens of every turn, all turns in one forward; each token is seen before the next."""
    said = {row: Said() for row in requests}
    prompts = [
        rows.row(
            row,
            request.prompt,
            params=request.params,
            seed=request.seed,
            grammar=request.grammar,
        )
        for row, request in requests.items()
    ]
    for row, result in zip(requests, rows.run(*prompts), strict=True):
        said[row].hear(result)
    while live := [row for row in requests if len(said[row].tokens) < num]:
        batch = []
        for row in live:
            heard = said[row]
            room = num - len(heard.tokens) - 1
            guessed = 0 if guess is None else guess(row, len(heard.tokens))
            start = len(requests[row].prompt) + len(heard.tokens) - 1
            last = np.array(heard.tokens[-1:], dtype=np.int32)
            if isinstance(guessed, int):
                drafts: Tokens | int = min(guessed, room)
            else:
                drafts = np.array(guessed[:room], dtype=np.int32) if guessed[:room] else 0
            batch.append(rows.row(row, last, start=start, drafts=drafts))
        for row, planned, result in zip(live, batch, rows.run(*batch), strict=True):
            if planned.num_drafts:
                said[row].starts.append(planned.start)
                said[row].accepted.append(len(result.token_ids) - 1)
            said[row].hear(result)
    return said


def assert_same(said: Mapping[int, Said], expected: Mapping[int, Said]) -> None:
    """The same tokens, and the same log-probabilities up to rounding."""
    for row, plain in expected.items():
        assert said[row].tokens == plain.tokens, row
        assert len(said[row].logprobs) == len(plain.logprobs)
        for one, other in zip(said[row].logprobs, plain.logprobs, strict=True):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [i for i, _ in one.top] == [i for i, _ in other.top]
