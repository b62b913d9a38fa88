"""Two ranks say of every family what `transformers` says: prompts in chunks, several sessions at
once, drafts that are rejected, sessions that give way.

The processes of the ranks are started once, and load one family after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from cache.spec import CacheSpec
from cache.types import RowId, Tokens
from session_server.core.batch import Batch, Probe, PromptLogprobRange
from session_server.core.ids import SessionId
from session_server.engine import drafting
from session_server.engine.config import Drafter, Speculation
from session_server.models.config import FULL_POOL
from session_server.models.errors import CheckpointError, ModelError
from session_server.models.registry import load_config
from session_server.parallel.loading import load_over, torch_options
from session_server.parallel.messages import LoadPart
from session_server.parallel.ranks import Ranks
from session_server.runner.activations import RunnerMaker, measure_activations
from session_server.runner.capacity import CapacityPlan, LargestForward, MemoryLimits
from session_server.runner.loader import (
    LoadedRunner,
    ResolvedOptions,
    RunnerOptions,
    load_runner,
)
from session_server.runner.model_runner import PROMPT_LOGPROB_BLOCK
from tests.depth import IS_PROOF, at_depth
from tests.models.raw_configs import VOCAB_SIZE
from tests.oracle import talks as talks_of
from tests.oracle import test_gguf as gguf_sizes
from tests.oracle import test_packed as packed_formats
from tests.oracle.checkpoints import reference_logits, to_mxfp4, write_checkpoint
from tests.oracle.conftest import ALL_FAMILIES
from tests.oracle.gguf_files import write_gguf
from tests.oracle.talks import Reference, Setup, Talk, assert_like_reference, load, run_talks
from tests.runner.rows import Rows

NUM_RANKS = 2
CPU = torch.device("cpu")
Write = Callable[[Path], tuple[Path, Path]]
"""Write a checkpoint into a directory; return it, and one of floats that it stands for."""

TURNS = ((20, 1, 3), (7, 5, 1), (1, 33, 2))
PAGES_AND_CHUNKS = at_depth(((4, 7),), proof=((1, 64), (4, 7), (16, 5), (64, 19)))

ODD_ONES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "copies_of_one_kv_head": ("llama", {"num_key_value_heads": 1}),
    "copies_normed_over_ranks": ("olmo3", {"num_key_value_heads": 1}),
    "copies_beside_sinks": ("gpt_oss", {"num_key_value_heads": 1}),
    "whole_mamba": ("granitemoehybrid", {"mamba_n_groups": 1}),
    "whole_delta_rule": (
        "qwen3_5_text",
        {"linear_num_key_heads": 1, "linear_num_value_heads": 3},
    ),
}
"""Models of which ranks hold copies: KV heads that are fewer than ranks, undivided recurrences."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks(NUM_RANKS, torch.device("cpu"))
    yield found
    found.close()


@pytest.fixture(autouse=True)
def _over_ranks(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_them(directory: Path, options: RunnerOptions) -> LoadedRunner:
        return load_over(ranks, directory, torch_options(options, NUM_RANKS))

    monkeypatch.setattr(talks_of, "load_runner", load_them)


def new_talks(num_outputs: int = 12) -> list[Talk]:
    return [
        Talk(SessionId(f"s{i}"), turns, num_outputs, rng=np.random.default_rng(i))
        for i, turns in enumerate(TURNS)
    ]


def guess_from(said: list[Talk], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have drafts be what was said before, every fourth token wrong."""

    def look_up(tokens: Tokens, num_guesses: int) -> Tokens:
        begun = tokens.tolist()
        known = next(talk.tokens for talk in said if talk.tokens[: len(begun)] == begun)
        coming = enumerate(known[len(begun) :][:num_guesses], len(begun))
        return np.array([t if at % 4 else t ^ 1 for at, t in coming], np.int32)

    monkeypatch.setattr(drafting, "look_up", look_up)


@pytest.mark.parametrize(("page_size", "chunk"), PAGES_AND_CHUNKS)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_two_ranks_say_what_the_whole_model_says_guessed_or_not(
    family: str,
    page_size: int,
    chunk: int,
    *,
    checkpoints: Mapping[str, Path],
    references: Mapping[str, Reference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = Setup(family, page_size, chunk, overlap=False)
    plain = new_talks()
    run_talks(setup, checkpoints[family], plain)
    guess_from(plain, monkeypatch)
    guessed = new_talks()
    with_drafts = replace(setup, speculation=Speculation(4))
    counters = run_talks(with_drafts, checkpoints[family], guessed)
    for before, after in zip(plain, guessed, strict=True):
        assert_like_reference(before, references[family])
        assert_like_reference(after, references[family])
    assert counters.draft_tokens > counters.accepted_tokens > 20


@pytest.mark.parametrize("name", ODD_ONES)
def test_what_does_not_divide_is_held_in_copies(name: str, tmp_path: Path) -> None:
    family, overrides = ODD_ONES[name]
    directory = write_checkpoint(family, tmp_path / name, **overrides)
    held = new_talks(6)
    run_talks(Setup(family, 4, 7, overlap=False), directory, held)
    for talk in held:
        assert_like_reference(talk, lambda tokens: reference_logits(directory, tokens))


def gguf(family: str, kind: Type) -> Write:
    def write(directory: Path) -> tuple[Path, Path]:
        twin = write_checkpoint(family, directory / "twin", **gguf_sizes.SIZES)
        return write_gguf(twin, directory / "model.gguf", lambda _: kind), twin

    return write


def awq(directory: Path) -> tuple[Path, Path]:
    twin = write_checkpoint("qwen2", directory / "twin", **packed_formats.SIZES)
    return packed_formats.FORMATS["awq"].write(twin, directory / "packed"), twin


def single_experts(directory: Path) -> tuple[Path, Path]:
    return (packed_formats.write_experts(directory),) * 2


def mxfp4(directory: Path, intermediate_size: int = 128) -> tuple[Path, Path]:
    sizes = {"hidden_size": 64, "intermediate_size": intermediate_size}
    written = write_checkpoint("gpt_oss", directory, **sizes)
    to_mxfp4(written)
    return written, written


FORMATS: Mapping[str, Write] = {
    "gguf_4": gguf("llama", Type.Q4_0),
    "gguf_8_with_one_matrix_for_both_ends": gguf("qwen2", Type.Q8_0),
    "awq": awq,
    "single_experts": single_experts,
    "mxfp4": mxfp4,
}


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_cut_as_the_numbers_they_stand_for(name: str, tmp_path: Path) -> None:
    path, twin = FORMATS[name](tmp_path)
    held = new_talks(4)
    run_talks(Setup(name, 16, 64, overlap=False), path, held)
    for talk in held:
        assert_like_reference(talk, lambda tokens: reference_logits(twin, tokens))


def test_codes_that_share_a_scale_stay_together_or_are_refused(tmp_path: Path) -> None:
    path, _ = mxfp4(tmp_path, intermediate_size=96)
    with pytest.raises(CheckpointError, match=r"blocks cannot be split in 2$"):
        load(Setup("mxfp4", 16, 64, overlap=False), path)


@pytest.mark.parametrize("family", ALL_FAMILIES if IS_PROOF else ("gemma2", "granitemoehybrid"))
def test_a_draft_model_is_split_like_the_model(
    family: str, checkpoints: Mapping[str, Path], references: Mapping[str, Reference]
) -> None:
    """A strange family guesses wrong nearly always. One without full attention helps itself."""
    has_full = FULL_POOL in load_config(checkpoints[family]).pools
    stranger = "qwen2" if has_full else family
    held = new_talks(8)
    setup = Setup(family, 4, 7, overlap=True, speculation=Speculation(4, Drafter.MODEL))
    counters = run_talks(setup, checkpoints[family], held, draft=checkpoints[stranger])
    for talk in held:
        assert_like_reference(talk, references[family])
    assert counters.draft_tokens > 0


@pytest.mark.parametrize("family", ALL_FAMILIES if IS_PROOF else ("qwen3", "lfm2"))
def test_sessions_that_give_way_are_computed_again_on_all_ranks(
    family: str, checkpoints: Mapping[str, Path], references: Mapping[str, Reference]
) -> None:
    held = new_talks(24)
    run_talks(Setup(family, 4, 7, overlap=True, max_total_tokens=112), checkpoints[family], held)
    for talk in held:
        assert_like_reference(talk, references[family])
    assert sum(talk.num_retractions for talk in held) > 0, "the pool was never short"


def test_a_page_is_probed_by_all_ranks_together(checkpoints: Mapping[str, Path]) -> None:
    loaded = load(Setup("llama", 4, 64, overlap=False), checkpoints["llama"])
    rows = Rows(loaded.runner, page_size=4)
    tokens = np.arange(3, 15, dtype=np.int32)
    rows.compute(1, tokens, (12,))

    def holds(row: int) -> bool | None:
        probe = Probe(RowId(row), 4, tokens[4:8])
        result = loaded.runner.launch(Batch(0, (), (), probe)).wait()
        assert result.error is None
        return result.probe_holds

    rows.compute(2, tokens[::-1].copy(), (12,))
    assert (holds(1), holds(2)) == (True, False)
    rows.run(rows.row(1, tokens[:1], start=12))  # the ranks are still in step


def test_prompts_are_scored_by_all_ranks_block_by_block(checkpoints: Mapping[str, Path]) -> None:
    tokens = np.random.default_rng(1).integers(3, VOCAB_SIZE, 200).astype(np.int32)

    def scores(loaded: LoadedRunner) -> list[float]:
        asked = PromptLogprobRange(0, tokens[1:], 1)
        rows = Rows(loaded.runner, page_size=16, pages_per_row=16)
        (result,) = rows.run(rows.row(1, tokens, prompt_logprobs=asked))
        return [each.logprob for each in result.prompt_logprobs]

    setup = Setup("qwen2", 16, 64, overlap=False, max_total_tokens=1024)
    whole = RunnerOptions(page_size=16, num_rows=8, device="cpu", max_context_len=512)
    split = scores(load(setup, checkpoints["qwen2"]))
    assert len(split) == len(tokens) - 1 > PROMPT_LOGPROB_BLOCK
    assert split == pytest.approx(scores(load_runner(checkpoints["qwen2"], whole)), abs=1e-4)


def test_a_rank_says_what_it_cannot_load_and_loads_the_next(ranks: Ranks, tmp_path: Path) -> None:
    ranks.send(LoadPart((str(tmp_path),), "float32", "float32", 16, 1))
    with pytest.raises(ModelError, match=r"^rank 1: "):
        ranks.await_loaded()
    directory = write_checkpoint("llama", tmp_path)
    assert load(Setup("llama", 4, 64, overlap=False), directory).runner.pools


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_ranks_hold_halves(family: str, checkpoints: Mapping[str, Path]) -> None:
    setup = Setup(family, 4, 64, overlap=False)
    half = load(setup, checkpoints[family])
    whole = load_runner(checkpoints[family], RunnerOptions(page_size=4, num_rows=8))
    assert half.spec.bytes_per_page * 2 == whole.spec.bytes_per_page
    assert half.config.vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3_5_text"])
def test_all_ranks_compute_the_forward_that_is_measured_then_serve(
    family: str,
    checkpoints: Mapping[str, Path],
    references: Mapping[str, Reference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = []
    plan = ResolvedOptions.capacity

    def capacity(
        self: ResolvedOptions, stored: CacheSpec, limits: MemoryLimits, make_runner: RunnerMaker
    ) -> CapacityPlan:
        largest, context_len = LargestForward(24, 3, 2), self.max_context_len
        measured.append(
            measure_activations(
                largest, make_runner, stored, device=CPU, max_context_len=context_len
            )
        )
        return plan(self, stored, limits)

    monkeypatch.setattr(ResolvedOptions, "capacity", capacity)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 2)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 5)
    talks = new_talks(4)
    run_talks(Setup(family, 4, 7, overlap=False), checkpoints[family], talks)
    assert measured == [3]
    for talk in talks:
        assert_like_reference(talk, references[family])
