"""`Owner`: who owns a session, and what a key may ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class Owner:
    """Identify the tenant behind a request, and carry what it is granted.

    `owner_id` never changes for one tenant; owners of equal ids are equal, whatever they are
    granted. `max_priority`: priorities of turns above it are lowered to it. `share`: the part of
    what the server counts per owner (sessions, bytes) that this one may hold, in (0, 1].
    `is_exempt`: counted, but refused by no limit; for probes of the server by itself. `is_admin`:
    may use the routes that concern the sessions of every owner.
    """

    owner_id: str
    max_priority: int = field(default=0, compare=False)
    share: float = field(default=1.0, compare=False)
    is_exempt: bool = field(default=False, compare=False)
    is_admin: bool = field(default=True, compare=False)

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"share must lie in (0, 1], is {self.share}")


ANONYMOUS: Final = Owner("anonymous")
"""The owner of all requests where no key is required."""

KEY_VARIABLE: Final = "SESSION_SERVER_API_KEY"
"""Environment variable with a key: clients send it, and `serve` requires it."""
