"""Who shares cached KV with whom, and names that nobody can guess: both from one secret."""

from __future__ import annotations

import hashlib
import hmac

from session_server.core.owner import Owner


class TenantSalts:
    """Cache namespaces of sessions, keyed by a secret that is never shown.

    Two servers that share a cache must share the secret. Without `share_prefixes` every session
    has a namespace of its own, and finds only what it computed itself.
    """

    def __init__(self, secret: bytes, *, share_prefixes: bool = True) -> None:
        assert len(secret) >= 16, "a guessable secret separates nobody"
        self._secret = secret
        self._share_prefixes = share_prefixes

    def salt_of(self, owner: Owner, session_id: str) -> str:
        """The namespace of a session."""
        salt = hmac.new(self._secret, owner.owner_id.encode(), hashlib.sha256)
        if self._share_prefixes:
            return salt.hexdigest()
        return hmac.new(salt.digest(), session_id.encode(), hashlib.sha256).hexdigest()

    def id_for_key(self, owner: Owner, key: str) -> str:
        """The session id that a client's idempotency key stands for; nobody else can guess it."""
        digest = hmac.new(
            self._secret, f"{owner.owner_id}/{key}".encode(), hashlib.sha256
        ).hexdigest()
        return f"s_{digest[:32]}"
