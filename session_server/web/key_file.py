"""Read files of API keys: who owns each key, and what it may ask for.

A line is `[NAME] KEY [options]`, where KEY may be `sha256:HEX`. Keys of one name have one owner, so
that a key can be replaced and its sessions stay; their lines have the same options.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

from session_server.core.owner import NO_LIMITS, TenantLimits, named_owner_id
from session_server.protocol.messages import MAX_PRIORITY

MAX_KEY_CHARS: Final = 512
MAX_KEYS: Final = 10_000
MAX_FILE_BYTES: Final = 8 << 20
SHORT_KEY_CHARS: Final = 8
"""A key of a file with fewer characters is warned of."""

LIMITS: Final = tuple(each.name for each in fields(TenantLimits))
OPTIONS: Final = ("max_priority", "share", "admin", "metrics", *LIMITS)
MAX_LIMIT: Final = 1 << 50
"""The highest number of a limit in a line."""

FORM: Final = "[NAME] KEY [max_priority=N] [share=PART] [admin=1] [metrics=1] [max_sessions=N ...]"

_DIGEST_PREFIX: Final = "sha256:"
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")

_logger: Final = logging.getLogger("session_server.web")
_OPTION: Final = re.compile(rf"(?:{'|'.join(OPTIONS)})=\S*")
_COUNT: Final = re.compile(r"[0-9]{1,16}")
_INTEGER: Final = re.compile(r"-?[0-9]{1,3}")
_DECIMAL: Final = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,9})?")
_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


class InvalidKeys(ValueError):
    """Report keys that cannot be used. The message gives their place and never a key."""


class InvalidWords(InvalidKeys):
    """Report words that no line could be made of."""


def digest_of(key: str) -> str:
    """Return the digest that is kept of an API key."""
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Grant:
    """Describe the owner and options of a key; None: the default of all keys."""

    owner_id: str
    max_priority: int | None = None
    share: float | None = None
    is_admin: bool = False
    sees_metrics: bool = False
    limits: TenantLimits = NO_LIMITS

    def max_priority_or(self, default: int) -> int:
        """Return the highest priority of the key's turns."""
        return default if self.max_priority is None else self.max_priority


@dataclass(frozen=True, slots=True)
class KeyLine:
    """Hold what one line says of a key. `number` counts from 1; `name` is None for a key alone;
    `options` as they are written."""

    number: int
    name: str | None
    digest: str
    options: tuple[str, ...]
    grant: Grant


def grants_of(text: str, where: str, *, may_be_none: bool = False) -> dict[str, Grant]:
    """Return the grant of each digest in the text of a file.

    `may_be_none`: it may hold no key, if it holds a comment. An empty one was cut short.

    Raises:
        InvalidKeys: a line is wrong, or there is no key.
    """
    grants: dict[str, Grant] = {}
    by_owner: dict[str, KeyLine] = {}
    for num_lines, line in enumerate(lines_of(text, where), start=1):
        # Lines and not keys: each is read again, and may be warned of, before a key is taken back.
        if num_lines > MAX_KEYS:
            raise InvalidKeys(f"{where}: more than {MAX_KEYS} keys")
        place = f"{where}, line {line.number}"
        if grants.setdefault(line.digest, line.grant) != line.grant:
            raise InvalidKeys(f"{place}: this key already has another owner or other options")
        first = by_owner.setdefault(line.grant.owner_id, line)
        if first.grant != line.grant:
            raise InvalidKeys(f"{place}: this name has other options in line {first.number}")
    if not grants and not (may_be_none and text.strip()):
        raise InvalidKeys(f"{where}: it contains no key")
    return grants


def read_file(path: Path) -> str:
    """Return the text of a file of keys. Raises InvalidKeys."""
    try:
        # A pipe would block until somebody writes to it, and what watches the file with it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise InvalidKeys(f"the key file {path}: not a regular file")
            payload = file.read(MAX_FILE_BYTES + 1)
        if len(payload) > MAX_FILE_BYTES:
            raise InvalidKeys(f"the key file {path}: more than {MAX_FILE_BYTES} bytes")
        return payload.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        if isinstance(error, FileNotFoundError):
            reason = f"{reason}; session-server keys add NAME --file {path} makes one"
        raise InvalidKeys(f"the key file {path}: {reason}") from None


def lines_of(text: str, where: str) -> Iterator[KeyLine]:
    """Yield every line that holds a key. Raises InvalidKeys."""
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if words and not words[0].startswith("#"):
            yield _line_of(words, number, f"{where}, line {number}")


def digest_in(key: str, where: str) -> str:
    """Return the digest of a key, or that which `sha256:HEX` gives. Raises InvalidKeys."""
    if key.startswith(_DIGEST_PREFIX):
        found = _DIGEST.fullmatch(key)
        if found is None:
            raise InvalidKeys(f"{where}: sha256: must be followed by 64 hex digits, lowercase")
        return found[1]
    if not key.strip():
        raise InvalidKeys(f"{where}: the key is empty")
    # An HTTP header carries only these characters unchanged.
    is_sendable = key.isascii() and key.isprintable() and key == key.strip()
    if not is_sendable or len(key) > MAX_KEY_CHARS:
        raise InvalidKeys(f"{where}: a key has 1 to {MAX_KEY_CHARS} printable ASCII characters")
    return digest_of(key)


def check_words(name: str, options: Sequence[str]) -> None:
    """Raise InvalidWords unless a line could begin with this name and end with these options."""
    if _NAME.fullmatch(name) is None:
        raise InvalidWords(f"{name!r} is no name: letters, digits and _ . - make one")
    values: dict[str, str] = {}
    for option in options:
        field, _, value = option.partition("=")
        if _OPTION.fullmatch(option) is None:
            known = ", ".join(OPTIONS)
            raise InvalidWords(f"{option!r} is no option: each is NAME=VALUE, of {known}")
        if values.setdefault(field, value) != value:
            raise InvalidWords(f"{field} is given twice")
        try:
            _with_options(Grant(name), {field: value}, repr(option))
        except InvalidKeys as error:
            raise InvalidWords(str(error)) from None


def limits_of(text: str, where: str) -> TenantLimits:
    """Return the limits of words as a line has them: `max_sessions=8 turns_per_min=60`. Raises
    InvalidKeys."""
    options: dict[str, str] = {}
    for word in text.split():
        name, _, value = word.partition("=")
        if name not in LIMITS:
            known = ", ".join(LIMITS)
            raise InvalidKeys(f"{where}: {word!r} is no limit: each is NAME=N, of {known}")
        if options.setdefault(name, value) != value:
            raise InvalidKeys(f"{where}: {name} is given twice")
    return _limits(options, where)


def is_readable_by_all(path: Path) -> bool:
    """Return whether every user of this machine may read a file."""
    return bool(path.stat().st_mode & stat.S_IROTH)


def _line_of(words: list[str], number: int, place: str) -> KeyLine:
    options = _take_options(words)
    written = tuple(f"{name}={value}" for name, value in options.items())
    *names, key = words
    if len(names) > 1 or not all(map(_NAME.fullmatch, names)):
        raise InvalidKeys(f"{place}: expected {FORM}")
    if key.startswith("#"):
        raise InvalidKeys(f"{place}: a key cannot begin with #; a comment has its own line")
    if len(key) < SHORT_KEY_CHARS:
        _logger.warning("%s: a short key; or is it a name, and its key is missing?", place)
    digest = digest_in(key, place)
    name = names[0] if names else None
    grant = _with_options(Grant(named_owner_id(name) if name else digest), options, place)
    return KeyLine(number, name, digest, written, grant)


def _take_options(words: list[str]) -> dict[str, str]:
    """Remove and return the options at a line's end. The first word is never one."""
    num_options = 0
    while num_options < len(words) - 1 and _OPTION.fullmatch(words[-1 - num_options]):
        num_options += 1
    taken = [words.pop().partition("=") for _ in range(num_options)]
    return {name: value for name, _, value in reversed(taken)}


def _with_options(grant: Grant, options: Mapping[str, str], place: str) -> Grant:
    return replace(
        grant,
        max_priority=_max_priority(options, place),
        share=_share(options, place),
        is_admin=_is_set("admin", options, place),
        sees_metrics=_is_set("metrics", options, place),
        limits=_limits(options, place),
    )


def _limits(options: Mapping[str, str], place: str) -> TenantLimits:
    return TenantLimits(**{name: _count(name, options, place) for name in LIMITS})


def _max_priority(options: Mapping[str, str], place: str) -> int | None:
    text = options.get("max_priority")
    if text is None:
        return None
    if _INTEGER.fullmatch(text) is None or abs(int(text)) > MAX_PRIORITY:
        limits = f"[-{MAX_PRIORITY}, {MAX_PRIORITY}]"
        raise InvalidKeys(f"{place}: max_priority must be an integer in {limits}")
    return int(text)


def _share(options: Mapping[str, str], place: str) -> float | None:
    text = options.get("share")
    if text is None:
        return None
    if _DECIMAL.fullmatch(text) is None or not 0.0 < float(text) <= 1.0:
        raise InvalidKeys(f"{place}: share must be above 0 and at most 1")
    return float(text)


def _count(name: str, options: Mapping[str, str], place: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if _COUNT.fullmatch(text) is None or not 1 <= int(text) <= MAX_LIMIT:
        raise InvalidKeys(f"{place}: {name} must be an integer in [1, {MAX_LIMIT}]")
    return int(text)


def _is_set(name: str, options: Mapping[str, str], place: str) -> bool:
    text = options.get(name, "0")
    if text not in ("0", "1"):
        raise InvalidKeys(f"{place}: {name} must be 0 or 1")
    return text == "1"
