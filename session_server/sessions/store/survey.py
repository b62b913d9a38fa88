"""Look through all sessions of a store for a page of them, on a thread and a connection of its own.

What is looked for has no index: all rows are read, a hundred thousand in about a tenth of a second.
SQLite does that by itself, so that nobody waits for the interpreter meanwhile: of what is read, no
more comes back than the page, and where owners are looked for each of them once.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

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

STATE: Final = "cold"
"""The state of all of them, as a list of sessions shows it."""

_IN_DIGEST: Final = re.compile(r"[0-9a-f]+")

_CONDITION: Final = (
    "expires >= :now_s"  # noqa: S608 - our own words
    " AND number NOT IN (SELECT value FROM json_each(:without))"
    f" AND (:text = '' OR instr('{STATE}', :text) OR instr(id, :text)"
    " OR owner IN (SELECT value FROM json_each(:owners)))"
)


@dataclass(frozen=True, slots=True)
class SurveyQuestion:
    """Ask for up to `limit` sessions behind a place and a number, None: from the first one on.

    `text`: what an id, the `digest` of the owner's id (hexadecimal digits) or the state must
    contain. `without`: numbers of sessions that are left out, and not counted.
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
        values: dict[str, object] = {
            "now_s": question.now_s,
            "text": question.text,
            "without": _json(sorted(question.without)),
            "owners": _json(owners_with(question, partial(_owners, database))),
        }
        counted = f"SELECT count(*) FROM sessions WHERE {_CONDITION}"  # noqa: S608 - our own words
        (num_matching,) = database.execute(counted, values).fetchone()
        place = PLACES[question.sort]
        query = f"SELECT {place}, {COLUMNS} FROM sessions WHERE {_CONDITION}"  # noqa: S608
        if question.after is not None:
            query += f" AND ({place}, number) > (:place, :number)"
            values |= dict(zip(("place", "number"), question.after, strict=True))
        query += f" ORDER BY {place}, number LIMIT :limit"
        values["limit"] = question.limit
        found = [(where, SessionRow(*row)) for where, *row in database.execute(query, values)]
    return SurveyAnswer(found, int(num_matching))


def owners_with(question: SurveyQuestion, read: Callable[[], list[str]]) -> list[str]:
    """Return those of all owners whose digest has the text; nobody's has what is not hexadecimal.
    Reads them only where one may."""
    if _IN_DIGEST.fullmatch(question.text) is None:
        return []
    return [owner for owner in read() if question.text in question.digest(owner)]


def _owners(database: sqlite3.Connection) -> list[str]:
    return [owner for (owner,) in database.execute("SELECT DISTINCT owner FROM sessions")]


def _json(values: list[int] | list[str]) -> str:
    return msgspec.json.encode(values).decode()
