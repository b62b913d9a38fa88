"""What states add to the proof of families: what a session went through does not show in its
logits.

A session that was rolled back, cut, cooled, rewound, forked or retracted answers its next turn like
one that never was, with the logits of a full forward over the tokens it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from session_server.core.ids import SessionId
from session_server.engine.settings import Drafter, Speculation
from session_server.models.errors import DraftMismatch
from tests.oracle.checkpoints import RECURRENT_FAMILIES
from tests.oracle.stories import EVENTS, Event, tell
from tests.oracle.talks import Reference, Setup, Talk, assert_like_reference, run_talks

SETUPS = [
    Setup(family, page_size, 7, overlap)
    for family in RECURRENT_FAMILIES
    for page_size in (1, 4, 16, 256)
    for overlap in (False, True)
]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
@pytest.mark.parametrize("event", EVENTS)
def test_the_next_turn_is_that_of_a_session_that_never_did_it(
    event: Event,
    setup: Setup,
    checkpoints: Mapping[str, Path],
    references: Mapping[str, Reference],
) -> None:
    """At every residue of a page of four, and around the end of one of sixteen."""
    for first in range(13, 19):
        talk = tell(event, setup, checkpoints[setup.family], first)
        assert_like_reference(talk, references[setup.family])


@pytest.mark.parametrize("overlap", [False, True], ids=["lockstep", "overlap"])
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_retracted_turns_resume_with_identical_output(
    family: str,
    overlap: bool,
    checkpoints: Mapping[str, Path],
    references: Mapping[str, Reference],
) -> None:
    talks = [
        Talk(SessionId(f"s{i}"), (9, 4), num_outputs=24, rng=np.random.default_rng(i))
        for i in range(6)
    ]
    run_talks(Setup(family, 4, 16, overlap, max_total_tokens=88), checkpoints[family], talks)
    assert sum(talk.num_retractions for talk in talks) > 0, "the pool was never short"
    for talk in talks:
        assert_like_reference(talk, references[family])


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_guesses_are_not_made_and_a_draft_model_is_refused(
    family: str, checkpoints: Mapping[str, Path]
) -> None:
    directory = checkpoints[family]
    talk = Talk(SessionId("s"), (20, 3), num_outputs=16)
    counters = run_talks(Setup(family, 4, 64, True, speculation=Speculation(4)), directory, [talk])
    assert counters.draft_tokens == 0
    with pytest.raises(DraftMismatch, match="cannot take back a wrong guess"):
        run_talks(
            Setup(family, 4, 64, True, speculation=Speculation(4, Drafter.MODEL)),
            directory,
            [talk],
            draft=directory,
        )
