"""Guessing ahead, whoever guesses, leaves what `transformers` computes: token by token, and as its
own `generate` says it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from session_server.core.ids import SessionId
from session_server.engine.config import Drafter, Speculation
from session_server.engine.context import Counters
from tests.depth import cases
from tests.oracle.checkpoints import FAMILIES
from tests.oracle.talks import Reference, Setup, Talk, assert_like_reference, run_talks

NUM_OUTPUTS = 24
TURNS = ((20, 1, 3), (7, 5, 1), (1, 33, 2))
STRANGERS = {"llama": "qwen2", "qwen2": "qwen3", "qwen3": "mistral", "mistral": "llama"}

CASES = [
    Setup(family, page_size, chunk, overlap, speculation=Speculation(num_drafts, drafter))
    for family, (page_size, num_drafts, chunk), overlap, drafter in cases(
        FAMILIES, ((1, 4, 7), (4, 2, 64), (16, 4, 64)), (False, True), Drafter
    )
]


def new_talks() -> list[Talk]:
    """Three sessions whose turns are long enough for random models to repeat themselves."""
    return [
        Talk(SessionId(f"s{i}"), turns, num_outputs=NUM_OUTPUTS, rng=np.random.default_rng(i))
        for i, turns in enumerate(TURNS)
    ]


def run_and_compare(
    case: Setup, directory: Path, reference: Reference, draft: Path | None
) -> Counters:
    talks = new_talks()
    counters = run_talks(case, directory, talks, draft=draft)
    for talk in talks:
        assert_like_reference(talk, reference)
    return counters


@pytest.mark.parametrize("case", CASES, ids=str)
def test_guessed_turns_in_company_are_what_transformers_computes(
    case: Setup, checkpoints: Mapping[str, Path], references: Mapping[str, Reference]
) -> None:
    """The draft model is another family of random weights: nearly all it guesses is wrong."""
    is_model = case.speculation.drafter is Drafter.MODEL
    draft = checkpoints[STRANGERS[case.family]] if is_model else None
    counters = run_and_compare(case, checkpoints[case.family], references[case.family], draft)
    assert counters.draft_tokens > counters.accepted_tokens
    assert is_model or counters.accepted_tokens > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_guesses_for_itself_is_right_through_turns_chunks_and_retractions(
    family: str, checkpoints: Mapping[str, Path], references: Mapping[str, Reference]
) -> None:
    """Wherever the target's KV comes from, the draft model's is there too, and right."""
    directory = checkpoints[family]
    case = Setup(
        family, 4, 7, True, max_total_tokens=160, speculation=Speculation(4, Drafter.MODEL)
    )
    talks = new_talks()
    counters = run_talks(case, directory, talks, draft=directory)
    for talk in talks:
        assert_like_reference(talk, references[family])
    assert sum(talk.num_retractions for talk in talks) > 0, "the pool was never short"
    assert counters.draft_tokens == counters.accepted_tokens > 50
    assert counters.cached_tokens > 0


@pytest.mark.parametrize("drafter", [None, *Drafter])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_turns_say_what_generate_says(
    family: str, drafter: Drafter | None, checkpoints: Mapping[str, Path]
) -> None:
    directory = checkpoints[family]
    speculation = Speculation() if drafter is None else Speculation(4, drafter)
    talk = Talk(SessionId("s"), (19,), num_outputs=60, rng=np.random.default_rng(5))
    draft = directory if drafter is Drafter.MODEL else None
    counters = run_talks(
        Setup(family, 16, 64, overlap=True, speculation=speculation), directory, [talk], draft=draft
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    generated = model.generate(
        torch.tensor([talk.tokens[:19]]),
        attention_mask=torch.ones(1, 19, dtype=torch.int64),
        max_new_tokens=60,
        min_new_tokens=60,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    assert talk.tokens == generated[0].tolist()
    if drafter is not None:
        assert counters.accepted_tokens > 0
        assert counters.steps < 60
