"""Keep and compare API keys as digests, each with the owner whose sessions it opens."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from session_server.core.errors import Unauthorized
from session_server.core.owner import ANONYMOUS, KEY_VARIABLE, Owner
from session_server.protocol.messages import MAX_PRIORITY
from session_server.sessions.budget import RESERVED_PART

MAX_KEY_CHARS: Final = 512
MAX_KEYS: Final = 10_000
SHORT_KEY_CHARS: Final = 8
"""A key of a file with fewer characters is warned of."""

_DIGEST_PREFIX: Final = "sha256:"
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")
SHARE_OF_MANY: Final = 0.5
"""Share of all sessions, turns and bytes that one owner may hold if there are several."""

_logger: Final = logging.getLogger("session_server.web")
_OPTION: Final = re.compile(r"(max_priority|share|admin)=(\S*)")
_INTEGER: Final = re.compile(r"-?[0-9]{1,3}")
_DECIMAL: Final = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,9})?")
_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


class InvalidKeys(ValueError):
    """Report keys that cannot be used. The message gives their place and never a key."""


def digest_of(key: str) -> str:
    """Return the digest that is kept of an API key."""
    return hashlib.sha256(key.encode()).hexdigest()


class KeyRing:
    """Map API keys to their owners. Without keys the server is open to everybody.

    Only digests are kept. A key belongs to one `Owner`, which holds its share and priority.
    """

    def __init__(
        self, owners: Mapping[str, Owner] = MappingProxyType({}), *, anonymous: Owner = ANONYMOUS
    ) -> None:
        """Take `owners` by the digest of their key, and the owner of callers without keys."""
        self._anonymous = anonymous
        self._buckets: dict[str, list[tuple[str, Owner]]] = {}
        for digest, owner in owners.items():
            self._buckets.setdefault(_bucket_of(digest), []).append((digest, owner))

    @classmethod
    def of(cls, *keys: str) -> KeyRing:
        """Return a key ring of unnamed keys: each has an owner of its own."""
        return cls({digest_of(key): Owner(digest_of(key)) for key in keys})

    @property
    def is_open(self) -> bool:
        """Return whether no key is required."""
        return not self._buckets

    def owner_of(self, key: str | None) -> Owner:
        """Return the owner that a key belongs to.

        Raises:
            Unauthorized: keys are required, and this is not one of them.
        """
        if self.is_open:
            return self._anonymous
        if key is not None and len(key) <= MAX_KEY_CHARS:
            digest = digest_of(key)
            # Buckets are chosen by a hash, so the time this takes reveals nothing about a key.
            for known, owner in self._buckets.get(_bucket_of(digest), ()):
                if hmac.compare_digest(digest, known):
                    return owner
        raise Unauthorized("A valid API key is required: Authorization: Bearer <key>.")


@dataclass(frozen=True, slots=True)
class _Grant:
    """Describe the owner and options of a key; None: the default of all keys."""

    owner_id: str
    max_priority: int | None = None
    share: float | None = None
    is_admin: bool = False


def key_ring(
    *, given: str | None, environment: str | None, path: Path | None, max_priority: int = 0
) -> KeyRing:
    """Return all keys: one from the command line, one from the environment, those of a file.

    `max_priority`: the highest priority of keys whose line sets none, and of callers without keys.

    Raises:
        InvalidKeys: one is empty or malformed, or the file cannot be read or holds none.
    """
    grants: dict[str, _Grant] = {}
    for key, where in ((given, "--api-key"), (environment, KEY_VARIABLE)):
        if key is not None:
            digest = _digest(key, where)
            grants[digest] = _Grant(digest)
    if path is not None:
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise InvalidKeys(f"--api-key-file {path}: {reason}") from None
        grants |= _grants_in(text, str(path))
    has_admins = any(grant.is_admin for grant in grants.values())
    is_alone = len({grant.owner_id for grant in grants.values()}) == 1
    # Several owners leave the reserve of each other alone, whatever share a line sets.
    default, most = (1.0, 1.0) if is_alone else (SHARE_OF_MANY, 1.0 - RESERVED_PART)
    owners = {
        digest: Owner(
            grant.owner_id,
            max_priority=max_priority if grant.max_priority is None else grant.max_priority,
            share=min(grant.share or default, most),
            is_admin=grant.is_admin or not has_admins,
        )
        for digest, grant in grants.items()
    }
    return KeyRing(owners, anonymous=replace(ANONYMOUS, max_priority=max_priority))


def is_readable_by_all(path: Path) -> bool:
    """Return whether every user of this machine may read a file."""
    return bool(path.stat().st_mode & stat.S_IROTH)


def _grants_in(text: str, where: str) -> dict[str, _Grant]:
    """Return the grant of each digest.

    A line is `[NAME] KEY [max_priority=N] [share=PART] [admin=1]`, where KEY may be `sha256:HEX`.
    Keys of one name have one owner, so that a key can be replaced and its sessions stay.
    """
    grants: dict[str, _Grant] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        place = f"{where}, line {number}"
        options = _take_options(words)
        *names, key = words
        if len(names) > 1 or not all(map(_NAME.fullmatch, names)):
            form = "[NAME] KEY [max_priority=N] [share=PART] [admin=1]"
            raise InvalidKeys(f"{place}: expected {form}")
        if key.startswith("#"):
            raise InvalidKeys(f"{place}: a key cannot begin with #; a comment has its own line")
        if len(key) < SHORT_KEY_CHARS:
            _logger.warning("%s: a short key; or is it a name, and its key is missing?", place)
        digest = _digest(key, place)
        grant = _Grant(
            f"name:{names[0]}" if names else digest,
            _max_priority(options, place),
            _share(options, place),
            _is_admin(options, place),
        )
        if grants.setdefault(digest, grant) != grant:
            raise InvalidKeys(f"{place}: this key already has another owner or other options")
        if len(grants) > MAX_KEYS:
            raise InvalidKeys(f"{where}: more than {MAX_KEYS} keys")
    if not grants:
        raise InvalidKeys(f"{where}: it contains no key")
    return grants


def _take_options(words: list[str]) -> dict[str, str]:
    """Remove and return the options at a line's end. The first word is never one."""
    options: dict[str, str] = {}
    while len(words) > 1 and (match := _OPTION.fullmatch(words[-1])) is not None:
        options[match[1]] = match[2]
        del words[-1]
    return options


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


def _is_admin(options: Mapping[str, str], place: str) -> bool:
    text = options.get("admin", "0")
    if text not in ("0", "1"):
        raise InvalidKeys(f"{place}: admin must be 0 or 1")
    return text == "1"


def _bucket_of(digest: str) -> str:
    return digest[:8]


def _digest(key: str, where: str) -> str:
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
