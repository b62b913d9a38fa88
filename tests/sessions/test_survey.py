"""A look through all sessions of a store costs the interpreter no more than its answer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from session_server.core.owner import Owner
from session_server.sessions.overview import digest_of_owner
from session_server.sessions.store.database import Database
from session_server.sessions.store.records import SessionRow
from session_server.sessions.store.survey import SurveyQuestion, survey

OWNERS = ("alice", "bob", "carol")
NUM_SESSIONS = 300
WITHOUT = frozenset({1, 2, 3, 299})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store in which each third session is of the same owner, and the last ten have expired."""
    database = Database(tmp_path / "store")
    with database.transaction():
        for number in range(1, NUM_SESSIONS + 1):
            owner, expires_s = OWNERS[number % 3], 5.0 if number > NUM_SESSIONS - 10 else 50.0
            name = f"name-{number}"
            database.put(SessionRow(number, owner, name, b"", expires_s, b"", number, 0, 0), b"")
    database.close()
    return database.path


@pytest.mark.parametrize(
    ("text", "num_digests", "num_matching"),
    [
        ("", 0, 286 + 1),  # one of those left out has expired
        ("name-", 0, 287),
        ("name-4", 0, 11),
        ("col", 0, 287),
        ("cold", 0, 287),
        ("nobody", 0, 0),
        (digest_of_owner(Owner("bob")), 3, 96),
        (digest_of_owner(Owner("bob"))[2:5], 3, 96),
    ],
)
def test_an_owner_is_digested_once_and_only_where_that_may_match(
    path: Path, text: str, num_digests: int, num_matching: int
) -> None:
    asked = Counter[str]()

    def digest(owner_id: str) -> str:
        asked[owner_id] += 1
        return digest_of_owner(Owner(owner_id))

    numbers: list[int] = []
    after: tuple[float, int] | None = None
    while True:
        question = SurveyQuestion("tokens", after, 20, text, digest, WITHOUT, now_s=10.0)
        answer = survey(path, question)
        assert answer.num_matching == num_matching
        assert asked.total() == num_digests
        assert set(asked.values()) <= {1}
        asked.clear()
        numbers += [row.number for _, row in answer.found]
        if len(answer.found) < 20:
            break
        place, row = answer.found[-1]
        after = place, row.number
    assert numbers == sorted(numbers, reverse=True)
    assert len(numbers) == num_matching
    assert not WITHOUT & set(numbers)
