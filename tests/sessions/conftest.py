"""A manager over an engine on paper, one per test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rig.postgres import Postgres, running
from tests.sessions.world import World


@pytest.fixture
def world() -> Iterator[World]:
    with World() as made:
        yield made


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A server of PostgreSQL; without one the test is skipped."""
    with running(is_synced=False) as server:
        yield server


@pytest.fixture(scope="session")
def empty_databases() -> list[str]:
    """Those that tests have had, and nothing is in them."""
    return []


@pytest.fixture
def url(postgres: Postgres, empty_databases: list[str]) -> Iterator[str]:
    """An empty database."""
    made = empty_databases.pop() if empty_databases else postgres.new_database()
    yield made
    postgres.empty(made)
    empty_databases.append(made)
