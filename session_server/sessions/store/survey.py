"""Look through all sessions of a store for a page of them, on a thread and a connection of its own.

What is looked for has no index: all rows are read, a hundred thousand in about a tenth of a second.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from session_server.sessions.store.records import SessionRow
from session_server.sessions.store.schema import COLUMNS

PLACES: Final[Mapping[str, str]] = {
    "opened": "0.0",
    "active": "1e12 - expires",
    "tokens": "-1.0 * num_tokens",
    "turns": "-1.0 * num_turns",
    "cached": "2.0",
    "ttft": "2.0",
}
"""By what sessions are sorted, the smaller the earlier: as `SessionOverview` does. How they were
used last the rows do not say: these come behind all that are in memory."""

_STATE: Final = "cold"

_CONDITION: Final = (
    "expires >= :now_s AND (:text = '' OR instr(id, :text) OR instr(digest(owner), :text)"
    f" OR instr('{_STATE}', :text))"
)


@dataclass(frozen=True, slots=True)
class SurveyQuestion:
    """Ask for up to `limit` sessions behind a place and a number, None: from the first one on.

    `text`: what an id, the `digest` of the owner's id or the state must contain. `without`: numbers
    of sessions that are left out, and not counted.
    """

    sort: str
    after: tuple[float, int] | None
    limit: int
    text: str
    digest: Callable[[str], str]
    without: frozenset[int]
    now_s: float = 0.0


class SurveyAnswer(NamedTuple):
    """Hold sessions with their places, and how many match."""

    found: list[tuple[float, SessionRow]]
    num_matching: int


def survey(path: Path, question: SurveyQuestion) -> SurveyAnswer:
    """Return what a store has. Raises sqlite3.Error."""
    uri = f"{path.absolute().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as database:
        database.create_function("digest", 1, question.digest, deterministic=True)
        values = {"now_s": question.now_s, "text": question.text}
        counted = f"SELECT number FROM sessions WHERE {_CONDITION}"  # noqa: S608 - our own words
        numbers = database.execute(counted, values)
        num_matching = sum(number not in question.without for (number,) in numbers)
        place = PLACES[question.sort]
        query = f"SELECT {place}, {COLUMNS} FROM sessions WHERE {_CONDITION}"  # noqa: S608
        if question.after is not None:
            query += f" AND ({place}, number) > (:place, :number)"
            values |= dict(zip(("place", "number"), question.after, strict=True))
        query += f" ORDER BY {place}, number LIMIT :limit"
        # Those left out are rows too.
        values["limit"] = question.limit + len(question.without)
        found: list[tuple[float, SessionRow]] = []
        for where, *columns in database.execute(query, values):
            row = SessionRow(*columns)
            if row.number not in question.without:
                found.append((where, row))
            if len(found) == question.limit:
                break
    return SurveyAnswer(found, num_matching)
