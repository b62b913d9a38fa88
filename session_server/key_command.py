"""Add, list and revoke the API keys of a file that `serve --api-key-file` reads.

  add NAME [OPTION=VALUE ...]   make a key, and show it: this once, on stdout
  list                          show names, digests and options; never a key
  revoke NAME or DIGEST         take a key back; digits of its digest suffice

The file holds digests of keys, which open nothing. A server that runs sees
a change within two seconds: a new key opens it, and what a revoked key has
opened ends. Keys of one name share their sessions, so to replace a key add
another of the same name, hand it out, and revoke the old one by its digest.
With the last key of a name a server that runs deletes all sessions, responses
and conversations of the name, those on disk too.

options of a name, the same for all its keys:
  max_priority=N   the highest priority of its turns, -100 to 100
  share=PART       its part of all sessions, turns and bytes: 0.2 is a fifth
  admin=1          it may use the dashboard and the routes that concern
                   everybody's sessions, which other keys may not
  metrics=1        it may read /metrics, as one with admin=1 may
  max_sessions=N, max_connections=N, max_bytes=N, max_kv_tokens=N,
  turns_per_min=N, input_tokens_per_min=N, output_tokens_per_min=N
                   what it may hold, and ask for in a minute

examples:
  session-server keys add alice --file keys
  session-server keys add operator admin=1 --file keys
  session-server keys add batch share=0.2 max_priority=-10 --file keys
  session-server keys list --file keys
  session-server keys revoke 3f9a1c --file keys
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from rich.console import Console

from session_server.arguments import add_key_file
from session_server.core.owner import KEY_FILE_VARIABLE, KEY_VARIABLE
from session_server.terminal import make_table
from session_server.web.key_file import InvalidKeys, InvalidWords, lines_of, read_file
from session_server.web.key_store import add_key, added_dates, revoke_keys, short_digest

_WORDS: Final = {"add": "NAME", "list": "", "revoke": "NAME or DIGEST"}

_ENDS_WITH_IT: Final = (
    "a server that runs with this file deletes its sessions, responses and conversations"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keys`."""
    parser.add_argument("action", choices=_WORDS, metavar="ACTION", help="add, list or revoke")
    parser.add_argument("words", nargs="*", default=[], metavar="NAME", help="see above")
    group = parser.add_argument_group("keys", "Choose the file, and which keys of it.")
    add_key_file(group)
    group.add_argument("--all", action="store_true", help="revoke every key of the name")


def run(args: argparse.Namespace) -> int:
    """Do what was asked. Return 0, 1 if the file refuses it, 2 for arguments that are wrong."""
    misuse = _misuse(args)
    if misuse is not None:
        print(f"session-server keys: {misuse}", file=sys.stderr)
        return 2
    path, today = Path(args.file), datetime.now(UTC).date().isoformat()
    try:
        match args.action:
            case "add":
                _add(path, args.words, today)
            case "revoke":
                _revoke(path, args, today)
            case _:
                _list(path)
    except (InvalidKeys, OSError) as error:
        told = _unwritten(path, error) if isinstance(error, OSError) else str(error)
        print(f"session-server keys: {told}", file=sys.stderr)
        return 2 if isinstance(error, InvalidWords) else 1
    return 0


def _misuse(args: argparse.Namespace) -> str | None:
    """Return what is wrong with the arguments, if anything is."""
    if args.file is None:
        return f"pass --file FILE, or set {KEY_FILE_VARIABLE}"
    takes_one = {"add": len(args.words) >= 1, "list": not args.words}
    if not takes_one.get(args.action, len(args.words) == 1):
        needs = _WORDS[args.action] or "no name"
        return f"{args.action} takes {needs}"
    if args.all and args.action != "revoke":
        return "--all is a flag of `revoke`"
    return None


def _unwritten(path: Path, error: OSError) -> str:
    """Return why a file was not written, and what to do."""
    directory = path.resolve().parent
    match error:
        case FileNotFoundError() | NotADirectoryError():
            return f"{directory} is no directory: make it, or pass another --file"
        case PermissionError():
            return (
                f"cannot write {path}: it is replaced, so you must be allowed to write {directory}"
            )
        case _:
            return f"cannot write {path}: {error.strerror}; it is as it was"


def _add(path: Path, words: list[str], today: str) -> None:
    name, *options = words
    key, line = add_key(path, name, options, today=today)
    print(key)
    about = " ".join((name, short_digest(line.digest), *line.options))
    print(f"added {about} to {path}; the key is shown this once", file=sys.stderr)
    print(
        "clients send it as `Authorization: Bearer KEY`, ours take it from "
        f"{KEY_VARIABLE}, and the page asks for it",
        file=sys.stderr,
    )


def _revoke(path: Path, args: argparse.Namespace, today: str) -> None:
    revoked = revoke_keys(path, args.words[0], all_of_name=args.all, today=today)
    for line in revoked:
        print(f"revoked {line.name or '-'} {short_digest(line.digest)}")
    left = tuple(lines_of(read_file(path), str(path)))
    name = revoked[0].name
    if name is None or name not in {line.name for line in left}:  # without a name it is an owner
        which = "its owner's only key" if name is None else f"the last key of {name}"
        print(f"that was {which}: {_ENDS_WITH_IT}", file=sys.stderr)
    if not left:
        print("no key is left: nobody gets in, and no server starts with it", file=sys.stderr)


def _list(path: Path) -> None:
    text = read_file(path)
    added = added_dates(text)
    rows = (
        (
            line.name or "-",
            short_digest(line.digest),
            added.get(short_digest(line.digest), ""),
            " ".join(line.options),
        )
        for line in lines_of(text, str(path))
    )
    table = make_table(("name", "digest", "added", "options"), rows)
    for column in table.columns:
        column.justify = "left"
    Console().print(table)
