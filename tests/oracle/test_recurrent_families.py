"""A state cannot take back a token. So a forward that verifies guesses leaves one after each of
them, and its turn goes on from the last that was right: to what `transformers` computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from cache.types import Tokens
from session_server.core.ids import SessionId
from session_server.engine import drafting
from session_server.engine.config import Drafter, Speculation
from session_server.models.errors import DraftMismatch
from tests.depth import cases
from tests.oracle.checkpoints import RECURRENT_FAMILIES
from tests.oracle.talks import Reference, Setup, Talk, assert_like_reference, run_talks

TURNS = ((20, 1, 3), (7, 5, 1), (1, 33, 2))
STRANGER = "qwen2"
CASES = [
    Setup(family, page_size, chunk, overlap, speculation=Speculation(num_drafts, drafter))
    for family, (page_size, num_drafts, chunk), overlap, drafter in cases(
        RECURRENT_FAMILIES, ((1, 4, 7), (4, 2, 64), (16, 4, 64)), (False, True), Drafter
    )
]


Prompter = Callable[[str], None]
"""Has whoever guesses for a family know what comes."""


def new_talks() -> list[Talk]:
    return [
        Talk(SessionId(f"s{i}"), turns, num_outputs=24, rng=np.random.default_rng(i))
        for i, turns in enumerate(TURNS)
    ]


@pytest.fixture(scope="module")
def histories(checkpoints: Mapping[str, Path]) -> Callable[[str], list[list[int]]]:
    """What the talks come to in a family, nobody guessing."""

    @cache
    def of(family: str) -> list[list[int]]:
        talks = new_talks()
        run_talks(Setup(family, 4, 64, False), checkpoints[family], talks)
        return [talk.tokens for talk in talks]

    return of


@pytest.fixture
def prompter(
    histories: Callable[[str], list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> Prompter:
    """Guesses what was said before, and every fourth token wrong: random models hardly repeat
    themselves."""

    def prompt(family: str) -> None:
        def look_up(tokens: Tokens, num_guesses: int) -> Tokens:
            begun = tokens.tolist()
            known = next(h for h in histories(family) if h[: len(begun)] == begun)
            coming = enumerate(known[len(begun) :][:num_guesses], len(begun))
            return np.array([t if at % 4 else t ^ 1 for at, t in coming], np.int32)

        histories(family)
        monkeypatch.setattr(drafting, "look_up", look_up)

    return prompt


@pytest.mark.parametrize("case", CASES, ids=str)
def test_guessed_turns_go_on_from_the_last_accepted_draft(
    case: Setup,
    prompter: Prompter,
    checkpoints: Mapping[str, Path],
    references: Mapping[str, Reference],
) -> None:
    """The draft model is another family of random weights: nearly all it guesses is wrong."""
    is_model = case.speculation.drafter is Drafter.MODEL
    talks = new_talks()
    draft = checkpoints[STRANGER] if is_model else None
    prompter(case.family)
    counters = run_talks(case, checkpoints[case.family], talks, draft=draft)
    for talk in talks:
        assert_like_reference(talk, references[case.family])
    assert counters.draft_tokens > counters.accepted_tokens
    assert is_model or counters.accepted_tokens > 50


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_guessed_turns_that_give_way_and_come_back_go_on_right(
    family: str,
    prompter: Prompter,
    checkpoints: Mapping[str, Path],
    references: Mapping[str, Reference],
) -> None:
    talks = new_talks()
    prompter(family)
    case = Setup(family, 4, 7, True, max_total_tokens=112, speculation=Speculation(4))
    counters = run_talks(case, checkpoints[family], talks)
    for talk in talks:
        assert_like_reference(talk, references[family])
    assert sum(talk.num_retractions for talk in talks) > 0, "the pool was never short"
    assert counters.draft_tokens > counters.accepted_tokens > 50


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_a_draft_model_whose_states_nobody_keeps_is_refused(
    family: str, checkpoints: Mapping[str, Path]
) -> None:
    directory = checkpoints[family]
    talk = Talk(SessionId("s"), (20, 3), num_outputs=16)
    case = Setup(family, 4, 64, True, speculation=Speculation(4, Drafter.MODEL))
    with pytest.raises(DraftMismatch, match="it has recurrent layers"):
        run_talks(case, directory, [talk], draft=directory)
