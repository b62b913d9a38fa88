"""Authenticate callers by a key, or by a ticket that one was given for a key, and end what a key
has opened when it is taken back."""

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

REVOKED_AT_ONCE: Final = 64
"""Sockets and requests ended before others are served."""


class Revocable(Protocol):
    """Name what `Authenticator` asks of a socket or a request that a key has opened."""

    def end(self, code: CloseCode) -> None:
        """End it, without waiting."""


class Authenticator:
    """Tell whose a key or a ticket is, and list what is open by the digest of its key."""

    def __init__(self, keys: KeyRing, *, now_s: Callable[[], float], replica_tag: str = "") -> None:
        self._keys = keys
        self._revocables: dict[str, set[Revocable]] = {}
        self.tickets = Tickets(now_s, tag=replica_tag)

    @property
    def is_open(self) -> bool:
        """Return whether no key is required."""
        return self._keys.is_open

    @property
    def num_revocables(self) -> int:
        """Return how many sockets and requests are listed."""
        return sum(map(len, self._revocables.values()))

    def authenticate(self, key: str | None) -> Credential:
        """Return whose key this is. Raises Unauthorized."""
        return self._keys.credential_of(key)

    def redeem(self, ticket: str) -> Credential:
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
    def track(self, credential: Credential, revocable: Revocable) -> Iterator[None]:
        """List what a key has opened, inside the block; it is ended when its key is taken back."""
        if credential.digest is None:
            yield
            return
        revocables = self._revocables.setdefault(credential.digest, set())
        revocables.add(revocable)
        try:
            if not self._keys.has(credential):  # revoked since
                revocable.end(CloseCode.UNAUTHORIZED)
            yield
        finally:
            revocables.discard(revocable)
            if not revocables:
                self._revocables.pop(credential.digest, None)

    async def revoke(self, digests: Iterable[str]) -> None:
        """End everything that these keys have opened. They let nobody in any more."""
        num_ended = 0
        for digest in digests:
            for revocable in tuple(self._revocables.get(digest, ())):
                revocable.end(CloseCode.UNAUTHORIZED)
                num_ended += 1
                if num_ended % REVOKED_AT_ONCE == 0:
                    await asyncio.sleep(0)
