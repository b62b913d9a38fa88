"""Let callers in, by a key or by a ticket that one was given for a key, and see them out when their
key is taken back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

from session_server.core.errors import Unauthorized
from session_server.core.owner import Owner
from session_server.protocol.session_protocol import CloseCode
from session_server.web.keys import Credential, KeyRing
from session_server.web.tickets import Tickets

SEEN_OUT_AT_ONCE: Final = 64
"""Sockets and requests ended before others are served."""


class Guest(Protocol):
    """Name what `Door` asks of a socket or a request that a key has opened."""

    def end(self, code: CloseCode) -> None:
        """End it, without waiting."""


class Door:
    """Decide who gets in, and list who is in by the digest of the key."""

    def __init__(self, keys: KeyRing, *, now_s: Callable[[], float]) -> None:
        self._keys = keys
        self._guests: dict[str, set[Guest]] = {}
        self.tickets = Tickets(now_s)

    @property
    def is_open(self) -> bool:
        """Return whether no key is required."""
        return self._keys.is_open

    @property
    def num_guests(self) -> int:
        """Return how many sockets and requests are listed."""
        return sum(map(len, self._guests.values()))

    def admit(self, key: str | None) -> Credential:
        """Return whose key this is. Raises Unauthorized."""
        return self._keys.credential_of(key)

    def admit_ticket(self, ticket: str) -> Credential:
        """Return for whom a ticket was made, which is then used up. Raises Unauthorized."""
        credential = self.tickets.redeem(ticket)
        if self.is_open:
            return self._keys.credential_of(None)
        if credential is None or not self._keys.has(credential):
            raise Unauthorized("This ticket was used or has expired: POST /v1/ws-ticket again.")
        return credential

    def has_key(self, owner: Owner) -> bool:
        """Return whether any key belongs to this owner."""
        return self._keys.has_owner(owner)

    @contextlib.contextmanager
    def hosting(self, credential: Credential, guest: Guest) -> Iterator[None]:
        """List a guest inside the block; it is ended when its key is taken back."""
        if credential.digest is None:
            yield
            return
        guests = self._guests.setdefault(credential.digest, set())
        guests.add(guest)
        try:
            if not self._keys.has(credential):  # since it was admitted
                guest.end(CloseCode.UNAUTHORIZED)
            yield
        finally:
            guests.discard(guest)
            if not guests:
                self._guests.pop(credential.digest, None)

    async def see_out(self, digests: Iterable[str]) -> None:
        """End everything that these keys have opened. They let nobody in any more."""
        num_ended = 0
        for digest in digests:
            for guest in tuple(self._guests.get(digest, ())):
                guest.end(CloseCode.UNAUTHORIZED)
                num_ended += 1
                if num_ended % SEEN_OUT_AT_ONCE == 0:
                    await asyncio.sleep(0)
