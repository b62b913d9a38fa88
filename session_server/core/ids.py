"""Identifiers both sides share. Every id the engine sees is made by the server.

A client's own turn id is an idempotency key of `sessions`; it never reaches the engine, so two
clients that pick the same name cannot meet.
"""

from __future__ import annotations

import secrets

from cache.types import SessionId, TokenId, TurnId

__all__ = ["SessionId", "TokenId", "TurnId", "new_session_id", "new_turn_id"]


def new_session_id() -> SessionId:
    """A fresh session id: 128 random bits, so that it cannot be guessed."""
    return SessionId(f"s_{secrets.token_hex(16)}")


def new_turn_id() -> TurnId:
    """A fresh engine-side turn id."""
    return TurnId(f"turn_{secrets.token_hex(8)}")
