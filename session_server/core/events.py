"""What the engine tells the server: a closed union of frozen values, in the order they happened.

Per accepted turn: at most one `TurnStarted` per admission, any number of `PrefillProgressed` and
`TokensProduced`, then exactly one of `TurnFinished` or `TurnFailed`, and nothing after it.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from session_server.core.ids import SessionId, TurnId
from session_server.core.sampling import TokenLogprob


class FinishReason(enum.Enum):
    """Why a turn ended well."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class TurnTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of one turn as the engine saw it, in milliseconds.

    `queue_ms`: submit to first admission. `prefill_ms`: admission to prompt computed.
    `ttft_ms`: submit to first token settled. `decode_ms`: first token to the end. `forward_ms`:
    time of the forwards the turn took part in, the whole of each. `num_steps`: how many.
    """

    queue_ms: float
    prefill_ms: float
    ttft_ms: float
    decode_ms: float
    forward_ms: float
    num_steps: int


class Event(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Root of the union."""


class EngineReady(Event, frozen=True, tag=True, kw_only=True):
    """The engine serves. `epoch` grows with every restart; older sessions are unknown to it."""

    epoch: int
    max_turn_len: int
    """Tokens that a context may have: the model's or the configured length, or what the pools hold
    if that is less. The one number that clients are told."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    page_size: int
    num_pages: int
    """Of the largest pool, padding included."""
    device: str
    dtype: str
    backend: str


class EngineDied(Event, frozen=True, tag=True, kw_only=True):
    """Made by the client side: every live turn is lost, sessions live on as tokens."""

    message: str
    will_restart: bool


class EnginePulse(Event, frozen=True, tag=True, kw_only=True):
    """Sent by an engine several times a second, busy or idle; the client side keeps it to itself.

    `stalled_s`: seconds without a completed step, if that is longer than steps of that size take;
    0 otherwise.
    """

    stalled_s: float


class EngineStalled(Event, frozen=True, tag=True, kw_only=True):
    """Made by the client side: for `stalled_s` seconds the engine completes no step, or says
    nothing at all. Told once; `EngineResumed` or `EngineDied` follows."""

    stalled_s: float


class EngineResumed(Event, frozen=True, tag=True, kw_only=True):
    """Made by the client side: an engine that had stalled completes steps again."""


class SessionRefused(Event, frozen=True, tag=True, kw_only=True):
    """Report that `OpenSession` was refused (duplicate id, pin quota)."""

    session_id: SessionId
    code: str
    message: str


class SessionCooled(Event, frozen=True, tag=True, kw_only=True):
    """Pressure took the session's KV; its tokens stay and the next turn computes them again."""

    session_id: SessionId


class SessionGone(Event, frozen=True, tag=True, kw_only=True):
    """The slot is gone; the answer to `CloseSession`, also for an unknown id."""

    session_id: SessionId


class TurnStarted(Event, frozen=True, tag=True, kw_only=True):
    """The turn was admitted. Sent again when it is admitted again after a retraction.

    `cached_tokens`: positions whose KV was not recomputed (of the first admission).
    """

    turn_id: TurnId
    prompt_tokens: int
    cached_tokens: int


class PrefillProgressed(Event, frozen=True, tag=True, kw_only=True):
    """`computed` of `total` prompt positions are done; sent between chunks only."""

    turn_id: TurnId
    computed: int
    total: int


class PromptLogprobsComputed(Event, frozen=True, tag=True, kw_only=True):
    """Logprobs of prompt positions, in order from `sampling.prompt_logprobs_from` on."""

    turn_id: TurnId
    logprobs: tuple[TokenLogprob, ...]


class TokensProduced(Event, frozen=True, tag=True, kw_only=True):
    """Output tokens, settled. `logprobs` is empty, or one entry per token."""

    turn_id: TurnId
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class TurnFinished(Event, frozen=True, tag=True, kw_only=True):
    """The turn ended as asked.

    `history_len`: tokens of the session the engine now holds; `num_outputs`: output tokens among
    them that belong to this turn. `matched_token`: the stop token that ended it, if one did.
    """

    turn_id: TurnId
    session_id: SessionId
    reason: FinishReason
    matched_token: int | None
    history_len: int
    prompt_tokens: int
    cached_tokens: int
    num_outputs: int
    num_retractions: int
    timings: TurnTimings


class TurnFailed(Event, frozen=True, tag=True, kw_only=True):
    """The turn ended by a fault; the session's history is what it was before the turn.

    `code` is a wire code of `session_server.core.errors`.
    """

    turn_id: TurnId
    session_id: SessionId
    code: str
    message: str
    history_len: int


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """Accounts of one pool, in pages; the fields from `free` on add up to `pages`.

    `page_bytes`: what a page takes in all layers of the pool, those of a draft model aside.
    """

    pages: int
    page_size: int
    page_bytes: int
    free: int
    reserved: int
    tree_evictable: int
    tree_protected: int
    session_held: int
    active: int
    fenced: int
    spill: int
    quarantine: int


ACCOUNTS: Final = PoolReport.__struct_fields__[PoolReport.__struct_fields__.index("free") :]
"""Names of the accounts: every page of a pool is in exactly one."""


class SessionPages(msgspec.Struct, frozen=True, kw_only=True):
    """What one session holds: its state, tokens, valid KV, and pages per pool."""

    session_id: SessionId
    state: str
    tokens: int
    committed_len: int
    protected_pages: dict[str, int]
    private_pages: dict[str, int]


class TracedRow(msgspec.Struct, frozen=True):
    """One row of a launch: positions [start, start + num_tokens) of a turn's context."""

    turn_id: TurnId
    row: int
    start: int
    num_tokens: int


class TracedStep(msgspec.Struct, frozen=True, kw_only=True):
    """What one step of the engine did. `commands` are their kinds, `settled` the launches whose
    results it took in; then the plan's decisions, and what was launched.
    """

    step: int
    now_s: float
    commands: tuple[str, ...]
    settled: tuple[int, ...]
    cooled: tuple[SessionId, ...]
    retracted: tuple[TurnId, ...]
    admitted: tuple[TurnId, ...]
    refused: TurnId | None
    launched: int | None
    is_probe: bool
    rows: tuple[TracedRow, ...]


class CheckerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the memory checker has done since the engine started.

    `runs` by level; `violations` in all, the texts of the most recent ones in `recent`.
    `quarantined_sessions`, the most recent ones, lost their KV, `rebuilds` dropped everybody's;
    together they cost `reprefill_tokens` to compute again. `probes` were answered by the device,
    the last one `last_probe_ago_s` ago (None: none yet). `check_ms` and `probe_ms` were spent on
    checks and on probes, which is `cost_share` of the engine's time.
    """

    runs: dict[str, int]
    violations: int = 0
    recent: tuple[str, ...] = ()
    quarantined_sessions: tuple[SessionId, ...] = ()
    rebuilds: int = 0
    reprefill_tokens: int = 0
    probes: int = 0
    last_probe_ago_s: float | None = None
    check_ms: float = 0.0
    probe_ms: float = 0.0
    cost_share: float = 0.0

    @property
    def num_runs(self) -> int:
        """Checks of any level."""
        return sum(self.runs.values())


class MemoryReported(Event, frozen=True, tag=True, kw_only=True):
    """Answer to `ReportMemory`. `trace`: the steps before the first violation, if asked for."""

    request_id: int
    pools: dict[str, PoolReport]
    rows: int
    rows_free: int
    sessions: tuple[SessionPages, ...]
    checks: CheckerReport
    trace: tuple[TracedStep, ...] = ()


class CacheFlushed(Event, frozen=True, tag=True, kw_only=True):
    """Answer to `FlushCache`; `done` is False when turns were live and nothing was touched."""

    request_id: int
    done: bool


class EngineStats(Event, frozen=True, tag=True, kw_only=True):
    """A sample of the engine's counters since start and gauges now; about once a second of work,
    and once more when the last turn has ended.

    `host_ms`: time outside forwards. Token and step counts are totals. `draft_tokens`: drafts
    that forwards verified, `accepted_tokens`: drafts accepted.
    """

    steps: int
    forward_ms: float
    host_ms: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    draft_tokens: int
    accepted_tokens: int
    retractions: int
    coolings: int
    running: int
    waiting: int
    sessions: int
    pages_free: dict[str, int]
    pages_total: dict[str, int]
    check_runs: int
    check_violations: int


EngineEvent = (
    EngineReady
    | EngineDied
    | EnginePulse
    | EngineStalled
    | EngineResumed
    | SessionRefused
    | SessionCooled
    | SessionGone
    | TurnStarted
    | PrefillProgressed
    | PromptLogprobsComputed
    | TokensProduced
    | TurnFinished
    | TurnFailed
    | MemoryReported
    | CacheFlushed
    | EngineStats
)
