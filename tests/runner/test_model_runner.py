"""What a launch promises beyond logits: order, isolation, failures, logprobs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cache.pool.page_table import PageTable
from cache.spec import Capacity
from cache.types import RowId, TableWrite, Tokens, TurnId
from session_server.core.batch import (
    Batch,
    BatchRow,
    DecodeRows,
    PendingStep,
    PromptLogprobRange,
    Runner,
)
from session_server.core.sampling import SamplingParams, TokenLogprob
from session_server.models.config import FULL_POOL, DTypeName
from session_server.models.registry import load_config
from session_server.runner.inputs import InputBuilder
from session_server.runner.model_runner import PROMPT_LOGPROB_BLOCK, ModelRunner
from session_server.runner.weights import load_decoder
from tests.models.raw_configs import VOCAB_SIZE
from tests.oracle.checkpoints import reference_logits, write_checkpoint
from tests.runner.rows import PAGES_PER_ROW, Rows

PAGE_SIZE = 16
NUM_ROWS = 6
POISON = 77
"""The embedding of this token is NaN."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_checkpoint("llama", tmp_path_factory.mktemp("runner"), num_hidden_layers=2)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(tensors, path)
    return directory


@pytest.fixture
def rows(checkpoint: Path) -> Rows:
    return rows_of(checkpoint, "float32")


def rows_of(checkpoint: Path, dtype: DTypeName) -> Rows:
    config = load_config(checkpoint)
    decoder = load_decoder(
        checkpoint, config, device=torch.device("cpu"), dtype=getattr(torch, dtype)
    )
    context_len = PAGES_PER_ROW * PAGE_SIZE
    capacity = Capacity({FULL_POOL: NUM_ROWS * PAGES_PER_ROW + 1}, NUM_ROWS, context_len)
    runner: Runner = ModelRunner(decoder, config.cache_spec(PAGE_SIZE, dtype), capacity)
    assert isinstance(runner, ModelRunner)
    return Rows(runner, PAGE_SIZE)


def prompt(length: int, seed: int = 0) -> Tokens:
    ids = np.random.default_rng(seed).integers(0, VOCAB_SIZE, length, dtype=np.int32)
    return np.where(ids == POISON, 1, ids).astype(np.int32)


def generate(
    rows: Rows, row: int, tokens: Tokens, *, params: SamplingParams, num: int
) -> list[int]:
    """Alone, one token at a time, seeing each before the next launch."""
    said: list[int] = []
    (result,) = rows.run(rows.row(row, tokens, params=params, seed=row))
    for _ in range(num):
        (token,) = result.token_ids
        said.append(token)
        start = len(tokens) + len(said) - 1
        (result,) = rows.run(rows.row(row, np.array([token], dtype=np.int32), start=start))
    return said


def test_results_come_in_the_order_of_the_batch(rows: Rows) -> None:
    prompts = {row: prompt(length, row) for row, length in ((1, 9), (2, 1), (3, 30), (4, 1))}
    alone = {row: rows.run(rows.row(row, tokens))[0] for row, tokens in prompts.items()}
    together = rows.run(*(rows.row(row, tokens) for row, tokens in prompts.items()))
    assert together == tuple(alone.values())
    assert len({result.token_ids for result in together}) > 1


def test_a_row_that_does_not_sample_gives_nothing(rows: Rows) -> None:
    quiet, loud = rows.run(
        rows.row(1, prompt(5), sample=False), rows.row(2, prompt(5), sample=True)
    )
    assert (quiet.token_ids, quiet.finite) == ((), True)
    assert len(loud.token_ids) == 1
    (quiet,) = rows.run(rows.row(3, prompt(5), sample=False))
    assert quiet.token_ids == ()


def test_an_empty_batch_only_writes_the_table(rows: Rows) -> None:
    tokens = prompt(20)
    (before,) = rows.run(rows.row(1, tokens))
    moved = np.array([100, 50], dtype=np.int32)
    write = TableWrite(FULL_POOL, RowId(1), 0, moved)
    result = rows.runner.launch(rows.batch(writes=(write,))).wait()
    assert (result.rows, result.error) == ((), None)
    assert rows.run(rows.row(1, tokens)) == (before,)
    k_of_first_page = rows.runner.pools[FULL_POOL].gather(0, torch.tensor([100]))
    assert k_of_first_page.any()


SAMPLED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.3),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.9),
    SamplingParams(temperature=1.0, repetition_penalty=1.4, frequency_penalty=0.3),
]


def test_launching_ahead_gives_the_tokens_of_waiting(rows: Rows) -> None:
    prompts = {row: prompt(5 + row, row) for row in range(1, len(SAMPLED) + 1)}
    patient = {
        row: generate(rows, row, tokens, params=SAMPLED[row - 1], num=12)
        for row, tokens in prompts.items()
    }
    pending: list[PendingStep] = [
        rows.runner.launch(
            rows.batch(
                *(
                    rows.row(row, tokens, params=SAMPLED[row - 1], seed=row)
                    for row, tokens in prompts.items()
                )
            )
        )
    ]
    for n in range(11):
        ahead = [rows.row(row, None, start=len(t) + n) for row, t in prompts.items()]
        pending.append(rows.runner.launch(rows.batch(*ahead)))
    results = [step.wait() for step in pending]
    said = {
        row: [result.rows[i].token_ids[0] for result in results] for i, row in enumerate(prompts)
    }
    assert said == patient


def test_a_seed_gives_one_text_alone_or_in_company(rows: Rows) -> None:
    params = SamplingParams(temperature=1.5)
    alone = generate(rows, 1, prompt(8), params=params, num=10)
    said: list[int] = []
    batch = [rows.row(1, prompt(8), params=params, seed=1), rows.row(2, prompt(90, 5))]
    for n in range(10):
        result = rows.run(*batch)
        said += result[0].token_ids
        batch = [rows.row(1, None, start=8 + n), rows.row(3, prompt(7 + 9 * n, n))]
    assert said == alone


def test_nan_stays_in_the_row_it_came_from(rows: Rows) -> None:
    healthy, poisoned = prompt(12), prompt(12).copy()
    poisoned[4] = POISON
    (expected,) = rows.run(rows.row(1, healthy))
    sick, well = rows.run(rows.row(2, poisoned), rows.row(1, healthy))
    assert not sick.finite
    assert sick.token_ids == ()
    assert well == expected


def test_pages_that_held_nan_serve_the_next_holder(rows: Rows) -> None:
    poisoned = np.full(40, POISON, dtype=np.int32)
    (expected,) = rows.run(rows.row(1, prompt(20)))
    (sick,) = rows.run(rows.row(2, poisoned))
    assert not sick.finite
    pages = np.arange(1 + PAGES_PER_ROW, 1 + 2 * PAGES_PER_ROW, dtype=np.int32)
    rows.runner.launch(rows.batch(writes=(TableWrite(FULL_POOL, RowId(1), 0, pages),))).wait()
    assert rows.run(rows.row(1, prompt(20))) == (expected,)
    short = [rows.row(1, prompt(3)), rows.row(3, prompt(1)), rows.row(4, prompt(2))]
    assert all(result.finite for result in rows.run(*short))


def test_A13_decoding_in_company_reads_nothing_that_stale_nan_left_behind(rows: Rows) -> None:
    """A masked score is no protection: zero times NaN is NaN."""
    token = np.array([5], dtype=np.int32)
    prompts = {1: prompt(3, 1), 3: prompt(37, 3)}
    for row, tokens in prompts.items():
        rows.run(rows.row(row, tokens))
    batch = [rows.row(row, token, start=len(tokens)) for row, tokens in prompts.items()]
    expected = rows.run(*batch)
    assert all(result.finite for result in expected)

    (sick,) = rows.run(rows.row(2, np.full(60, POISON, dtype=np.int32)))
    assert not sick.finite
    held_nan = np.arange(1 + PAGES_PER_ROW, 1 + 2 * PAGES_PER_ROW, dtype=np.int32)
    writes = (TableWrite(FULL_POOL, RowId(1), 0, held_nan),)
    rows.runner.launch(rows.batch(rows.row(1, prompts[1]), writes=writes)).wait()
    assert rows.run(*batch) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_goes_every_way_that_full_precision_goes(
    checkpoint: Path, dtype: DTypeName
) -> None:
    """A prompt, a chunk on history and decoding in company: near the logits of float32."""
    tokens = prompt(30)
    logits = []
    for rows in (rows_of(checkpoint, "float32"), rows_of(checkpoint, dtype)):
        runner = rows.runner
        parts = [runner.logits(rows.batch(rows.row(1, tokens[:12]), rows.row(2, tokens[:20])))]
        chunks = (rows.row(1, tokens[12:], start=12), rows.row(2, tokens[20:29], start=20))
        parts.append(runner.logits(rows.batch(*chunks)))
        single = (rows.row(1, tokens[:1], start=30), rows.row(2, tokens[29:], start=29))
        parts.append(runner.logits(rows.batch(*single)))
        logits.append(torch.cat(parts))
    full, half = logits
    assert torch.nn.functional.cosine_similarity(full, half).min() > 0.995


def test_a_chunk_that_samples_nothing_is_checked_too(rows: Rows) -> None:
    poisoned = prompt(20).copy()
    poisoned[3] = POISON
    sick, well = rows.run(
        rows.row(1, poisoned, sample=False), rows.row(2, prompt(20), sample=False)
    )
    assert not sick.finite
    assert well.finite


@pytest.mark.parametrize("is_seen", [False, True])
def test_rows_that_decode_give_the_same_as_columns(checkpoint: Path, is_seen: bool) -> None:
    prompts = {1: prompt(20, 1), 2: prompt(3, 2), 4: prompt(37, 3), 5: prompt(3, 4)}
    starts = np.array([len(tokens) for tokens in prompts.values()], dtype=np.int32)
    listed, columns = (rows_of(checkpoint, "float32") for _ in range(2))
    given: tuple[int, ...] | None = None
    for each in (listed, columns):
        first = each.run(*(each.row(row, tokens) for row, tokens in prompts.items()))
        given = tuple(result.token_ids[0] for result in first) if is_seen else None
    tokens = [None if given is None else np.array([token], np.int32) for token in given or "1234"]
    for step in range(3):
        own = tokens if step == 0 else [None] * len(prompts)
        expected = listed.run(
            *(
                listed.row(row, token, start=start + step)
                for row, token, start in zip(prompts, own, starts.tolist(), strict=True)
            )
        )
        ids = np.array(list(prompts), dtype=np.int32)
        names = tuple(TurnId(f"turn-{row}") for row in prompts)
        decoding = DecodeRows(names, (0,) * 4, ids, starts + step, given if step == 0 else None)
        batch = Batch(100 + step, (), (), decoding=decoding)
        result = columns.runner.launch(batch).wait()
        assert result.tokens == tuple(each.token_ids[0] for each in expected)
        assert not result.rows


def test_columns_tell_a_row_of_nan_from_the_others(rows: Rows) -> None:
    for row in (1, 2):
        rows.run(rows.row(row, prompt(20, row)))
    columns = np.array([1, 2], dtype=np.int32), np.array([20, 20], dtype=np.int32)
    decoding = DecodeRows((TurnId("a"), TurnId("b")), (0, 0), *columns, (POISON, 5))
    result = rows.runner.launch(Batch(100, (), (), decoding=decoding)).wait()
    assert result.tokens is None
    assert [row.finite for row in result.rows] == [False, True]


def test_inputs_of_a_step_that_decodes_take_few_calls() -> None:
    """Of Python functions: they are the same in every run."""

    def num_calls(num_rows: int) -> int:
        columns = np.arange(1, num_rows + 1, dtype=np.int32), np.full(num_rows, 20, np.int32)
        names = tuple(TurnId(f"turn-{row}") for row in range(num_rows))
        decoding = DecodeRows(names, (0,) * num_rows, *columns, (5,) * num_rows)
        batch = Batch(100, (), (), decoding=decoding)
        num_counted = 0

        def count(frame: FrameType, kind: str, argument: object) -> None:
            nonlocal num_counted
            num_counted += kind == "call"

        inputs = InputBuilder(
            {FULL_POOL: PageTable(NUM_ROWS, PAGES_PER_ROW, device=torch.device("cpu"))},
            page_size=PAGE_SIZE,
            last_tokens=torch.zeros(NUM_ROWS + 1, dtype=torch.int64),
        )
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            inputs.build(batch)
        finally:
            sys.setprofile(before)
        return num_counted

    assert num_calls(1) <= 20
    assert num_calls(5) - num_calls(1) <= 4 * 3


@pytest.mark.parametrize("is_decoding", [True, False])
def test_slots_may_be_more_than_an_int32_counts(*, is_decoding: bool) -> None:
    """Pages are int32; of a large pool of small layers their slots are not."""
    table, page = PageTable(1, 2, device=torch.device("cpu")), 2**27 + 5
    table.apply(TableWrite(FULL_POOL, RowId(1), 0, np.array([7, page], dtype=np.int32)))
    last_tokens = torch.zeros(2, dtype=torch.int64)
    builder = InputBuilder({FULL_POOL: table}, page_size=PAGE_SIZE, last_tokens=last_tokens)
    tokens = np.arange(3, dtype=np.int32)
    row = BatchRow(TurnId("turn"), 0, RowId(1), PAGE_SIZE - 1, 3, tokens, False, None)
    columns = np.array([1], np.int32), np.array([PAGE_SIZE + 2], np.int32)
    decoding = DecodeRows((TurnId("turn"),), (0,), *columns, (5,))
    batch = Batch(1, (), (), decoding=decoding) if is_decoding else Batch(1, (row,), ())
    slots = builder.build(batch).attention.slot_mapping[FULL_POOL].tolist()
    first = page * PAGE_SIZE
    assert slots == ([first + 2] if is_decoding else [7 * PAGE_SIZE + 15, first, first + 1])


def test_a_row_of_nan_does_not_spread_to_those_it_decodes_with(rows: Rows) -> None:
    healthy = {1: prompt(3, 1), 3: prompt(37, 3)}
    for row, tokens in healthy.items():
        rows.run(rows.row(row, tokens))
    rows.run(rows.row(2, prompt(5, 2)))
    token, poison = (np.array([i], dtype=np.int32) for i in (5, POISON))
    batch = [rows.row(row, token, start=len(tokens)) for row, tokens in healthy.items()]
    expected = rows.run(*batch)
    sick, *well = rows.run(rows.row(2, poison, start=5), *batch)
    assert not sick.finite
    assert tuple(well) == expected


def test_a_failed_forward_is_a_result_and_the_next_one_works(rows: Rows) -> None:
    beyond = np.array([VOCAB_SIZE + 3], dtype=np.int32)
    failed = rows.runner.launch(rows.batch(rows.row(1, beyond)))
    assert failed.is_done()
    result = failed.wait()
    assert result.error is not None
    assert result.rows == ()
    (after,) = rows.run(rows.row(1, prompt(4)))
    assert after.finite


def test_a_device_that_is_lost_ends_the_engine_instead_of_failing_turn_after_turn(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def synchronize() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    beyond = np.array([VOCAB_SIZE + 3], dtype=np.int32)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        rows.runner.launch(rows.batch(rows.row(1, beyond)))


def test_the_forward_has_a_duration(rows: Rows) -> None:
    result = rows.runner.launch(rows.batch(rows.row(1, prompt(30)))).wait()
    assert 0 < result.forward_s < 60


def assert_prompt_logprobs(
    logprobs: tuple[TokenLogprob, ...], expected: Tensor, targets: Tokens, num_top: int
) -> None:
    assert len(logprobs) == len(targets)
    for logprob, row, target in zip(logprobs, expected.log_softmax(-1), targets, strict=True):
        assert logprob.token_id == target
        assert logprob.logprob == pytest.approx(row[target].item(), abs=1e-4)
        top = row.topk(num_top)
        assert [i for i, _ in logprob.top] == top.indices.tolist()
        assert [p for _, p in logprob.top] == pytest.approx(top.values.tolist(), abs=1e-4)


def test_prompt_logprobs_are_those_of_the_reference(rows: Rows, checkpoint: Path) -> None:
    length = 2 * PROMPT_LOGPROB_BLOCK + 20
    tokens = prompt(length)
    expected = reference_logits(checkpoint, tokens)
    first, cut = 3, 150
    early = PromptLogprobRange(first, tokens[first + 1 : cut + 1], 3)
    late = PromptLogprobRange(cut, tokens[cut + 1 :], 0)
    begun = rows.run(
        rows.row(1, tokens[:cut], sample=False, prompt_logprobs=early), rows.row(2, prompt(6, 1))
    )
    ended = rows.run(rows.row(1, tokens[cut:], start=cut, prompt_logprobs=late))
    assert_prompt_logprobs(begun[0].prompt_logprobs, expected[first:cut], early.targets, 3)
    assert_prompt_logprobs(ended[0].prompt_logprobs, expected[cut:-1], late.targets, 0)
    assert begun[0].token_ids == ()
    assert ended[0].token_ids == (int(expected[-1].argmax()),)


def test_an_overflow_in_one_scored_position_makes_the_row_not_finite(tmp_path: Path) -> None:
    """The last layer's MLP overflows at one token, which no other position ever sees."""
    directory = write_checkpoint("llama", tmp_path, num_hidden_layers=1)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 0] = 0
    tensors["model.embed_tokens.weight"][POISON, 0] = 1
    tensors["model.layers.0.self_attn.o_proj.weight"][0] = 0
    for projection in ("gate_proj", "up_proj"):
        tensors[f"model.layers.0.mlp.{projection}.weight"][:, 0] = 1e30
    save_file(tensors, directory / "model.safetensors")
    rows = rows_of(directory, "float32")
    tokens = prompt(10)
    tokens[6] = POISON
    (plain,) = rows.run(rows.row(1, tokens))
    (beside,) = rows.run(rows.row(1, tokens, prompt_logprobs=PromptLogprobRange(0, tokens[1:7], 0)))
    (across,) = rows.run(rows.row(1, tokens, prompt_logprobs=PromptLogprobRange(0, tokens[1:], 0)))
    assert plain.finite
    assert len(plain.token_ids) == 1
    assert (beside.finite, beside.token_ids) == (True, plain.token_ids)
    assert (across.finite, across.token_ids) == (False, ())


def test_logprobs_are_the_models_own_before_any_rule(rows: Rows, checkpoint: Path) -> None:
    tokens = prompt(14)
    expected = reference_logits(checkpoint, tokens)[-1].log_softmax(-1)
    params = SamplingParams(
        temperature=3.0, top_k=2, logit_bias=((5, 3.0),), logprobs=True, top_logprobs=4
    )
    plain, asking = rows.run(rows.row(2, tokens), rows.row(1, tokens, params=params, seed=3))
    assert plain.logprobs == ()
    (logprob,) = asking.logprobs
    assert logprob.token_id == asking.token_ids[0]
    assert logprob.logprob == pytest.approx(expected[logprob.token_id].item(), abs=1e-4)
    assert [i for i, _ in logprob.top] == expected.topk(4).indices.tolist()


def test_asking_for_logits_twice_changes_nothing(rows: Rows) -> None:
    tokens = prompt(25)
    first = rows.runner.logits(rows.batch(rows.row(1, tokens)))
    again = rows.runner.logits(rows.batch(rows.row(1, tokens)))
    assert torch.equal(first, again)
    assert rows.run(rows.row(1, tokens))[0].token_ids == (int(first[0].argmax()),)
