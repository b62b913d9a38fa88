"""What a store may hold, by what was asked of it and what it told: the judge of its images.

It knows nothing of files. A store has what it told to be on disk, as it was asked for, in the order
in which it was asked for. Behind the last of that it may have what it has told nothing of, or that
it failed: nothing, or what follows each other. Where calls fail, some of that may be missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from session_server.sessions.history_change import AnswersChange, HistoryChange, ItemsChange
from session_server.sessions.store.lock import StoreUnusable
from session_server.sessions.store.records import (
    EndRecord,
    LogEntry,
    SessionRow,
    StoredSettings,
    encode_entry,
    encode_settings,
)
from session_server.sessions.store.session_store import SessionStore

SETTINGS: Final = StoredSettings(900.0, {"k": "v"}, False, 1.0, b"digest", None, 1.0)
OWNER: Final = "owner"
NOW_S: Final = 10.0
_AFTERWARDS: Final = 1 << 40


class Held(NamedTuple):
    """A session. `tags`: its entries, each named by a number that is given once. `touched`: how
    often its row was written."""

    name: str
    tags: tuple[int, ...]
    touched: int


State = dict[int, Held]


class Asked(NamedTuple):
    """A write that was asked for. `tag`: its entry, 0 without one."""

    order: int
    verb: str
    number: int
    name: str
    tag: int
    touched: int

    def on(self, state: State) -> State:
        """Return what a store holds after it."""
        after = dict(state)
        held = after.get(self.number)
        if self.verb == "put":
            for number in [at for at, other in state.items() if other.name == self.name]:
                del after[number]
            after[self.number] = Held(self.name, (self.tag,), self.touched)
        elif self.verb == "delete":
            after.pop(self.number, None)
        elif held is not None:
            tags = (*held.tags, self.tag) if self.tag else held.tags
            after[self.number] = Held(held.name, tags, self.touched)
        return after


def entry_of(tag: int) -> LogEntry:
    """Return the entry that a number names: no two have the same tokens, nor the same length."""
    seed = blake2b(tag.to_bytes(8, "little")).digest()
    num_words = 1 << tag % 9  # 64 bytes to 16 KB: rows of one page, and of several
    change = HistoryChange(
        0, seed * num_words, ItemsChange(0, (), tag), AnswersChange(0, (), ()), None, 1, False, 0
    )
    return LogEntry(change, (EndRecord(tag, seed, "stop", "", 1, 0, 5, 4, 3, 2, 1, 0.5),))


def row_of(asked: Asked, num_entries: int) -> SessionRow:
    """Return the row that a write comes with."""
    settings, expires_s = encode_settings(SETTINGS), 100.0 + asked.touched
    counts = (asked.touched, asked.touched, asked.touched, num_entries)
    return SessionRow(asked.number, OWNER, asked.name, b"model", expires_s, settings, *counts)


class StoreHistory:
    """Judge images of a store by the notes of a program that used it, taken one by one."""

    def __init__(self, directory: str, *, may_fail: bool = False) -> None:
        self._directory, self._may_fail = directory, may_fail
        self._secret: str | None = None
        self._states: list[State] = [{}]
        """What it may have held when the last thing was told of."""

        self._tail: list[Asked] = []
        """What was asked for behind that, in order."""

        self._failed: set[int] = set()
        self.phase = ""
        self.num_notes = 0
        self._complaint: str | None = None

    def take(self, note: dict[str, Any]) -> None:
        """Know what the program has seen."""
        self.num_notes += 1
        match note:
            case {"asked": asked}:
                self._tail.append(Asked(*asked))
            case {"told": order, "error": None}:
                place = [asked.order for asked in self._tail].index(order)
                self._states = _unique([self._tail[place].on(state) for state in self._states])
                del self._tail[: place + 1]
            case {"told": order}:
                self._failed.add(order)
            case {"opened": secret}:
                if self._secret not in {None, secret}:
                    self._complaint = "it was opened with another secret"
                self._secret = secret
                self._states, self._tail = self.allowed(), []
            case {"phase": phase}:
                self.phase = phase

    @property
    def labels(self) -> Iterator[str]:
        """Yield what is going on."""
        yield self.phase
        waits = [asked for asked in self._tail if asked.order not in self._failed]
        yield from {asked.verb for asked in waits}

    def allowed(self) -> list[State]:
        """Return what a store may hold now."""
        found, tail = list(self._states), self._tail
        for state in self._states:
            before = state
            for lost, asked in enumerate(tail):
                # A commit may have failed, and the next one not, before anybody is told of either,
                # or of what was there before them.
                starts = range(lost + 1, len(tail)) if self._may_fail else ()
                for start in starts:
                    after = before
                    for other in tail[start:]:
                        after = other.on(after)
                        found.append(after)
                before = asked.on(before)
                found.append(before)
        return _unique(found)

    def check(self, image: Path) -> str | None:
        """Open an image, and go on writing. Return what is wrong, if anything."""
        return self._complaint or asyncio.run(self._check(image / self._directory))

    async def _check(self, directory: Path) -> str | None:
        try:
            store = SessionStore.in_directory(
                directory, model=b"model", wall=lambda: NOW_S, clock=lambda: NOW_S
            )
        except StoreUnusable as error:
            return f"cannot be opened: {error}"
        try:
            store.start(asyncio.get_running_loop())
            problem = self._problem(store)
            if problem is None:
                problem = await _goes_on(store)
        except Exception as error:  # noqa: BLE001 - no error is right
            problem = f"cannot be used: {error!r}"
        finally:
            await store.close()
        return problem

    def _problem(self, store: SessionStore) -> str | None:
        if self._secret is not None and store.secret.hex() != self._secret:
            return "it has another secret"
        held = state_of(store)
        if isinstance(held, str):
            return held
        allowed = self.allowed()
        if held not in allowed:
            return f"it holds\n  {held}\nand not one of\n  " + "\n  ".join(map(str, allowed))
        ((whole,),) = store._database._reader.execute("PRAGMA integrity_check").fetchall()
        return None if whole == "ok" else f"SQLite says: {whole}"


def state_of(store: SessionStore) -> State | str:
    """Return what a store holds, or what in it was never written. Raises Damaged, sqlite3.Error."""
    state = {}
    for row in store._database.walk(None):
        if row.name != row.session_id:
            continue  # it has made way for another one of its name, and is nobody's
        entries = [entry for part, _ in store.slices(row) for entry in part]
        tags = tuple(entry.turns[0].key for entry in entries)
        for tag, entry in zip(tags, entries, strict=True):
            if entry != entry_of(tag):
                return f"entry {tag} of session {row.number} was never written so"
        asked = Asked(0, "", row.number, row.session_id, 0, row.num_turns)
        num_bytes = sum(len(encode_entry(entry)) for entry in entries)
        if row != replace(row_of(asked, len(tags)), num_bytes=num_bytes):
            return f"the row of session {row.number} was never written so: {row}"
        state[row.number] = Held(row.session_id, tags, row.num_turns)
    return state


async def _goes_on(store: SessionStore) -> str | None:
    told: list[Exception | None] = []
    asked = Asked(0, "put", _AFTERWARDS, "afterwards", 1, 1)
    store.put(row_of(asked, 0), [encode_entry(entry_of(1))], told.append)
    await store.flush()
    if told != [None]:
        return f"a session cannot be written: {told}"
    if store.find(OWNER, "afterwards") is None:
        return "a session that was written is not there"
    return None


def _unique(states: list[State]) -> list[State]:
    found: list[State] = []
    for state in states:
        if state not in found:
            found.append(state)
    return found
