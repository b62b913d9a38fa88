"""A state cannot take back a token, so nobody guesses for a model that has one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from session_server.core.ids import SessionId
from session_server.engine.settings import Drafter, Speculation
from session_server.models.errors import DraftMismatch
from tests.oracle.checkpoints import RECURRENT_FAMILIES
from tests.oracle.talks import Setup, Talk, run_talks


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
