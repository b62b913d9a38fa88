"""One session: identity, settings, history, and the turns that wait, run, and ended lately."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Literal

from session_server.core.ids import SessionId, new_session_id
from session_server.core.owner import Owner
from session_server.core.session_events import TurnEnd
from session_server.sessions.journal import Journal
from session_server.sessions.transcript import Transcript
from session_server.sessions.turn import Turn, TurnPhase
from session_server.sessions.views import SessionState, SessionView, TurnStatus, TurnView

CloseReason = Literal["client", "expired", "draining"]


@dataclass(slots=True)
class SessionSettings:
    """What a client chose. `created_s` is wall-clock time."""

    ttl_s: float
    metadata: dict[str, str]
    is_pinned: bool
    is_single_turn: bool
    created_s: float


@dataclass(slots=True)
class EngineCopy:
    """What the engine holds of the history.

    `session_id` is ours and unguessable, so that owners may choose equal names. The engine's
    tokens and the history agree on the first `known_len`; None: it does not know the session.
    `state` is what readers were told last.
    """

    session_id: SessionId = field(default_factory=new_session_id)
    known_len: int | None = None
    state: Literal["new", "resident", "cold"] = "new"


@dataclass(slots=True, eq=False)
class Session:
    """A conversation and its owner. At most one turn is live; the rest wait in order."""

    owner: Owner
    session_id: str
    settings: SessionSettings
    journal: Journal
    transcript: Transcript
    last_active_s: float
    copy: EngineCopy = field(default_factory=EngineCopy)
    live: Turn | None = None
    queue: deque[Turn] = field(default_factory=deque)
    ended: OrderedDict[str, tuple[bytes, TurnView]] = field(default_factory=OrderedDict)
    num_turns: int = 0
    closing: CloseReason | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no turn runs or waits."""
        return self.live is None and not self.queue

    def turns(self) -> list[Turn]:
        """Turns that have not ended, in order."""
        return [*([self.live] if self.live else []), *self.queue]

    def find(self, turn_id: str) -> Turn | None:
        """The turn of this id that has not ended."""
        return next((turn for turn in self.turns() if turn.request.turn_id == turn_id), None)

    def take_out(self, turn: Turn) -> None:
        """Let go of a turn that has ended or was refused."""
        if self.live is turn:
            self.live = None
        else:
            self.queue.remove(turn)

    def view(self) -> SessionView:
        """The session now."""
        return SessionView(
            session_id=self.session_id,
            epoch=self.journal.epoch,
            seq=self.journal.last_seq,
            state=self._state(),
            num_tokens=len(self.transcript),
            num_turns=self.num_turns,
            running_turn=self.live.request.turn_id if self.live else None,
            queued_turns=len(self.queue),
            ttl_s=self.settings.ttl_s,
            metadata=dict(self.settings.metadata),
            history=self.transcript.mode,
            created_s=self.settings.created_s,
        )

    def turn_view(self, turn: Turn) -> TurnView:
        """A turn of this session that has not ended."""
        is_running = turn.phase in (TurnPhase.RUNNING, TurnPhase.ENDING)
        return TurnView(
            turn_id=turn.request.turn_id,
            session_id=self.session_id,
            status="running" if is_running else "queued",
            position=self.turns().index(turn),
            created_seq=turn.created_seq,
            text=turn.running.answer.text if turn.running else "",
            end=None,
        )

    def keep_ended(self, turn: Turn, end: TurnEnd, status: TurnStatus, *, max_kept: int) -> None:
        """Remember how a turn ended, for whoever sends or asks for its id again."""
        view = TurnView(
            turn_id=turn.request.turn_id,
            session_id=self.session_id,
            status=status,
            position=0,
            created_seq=turn.created_seq,
            text=end.outcome.text,
            end=end,
        )
        self.ended[turn.request.turn_id] = (turn.fingerprint, view)
        while len(self.ended) > max_kept:
            self.ended.popitem(last=False)

    def _state(self) -> SessionState:
        if self.closing is not None:
            return "closing"
        return "resident" if self.copy.state == "resident" else "cold"
