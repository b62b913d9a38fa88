"""Identifiers that server and engine share. The server makes every id that the engine sees.

A client's own turn id is an idempotency key in `sessions`. It never reaches the engine, so the
names that two clients choose cannot collide.
"""

from __future__ import annotations

import secrets

from cache.types import SessionId, TokenId, TurnId

__all__ = ["SessionId", "TokenId", "TurnId", "new_session_id", "new_turn_id"]


def new_session_id() -> SessionId:
    """Return a new session id of 128 random bits, which cannot be guessed."""
    return SessionId(f"s_{secrets.token_hex(16)}")


def new_turn_id() -> TurnId:
    """Return a new turn id of the engine."""
    return TurnId(f"turn_{secrets.token_hex(8)}")
