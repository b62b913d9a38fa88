"""Define what `SessionManager` accepts and returns: frozen values, safe to keep and, but for the
journal of a turn, to serialize."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from session_server.core.events import EngineReady, EngineStats
from session_server.core.session_events import (
    CheckOutcome,
    CloseReason,
    ConversationItem,
    Message,
    SessionState,
    StateReason,
    TurnEnd,
)
from session_server.sessions.journal import Journal

TurnStatus = Literal["queued", "running", "completed", "cancelled", "failed"]
HistoryMode = Literal["append", "template"]


@dataclass(frozen=True, slots=True)
class HistoryModes:
    """Hold how turns of a session are rendered: without tools, and with tools."""

    plain: HistoryMode
    with_tools: HistoryMode

    def of(self, tools: Sequence[str]) -> HistoryMode:
        """Return the mode of a conversation with these tools."""
        return self.with_tools if tools else self.plain


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """Describe a session as a client requested it.

    `session_id`: None for a server-made one. `messages` begin the conversation and are rendered
    with the first turn. `ttl_s`: idle life time counted from the end of the last turn, None for
    the server's default. `history` None takes "append" when the chat template allows it, else
    "template" (the whole history is rendered again each turn and the longest common token prefix
    is kept). `single_turn`: the session closes itself when its first turn has ended, which is how
    a stateless completion runs. `idempotency_key`: replaces `session_id`; `SessionManager.create`
    gives the same session for the same key and request. `is_stored`: it outlives the process, if
    the server has a store.
    """

    session_id: str | None = None
    messages: tuple[Message, ...] = ()
    ttl_s: float | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    pinned: bool = False
    history: HistoryMode | None = None
    single_turn: bool = False
    idempotency_key: str | None = None
    is_stored: bool = False


@dataclass(frozen=True, slots=True)
class SessionView:
    """Describe the present state of a session. `seq` is that of its newest journal entry;
    `num_tokens` is the length of the history; `num_uses` grows with every use by its id.

    `created_s` is wall-clock seconds, for display only.
    """

    session_id: str
    epoch: str
    seq: int
    state: SessionState
    num_tokens: int
    num_turns: int
    num_uses: int
    running_turn: str | None
    queued_turns: int
    ttl_s: float
    metadata: Mapping[str, str]
    is_pinned: bool
    history: HistoryMode
    created_s: float
    is_durable: bool | None = None
    """Whether all of it is on disk; None for one that lives as long as the process."""


@dataclass(frozen=True, slots=True)
class StoredSummary:
    """Describe a session that is on disk alone to operators. `number` identifies it; `place`: by
    what it was sorted."""

    number: int
    owner_id: str
    view: SessionView
    idle_s: float
    place: float


@dataclass(frozen=True, slots=True)
class SessionPage:
    """Hold sessions of one owner, oldest first, each with the cursor of the sessions after it."""

    sessions: tuple[SessionView, ...]
    cursors: tuple[str, ...]
    has_more: bool

    @property
    def next_after(self) -> str | None:
        """Return the cursor of the next page, None on the last one."""
        return self.cursors[-1] if self.has_more else None

    def first(self, count: int) -> SessionPage:
        """Return the page of the first `count` sessions, at least one."""
        has_more = self.has_more or count < len(self.sessions)
        return SessionPage(self.sessions[:count], self.cursors[:count], has_more)


@dataclass(frozen=True, slots=True)
class DraftView:
    """Say how far a draft was computed: `processed` of the `total` tokens of its context, `kept` of
    which were not computed for it. All 0 where something came in its place."""

    draft_id: str
    kept: int
    processed: int
    total: int


@dataclass(frozen=True, slots=True)
class TurnView:
    """Describe the present state of a turn.

    `created_seq` is the sequence number of its `TurnCreated` in `journal`, which its session has
    until it leaves the memory: a reader that starts after `created_seq - 1` sees all of the turn.
    `said` is the answer so far. `end` is set once the turn has ended and repeats the terminal
    entry, so that a reader who lost the journal misses nothing.
    """

    turn_id: str
    session_id: str
    journal: Journal
    status: TurnStatus
    position: int
    created_seq: int
    said: Message
    end: TurnEnd | None
    is_answer_lost: bool = False
    """Whether the turn has said something that neither journal nor conversation hold any more."""

    @property
    def text(self) -> str:
        """Return the text of the answer so far."""
        return self.said.content


@dataclass(frozen=True, slots=True)
class SessionSnapshot:
    """Hold everything that a reader who lost the journal needs, as of entry `session.seq`.

    `running` is the live turn with its text so far, None if there is none.
    """

    session: SessionView
    items: tuple[ConversationItem, ...]
    running: TurnView | None
    queued: tuple[TurnView, ...]


class BudgetUse(NamedTuple):
    """Say how much of a budget is held, by all owners together, and how much may be."""

    held: int
    limit: int


@dataclass(frozen=True, slots=True)
class StoreUse:
    """Hold what a store has done since the start, and whether it can be written to.

    `num_commits` by how long they took, in the classes of `COMMIT_BOUNDS_S`. `num_behind`: sessions
    of which something is not on disk, because a write has failed.
    """

    num_commits: Sequence[int]
    num_writes: int
    num_failed: int
    commit_s: float
    num_behind: int
    is_failing: bool


@dataclass(frozen=True, slots=True)
class ManagerStats:
    """Hold what the manager counts now, what it has counted by reason or outcome since it was made,
    and the engine's last statistics. `store`: None where no session is stored.

    `sessions` are in memory, `unread_sessions` on disk alone. `loaded_sessions` came from there,
    `unloaded_sessions` left the memory to make room.
    """

    sessions: int
    unread_sessions: int
    resident_sessions: int
    opened_sessions: int
    loaded_sessions: int
    unloaded_sessions: int
    closed_sessions: Mapping[CloseReason, int]
    evictions: Mapping[StateReason, int]
    live_turns: int
    queued_turns: int
    ended_turns: Mapping[str, int]
    grammar_checks: Mapping[CheckOutcome, int]
    budgets: Mapping[str, BudgetUse]
    store: StoreUse | None
    engine: EngineStats | None
    ready: EngineReady | None
