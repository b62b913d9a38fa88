"""Define what operators are shown of all owners: samples of the server, and a page of sessions."""

from __future__ import annotations

from typing import Literal

import msgspec

from session_server.core.session_events import SessionState
from session_server.protocol.resources import MemoryBody

EngineState = Literal["up", "stalled", "draining", "down"]


class EngineBody(msgspec.Struct, frozen=True, kw_only=True):
    """The engine. `stalled`: it completes no step, for `stalled_s` so far; `down`: there is none,
    or it restarts. `epoch` counts its starts; the rest is that of the last one."""

    state: EngineState
    stalled_s: float
    epoch: int
    device: str
    dtype: str
    backend: str
    max_model_len: int


class TotalsBody(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine did since it started. `input_draft_tokens`: positions computed while they
    were typed, `used_draft_tokens` of which a turn then had; `draft_tokens`: guesses verified."""

    steps: int
    forward_ms: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    draft_tokens: int
    accepted_tokens: int
    input_draft_tokens: int
    used_draft_tokens: int
    retractions: int
    coolings: int
    running: int
    waiting: int


class RatesBody(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine did per second since the sample before. `input_tokens_per_s` are computed
    ones; `cached_share` is of all input, null without any. `busy_share`: of the time, in forwards.
    """

    output_tokens_per_s: float
    input_tokens_per_s: float
    cached_share: float | None
    forwards_per_s: float
    busy_share: float


class FirstTokensBody(msgspec.Struct, frozen=True, kw_only=True):
    """Times from the request to the first token, of the turns that ended since the sample
    before."""

    turns: int
    p50_ms: float | None
    p95_ms: float | None


class CountsBody(msgspec.Struct, frozen=True, kw_only=True):
    """What the server holds now: sessions, turns and readers by kind; and what it has counted since
    it started: resumed readers by outcome, refusals by code, lost KV by reason."""

    open_sessions: int
    resident_sessions: int
    live_turns: int
    queued_turns: int
    readers: dict[str, int]
    resumes: dict[str, int]
    refusals: dict[str, int]
    evictions: dict[str, int]


RowKind = Literal["prefill", "decode", "draft"]


class ForwardRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Part of a forward: a place in `turns`, the tokens computed, and what they are: of a prompt,
    of an answer with guesses of it, or of input that is still typed."""

    turn: int
    tokens: int
    kind: RowKind


class ForwardBody(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One forward: its number, when it was launched in seconds of the engine's clock, how long it
    took, and whom it computed. Without rows it was a check of a page."""

    number: int
    start_s: float
    forward_ms: float
    rows: tuple[ForwardRow, ...]


class ForwardTurn(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A turn of a forward: its client's id, and the `id` of its session under
    `/v1/admin/sessions`. Null where it is no longer known."""

    turn_id: str | None
    session: str | None


class ForwardsBody(msgspec.Struct, frozen=True, kw_only=True):
    """The newest forwards that ended since the sample before, oldest first, and their turns."""

    turns: tuple[ForwardTurn, ...]
    forwards: tuple[ForwardBody, ...]


class SampleBody(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="sample"):
    """What the server does, about once a second.

    `memory`: what `GET /v1/admin/memory` answers, without its sessions; null where the engine does
    not answer, as are `totals`. `rates`: null in the first sample of an engine. `interval_s`: since
    the sample before. `loop_lag_ms`: the worst one since. `listeners`: readers of this stream.
    """

    interval_s: float
    engine: EngineBody
    memory: MemoryBody | None
    totals: TotalsBody | None
    rates: RatesBody | None
    first_tokens: FirstTokensBody
    counts: CountsBody
    loop_lag_ms: float
    listeners: int
    timeline: ForwardsBody


class AdminSessionBody(msgspec.Struct, frozen=True, kw_only=True):
    """A session of any owner.

    `id` is the server's own, as `/v1/admin/memory` has it, and begins with `d_` where the session
    is on disk alone; `session_id` is what the session's owner
    calls it, `owner` a digest that names nobody. `pages` and `kv_bytes`: what it holds of all
    pools, pages that it shares included; null where the engine does not know. `idle_s`: since its
    last turn ended, 0 while one runs. `cached_share` and the times to the first token are those of
    its last 16 turns.
    """

    id: str
    object: Literal["admin.session"]
    session_id: str
    owner: str
    state: SessionState
    tokens: int
    turns: int
    running_turn: str | None
    queued_turns: int
    pinned: bool
    readers: int
    idle_s: float
    pages: int | None
    kv_bytes: int | None
    cached_share: float | None
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None


class AdminSessionList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of the sessions of all owners; `total` counts those that match. The next one comes
    `after` = `next_after`."""

    object: Literal["list"]
    data: list[AdminSessionBody]
    total: int
    next_after: str | None
