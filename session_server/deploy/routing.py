"""Say which replica a request belongs to, from what is known before its body is read.

The key of a request is, in this order: the ticket that its handshake offers, the session,
conversation or response in its path, the replica that the query names (`?replica=TAG`), a header in
which clients name their conversation (`x-session-id` first), and its idempotency key. Requests of
one key go to one replica. A request without a key goes to any replica, and so does the opening of a
session.

The ids that a replica gives to sessions begin with its tag, and so do its tickets: whoever comes
back with one finds the replica that made it. Other keys, and those of a replica that is gone, are
hashed to one of those that there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any, Final
from urllib.parse import parse_qs

from session_server.core.ids import SESSION_PREFIX
from session_server.web.headers import CONVERSATION_NAMES, IDEMPOTENCY_KEY
from session_server.web.requests import TICKET_PROTOCOL

TAG_CHARS: Final = 8
"""Hex digits of a tag, of the 32 that an id has: 96 random bits remain, which cannot be guessed."""

REPLICA_FIELD: Final = "replica"
"""Field of a query that names a replica, for scrapes of each."""

MAX_KEY_CHARS: Final = 256

MAX_QUERY_FIELDS: Final = 64
"""Fields of a query in which a replica is looked for; one of more names none."""

_NAMED_IN_PATH: Final = re.compile(r"/v1/(?:admin/)?(sessions|conversations|responses)/([^/]+)")
_NEW: Final = "new"
"""Stands in a path for the id of a session that is not open yet."""

_TAGGED: Final = re.compile(rf"{SESSION_PREFIX}([0-9a-f]{{{TAG_CHARS}}})")


def tag_of(replica: str) -> str:
    """Return the tag of the replica with this name."""
    return sha256(replica.encode()).hexdigest()[:TAG_CHARS]


def key_for(tag: str) -> str:
    """Return a key that belongs to the replica with this tag."""
    return f"{SESSION_PREFIX}{tag}"


def tag_in(key: str) -> str | None:
    """Return the tag of the replica that a key names; None if it names none."""
    found = _TAGGED.match(key)
    return found[1] if found else None


def routing_key(scope: Mapping[str, Any]) -> str | None:
    """Return the key of a request with this ASGI scope; None if any replica may have it."""
    key = (
        _key_in_ticket(scope)
        or _key_in_path(scope)
        or _key_in_query(scope)
        or _key_in_headers(scope.get("headers", ()))
    )
    return key[:MAX_KEY_CHARS] if key else None


def _key_in_ticket(scope: Mapping[str, Any]) -> str | None:
    """Return the key of the replica that made the ticket of a handshake: no other can redeem it."""
    offers = map(str, scope.get("subprotocols", ()))
    ticket = next((each for each in offers if each.startswith(TICKET_PROTOCOL)), "")
    key = key_for(ticket.removeprefix(TICKET_PROTOCOL))
    return key_for(tag) if (tag := tag_in(key)) else None


def _key_in_path(scope: Mapping[str, Any]) -> str | None:
    path = str(scope.get("path", "")).removeprefix(str(scope.get("root_path", "")))
    found = _NAMED_IN_PATH.match(path)
    return found[2] if found and found[2] != _NEW else None


def _key_in_query(scope: Mapping[str, Any]) -> str | None:
    query = bytes(scope.get("query_string", b"")).decode("latin-1")
    if REPLICA_FIELD not in query:
        return None
    try:
        tags = parse_qs(query, max_num_fields=MAX_QUERY_FIELDS).get(REPLICA_FIELD)
    except ValueError:  # of more fields: whoever routes has no answer of its own to refuse it with
        return None
    return key_for(tags[0]) if tags else None


def _key_in_headers(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    given = {bytes(name).lower().decode("latin-1"): bytes(value) for name, value in headers}
    names = (*CONVERSATION_NAMES, IDEMPOTENCY_KEY)
    value = next((given[name] for name in names if given.get(name)), b"")
    return value.decode("latin-1") or None
