"""A manager over an engine on paper, one per test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sessions.world import World


@pytest.fixture
def world() -> Iterator[World]:
    with World() as made:
        yield made
