"""List, show, move and delete the sessions that `serve` keeps on disk.

  list                     show the sessions, oldest first, a line each
  show ID                  print what was said in one
  export ID [FILE]         write one to a file, or to stdout: it is JSON
  import FILE              put one from a file into the store, which is made if
                           there is none; its token ids are what the model is
                           told, its texts are shown, and nobody compares them
  delete ID [ID ...]       delete some, by their whole ids
  backup FILE              copy the whole store, as of one moment, to a file
  vacuum                   give the space of deleted sessions back to the disk;
                           until it is done that takes up to twice the size of
                           the store more

`list`, `show`, `export` and `backup` work beside a server, and take the
beginning of an ID; the others need the store for themselves, so stop the
server first. The store is that of `serve` with the same variables and
--config, unless --store names another.

examples:
  session-server sessions list
  session-server sessions export s_4f1c > talk.json
  session-server sessions import talk.json --store OTHER
"""

from __future__ import annotations

import argparse
import contextlib
import sqlite3
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Final

from session_server.core.errors import InvalidRequest
from session_server.core.kv_place import KV_DIRECTORY
from session_server.core.owner import ANONYMOUS, owner_id_of, shown_owner
from session_server.sessions.store.database import Database
from session_server.sessions.store.directories import new_file
from session_server.sessions.store.disk_health import explain
from session_server.sessions.store.imported import entry_of, settings_of
from session_server.sessions.store.lock import StoreIsServed, StoreUnusable
from session_server.sessions.store.pieces import encode_pieces
from session_server.sessions.store.records import (
    Damaged,
    SessionRow,
    decode_settings,
    encode_settings,
)
from session_server.sessions.store.session_file import (
    SessionFile,
    UnusableFile,
    file_of,
    read_file,
    write_file,
)
from session_server.sessions.validation import check_session_id
from session_server.store_place import add_config, find_store, made_store
from session_server.terminal import printable

_WORDS: Final = {
    "list": (0, 0, "no id"),
    "show": (1, 1, "ID"),
    "export": (1, 2, "ID, and FILE perhaps"),
    "import": (1, 1, "FILE"),
    "delete": (1, sys.maxsize, "ID, one or more"),
    "backup": (1, 1, "FILE"),
    "vacuum": (0, 0, "no id"),
}
_FLAGS: Final = {
    "--owner": ("owner", {"list", "show", "export", "import", "delete"}),
    "--id": ("new_id", {"import"}),
}
"""Of which action each of them says something."""

_WHILE_SERVED: Final = {
    "import": "stop that server first, or pass another --store",
    "delete": "stop that server first, or while it runs send it DELETE /v1/sessions/ID, or say "
    "/forget in its chat",
    "vacuum": "stop that server first",
}
LISTED_AT_ONCE: Final = 4096
"""Sessions that `list` reads at a time. It prints them once others may have the store."""

_MAX_NAMED: Final = 8
_LAST_CHARACTER: Final = "~"
"""Is behind every one that an id may have."""

_COLUMNS: Final = "{:<36} {:<16} {:>7} {:>11} {:<16} {:>12} {}"
"""Of a list. A longer id, or owner, moves what is behind it."""


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
        type=_owner_id,
        help=f"name of the key whose sessions they are, as `list` shows it; {ANONYMOUS.owner_id} "
        "without keys. By default everybody's, and for import that",
    )
    group.add_argument("--id", dest="new_id", metavar="ID", help="import it under another id")


def _owner_id(given: str) -> str:
    if not given:
        raise argparse.ArgumentTypeError("it is empty")
    return owner_id_of(given)


def run(args: argparse.Namespace) -> int:
    """Do what was asked. Return 0, 1 if it cannot be done, 2 for arguments that are wrong."""
    least, most, needs = _WORDS[args.action]
    if not least <= len(args.words) <= most or "" in args.words:
        print(f"session-server sessions: {args.action} takes {needs}", file=sys.stderr)
        return 2
    for flag, (name, actions) in _FLAGS.items():
        if getattr(args, name) is not None and args.action not in actions:
            print(f"session-server sessions: {args.action} takes no {flag}", file=sys.stderr)
            return 2
    directory = Path()
    try:
        directory = find_store(args.store, args.config)
        if args.action != "import":  # makes one, as `serve` does
            made_store(directory)
        _ACTIONS[args.action](directory, args)
    except BrokenPipeError:
        raise  # whoever reads what is printed has seen enough
    except (*_ERRORS, OSError, ValueError) as error:
        told = str(error)
        if isinstance(error, StoreIsServed):
            told = f"{directory}: a server has it open; {_WHILE_SERVED[args.action]}"
        elif isinstance(error, sqlite3.Error):
            told = f"{directory}: {explain(error, directory)}"
        elif isinstance(error, OSError):
            told = explain(error, Path(error.filename or ".").absolute().parent)
            if isinstance(error, FileExistsError):
                told += ": name another file, or remove that one"
        print(f"session-server sessions: {printable(told)}", file=sys.stderr)
        return 1
    return 0


def _list(directory: Path, args: argparse.Namespace) -> None:
    head = "id", "owner", "turns", "tokens", "opened", "expires in", "opened by"
    begin, after, num_read = f"{_COLUMNS.format(*head)}\n", 0, LISTED_AT_ONCE
    while num_read == LISTED_AT_ONCE:
        with closing(Database(directory, is_read_only=True)) as database:
            rows = database.walk(args.owner, after=after)
            lines = []
            for row in islice(rows, LISTED_AT_ONCE):
                lines.append(_line_of(row))
                after = row.number
        num_read = len(lines)
        if lines:
            print(begin, *lines, sep="", end="")
            begin = ""
    if begin:
        whose = "" if args.owner is None else f" of {shown_owner(args.owner)}"
        print(f"no sessions{whose} in {directory}", file=sys.stderr)


def _line_of(row: SessionRow) -> str:
    left_s = row.expires_s - time.time()
    when, opener = "damaged", ""
    with contextlib.suppress(Damaged):
        settings = decode_settings(row.settings)
        when = datetime.fromtimestamp(settings.created_s).isoformat(" ", "minutes")
        opener = "" if settings.num_own_uses is None else "Responses"
    line = _COLUMNS.format(
        row.session_id,
        shown_owner(row.owner_id),
        f"{row.num_turns:,}",
        f"{row.num_tokens:,}",
        when,
        shown_time(left_s),
        opener,
    )
    return f"{line.rstrip()}\n"


def shown_time(left_s: float) -> str:
    """Return how long a session has: minutes, or hours from two on."""
    if left_s <= 0:
        return "expired"
    left_min = left_s / 60
    return f"{left_min:.0f} min" if left_min < 120 else f"{left_min / 60:.0f} h"


def _show(directory: Path, args: argparse.Namespace) -> None:
    for item in _read(directory, args.words[0], args.owner).items:
        # Only who speaks begins a line, or a text could look as if another one spoke.
        content = item.content.replace("\n", "\n    ")
        print(printable(f"{item.role}: {content}"))


def _export(directory: Path, args: argparse.Namespace) -> None:
    data = write_file(_read(directory, args.words[0], args.owner))
    if len(args.words) == 1:
        sys.stdout.buffer.write(data)
    else:
        with new_file(Path(args.words[1])) as file:
            file.write(data)


def _import(directory: Path, args: argparse.Namespace) -> None:
    path = Path(args.words[0])
    file = read_file(path)
    session_id = file.session_id if args.new_id is None else args.new_id
    owner_id = args.owner or ANONYMOUS.owner_id
    try:
        check_session_id(session_id)
    except InvalidRequest as error:
        raise _Refused(f"{session_id!r}: {error.message}") from error
    try:
        entry, settings = entry_of(file), settings_of(file)
    except UnusableFile as error:
        raise UnusableFile(f"{path} holds what no server writes: {error}") from error
    now_s = time.time()
    with closing(Database(directory)) as database:
        if database.find(owner_id, session_id) is not None:
            raise _Refused(f"{session_id} is there already: pass --id ID for another one")
        last_number = database.last_number()
        row = SessionRow(
            number=max(last_number + 1, int(now_s * 1e6)),
            owner_id=owner_id,
            session_id=session_id,
            model=file.model,
            expires_s=now_s + settings.ttl_s,
            settings=encode_settings(settings),
            num_tokens=len(file.token_ids),
            num_turns=len(file.ended_turns),
            num_uses=0,
        )
        with database.transaction():
            database.put(row, *encode_pieces(entry))
    whose = shown_owner(owner_id)
    turns = "1 turn" if row.num_turns == 1 else f"{row.num_turns:,} turns"
    print(f"imported {session_id} for {whose}, {turns}, {row.num_tokens:,} tokens")


def _delete(directory: Path, args: argparse.Namespace) -> None:
    files = directory / KV_DIRECTORY
    has_files = files.is_dir() and any(files.iterdir())
    with closing(Database(directory)) as database:
        rows = [_exact(database, name, args.owner) for name in dict.fromkeys(args.words)]
        # The KV of a session is found by its tokens, which only a server of its model can do.
        end = database.retire if has_files else database.delete
        with database.transaction():
            for row in rows:
                end(row.number)
    for row in rows:
        print(f"deleted {row.session_id}")
    if has_files:
        print(f"Their tokens and KV go when a server of this store starts. Before: rm -r {files}")


def _backup(directory: Path, args: argparse.Namespace) -> None:
    path = Path(args.words[0])
    with closing(Database(directory, is_read_only=True)) as database, new_file(path):
        try:
            database.back_up(path)
        except sqlite3.Error as error:
            raise _Refused(f"{path}: {explain(error, path.absolute().parent)}") from error
    print(f"copied {path.stat().st_size:,} bytes; to go back to it, put it in a new directory as")
    print(f"{Database.FILE}, and `serve --store` that")


def _vacuum(directory: Path, _args: argparse.Namespace) -> None:
    with closing(Database(directory)) as database:
        before = database.path.stat().st_size
        database.vacuum()
        after = database.path.stat().st_size
    print(f"{before:,} bytes before, {after:,} now")


_ACTIONS: Final = {
    "list": _list,
    "show": _show,
    "export": _export,
    "import": _import,
    "delete": _delete,
    "backup": _backup,
    "vacuum": _vacuum,
}


def _read(directory: Path, session_id: str, owner_id: str | None) -> SessionFile:
    """Read a session by its id, or by how that begins."""
    with closing(Database(directory, is_read_only=True)) as database:
        exact = database.named(owner_id, session_id, session_id, limit=_MAX_NAMED)
        row = _only(exact or _beginning(database, session_id, owner_id), session_id)
        log = database.entries(row.number)
    try:
        return file_of(row, log)
    except Damaged as error:
        raise _Refused(
            f"{row.session_id} is damaged ({error}): `session-server doctor --store {directory}` "
            "says what to do"
        ) from error


def _exact(database: Database, session_id: str, owner_id: str | None) -> SessionRow:
    """Return the session of an id: one that is deleted by how its id begins may be another one."""
    exact = database.named(owner_id, session_id, session_id, limit=_MAX_NAMED)
    begin_so = [] if exact else _beginning(database, session_id, owner_id)
    if begin_so:
        raise _Refused(
            f"no session has the id {session_id}; give all of it to delete {_names(begin_so)}"
        )
    return _only(exact, session_id)


def _beginning(database: Database, prefix: str, owner_id: str | None) -> list[SessionRow]:
    return database.named(owner_id, prefix, f"{prefix}{_LAST_CHARACTER}", limit=_MAX_NAMED)


def _only(rows: Sequence[SessionRow], session_id: str) -> SessionRow:
    match rows:
        case [row]:
            return row
        case []:
            raise _Refused(
                f"no session has the id {session_id}: `session-server sessions list` shows "
                "those there are"
            )
        case several:
            raise _Refused(
                f"more than one session has the id {session_id}, or one that begins so: give more "
                f"of it, or an --owner: {_names(several)}"
            )


def _names(rows: Sequence[SessionRow]) -> str:
    more = ", ..." if len(rows) == _MAX_NAMED else ""
    return ", ".join(f"{row.session_id} of {shown_owner(row.owner_id)}" for row in rows) + more
