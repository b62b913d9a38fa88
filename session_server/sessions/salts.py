"""Derive cache namespaces and unguessable session ids from one secret."""

from __future__ import annotations

import hashlib
import hmac

from session_server.core.owner import Owner


class TenantSalts:
    """Derive the cache namespaces of sessions from a secret that is never shown.

    Servers that share a cache must share the secret. Without `share_prefixes` every session has its
    own namespace and matches only KV that it computed itself.
    """

    def __init__(self, secret: bytes, *, share_prefixes: bool = True) -> None:
        assert len(secret) >= 16, "a guessable secret protects no namespace"
        self._secret = secret
        self._share_prefixes = share_prefixes

    def salt_of(self, owner: Owner, session_id: str) -> str:
        """Return the cache namespace of a session."""
        salt = hmac.new(self._secret, owner.owner_id.encode(), hashlib.sha256)
        if self._share_prefixes:
            return salt.hexdigest()
        return hmac.new(salt.digest(), session_id.encode(), hashlib.sha256).hexdigest()

    def tag_of(self, owner: Owner) -> str:
        """Return the short id by which the engine knows an owner; it names nobody."""
        # Of every turn: a keyed hash of its own kind takes a fifth of an HMAC.
        name = f"tenant/{owner.owner_id}".encode()
        return hashlib.blake2b(name, key=self._secret[:64], digest_size=8).hexdigest()

    def id_for_key(self, owner: Owner, key: str) -> str:
        """Return the session id for a client's idempotency key; no other client can guess it."""
        digest = hmac.new(self._secret, f"{owner.owner_id}/{key}".encode(), hashlib.sha256)
        return f"s_{digest.hexdigest()[:32]}"
