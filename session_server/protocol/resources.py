"""Define what the native REST surface returns: sessions, turns, items, models, memory."""

from __future__ import annotations

from typing import Literal

import msgspec

from session_server.core.events import (
    CheckerReport,
    PoolReport,
    SessionPages,
    TierReport,
    TracedStep,
    TurnTimings,
)
from session_server.core.session_events import ConversationItem, SessionState
from session_server.protocol.errors import ErrorBody
from session_server.protocol.frames import ItemBody, UsageBody


class SessionBody(msgspec.Struct, frozen=True, kw_only=True):
    """One session. `seq` and `epoch` are its journal position now; `turns` counts the ended turns.
    `created` is wall-clock seconds. `durable`: whether all of it is on disk; null for one that ends
    with the server."""

    id: str
    object: Literal["session"]
    model: str
    state: SessionState
    epoch: str
    seq: int
    tokens: int
    turns: int
    running_turn: str | None
    queued_turns: int
    ttl_s: float
    metadata: dict[str, str]
    pinned: bool
    history: Literal["append", "template"]
    created: float
    durable: bool | None = None


class TicketBody(msgspec.Struct, frozen=True, kw_only=True):
    """A ticket for one WebSocket, offered as the subprotocol `ticket.` and this."""

    ticket: str
    expires_in_s: int


class HoldingBody(msgspec.Struct, frozen=True, kw_only=True):
    """What is held of a quota, and may be; `limit` null: the tenant has no such quota."""

    held: int
    limit: int | None


class RateBody(msgspec.Struct, frozen=True, kw_only=True):
    """What of a minute's worth is used up, which may be more than `limit` after a large turn, and
    in how many seconds nothing of it will be; `limit` null: the tenant has no such quota."""

    held: int
    limit: int | None
    refilled_in_s: float


class QuotasBody(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's quotas, by the words of a line of the key file."""

    max_sessions: HoldingBody
    max_kv_tokens: HoldingBody
    turns_per_min: RateBody
    input_tokens_per_min: RateBody
    output_tokens_per_min: RateBody
    max_connections: HoldingBody
    max_bytes: HoldingBody


class TenantUsageBody(msgspec.Struct, frozen=True, kw_only=True):
    """What the tenant of the caller's key holds; without keys all callers are one tenant."""

    object: Literal["usage"]
    quotas: QuotasBody


class SessionList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of sessions, oldest first. While `has_more`, ask for the next page with
    `after` = `next_after`, which stays valid when sessions close."""

    object: Literal["list"]
    data: list[SessionBody]
    has_more: bool
    next_after: str | None


class TurnResultBody(msgspec.Struct, frozen=True, kw_only=True):
    """One turn. Until it ends, `item`, `usage` and `timings` are null and `text` is the text so
    far. `kept_partial`, of a cancelled turn: whether its input and partial answer stay. `durable`:
    whether it is on disk; null by a server that keeps no session there."""

    id: str
    object: Literal["turn"]
    session_id: str
    status: Literal["queued", "running", "completed", "cancelled", "failed"]
    text: str
    finish_reason: Literal["stop", "length"] | None = None
    matched: int | str | None = None
    kept_partial: bool | None = None
    item: ItemBody | None = None
    usage: UsageBody | None = None
    timings: TurnTimings | None = None
    error: ErrorBody | None = None
    durable: bool | None = None


class DraftResultBody(msgspec.Struct, frozen=True, kw_only=True):
    """How far a draft was computed: `processed` of the `total` tokens of its context, `kept` of
    which were before. All are 0 where another draft or a turn has taken its place, or where it was
    dropped."""

    object: Literal["draft"]
    draft_id: str | None
    processed: int
    kept: int
    total: int


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """The items of a session."""

    object: Literal["list"]
    data: list[ConversationItem]


class ModelBody(msgspec.Struct, frozen=True, kw_only=True):
    """A model, in the shape clients of OpenAI's list know. `max_model_len` is in tokens."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The models served."""

    object: Literal["list"]
    data: list[ModelBody]


class MemoryBody(msgspec.Struct, frozen=True, kw_only=True):
    """Pages by account and pool, rows, and pages of the first 1,000 of `num_sessions` sessions. A
    pool's accounts add up to `pages`. `trace`: the engine's steps before the first violation, if
    requested. `tiers`: what is kept of KV outside of the pools."""

    pools: dict[str, PoolReport]
    rows: int
    rows_free: int
    num_sessions: int
    sessions: tuple[SessionPages, ...]
    checks: CheckerReport
    trace: tuple[TracedStep, ...]
    tiers: TierReport


class StatusBody(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of the probes. `stalled_s`: seconds for which the engine has completed no step.
    `message`: what an operator can do about something that is wrong."""

    status: str
    message: str | msgspec.UnsetType = msgspec.UNSET
    stalled_s: float | msgspec.UnsetType = msgspec.UNSET


class IndexBody(msgspec.Struct, frozen=True, kw_only=True):
    """The paths of the endpoints; those of operators only where they are served."""

    name: str = "session-server"
    page: str = "/"
    dashboard: str | msgspec.UnsetType = "/dashboard"
    sessions: str = "/v1/sessions"
    socket: str = "/v1/sessions/new/ws"
    chat_completions: str = "/v1/chat/completions"
    responses: str = "/v1/responses"
    conversations: str = "/v1/conversations"
    realtime: str = "/v1/realtime"
    models: str = "/v1/models"
    docs: str = "/docs"
    openapi: str = "/openapi.json"
    asyncapi: str = "/asyncapi.json"
    health: str = "/health"
    ready: str = "/ready"
    metrics: str | msgspec.UnsetType = "/metrics"
    memory: str | msgspec.UnsetType = "/v1/admin/memory"
    all_sessions: str | msgspec.UnsetType = "/v1/admin/sessions"
