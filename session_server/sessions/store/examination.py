"""Examine a store, and say what is wrong with it and what to do. Nothing in it is changed."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from session_server.core.kv_place import KV_DIRECTORY, KV_REFUSED
from session_server.core.os_errors import user_name
from session_server.core.owner import shown_owner
from session_server.sessions.store.database import Database
from session_server.sessions.store.lock import StoreUnusable
from session_server.sessions.store.log_frames import log_of
from session_server.sessions.store.open_files import EXPOSED, LOCK_NAME
from session_server.sessions.store.records import Damaged, Parts, SessionRow, check_part
from session_server.sessions.store.schema import SCHEMA_VERSION
from session_server.sessions.store.session_file import file_of

MAX_NAMED: Final = 8
"""Faults of one kind that are named; others are counted."""

MIN_FREE_BYTES: Final = 1 << 30
"""Bytes on the disk of a store below which there is a warning."""

_HOLDERS: Final = {"entries": "sessions", "parts": "records"}


@dataclass(frozen=True, slots=True)
class StoreFinding:
    """Say what was found of one thing. `advice`: what to do; empty if nothing is wrong.
    `is_wrong`: sessions are lost, or cannot be served."""

    topic: str
    found: str
    advice: str = ""
    is_wrong: bool = False


OnProgress = Callable[[int], object]
"""Called with how many more sessions, or records, were examined."""


def examine(directory: Path, on_progress: OnProgress) -> Iterator[StoreFinding]:
    """Yield what is found of a store, beside a server that has it open or without one. A store that
    cannot be read is a finding too."""
    yield _files(directory)
    yield from _kv(directory)
    try:
        database = Database(directory, is_read_only=True)
    except StoreUnusable as error:
        yield StoreFinding("store", str(error), is_wrong=True)
        return
    try:
        yield from _content(database, directory, on_progress)
    except sqlite3.Error as error:
        yield StoreFinding("store", f"cannot be read: {error}", _restore(directory), is_wrong=True)
    finally:
        database.close()
    yield _disk(directory)


def _files(directory: Path) -> StoreFinding:
    """Check that nobody else can read the store."""
    there = [directory, *sorted(directory.iterdir())] if directory.is_dir() else []
    links = [path.name for path in there if path.is_symlink()]
    if links:
        found = f"links, which no server follows: {', '.join(links)}"
        return StoreFinding("files", found, "put the files themselves there", is_wrong=True)
    needed = (path for path in there if path.name in (directory.name, Database.FILE, LOCK_NAME))
    kept = [path.name for path in needed if not os.access(path, os.W_OK, effective_ids=True)]
    if kept:
        found = f"in {directory}, where user {user_name()} cannot write {', '.join(kept)}"
        advice = f"begin a server as their owner, or chown -R {user_name()} {directory}"
        return StoreFinding("files", found, advice)
    exposed = [path.name for path in there if path.stat().st_mode & EXPOSED]
    if exposed:
        advice = f"chmod -R go= {directory}"
        return StoreFinding("files", f"open to other users: {', '.join(exposed)}", advice)
    sizes = _sizes(directory)
    database, log = (
        sizes.pop(Database.FILE, 0),
        sizes.pop(log_of(directory / Database.FILE).name, 0),
    )
    others = "1 other" if len(sizes) == 1 else f"{len(sizes)} others"
    found = f"in {directory}: database {database:,} bytes, its log {log:,}"
    return StoreFinding("files", f"{found}, {others} {sum(sizes.values()):,}")


def _kv(directory: Path) -> Iterator[StoreFinding]:
    """Say what files of KV take, if there is a place for them."""
    if (directory / KV_DIRECTORY).is_dir():
        kv = directory / KV_DIRECTORY
        sizes, refused = _sizes(kv), _sizes(kv / KV_REFUSED)
        found = f"{len(sizes):,} files, {sum(sizes.values()):,} bytes"
        more = f"; {len(refused):,} refused, {sum(refused.values()):,} bytes" if refused else ""
        yield StoreFinding("kv", found + more)


def _sizes(directory: Path) -> dict[str, int]:
    """Return the files of a directory and their bytes. A server may be removing some of them."""
    sizes = dict[str, int]()
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
    return sizes


def _content(
    database: Database, directory: Path, on_progress: OnProgress
) -> Iterator[StoreFinding]:
    version = database.version
    if version != SCHEMA_VERSION:
        advice = "a server of this version changes it when it begins; examine it then"
        yield StoreFinding("schema", f"version {version}, before {SCHEMA_VERSION}", advice)
        return
    yield StoreFinding("schema", f"version {version}")
    faults = database.faults(MAX_NAMED)
    if faults:
        found = "; ".join(" ".join(fault.split()) for fault in faults)
        yield StoreFinding("database", found, _restore(directory), is_wrong=True)
    else:
        yield StoreFinding("database", "pages, tables and indexes are whole")
    for table, num_rows in sorted(database.strays().items()):
        advice = f"export the sessions, and import them into a new store: {directory} has lost some"
        found = f"{num_rows:,} {table} of {_HOLDERS.get(table, 'rows')} that are not there"
        yield StoreFinding(table, found, advice, is_wrong=True)
    yield _sessions(database, directory, on_progress)
    yield _records(database, on_progress)


def _sessions(database: Database, directory: Path, on_progress: OnProgress) -> StoreFinding:
    now_s = time.time()
    num_sessions, num_expired, num_tokens = 0, 0, 0
    damaged, ids = list[str](), list[str]()
    for rows in database.slices():
        for row in rows:
            why = _fault_of(row, database)
            if why is not None:
                damaged.append(f"{row.session_id} of {shown_owner(row.owner_id)} ({why})")
                ids.append(row.session_id)
            num_tokens += row.num_tokens
            num_expired += row.expires_s < now_s
        num_sessions += len(rows)
        on_progress(len(rows))
    words = "session-server", "sessions", "delete", *dict.fromkeys(ids[:MAX_NAMED])
    delete = shlex.join([*words, "--store", str(directory)])
    advice = f"the others are served; take these from a backup, or `{delete}`, with no server there"
    found = f"{num_sessions:,} with {num_tokens:,} tokens"
    found += f", {num_expired:,} of them expired" if num_expired else ""
    return _walked("sessions", found, damaged, advice)


def _records(database: Database, on_progress: OnProgress) -> StoreFinding:
    """Check every part of responses and conversations."""
    num_of, damaged = Counter[str](), list[str]()
    for rows in database.record_slices():
        for row in rows:
            num_of[row.kind] += 1
            try:
                _check_parts(database.parts(row.number))
            except Damaged as error:
                damaged.append(f"{row.record_id} of {shown_owner(row.owner_id)} ({error})")
        on_progress(len(rows))
    found = ", ".join(f"{num_of[kind]:,} {kind}" for kind in sorted(num_of)) or "none"
    advice = "the others are served; take these from a backup, or have their clients delete them"
    return _walked("records", found, damaged, advice)


def _check_parts(parts: Parts) -> None:
    if not parts or parts[0][0] != 0:
        raise Damaged("its first part is missing")
    for _, part in parts:
        check_part(part)


def _walked(topic: str, found: str, damaged: Sequence[str], advice: str) -> StoreFinding:
    """Say what was found of all sessions, or records, and which of them are damaged."""
    if not damaged:
        return StoreFinding(topic, f"{found}; every checksum matches")
    more = f" and {len(damaged) - MAX_NAMED:,} more" if len(damaged) > MAX_NAMED else ""
    found += f", {len(damaged):,} damaged: {', '.join(damaged[:MAX_NAMED])}{more}"
    return StoreFinding(topic, found, advice, is_wrong=True)


def _fault_of(row: SessionRow, database: Database) -> str | None:
    """Return why a session cannot be read; None if it can."""
    try:
        file_of(row, database.entries(row.number))
    except Damaged as error:
        return str(error)
    return None


def _disk(directory: Path) -> StoreFinding:
    free_bytes = shutil.disk_usage(directory).free
    found = f"{free_bytes / (1 << 30):.1f} GiB free"
    if free_bytes < MIN_FREE_BYTES:
        advice = "make room: turns are not durable on a full disk"
        return StoreFinding("disk", found, advice)
    return StoreFinding("disk", found)


def _restore(directory: Path) -> str:
    return (
        f"export what can be read, then put a backup in the place of {Database.FILE}, or move the "
        f"store away (mv {directory} {directory}.lost)"
    )
