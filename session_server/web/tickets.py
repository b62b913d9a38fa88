"""Keep tickets: each lets one WebSocket in, once and soon, in place of the key it was given for.

A script in a browser cannot set a header on a WebSocket. What it can send, a subprotocol or a
query, is written to more logs than a header is, so it should be worth nothing a moment later.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from session_server.sessions.budget import OwnerBudget
from session_server.web.key_file import digest_of
from session_server.web.keys import Credential

TICKET_TTL_S: Final = 30
TICKET_RANDOM_BYTES: Final = 24
TICKET_BYTES: Final = 512
"""What an unused ticket counts: its digest, what it stands for, and the maps they are in."""

MAX_TICKET_BYTES: Final = 8 << 20
MAX_OWNER_TICKET_BYTES: Final = 512 << 10
"""Of one owner: 1,024 unused tickets."""

DROPPED_AT_ONCE: Final = 1024

_TICKET_CHARS: Final = len(secrets.token_urlsafe(TICKET_RANDOM_BYTES))


@dataclass(frozen=True, slots=True)
class _Unused:
    credential: Credential
    expires_s: float


class Tickets:
    """Hold the digests of tickets that nobody has used, each with what it stands for.

    `tag`: what tickets begin with; of a replica, which alone can redeem them.
    """

    def __init__(self, now_s: Callable[[], float], *, tag: str = "") -> None:
        self._now_s = now_s
        self._tag = tag
        self._unused: OrderedDict[str, _Unused] = OrderedDict()
        """By digest. All live equally long, so the first is the first to expire; a plain map would
        look for it among all that were dropped before it."""

        self._budget = OwnerBudget(
            "bytes of unused tickets", MAX_TICKET_BYTES, owner_limit=MAX_OWNER_TICKET_BYTES
        )

    def __len__(self) -> int:
        return len(self._unused)

    def issue(self, credential: Credential) -> str:
        """Return a new ticket. Raises QuotaExceeded, ServerBusy."""
        self.drop_expired()
        self._budget.take(credential.owner, TICKET_BYTES)
        ticket = f"{self._tag}{secrets.token_urlsafe(TICKET_RANDOM_BYTES)}"
        self._unused[digest_of(ticket)] = _Unused(credential, self._now_s() + TICKET_TTL_S)
        return ticket

    def redeem(self, ticket: str) -> Credential | None:
        """Use a ticket up, and return what it stands for; None if it was used or has expired."""
        if len(ticket) != len(self._tag) + _TICKET_CHARS:
            return None
        # A map by digests: the time this takes reveals nothing about a ticket.
        digest = digest_of(ticket)
        unused = self._unused.get(digest)
        if unused is None:
            return None
        self._drop(digest)
        return unused.credential if self._now_s() < unused.expires_s else None

    def drop_expired(self) -> None:
        """Drop tickets that have expired, a slice of them if there are many."""
        now_s = self._now_s()
        for _ in range(DROPPED_AT_ONCE):
            digest = next(iter(self._unused), None)
            if digest is None or now_s < self._unused[digest].expires_s:
                return
            self._drop(digest)

    def _drop(self, digest: str) -> None:
        unused = self._unused.pop(digest)
        self._budget.add(unused.credential.owner, -TICKET_BYTES)
