"""List, show, move and delete the sessions that `serve` keeps on disk.

  list                     show the sessions, oldest first
  show ID                  print what was said in one
  export ID [FILE]         write one to a file, or to stdout: it is JSON
  import FILE              put one from a file into the store
  delete ID [ID ...]       delete some
  vacuum                   give the space of deleted sessions back to the disk

`list`, `show` and `export` work beside a server; the others need the store
for themselves, so stop the server first. The store is that of `serve` with the
same variables and --config, unless --store names another.

examples:
  session-server sessions list
  session-server sessions export s_4f1c > talk.json
  session-server sessions import talk.json --store OTHER
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
import time
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Final

from msgspec import structs
from rich.console import Console

from session_server.core.errors import InvalidRequest
from session_server.core.os_errors import in_words
from session_server.core.owner import ANONYMOUS, owner_id_of, shown_owner
from session_server.sessions.store.database import Database, StoreUnusable
from session_server.sessions.store.places import KV_DIRECTORY
from session_server.sessions.store.records import (
    Damaged,
    LogEntry,
    SessionRow,
    decode_entry,
    decode_settings,
    encode_entry,
    encode_settings,
)
from session_server.sessions.store.session_file import (
    UnusableFile,
    entry_of,
    file_of,
    read_file,
    write_file,
)
from session_server.sessions.validation import check_session_id
from session_server.store_place import add_config, find_store, made_store
from session_server.terminal import make_table, printable

_WORDS: Final = {
    "list": (0, 0, "no id"),
    "show": (1, 1, "ID"),
    "export": (1, 2, "ID, and FILE perhaps"),
    "import": (1, 1, "FILE"),
    "delete": (1, sys.maxsize, "ID, one or more"),
    "vacuum": (0, 0, "no id"),
}
_PIPED_COLUMNS: Final = 160
_READS: Final = frozenset({"list", "show", "export"})


class _Refused(Exception):
    """Report what cannot be done, and what to do."""


_ERRORS: Final = (StoreUnusable, UnusableFile, Damaged, _Refused, sqlite3.Error)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sessions`."""
    parser.add_argument("action", choices=_WORDS, metavar="ACTION", help=", ".join(_WORDS))
    parser.add_argument("words", nargs="*", default=[], metavar="ID", help="see above")
    group = parser.add_argument_group("sessions", "Choose the store, and whose sessions.")
    told = "directory of the store; by default that of `serve` with the same configuration"
    group.add_argument("--store", metavar="DIR", help=told)
    add_config(group)
    group.add_argument(
        "--owner",
        type=owner_id_of,
        help=f"name of the key whose sessions they are, as `list` shows it; {ANONYMOUS.owner_id} "
        "without keys. By default everybody's, and for import that",
    )
    group.add_argument("--id", dest="new_id", metavar="ID", help="import it under another id")


def run(args: argparse.Namespace) -> int:
    """Do what was asked. Return 0, 1 if it cannot be done, 2 for arguments that are wrong."""
    least, most, needs = _WORDS[args.action]
    if not least <= len(args.words) <= most:
        print(f"session-server sessions: {args.action} takes {needs}", file=sys.stderr)
        return 2
    try:
        directory = made_store(find_store(args.store, args.config))
        with closing(Database(directory, is_read_only=args.action in _READS)) as database:
            _ACTIONS[args.action](database, args)
    except (*_ERRORS, OSError, ValueError) as error:
        print(f"session-server sessions: {printable(in_words(error))}", file=sys.stderr)
        return 1
    return 0


def _list(database: Database, args: argparse.Namespace) -> None:
    now_s = time.time()
    rows = (
        (
            row.session_id,
            shown_owner(row.owner_id),
            f"{row.num_turns:,}",
            f"{row.num_tokens:,}",
            datetime.fromtimestamp(_created_s(row)).isoformat(" ", "minutes"),
            f"{(row.expires_s - now_s) / 60:,.0f} min" if row.expires_s > now_s else "expired",
            "" if decode_settings(row.settings).num_own_uses is None else "Responses",
        )
        for row in database.walk(args.owner)
    )
    columns = ("id", "owner", "turns", "tokens", "opened", "expires in", "opened by")
    table = make_table(columns, rows)
    console = Console()
    if not console.is_terminal:
        console.width = _PIPED_COLUMNS
    console.print(table)


def _created_s(row: SessionRow) -> float:
    return decode_settings(row.settings).created_s


def _show(database: Database, args: argparse.Namespace) -> None:
    row = _find(database, args.words[0], args.owner)
    for item in file_of(row, _entries(database, row)).items:
        print(printable(f"{item.role}: {item.content}"))


def _export(database: Database, args: argparse.Namespace) -> None:
    row = _find(database, args.words[0], args.owner)
    data = write_file(file_of(row, _entries(database, row)))
    if len(args.words) == 1:
        sys.stdout.buffer.write(data)
    else:
        path = Path(args.words[1])
        with path.open("xb") as file:
            path.chmod(0o600)
            file.write(data)


def _import(database: Database, args: argparse.Namespace) -> None:
    file = read_file(Path(args.words[0]))
    session_id, owner_id = args.new_id or file.session_id, args.owner or ANONYMOUS.owner_id
    try:
        check_session_id(session_id)
    except InvalidRequest as error:
        raise _Refused(f"{session_id!r}: {error.message}") from error
    if database.find(owner_id, session_id) is not None:
        raise _Refused(f"{session_id} is there already: pass --id ID for another one")
    entry, now_s = entry_of(file), time.time()
    # A key of the client is one of the server that it was sent to; who imports a session uses it.
    settings = structs.replace(file.settings, request_digest=b"", num_own_uses=None)
    _, last_number = database.count()
    row = SessionRow(
        number=max(last_number + 1, int(now_s * 1e6)),
        owner_id=owner_id,
        session_id=session_id,
        model=file.model,
        expires_s=now_s + file.settings.ttl_s,
        settings=encode_settings(settings),
        num_tokens=len(file.token_ids),
        num_turns=len(file.ended_turns),
        num_uses=0,
    )
    with database.transaction():
        database.put(row, encode_entry(entry))
    print(f"imported {session_id}, {row.num_turns:,} turns, {row.num_tokens:,} tokens")


def _delete(database: Database, args: argparse.Namespace) -> None:
    rows = [_find(database, name, args.owner) for name in args.words]
    files = database.path.parent / KV_DIRECTORY
    has_files = files.is_dir() and any(files.iterdir())
    # The KV of a session is found by its tokens, which only a server of its model can do.
    end = database.retire if has_files else database.delete
    with database.transaction():
        for row in rows:
            end(row.number)
    for row in rows:
        print(f"deleted {row.session_id}")
    if has_files:
        print(f"Their tokens and KV go when a server of this store starts. Before: rm -r {files}")


def _vacuum(database: Database, _args: argparse.Namespace) -> None:
    before = database.path.stat().st_size
    database.vacuum()
    print(f"{before:,} bytes before, {database.path.stat().st_size:,} now")


_ACTIONS: Final = {
    "list": _list,
    "show": _show,
    "export": _export,
    "import": _import,
    "delete": _delete,
    "vacuum": _vacuum,
}


def _find(database: Database, session_id: str, owner_id: str | None) -> SessionRow:
    """Return a session by its id, or by how its id begins."""
    found = [row for row in database.walk(owner_id) if row.session_id.startswith(session_id)]
    exact = [row for row in found if row.session_id == session_id]
    match exact or found:
        case [row]:
            return row
        case []:
            raise _Refused(f"no session has the id {session_id}, or one that begins so")
        case several:
            owners = ", ".join(sorted({shown_owner(row.owner_id) for row in several}))
            raise _Refused(
                f"{len(several)} sessions have an id that is or begins with {session_id}: give "
                f"more of it, or an --owner of {owners}"
            )


def _entries(database: Database, row: SessionRow) -> list[LogEntry]:
    return [decode_entry(data) for data in database.entries(row.number)]
