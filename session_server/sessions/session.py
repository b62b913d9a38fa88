"""Define one session: identity, settings, history, and its waiting, running and ended turns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from session_server.core.errors import SessionClosing, SessionMoved, TurnNotActive, TurnNotFound
from session_server.core.ids import SessionId, new_session_id
from session_server.core.owner import Owner
from session_server.core.session_events import (
    CloseReason,
    Message,
    SessionState,
    SessionUpdated,
    TurnEnd,
)
from session_server.sessions.ended_turns import EndedTurn, EndedTurns
from session_server.sessions.footprint import SESSION_BYTES, metadata_bytes
from session_server.sessions.items import message_of, message_of_answer
from session_server.sessions.journal import Journal
from session_server.sessions.store.records import EndRecord
from session_server.sessions.transcript import Transcript
from session_server.sessions.turn import CancelAccepted, SessionTurn, TurnPhase
from session_server.sessions.turn_ends import with_durability
from session_server.sessions.views import HistoryMode, SessionView, TurnView


@dataclass(slots=True)
class SessionConfig:
    """Hold the options that a client chose. `created_s` is wall-clock time.

    `request_digest` identifies the request that an idempotency key came with; empty without a key.
    `asked_history`: the `history` that was asked for.
    """

    ttl_s: float
    metadata: dict[str, str]
    is_pinned: bool
    is_single_turn: bool
    created_s: float
    request_digest: bytes = b""
    asked_history: HistoryMode | None = None

    def updated(self) -> SessionUpdated:
        """Return the journal entry for settings that hold now."""
        return SessionUpdated(self.ttl_s, dict(self.metadata), self.is_pinned)


@dataclass(slots=True)
class EngineCopy:
    """Track what the engine holds of the history.

    `session_id` is made by the server and unguessable, so that owners may choose equal ids.
    `state` is the one last reported to readers. `counted_tokens`: what `Quotas` counts of its KV.
    `held_len`: how many tokens the engine has had last, also behind what the history has now.
    """

    session_id: SessionId = field(default_factory=new_session_id)
    state: Literal["new", "resident", "cold"] = "new"
    counted_tokens: int = 0
    held_len: int = 0
    _len: int | None = None
    _generation: int = 0

    def known_len(self, generation: int) -> int | None:
        """Return how many leading tokens of the history the engine of this generation holds; None
        if it does not know the session."""
        return self._len if self._generation == generation else None

    def set_known_len(self, length: int | None, generation: int) -> None:
        """Set how many leading tokens the engine of this generation holds; a newer generation
        invalidates it."""
        self._len = length
        self._generation = generation

    def set_held_len(self, length: int, generation: int) -> None:
        """Set how many tokens the engine of this generation holds, all of them the history's."""
        self.set_known_len(length, generation)
        self.held_len = length


class LogSize(NamedTuple):
    """Count what the store has of a session: entries, their bytes, and those of its row that are
    what its client has set."""

    num_entries: int = 0
    num_bytes: int = 0
    num_row_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Return the bytes that count."""
        return self.num_bytes + self.num_row_bytes


class Hold(NamedTuple):
    """Say in which epoch a session of a shared store is held, and as which replica: another one
    with each lease."""

    epoch: int = 0
    replica_id: int = 0


NO_HOLD: Final = Hold()
"""In a store of this server alone."""


@dataclass(slots=True)
class LogPlace:
    """Say what the store has of a session, of the `size` given.

    One write is under way at a time (`is_writing`); what comes meanwhile waits for the next one:
    `has_changed` if it needs an entry, `is_touched` if not, with the `ends` of turns and those that
    are `told`. `is_behind`: a write has failed, so the next one has all of the session.
    `expires_s`, `num_uses`: when the session expires as the last write has it, by the clock of the
    store, and how often it was used. `is_synced`: a write that is told of is on disk. `hold`: of
    a shared store; `has_moved`: another replica holds the session, and nothing is written any more.
    """

    size: LogSize = field(default_factory=LogSize)
    is_writing: bool = False
    has_changed: bool = False
    is_touched: bool = False
    is_behind: bool = False
    ends: list[EndRecord] = field(default_factory=list)
    told: list[Callable[[Exception | None], None]] = field(default_factory=list)
    expires_s: float = 0.0
    num_uses: int = 0
    is_synced: bool = True
    hold: Hold = NO_HOLD
    has_moved: bool = False

    def check_not_moved(self) -> None:
        """Raise SessionMoved if another replica holds the session."""
        if self.has_moved:
            raise _moved()

    @property
    def is_written(self) -> bool:
        """Return whether all of the session is in the store."""
        is_refused = self.is_behind or self.has_moved
        return not (self.is_writing or self.has_changed or self.is_touched or is_refused)

    @property
    def is_durable(self) -> bool:
        """Return whether all of the session is on disk."""
        return self.is_synced and self.is_written


@dataclass(slots=True)
class SessionLife:
    """Hold when a session was last used, and the second under which `Deadlines` files it; both
    monotonic.

    `order` counts up in the order in which sessions were opened (`SessionRegistry.add`), and is a
    session's own for good; `num_uses` counts up with every call that changes the session or runs a
    turn in it. `num_own_uses`: those by the surface that opened it for a client which does not name
    sessions; None for one that a client opened. `log`: None where the session lives as long as the
    process.
    """

    last_active_s: float
    deadline_s: float = math.inf
    order: int = 0
    num_uses: int = 0
    num_own_uses: int | None = None
    log: LogPlace | None = None


@dataclass(slots=True, eq=False, weakref_slot=True)
class Session:
    """Hold a conversation and its owner. At most one turn is live; the rest wait in order.

    `counted_bytes` is what `Quotas` counts for it.
    """

    owner: Owner
    session_id: str
    settings: SessionConfig
    journal: Journal
    transcript: Transcript
    life: SessionLife
    copy: EngineCopy = field(default_factory=EngineCopy)
    live: SessionTurn | None = None
    queue: list[SessionTurn] = field(default_factory=list)
    ended: EndedTurns = field(default_factory=EndedTurns)
    closing: CloseReason | Literal["moved"] | None = None
    counted_bytes: int = 0

    @property
    def is_idle(self) -> bool:
        """Return whether no turn runs or waits."""
        return self.live is None and not self.queue

    @property
    def is_concluding(self) -> bool:
        """Return whether a turn has ended and its end is on its way to disk: the conversation has
        already what readers are not told of."""
        return self.live is not None and self.live.phase is TurnPhase.ENDED

    @property
    def is_lost(self) -> bool:
        """Return whether another replica may hold the session: what is here is old."""
        return self.life.log is not None and self.life.log.has_moved

    @property
    def expires_s(self) -> float:
        """Return when the session expires if it stays idle, in monotonic seconds."""
        return self.life.last_active_s + self.settings.ttl_s

    @property
    def num_bytes(self) -> int:
        """Return the host memory of the conversation and of what is kept with it. The journal and
        unfinished turns are counted separately."""
        kept = self.transcript.num_bytes + self.ended.num_bytes
        return SESSION_BYTES + metadata_bytes(self.settings.metadata) + kept

    def check_not_lost(self, log: LogPlace | None) -> None:
        """Raise SessionMoved if the session goes on in another replica, perhaps without its last
        change. `log`: as it was at that change; one that was deleted since has none."""
        if log is not None and (log.has_moved or (self.closing == "moved" and not log.is_written)):
            raise _moved()

    def check_not_closing(self) -> None:
        """Raise SessionClosing if the session takes no new work, SessionMoved if that goes
        elsewhere."""
        if self.closing == "moved":
            raise _moved()
        if self.closing is not None:
            raise SessionClosing("the session is closing")

    def turns(self) -> list[SessionTurn]:
        """Return the unfinished turns in order."""
        return [*([self.live] if self.live else []), *self.queue]

    def find(self, turn_id: str) -> SessionTurn | None:
        """Return the unfinished turn with this id, or None."""
        return next((turn for turn in self.turns() if turn.request.turn_id == turn_id), None)

    def remove_turn(self, turn: SessionTurn) -> None:
        """Remove a turn that has ended or was rejected."""
        if self.live is turn:
            self.live = None
        else:
            self.queue.remove(turn)

    def view(self) -> SessionView:
        """Return the present state of the session."""
        return SessionView(
            session_id=self.session_id,
            epoch=self.journal.epoch,
            seq=self.journal.last_seq,
            state=self._state(),
            num_tokens=len(self.transcript),
            num_turns=len(self.ended),
            num_uses=self.life.num_uses,
            running_turn=self.live.request.turn_id if self.live else None,
            queued_turns=len(self.queue),
            ttl_s=self.settings.ttl_s,
            metadata=dict(self.settings.metadata),
            is_pinned=self.settings.is_pinned,
            history=self.transcript.mode,
            created_s=self.settings.created_s,
            is_durable=None if self.life.log is None else self.life.log.is_durable,
        )

    def turn_view(self, turn: SessionTurn) -> TurnView:
        """Return the present state of an unfinished turn of this session."""
        # One that has ended is on its way to disk: its end comes with the next entry.
        is_running = turn.phase in (TurnPhase.RUNNING, TurnPhase.ENDING, TurnPhase.ENDED)
        nothing = Message("assistant", "")
        return TurnView(
            turn_id=turn.request.turn_id,
            session_id=self.session_id,
            journal=self.journal,
            status="running" if is_running else "queued",
            position=self.turns().index(turn),
            created_seq=turn.created_seq,
            said=turn.submitted.answer.message if turn.submitted else nothing,
            end=None,
        )

    def view_of(self, turn_id: str) -> TurnView:
        """Return the state of a turn that waits, runs or has ended. Raises TurnNotFound."""
        turn = self.find(turn_id)
        if turn is not None and turn.is_accepted:
            return self.turn_view(turn)
        ended = self.ended.find(turn_id)
        if ended is None:
            # Also one that a crash has lost before it was stored.
            raise TurnNotFound("no such turn in this session; send it again under its id")
        return self.ended_view(turn_id, ended)

    def turn_to_cancel(self, turn_id: str | None) -> SessionTurn:
        """Return the turn that a cancel names; None names the running one, else the first in the
        queue.

        Raises:
            TurnNotFound: there is none of that id.
            TurnNotActive: it has ended, or its last token is already there.
        """
        if turn_id is None:
            turn = next(iter(self.turns()), None)
            if turn is None:
                raise TurnNotActive("no turn of this session runs")
        else:
            turn = self.find(turn_id)
            if turn is None and self.ended.find(turn_id) is None:
                raise TurnNotFound("no such turn in this session")
        # A stop string has decided the end: too late to cancel. A second cancel is no error.
        is_over = (
            turn is None
            or turn.phase is TurnPhase.ENDED
            or (
                turn.phase is TurnPhase.ENDING
                and turn.submitted is not None
                and not isinstance(turn.submitted.verdict, CancelAccepted)
            )
        )
        if turn is None or is_over:
            raise TurnNotActive("the turn has ended")
        return turn

    def ended_view(self, turn_id: str, ended: EndedTurn) -> TurnView:
        """Return the state of an ended turn: its whole end while the journal has it, otherwise what
        the record holds (see `EndedTurn.short_end`)."""
        found, is_lost = self.journal.find(ended.end_seq), False
        if not isinstance(found, TurnEnd):
            item = self.transcript.answer_of(turn_id, ended.answer_index, ended.item_id)
            found = ended.short_end(turn_id, None if item is None else message_of(item))
            is_lost = item is None and ended.usage.output_tokens > 0
        elif ended.is_durable and not found.outcome.is_durable:
            found = with_durability(found, is_durable=True)  # it was written since it was told
        return TurnView(
            turn_id=turn_id,
            session_id=self.session_id,
            journal=self.journal,
            status=ended.status,
            position=0,
            created_seq=ended.created_seq,
            said=message_of_answer(found.outcome),
            end=found,
            is_answer_lost=is_lost,
        )

    def _state(self) -> SessionState:
        if self.closing is not None:
            return "closing"
        return "resident" if self.copy.state == "resident" else "cold"


def _moved() -> SessionMoved:
    return SessionMoved("the session goes on in another replica: ask again")
