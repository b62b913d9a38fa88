"""Write files of API keys: add keys and revoke them, while a server reads the same file.

A file is replaced as a whole, and keeps its comments, its order, its owner and its permissions.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from session_server.web.key_file import (
    InvalidKeys,
    KeyLine,
    check_words,
    digest_of,
    grants_of,
    lines_of,
    read_file,
)

KEY_PREFIX: Final = "sk-"
KEY_RANDOM_BYTES: Final = 32
SHORT_DIGEST_CHARS: Final = 12
MIN_PREFIX_CHARS: Final = 4
"""Characters of a digest that name a key to revoke."""

_PREFIX: Final = re.compile(rf"(?:sha256:)?([0-9a-f]{{{MIN_PREFIX_CHARS},64}})")
_ADDED: Final = re.compile(r"# \S+ \(([0-9a-f]+)\) added (\d{4}-\d\d-\d\d)")
_HEAD: Final = "# API keys of session-server, as digests; `session-server keys --help` explains.\n"


class NoSuchKey(InvalidKeys):
    """Report that nothing in a file, or more than one key, is meant by a name or digest."""


def short_digest(digest: str) -> str:
    """Return as much of a digest as people are shown."""
    return digest[:SHORT_DIGEST_CHARS]


def add_key(path: Path, name: str, options: Sequence[str], *, today: str) -> tuple[str, KeyLine]:
    """Add a new key to a file, which is made if it is not there. Return the key and its line.

    Without `options` the key gets those that the name has already. `today`: the date, as it is
    noted.

    Raises:
        InvalidWords: the name or an option is malformed.
        InvalidKeys: the name has other options, or the file is malformed.
        OSError: the file cannot be written.
    """
    check_words(name, options)
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_RANDOM_BYTES)
    digest = digest_of(key)
    with _rewriting(path, may_make=True) as file:
        before = next((line for line in file.lines if line.name == name), None)
        words = options or (before.options if before is not None else ())
        note = f"# {name} ({short_digest(digest)}) added {today}"
        file.text = _ended(file.text or _HEAD)
        file.text += f"{note}\n{' '.join((name, f'sha256:{digest}', *words))}\n"
        added = next(line for line in lines_of(file.text, str(path)) if line.digest == digest)
        if before is not None and added.grant != before.grant:
            has = f"{name} has {' '.join(before.options) or 'no options'} in line {before.number}"
            advice = "all keys of a name have the same options: add this one without any"
            raise InvalidKeys(f"{path}: {has}, and {advice}")
    return key, added


def revoke_keys(path: Path, meant: str, *, all_of_name: bool, today: str) -> list[KeyLine]:
    """Take keys out of a file: those of a name, or the one whose digest begins so.

    Raises:
        NoSuchKey: no key is meant, or several and not `all_of_name`.
        InvalidKeys: the file is malformed or is not there.
        OSError: it cannot be written.
    """
    with _rewriting(path) as file:
        found = _meant(file.lines, meant)
        if not found:
            raise NoSuchKey(
                f"{path}: no key has this name, or a digest that begins so: see keys list"
            )
        if len(found) > 1 and not (all_of_name and len({line.name for line in found}) == 1):
            shown = ", ".join(f"{line.name or '-'} {short_digest(line.digest)}" for line in found)
            advice = "say its digest, or --all for every key of a name"
            raise NoSuchKey(f"{path}: more than one key is meant, {shown}: {advice}")
        gone = {line.number: line for line in found}
        text_lines = file.text.splitlines()
        file.text = "".join(_revoked(text_lines, gone, today))
    return found


def added_dates(text: str) -> dict[str, str]:
    """Return when keys were added, by their short digest, as far as it was noted."""
    matches = map(_ADDED.fullmatch, text.splitlines())
    return {match[1]: match[2] for match in matches if match is not None}


class _File:
    """Hold the text of a file while it is rewritten, and the keys that it had before."""

    def __init__(self, text: str, where: str) -> None:
        self.text = text
        self.lines = tuple(lines_of(text, where))


@contextlib.contextmanager
def _rewriting(path: Path, *, may_make: bool = False) -> Iterator[_File]:
    """Replace a file by what its text is at the end of the block. Nobody else does so meanwhile.

    Raises:
        InvalidKeys: the file is malformed, or would be, or is not there and `may_make` is false.
        OSError: it cannot be written; it is as it was.
    """
    path = path.resolve()  # of a link, the file is replaced and not the link
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        is_new = may_make and not path.exists()
        file = _File("" if is_new else read_file(path), str(path))
        yield file
        grants_of(file.text, str(path), may_be_none=True)
        _replace(path, file.text)
        os.fsync(directory)
    finally:
        os.close(directory)


def _replace(path: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if path.exists():
                before = path.stat()
                os.fchmod(descriptor, before.st_mode & 0o7777)
                if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(descriptor, before.st_uid, before.st_gid)
            os.fsync(descriptor)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _meant(lines: Sequence[KeyLine], meant: str) -> list[KeyLine]:
    """Return the keys of this name, and those whose digest begins so."""
    prefix = _PREFIX.fullmatch(meant)
    return [
        line
        for line in lines
        if line.name == meant or (prefix is not None and line.digest.startswith(prefix[1]))
    ]


def _revoked(text_lines: Sequence[str], gone: dict[int, KeyLine], today: str) -> Iterator[str]:
    """Yield the lines of a file with a comment in place of each key that is gone."""
    notes = {short_digest(line.digest) for line in gone.values()}
    for number, text in enumerate(text_lines, start=1):
        added = _ADDED.fullmatch(text)
        if number in gone:
            line = gone[number]
            yield f"# {line.name or '-'} ({short_digest(line.digest)}) revoked {today}\n"
        elif added is None or added[1] not in notes:
            yield text + "\n"


def _ended(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"
