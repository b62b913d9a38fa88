"""Every scenario has its story, and every story falls when its guard is taken away."""

from __future__ import annotations

import pytest

from cache.errors import CacheError
from session_server.core.errors import SessionServerError
from tests.mutants.mutant import Mutant
from tests.scenarios.catalogue import CATALOGUE, NOT_APPLICABLE
from tests.scenarios.registry import Scenario, scenarios
from tests.web import serving

SHOWN = (AssertionError, CacheError, SessionServerError, TimeoutError, pytest.fail.Exception)
"""How a story fails for the reason it tells of; anything else is an accident."""

HOPELESS_S = 10.0
"""When a story that waits for what cannot come is given up; each takes a second at most."""

GUARDED = [
    pytest.param(found, guard, id=f"{found.name}-{index}")
    for found in scenarios()
    for index, guard in enumerate(found.guards)
]


@pytest.mark.parametrize(("found", "guard"), GUARDED)
def test_a_story_fails_without_its_guard(
    found: Scenario, guard: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "DEADLINE_S", HOPELESS_S)
    with guard.apply(), pytest.raises(SHOWN):
        found.story()


def test_every_scenario_has_a_story_or_a_reason_why_not_and_none_has_both() -> None:
    told = {found.id for found in scenarios()}
    assert told | set(NOT_APPLICABLE) == set(CATALOGUE)
    assert not told & set(NOT_APPLICABLE)
