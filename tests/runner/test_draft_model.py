"""A draft model guesses from KV of its own in the target's pages; it changes no answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random

import numpy as np
import pytest

from cache.types import RowId, TableWrite
from session_server.core.batch import BatchRow
from session_server.core.sampling import SamplingParams
from session_server.models.config import FULL_POOL
from session_server.models.decoder import Decoder
from session_server.runner.paged_decoder import BackendName
from tests.models.raw_configs import VOCAB_SIZE
from tests.oracle.checkpoints import write_checkpoint
from tests.runner.drafting import (
    MAX_LEN,
    Guess,
    Request,
    Said,
    assert_same,
    load,
    new_rows,
    random_prompt,
    run_turns,
)
from tests.runner.rows import Rows
from tests.runner.test_speculation import KINDS

NUM = 30
NUM_DRAFTS = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load(write_checkpoint("qwen3", tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Random weights of another shape: it agrees with the target by chance only."""
    directory = write_checkpoint(
        "llama",
        tmp_path_factory.mktemp("draft"),
        num_hidden_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=1,
    )
    return load(directory)


@pytest.fixture(scope="module")
def plain(target: Decoder) -> Mapping[int, Said]:
    return run_turns(new_rows(target), everyone(), num=NUM)


def everyone() -> dict[int, Request]:
    return {
        row: Request(random_prompt(9 + row, row), params, seed=100 + row)
        for row, params in enumerate(KINDS.values(), 1)
    }


def always(num_drafts: int) -> Guess:
    return lambda *_: num_drafts


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_model_that_drafts_for_itself_is_always_right(
    page_size: int, backend: BackendName, target: Decoder, plain: Mapping[int, Said]
) -> None:
    rows = new_rows(target, page_size=page_size, backend=backend, draft=target)
    said = run_turns(rows, everyone(), num=NUM, guess=always(NUM_DRAFTS))
    assert_same(said, plain)
    for heard in said.values():
        # The last guesses are fewer: no more tokens are wanted.
        assert heard.accepted[:-1] == [NUM_DRAFTS] * (len(heard.accepted) - 1)
        assert len(heard.accepted) == pytest.approx(NUM / (1 + NUM_DRAFTS), abs=1)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_model_that_knows_nothing_is_right_by_chance_and_changes_nothing(
    page_size: int, target: Decoder, stranger: Decoder, plain: Mapping[int, Said]
) -> None:
    rows = new_rows(target, page_size=page_size, draft=stranger)
    said = run_turns(rows, everyone(), num=NUM, guess=always(NUM_DRAFTS))
    assert_same(said, plain)
    accepted = [n for heard in said.values() for n in heard.accepted]
    assert 0 < sum(accepted) < 0.5 * NUM_DRAFTS * len(accepted)


def test_the_same_noise_makes_strangers_agree_more_often_than_chance(
    target: Decoder, stranger: Decoder
) -> None:
    """Two flat distributions that race with the same noise mostly choose the same token."""
    params = SamplingParams(temperature=20.0)
    requests = {row: Request(random_prompt(5, row), params, seed=row) for row in range(1, 9)}
    rows = new_rows(target, draft=stranger)
    said = run_turns(rows, requests, num=NUM, guess=always(1))
    accepted = [n for heard in said.values() for n in heard.accepted]
    assert sum(accepted) > 0.5 * len(accepted)


def test_every_way_a_position_can_be_computed_leaves_the_drafts_kv_right(
    target: Decoder, plain: Mapping[int, Said]
) -> None:
    """Prompts, plain rows, right and wrong guesses of the host: whenever the model guesses for
    itself all of it is right, which it is only on the history that really was."""
    random = Random(1)
    wanted: dict[tuple[int, int], int] = {}

    def guess(row: int, num_said: int) -> list[int] | int:
        coming = plain[row].tokens[num_said : num_said + random.randint(1, NUM_DRAFTS)]
        match random.randrange(4):
            case 0:
                return 0
            case 1:
                return [(token + 1) % VOCAB_SIZE for token in coming]
            case 2:
                return coming
            case _:
                wanted[row, num_said] = min(len(coming), NUM - num_said - 1)
                return len(coming)

    rows = new_rows(target, page_size=4, draft=target)
    said = run_turns(rows, everyone(), num=NUM, guess=guess)
    assert_same(said, plain)
    given = {
        (row, start - len(everyone()[row].prompt) + 1): num_right
        for row, heard in said.items()
        for start, num_right in zip(heard.starts, heard.accepted, strict=True)
    }
    assert {key: given[key] for key, count in wanted.items() if count} == {
        key: count for key, count in wanted.items() if count
    }
    assert len(wanted) > 20


def test_pages_shared_with_another_row_carry_the_drafts_kv_along(target: Decoder) -> None:
    prompt = random_prompt(40, 3)
    plain = run_turns(new_rows(target), {1: Request(prompt)}, num=6)
    rows = new_rows(target, draft=target)
    rows.run(rows.row(1, prompt))
    first_page = np.array([1, 2], dtype=np.int32)
    shared = TableWrite(FULL_POOL, RowId(2), 0, first_page)
    tail = rows.row(2, prompt[32:], start=32)
    begun = rows.row(2, prompt[:1])  # gives row 2 a sampler state; its pages are replaced below
    rows.run(begun)
    rows.runner.launch(rows.batch(tail, writes=(shared,))).wait()
    last = np.array(plain[1].tokens[:1], dtype=np.int32)
    (result,) = rows.run(rows.row(2, last, start=40, drafts=NUM_DRAFTS))
    assert list(result.token_ids) == plain[1].tokens[1 : 2 + NUM_DRAFTS]


def test_rows_may_want_different_numbers_of_drafts(
    target: Decoder, plain: Mapping[int, Said]
) -> None:
    rows = new_rows(target, page_size=4, draft=target)
    said = run_turns(rows, everyone(), num=NUM, guess=lambda row, _: row % (NUM_DRAFTS + 1))
    assert_same(said, plain)
    assert {row: set(heard.accepted[:-1]) for row, heard in said.items()} == {
        row: {row % (NUM_DRAFTS + 1)} - {0} for row in said
    }


def test_a_row_that_wants_fewer_drafts_writes_nothing_behind_them(target: Decoder) -> None:
    """What the table says beyond a row's end may be somebody else's pages by now."""
    requests = {row: Request(random_prompt(12, row)) for row in (1, 2)}
    plain = run_turns(new_rows(target, page_size=1), requests, num=12)
    rows = new_rows(target, page_size=1, draft=target)
    rows.run(*(rows.row(row, request.prompt) for row, request in requests.items()))
    history_of_other = np.arange(MAX_LEN + 1, MAX_LEN + 11, dtype=np.int32)
    stale = TableWrite(FULL_POOL, RowId(1), 14, history_of_other)
    rows.runner.launch(rows.batch(writes=(stale,))).wait()

    def guessing(row: int, num_said: int, num_drafts: int) -> BatchRow:
        last = np.array(plain[row].tokens[num_said - 1 : num_said], dtype=np.int32)
        return rows.row(row, last, start=11 + num_said, drafts=num_drafts)

    short, long = rows.run(guessing(1, 1, 1), guessing(2, 1, 4))
    assert (len(short.token_ids), len(long.token_ids)) == (2, 5)
    (result,) = rows.run(guessing(2, 6, 4))
    assert list(result.token_ids) == plain[2].tokens[6:11]


def test_nan_in_the_draft_model_is_only_a_bad_guess(
    tmp_path: Path, target: Decoder, plain: Mapping[int, Said]
) -> None:
    sick = load(write_checkpoint("llama", tmp_path, num_hidden_layers=1))
    sick.embedding.fill_(float("nan"))
    said = run_turns(new_rows(target, draft=sick), everyone(), num=NUM, guess=always(2))
    assert_same(said, plain)


def test_a_draft_model_adds_nothing_to_logits(target: Decoder, stranger: Decoder) -> None:
    def logits(rows: Rows) -> np.ndarray:
        return rows.runner.logits(rows.batch(rows.row(1, random_prompt(12, 1)))).numpy()

    assert np.array_equal(logits(new_rows(target)), logits(new_rows(target, draft=stranger)))
