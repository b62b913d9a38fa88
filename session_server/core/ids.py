"""Identifiers that server and engine share. The server makes every id that the engine sees.

A client's own turn id is an idempotency key in `sessions`. It never reaches the engine, so the
names that two clients choose cannot collide.
"""

from __future__ import annotations

import secrets
import string
from typing import Final

from cache.types import SessionId, TokenId, TurnId

__all__ = [
    "SESSION_PREFIX",
    "SessionId",
    "TokenId",
    "TurnId",
    "new_call_id",
    "new_session_id",
    "new_turn_id",
]

SESSION_PREFIX: Final = "s_"
"""What the ids begin with that the server gives to sessions."""

_LETTERS: Final = string.ascii_letters + string.digits


def new_session_id() -> SessionId:
    """Return a new session id of 128 random bits, which cannot be guessed."""
    return SessionId(f"{SESSION_PREFIX}{secrets.token_hex(16)}")


def new_turn_id() -> TurnId:
    """Return a new turn id of the engine."""
    return TurnId(f"turn_{secrets.token_hex(8)}")


def new_call_id() -> str:
    """Return a new id for a call of a tool. Templates of Mistral take nine letters and digits."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))
