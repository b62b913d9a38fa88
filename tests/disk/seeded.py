"""Bugs of a store that only a disk shows; a campaign must find each of them."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Edit, Mutant

_DATABASE: Final = "session_server.sessions.store.database"
_LOCK: Final = "session_server.sessions.store.lock:StoreLock"
_WRITER: Final = "session_server.sessions.store.writer:GroupCommits"

WRITING: Final = {
    "no sync": Mutant(
        "a commit does not wait for the disk",
        "systematic",
        Edit(f"{_DATABASE}:Database._open_to_write", "'FULL' if", "'OFF' if"),
    ),
    "sync at checkpoints": Mutant(
        "a commit is left to the system, as with `--durability relaxed`",
        "systematic",
        Edit(f"{_DATABASE}:Database._open_to_write", "'FULL' if", "'NORMAL' if"),
    ),
    "told early": Mutant(
        "a group is told before it is committed",
        "systematic",
        Edit(
            f"{_WRITER}._run",
            "errors = self._commit(group)",
            "errors, held = [None] * len(group), getattr(self, 'held', [])\n"
            "            self.held = group\n"
            "            self._commit(held)",
        ),
    ),
    "parent not synced": Mutant(
        "the directory of a new store is not synced into its parent",
        "systematic",
        Edit(f"{_LOCK}.alone", "sync_above(directory.resolve())", "pass"),
    ),
    "journal in memory": Mutant(
        "pages are changed in place, and what they were is in memory",
        "systematic",
        Edit(
            f"{_DATABASE}:Database._open_to_write",
            'WAL").fetchone()\n        if mode != "wal"',
            'MEMORY").fetchone()\n        if mode == "wal"',
        ),
        Edit(
            f"{_DATABASE}:Database.__init__", "OpenFiles(self.path, directory / LOCK_NAME)", "None"
        ),
    ),
    "put in two commits": Mutant(
        "a session that is written whole is deleted in a commit of its own",
        "systematic",
        Edit(
            f"{_DATABASE}:Database.put",
            "self.delete(row.number)\n",
            "self.delete(row.number)\n"
            '        execute("COMMIT")\n        execute("BEGIN IMMEDIATE")\n',
        ),
    ),
    "secret in another commit": Mutant(
        "the tables of a new store are committed before its secret",
        "systematic",
        Edit(
            f"{_DATABASE}:Database._migrate",
            "                    secret = secrets",
            '                    self._writer.execute("COMMIT")\n'
            '                    self._writer.execute("BEGIN IMMEDIATE")\n'
            "                    secret = secrets",
        ),
    ),
    "vacuum by a rename": Mutant(
        "a smaller database is written beside the old one, and renamed without a sync",
        "systematic",
        Edit(
            f"{_DATABASE}:Database.vacuum",
            'self._writer.execute("VACUUM")',
            'self._writer.execute("PRAGMA synchronous = OFF")\n'
            "        smaller = f'{self.path}.smaller'\n"
            "        Path(smaller).unlink(missing_ok=True)\n"
            "        self._writer.execute('VACUUM INTO ?', (smaller,))\n"
            "        os.rename(smaller, self.path)",
        ),
    ),
}
"""Bugs of whoever ran before the crash."""

KILLED: Final = {
    "what was left is believed": Mutant(
        "what a killed process had not synced is told of by the next one as it is",
        "systematic",
        Edit(
            f"{_DATABASE}:Database.__init__",
            "write_again(log, committed_bytes(log))",
            "pass",
        ),
        Edit(f"{_DATABASE}:Database._note_made", '"PRAGMA wal_checkpoint(TRUNCATE)"', '"SELECT 1"'),
    ),
    "only a new directory is synced": Mutant(
        "the name of a directory that is there already is taken to be on disk",
        "systematic",
        Edit(
            f"{_LOCK}.alone",
            "            make_directory(directory)\n            sync_above(directory.resolve())\n",
            "            if not directory.exists():\n"
            "                make_directory(directory)\n"
            "                sync_above(directory.resolve())\n",
        ),
    ),
}
"""Bugs that show where a process was killed."""

FAILING: Final = {
    "error ignored": Mutant(
        "a commit that has failed is told as one that has not",
        "systematic",
        Edit(f"{_WRITER}._try", "return error", "return None"),
    ),
    "a failed sync of names": Mutant(
        "the names in the directory are left to SQLite, which ignores that it fails",
        "systematic",
        Edit(f"{_DATABASE}:Database.__init__", "            sync_directory(directory)\n", ""),
        Edit(f"{_DATABASE}:Database._note_made", "        sync_directory(self.path.parent)\n", ""),
    ),
    "an end that raises": Mutant(
        "a store that cannot write its last pages cannot be closed",
        "systematic",
        Edit(f"{_DATABASE}:Database.close", "suppress(sqlite3.Error)", "suppress()"),
    ),
}
"""Bugs that show where calls fail."""

READING: Final = {
    "log removed": Mutant(
        "a log that an earlier server left is removed",
        "systematic",
        Edit(
            f"{_DATABASE}:Database.__init__",
            "            self._writer = self._open",
            "            Path(f'{self.path}-wal').unlink(missing_ok=True)\n"
            "            self._writer = self._open",
        ),
    ),
    "checksum of entries ignored": Mutant(
        "an entry is read whatever its checksum is",
        "systematic",
        Edit(
            "session_server.sessions.store.records:_decoded",
            "zlib.crc32(payload) != int.from_bytes",
            "0 == int.from_bytes",
        ),
    ),
}
"""Bugs of whoever opens what a crash left."""
