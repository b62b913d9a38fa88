"""What the stories keep saying: prompts and the shortest commands."""

from __future__ import annotations

from cache.types import SessionId, TurnId
from session_server.core.commands import CancelTurn, CloseSession

PROMPT = tuple(1 + i % 31 for i in range(20))


def distinct(seed: int, length: int) -> tuple[int, ...]:
    """Tokens that have no long beginning in common with those of another seed."""
    return tuple(1 + (seed * 13 + i * (seed + 3)) % 31 for i in range(length))


def cancel(name: str, num_outputs: int | None) -> CancelTurn:
    """End a turn, keeping its input and some outputs, or nothing."""
    return CancelTurn(turn_id=TurnId(name), num_outputs=num_outputs)


def close(name: str) -> CloseSession:
    """Forget a session."""
    return CloseSession(session_id=SessionId(name))
