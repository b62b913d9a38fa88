"""What the engine tells the server: a closed union of frozen values, in the order they happened.

For each accepted turn: at most one `TurnStarted` per admission, any number of `PrefillProgressed`
and `TokensProduced`, then exactly one of `TurnFinished` or `TurnFailed`, and nothing after it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import Final, Literal

import msgspec

from session_server.core.ids import SessionId, TurnId
from session_server.core.sampling import TokenLogprob


class FinishReason(enum.Enum):
    """Say why a turn ended without an error."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class TurnTimings(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Hold the durations of one turn as the engine saw them, in milliseconds.

    `queue_ms`: submit to first admission. `prefill_ms`: admission to prompt computed. `ttft_ms`:
    submit to first token settled, or to the end without one. `decode_ms`: first token to the end.
    `forward_ms`: the whole time of the forwards that the turn took part in. `num_steps`: how many
    there were.
    """

    queue_ms: float
    prefill_ms: float
    ttft_ms: float
    decode_ms: float
    forward_ms: float
    num_steps: int


class Event(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all events."""


class EngineReady(Event, frozen=True, tag=True, kw_only=True):
    """Report that the engine serves.

    `epoch` grows with every restart; an engine does not know the sessions of an older one.
    """

    epoch: int
    max_turn_len: int
    """Tokens that a context may have: the model's or the configured length, or what the pools hold
    if that is less. Clients are told this number alone."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    page_size: int
    num_pages: int
    """Of the largest pool, padding included."""
    device: str
    dtype: str
    backend: str
    kv_tiers: Literal["none", "host", "disk"] = "none"
    """Where KV is kept that the pools have no room for: what is in host memory ends with the
    engine."""


class EngineDied(Event, frozen=True, tag=True, kw_only=True):
    """Report that the engine's process ended. Made on the client side.

    Every live turn is lost; sessions live on as tokens.
    """

    message: str
    will_restart: bool


class EnginePulse(Event, frozen=True, tag=True, kw_only=True):
    """Report several times a second, busy or idle, whether steps complete.

    The client side does not pass it on. `stalled_s`: seconds without a completed step, if that is
    longer than steps of that size take; 0 otherwise.
    """

    stalled_s: float


class EngineStalled(Event, frozen=True, tag=True, kw_only=True):
    """Report that the engine has completed no step for `stalled_s` seconds, or sends nothing.

    Made on the client side, once per stall. `EngineResumed` or `EngineDied` follows.
    """

    stalled_s: float


class EngineResumed(Event, frozen=True, tag=True, kw_only=True):
    """Report that an engine completes steps again after a stall. Made on the client side."""


class SessionRefused(Event, frozen=True, tag=True, kw_only=True):
    """Report that `OpenSession` was refused: a duplicate id, or no pin quota."""

    session_id: SessionId
    code: str
    message: str


class SessionCooled(Event, frozen=True, tag=True, kw_only=True):
    """Report that a session lost its KV. Its tokens stay; its next turn computes them again."""

    session_id: SessionId


class SessionGone(Event, frozen=True, tag=True, kw_only=True):
    """Report that the slot is gone. Answers `CloseSession`, also for an unknown id."""

    session_id: SessionId


class SessionWritten(Event, frozen=True, tag=True, kw_only=True):
    """Report that the KV of a session that moves is where other servers find it, or that nobody is
    to wait for that any longer. Answers `CloseSession` where that says so."""

    session_id: SessionId


class KVForgotten(Event, frozen=True, tag=True, kw_only=True):
    """Answer `ForgetKV`: whether nothing of it is left on disk, also if the power fails now."""

    number: int
    is_gone: bool


class KVMeasured(Event, frozen=True, tag=True, kw_only=True):
    """Answer `MeasureKV`: the first `held_len` tokens have KV in the pools, in host memory or in
    files. `copied_len`: of those, how many are outside of the pools, where files would go on."""

    request_id: int
    held_len: int
    copied_len: int


class KVWritten(Event, frozen=True, tag=True, kw_only=True):
    """Answer `WriteKV`: files that hold the first `num_tokens` of the session, in order, each by
    its id and bytes. Fewer than were published where the disk did not take them."""

    request_id: int
    num_tokens: int
    files: tuple[tuple[bytes, int], ...]


class TurnStarted(Event, frozen=True, tag=True, kw_only=True):
    """Report that a turn was admitted, also after a retraction.

    `cached_tokens`: positions that its first admission did not compute; a draft of the input had
    computed `drafted_tokens` of them.
    """

    turn_id: TurnId
    prompt_tokens: int
    cached_tokens: int
    drafted_tokens: int = 0


class InputDrafted(Event, frozen=True, tag=True, kw_only=True):
    """Answer `DraftInput`: `processed` of the draft's `total` context positions have KV, `kept` of
    which were not computed for it. Fewer than `total` where memory was short."""

    session_id: SessionId
    draft_id: TurnId
    kept: int
    processed: int
    total: int


class PrefillProgressed(Event, frozen=True, tag=True, kw_only=True):
    """Report that `computed` of `total` prompt positions are done. Sent between chunks only."""

    turn_id: TurnId
    computed: int
    total: int


class PromptLogprobsComputed(Event, frozen=True, tag=True, kw_only=True):
    """Report the logprobs of more prompt tokens.

    In order of positions, from `sampling.prompt_logprobs_from` on, as chunks are computed.
    """

    turn_id: TurnId
    logprobs: tuple[TokenLogprob, ...]


class TokensProduced(Event, frozen=True, tag=True, kw_only=True):
    """Report settled output tokens. `logprobs`: one per token, or empty."""

    turn_id: TurnId
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class StepTokens(Event, frozen=True, tag=True, kw_only=True):
    """Report one new token of each of several turns: a `TokensProduced` of each, in this order."""

    turn_ids: tuple[TurnId, ...]
    token_ids: tuple[int, ...]

    def each(self) -> Iterator[TokensProduced]:
        """Yield the event of each turn."""
        for turn_id, token_id in zip(self.turn_ids, self.token_ids, strict=True):
            yield TokensProduced(turn_id=turn_id, token_ids=(token_id,))


class TurnFinished(Event, frozen=True, tag=True, kw_only=True):
    """Report that a turn ended without an error.

    `history_len`: tokens of the session that the engine now holds. `num_outputs`: output tokens of
    this turn among them. `matched_token`: the stop token that ended it, if one did.
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
    """Report that an error ended a turn; the session's history is what it was before the turn.

    `code` is a wire code of `session_server.core.errors`.
    """

    turn_id: TurnId
    session_id: SessionId
    code: str
    message: str
    history_len: int


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report the accounts of one pool, in pages. Those from `free` on add up to `pages`.

    `page_bytes`: what a page takes in all layers of the pool, without those of a draft model.
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
"""Names of the accounts. Every page of a pool is in exactly one."""


class SessionPages(msgspec.Struct, frozen=True, kw_only=True):
    """Report what one session holds: its state, tokens, valid KV, and pages per pool."""

    session_id: SessionId
    state: str
    tokens: int
    committed_len: int
    protected_pages: dict[str, int]
    private_pages: dict[str, int]


class TracedRow(msgspec.Struct, frozen=True, gc=False):
    """Describe one row of a forward: positions [start, start + num_tokens) of a turn, the last
    `num_drafts` of them guesses that it verified. `sample`: whether it chose a token."""

    turn_id: TurnId
    row: int
    start: int
    num_tokens: int
    num_drafts: int = 0
    sample: bool = False


class TracedStep(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Describe what one step of the engine did.

    `commands`: their kinds. `settled`: the forwards whose results it took, which lasted
    `forward_s`. Then the decisions of the plan; `launched`: the forward launched, if any.
    """

    step: int
    now_s: float
    commands: tuple[str, ...]
    settled: tuple[int, ...]
    forward_s: tuple[float, ...]
    cooled: tuple[SessionId, ...]
    retracted: tuple[TurnId, ...]
    admitted: tuple[TurnId, ...]
    refused: TurnId | None
    launched: int | None
    is_probe: bool
    rows: tuple[TracedRow, ...]


class CheckerReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report what the memory checker has done since the engine started.

    `levels`: `runs` by level. `violations`: how many in all; `recent`: the texts of the latest.
    `quarantined_sessions`: the latest sessions that lost their KV to a violation. `rebuilds`: how
    often all sessions did. `reprefill_tokens`: tokens that both cost to compute again. `probes`:
    answered by the device, the last one `last_probe_ago_s` seconds ago (None: none yet). `check_ms`
    and `probe_ms`: time spent on checks and probes, which is `cost_share` of the engine's time.
    """

    runs: int
    levels: dict[str, int]
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


class TierReport(msgspec.Struct, frozen=True, gc=False):
    """Report what was kept of KV outside of the pools since the engine's start.

    Attributes:
        spilled_tokens, spilled_bytes, spill_ms: copied out of the pools, and how long that took.
        restored_tokens, restored_bytes, restore_ms: copied back, for turns that did not compute
            them.
        lookups, hits: how often KV that the pools lack of a session was looked for, and was copied
            back.
        written_bytes: of files.
        refused_files: files that were not what they should be.
        failed_copies: copies that memory or the disk did not do.
        no_room_files: files that were not written, because the disk had no room or too little.
        dropped_segments: copies that gave way to others, or were of no use any more.
        host_bytes, disk_bytes: held now; `host_max_bytes`, `disk_max_bytes`: at most.
        disk_given_bytes: what `disk_max_bytes` is on a disk that has room for it.
    """

    spilled_tokens: int = 0
    spilled_bytes: int = 0
    spill_ms: float = 0.0
    restored_tokens: int = 0
    restored_bytes: int = 0
    restore_ms: float = 0.0
    lookups: int = 0
    hits: int = 0
    written_bytes: int = 0
    refused_files: int = 0
    failed_copies: int = 0
    no_room_files: int = 0
    dropped_segments: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    host_max_bytes: int = 0
    disk_max_bytes: int = 0
    disk_given_bytes: int = 0


class MemoryReported(Event, frozen=True, tag=True, kw_only=True):
    """Answer `ReportMemory`. `sessions`: those listed of all `num_sessions`. `trace`: the steps
    before the first violation, if asked for; `steps`: the newest ones, likewise. `tiers`: of KV
    outside of the pools."""

    request_id: int
    pools: dict[str, PoolReport]
    rows: int
    rows_free: int
    num_sessions: int
    sessions: tuple[SessionPages, ...]
    checks: CheckerReport
    trace: tuple[TracedStep, ...] = ()
    steps: tuple[TracedStep, ...] = ()
    tiers: TierReport = TierReport()


class CacheFlushed(Event, frozen=True, tag=True, kw_only=True):
    """Answer `FlushCache`. `done` is False if turns were live and nothing was changed."""

    request_id: int
    done: bool


SIZE_BOUNDS: Final = tuple(1 << power for power in range(14))
"""Upper ends of what `SizeCounts` counts apart."""


class SizeCounts(msgspec.Struct, frozen=True, gc=False):
    """Count sizes: `counts[i]` of them are at most `SIZE_BOUNDS[i]` and above the bound before,
    the last are above all bounds. `total`: their sum."""

    counts: tuple[int, ...] = (0,) * (len(SIZE_BOUNDS) + 1)
    total: int = 0


class EngineStats(Event, frozen=True, tag=True, kw_only=True):
    """Report totals since the engine's start, and gauges of now.

    Sent about once a second of work, when the last turn has ended, and behind a report.
    `host_ms`: time outside forwards. `draft_tokens`: drafts that forwards verified;
    `accepted_tokens`: drafts accepted. `input_draft_tokens` and the fields behind it: see
    `engine.tallies`. `tiers`: of KV outside of the pools. `graph_uses`: by the values of
    `core.batch.GraphUse`.
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
    check_runs: int
    check_violations: int
    input_draft_tokens: int = 0
    used_draft_tokens: int = 0
    batch_rows: SizeCounts = SizeCounts()
    prefill_tokens: SizeCounts = SizeCounts()
    tiers: TierReport = TierReport()
    graph_uses: dict[str, int] = {}


TurnEvent = (
    TurnStarted
    | PrefillProgressed
    | PromptLogprobsComputed
    | TokensProduced
    | TurnFinished
    | TurnFailed
)

EngineEvent = (
    EngineReady
    | EngineDied
    | EnginePulse
    | EngineStalled
    | EngineResumed
    | SessionRefused
    | SessionCooled
    | SessionGone
    | SessionWritten
    | KVForgotten
    | KVMeasured
    | KVWritten
    | TurnEvent
    | InputDrafted
    | StepTokens
    | MemoryReported
    | CacheFlushed
    | EngineStats
)


def one_by_one(events: Iterable[EngineEvent]) -> Iterator[EngineEvent]:
    """Yield events, and in place of each `StepTokens` those of its turns."""
    for event in events:
        if isinstance(event, StepTokens):
            yield from event.each()
        else:
            yield event
