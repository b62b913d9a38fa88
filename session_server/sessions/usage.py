"""Tell an owner what it holds of each of its quotas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from session_server.core.owner import Owner
from session_server.sessions.quotas import Quotas


@dataclass(frozen=True, slots=True)
class QuotaUse:
    """Say what is held of a quota: of a rate, what of its bucket is used up, which is more than
    `limit` after a turn larger than a minute's worth. `limit` None: there is no such quota.

    `refilled_in_s`: seconds until the bucket of a rate is full again if nothing more is asked for;
    None for what is no rate.
    """

    held: int
    limit: int | None
    refilled_in_s: float | None = None


def quota_uses(
    quotas: Quotas, owner: Owner, *, num_connections: int, now_s: float
) -> Mapping[str, QuotaUse]:
    """Return what an owner holds, by the names of `TenantLimits`. Costs the same however much
    anybody holds."""
    limits, num_bytes = owner.limits, (quotas.history_bytes, quotas.turn_bytes)
    uses = {
        "max_sessions": QuotaUse(quotas.owned_sessions.held_by(owner), limits.max_sessions),
        "max_kv_tokens": QuotaUse(quotas.kv_tokens.held_by(owner), limits.max_kv_tokens),
        "max_connections": QuotaUse(num_connections, limits.max_connections),
        "max_bytes": QuotaUse(sum(each.held_by(owner) for each in num_bytes), limits.max_bytes),
    }
    return {**uses, **rate_uses(quotas, owner, now_s=now_s)}


def rate_uses(quotas: Quotas, owner: Owner, *, now_s: float) -> Mapping[str, QuotaUse]:
    """Return what an owner has used of its rates, by the names of `TenantLimits`."""
    rates = {
        "turns_per_min": quotas.turn_rate,
        "input_tokens_per_min": quotas.input_rate,
        "output_tokens_per_min": quotas.output_rate,
    }
    return {
        name: QuotaUse(
            rate.used(owner, now_s=now_s),
            rate.rate(owner),
            rate.refilled_in_s(owner, now_s=now_s),
        )
        for name, rate in rates.items()
    }
