"""`Owner`: who owns a session, and what a key may ask for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Final


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Bound what one tenant may hold and ask for; None: nothing beyond the server's own bounds.

    `max_sessions`: open sessions. `max_kv_tokens`: tokens of its sessions' KV, held by running
    turns or kept for later ones. `turns_per_min`, `input_tokens_per_min`, `output_tokens_per_min`:
    buckets that refill steadily and hold one minute's worth. `max_connections`: WebSockets, event
    streams and HTTP requests that wait for a turn. `max_bytes`: memory of conversations and
    unfinished turns.
    """

    max_sessions: int | None = None
    max_kv_tokens: int | None = None
    turns_per_min: int | None = None
    input_tokens_per_min: int | None = None
    output_tokens_per_min: int | None = None
    max_connections: int | None = None
    max_bytes: int | None = None

    def or_else(self, defaults: TenantLimits) -> TenantLimits:
        """Return these limits, and those of `defaults` where there is none."""
        names = [each.name for each in fields(self)]
        mine = {name: getattr(self, name) for name in names}
        return TenantLimits(
            **{n: getattr(defaults, n) if mine[n] is None else mine[n] for n in names}
        )


NO_LIMITS: Final = TenantLimits()


@dataclass(slots=True, weakref_slot=True)
class Owner:
    """Identify the tenant behind a request, and carry what it is granted.

    `owner_id` never changes; owners of equal ids are equal, whatever they are granted. What a
    tenant is granted may change while its sessions live (`follow`), so read it when it counts.

    `max_priority`: priorities of turns above it are lowered to it. `share`: the part of what the
    server counts per owner (sessions, bytes) that this one may hold, in (0, 1]. `is_exempt`:
    counted, but refused by no limit; for probes of the server by itself. `is_admin`: may use the
    routes that concern the sessions of every owner; `sees_metrics`: may read their totals.
    `limits`: its quotas.
    """

    owner_id: str
    max_priority: int = field(default=0, compare=False)
    share: float = field(default=1.0, compare=False)
    is_exempt: bool = field(default=False, compare=False)
    is_admin: bool = field(default=False, compare=False)
    sees_metrics: bool = field(default=False, compare=False)
    limits: TenantLimits = field(default=NO_LIMITS, compare=False)

    def __hash__(self) -> int:
        return hash(self.owner_id)

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"share must lie in (0, 1], is {self.share}")

    def is_granted(self, other: Owner) -> bool:
        """Return whether an equal owner is granted the same."""
        return all(getattr(self, f.name) == getattr(other, f.name) for f in fields(self))

    def follow(self, other: Owner) -> None:
        """Be granted what `other`, an equal owner, is granted."""
        assert self == other, "a tenant does not become another"
        for granted in fields(self):
            setattr(self, granted.name, getattr(other, granted.name))


ANONYMOUS: Final = Owner("anonymous", is_admin=True, sees_metrics=True)
"""The owner of all requests where no key is required."""

_NAMED: Final = "name:"
_DIGEST: Final = re.compile("[0-9a-f]{64}")


def named_owner_id(name: str) -> str:
    """Return the id of the owner of the keys of a name."""
    return _NAMED + name


def owner_id_of(given: str) -> str:
    """Return the id of the owner that an operator names: by the name of a key, the digest of a key
    without one, or "anonymous". What `shown_owner` returns leads back to its owner."""
    is_id = given == ANONYMOUS.owner_id or given.startswith(_NAMED) or _DIGEST.fullmatch(given)
    return given if is_id else named_owner_id(given)


def shown_owner(owner_id: str) -> str:
    """Return how an operator names an owner."""
    name = owner_id.removeprefix(_NAMED)
    return name if owner_id_of(name) == owner_id else owner_id


KEY_VARIABLE: Final = "SESSION_SERVER_API_KEY"
"""Environment variable with a key: clients send it, and `serve` requires it."""

KEY_FILE_VARIABLE: Final = "SESSION_SERVER_API_KEY_FILE"
"""Environment variable with the path of a file of keys."""
