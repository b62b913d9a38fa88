"""A program that uses a store as the server does, and notes what it asked for and was told.

As a program: `store_program LOG BUG`, in the directory that is watched. It reads lines of JSON: in
which directory a store is, the seed of what it does with it, and the number of its first write. It
says "now" when whatever fails must fail no longer, waits for a line, and writes what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from session_server.sessions.store import deleted_rows
from session_server.sessions.store.database import Database
from session_server.sessions.store.lock import StoreUnusable
from session_server.sessions.store.records import encode_entry
from session_server.sessions.store.schema import SCHEMA_VERSION
from session_server.sessions.store.session_store import SessionStore
from tests.disk.recording import Notes
from tests.disk.seeded import FAILING, KILLED, WRITING
from tests.disk.store_history import NOW_S, Asked, entry_of, row_of
from tests.rig.decisions import Decisions

NUM_NAMES: Final = 6
ROUNDS: Final = 7
DELETED_ENTRIES: Final = 2
"""Of a session in one write, so that many are deleted in parts."""

CHECKPOINT_PAGES: Final = 16
"""Of the log, so that checkpoints come often: SQLite's own is 1,000."""


_OLDER: Final = (
    "DROP TABLE parts",
    "DROP TABLE records",
    "CREATE TABLE older (session INTEGER NOT NULL REFERENCES sessions (number) ON DELETE CASCADE,"
    " position INTEGER NOT NULL, entry BLOB NOT NULL, PRIMARY KEY (session, position))"
    " STRICT, WITHOUT ROWID",
    "INSERT INTO older SELECT * FROM entries",
    "DROP TABLE entries",
    "ALTER TABLE older RENAME TO entries",
    "ALTER TABLE sessions DROP COLUMN num_bytes",
    "PRAGMA user_version = 1",
)
"""What makes a store one of version 1, with what it has."""


class User:
    """Whoever uses a store: it gives each session one write at a time, and writes those whole whose
    last write has failed."""

    def __init__(self, directory: Path, notes: Notes, seed: int, first: int) -> None:
        self._directory, self._notes = directory, notes
        self._chance = Decisions(seed, "user", first)
        self._store: SessionStore
        self._last = first
        self._numbers: dict[str, int] = {}
        self._num_entries: dict[str, int] = {}
        self._busy: set[str] = set()
        self._behind: dict[str, str] = {}
        self._undeleted: dict[int, Asked] = {}

    async def live(self, heal: Callable[[], None]) -> None:
        """Use a store that is opened and closed a few times, and made smaller. It is made one of
        version 1, and brought to this one when it is opened again."""
        is_new, found = not self._directory.exists(), self._find_version()
        await self._use(heal, "creation" if is_new else "migration" if found == 1 else "opening")
        await self._use(heal, "migration" if self._make_older() else "opening")
        await self._open(heal, "opening")
        await self._round()
        heal()
        await self._recover()
        await self._close()

    async def _use(self, heal: Callable[[], None], phase: str) -> None:
        await self._open(heal, phase)
        for _ in range(ROUNDS):
            await self._round()
        await self._close()
        self._vacuum()

    def _find_version(self) -> int:
        """Return the version of a store that is there; that of a new one without one."""
        uri = f"{(self._directory / Database.FILE).absolute().as_uri()}?mode=ro"
        with contextlib.suppress(sqlite3.OperationalError):
            with contextlib.closing(sqlite3.connect(uri, uri=True)) as found:
                (version,) = found.execute("PRAGMA user_version").fetchone()
            return int(version)
        return SCHEMA_VERSION

    def _make_older(self) -> bool:
        """Have the store be of version 1, if that succeeds; return whether it is."""
        with (
            contextlib.suppress(StoreUnusable, sqlite3.Error),
            contextlib.closing(Database(self._directory)) as opened,
            opened.transaction(),
        ):
            for statement in _OLDER:
                opened._writer.execute(statement)
        return self._find_version() == 1

    async def _open(self, heal: Callable[[], None], phase: str) -> None:
        self._notes.add(phase=phase)
        try:
            self._store = self._make()
        except StoreUnusable as error:
            self._notes.add(refused=str(error))
            heal()
            self._store = self._make()
        self._notes.add(opened=self._store.secret.hex())
        self._notes.add(phase="writing")
        opened = self._store._database
        opened._writer.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        rows = list(opened.walk(None))
        self._numbers = {row.session_id: row.number for row in rows}
        self._num_entries = {row.session_id: row.num_entries for row in rows}
        for writes in (self._behind, self._busy, self._undeleted):
            writes.clear()
        self._store.start(asyncio.get_running_loop())

    def _make(self) -> SessionStore:
        return SessionStore.in_directory(
            self._directory, model=b"model", wall=lambda: NOW_S, clock=lambda: NOW_S
        )

    async def _close(self) -> None:
        self._notes.add(phase="closing")
        await self._store.close()

    def _vacuum(self) -> None:
        with (
            contextlib.suppress(StoreUnusable, sqlite3.Error),
            contextlib.closing(Database(self._directory)) as opened,
        ):
            self._notes.add(phase="vacuum")
            opened.vacuum()

    async def _round(self) -> None:
        """Ask for a few things at once, and wait for them or not."""
        for _ in range(self._chance.between(1, 4)):
            self._ask(f"s{self._chance.below(NUM_NAMES)}")
        if self._chance.happens(0.7):
            await self._store.flush()
        else:
            await asyncio.sleep(0.001)

    def _ask(self, name: str) -> None:
        draw = self._chance.share()
        if name in self._busy:
            return
        if name not in self._numbers or name in self._behind or draw < 0.1:
            self._write("put", name)
        elif draw < 0.25:
            self._delete(name)
        elif draw < 0.4:
            self._write("touch", name)
        else:
            self._write("append", name)

    def _asked(self, verb: str, name: str, number: int, tag: int) -> Asked:
        asked = Asked(self._last, verb, number, name, tag, self._last)
        self._notes.add(asked=asked)
        return asked

    def _write(self, verb: str, name: str) -> None:
        self._last += 1
        number = self._numbers.setdefault(name, self._last)
        asked = self._asked(verb, name, number, 0 if verb == "touch" else self._last)
        num_entries = 0 if verb == "put" else self._num_entries[name]
        self._busy.add(name)
        told = partial(self._on_told, asked, num_entries + (asked.tag > 0))
        row = row_of(asked, num_entries)
        if verb == "touch":
            self._store.touch(row, told)
        else:
            write = self._store.put if verb == "put" else self._store.append
            write(row, (encode_entry(entry_of(asked.tag)),), told)

    def _on_told(self, asked: Asked, num_entries: int, error: Exception | None) -> None:
        self._note_told(asked, error)
        self._busy.discard(asked.name)
        if error is None:
            self._num_entries[asked.name] = num_entries
            self._behind.pop(asked.name, None)
        else:
            self._behind[asked.name] = str(error)

    def _note_told(self, asked: Asked, error: Exception | None) -> None:
        self._notes.add(told=asked.order, error=None if error is None else str(error))

    def _delete(self, name: str) -> None:
        self._last += 1
        asked = self._asked("delete", name, self._numbers.pop(name), 0)

        def told(error: Exception | None) -> None:
            self._note_told(asked, error)
            if error is not None:
                self._undeleted[asked.number] = asked

        self._store.deletions.delete(asked.number, told)

    async def _recover(self) -> None:
        """There is room again: write what is missing, and go on."""
        self._notes.add(phase="recovery")
        await self._store.flush()
        again = []
        for asked in self._undeleted.values():
            self._last += 1
            again.append(self._asked("delete", asked.name, asked.number, 0))
        while self._store.deletions.num_failed:
            self._store.deletions.retry(is_failing=False)
            await self._store.flush()
        for asked in again:
            self._note_told(asked, None)
        for name in sorted(self._behind):
            self._write("put", name)
        await self._store.flush()
        for _ in range(3):
            await self._round()
        await self._store.flush()
        assert not self._behind, f"could not be written: {self._behind}"
        assert self._store.failure is None, self._store.failure


def main() -> None:
    log, bug = sys.argv[1:]
    notes = Notes(Path(log))

    def heal() -> None:
        print("now", flush=True)
        sys.stdin.readline()

    deleted_rows.DELETED_ENTRIES = DELETED_ENTRIES  # type: ignore[misc]
    with (WRITING | KILLED | FAILING)[bug].apply() if bug else contextlib.nullcontext():
        for line in sys.stdin:
            asked = json.loads(line)
            user = User(Path(asked["name"]), notes, asked["seed"], asked["first"])
            asyncio.run(user.live(heal))
            print("over", flush=True)


if __name__ == "__main__":
    main()
