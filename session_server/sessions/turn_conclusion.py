"""`TurnConclusion`: write a turn that has ended to the store, then tell of it and give back what it
held."""

from __future__ import annotations

from collections.abc import Callable

from session_server.core.session_events import SessionRewound, TurnEnd
from session_server.sessions.bugs import contained
from session_server.sessions.ended_turns import record_of
from session_server.sessions.quotas import Quotas
from session_server.sessions.session import Session
from session_server.sessions.session_logs import SessionLogs
from session_server.sessions.store.ownership import NotOurs
from session_server.sessions.store.writer import Beside, Told
from session_server.sessions.tokenizing import PromptBuilder
from session_server.sessions.turn import SessionTurn, TurnCounts
from session_server.sessions.turn_ends import refused, report_of, turn_moved, with_durability


class TurnConclusion:
    """Conclude turns whose end is decided and whose session has what they leave.

    `logs` keep sessions on disk. Where they do, a turn that was computed holds its place until it
    is there: nobody is told of a turn that a crash could undo.
    """

    def __init__(
        self, quotas: Quotas, prompt_builder: PromptBuilder, *, clock: Callable[[], float]
    ) -> None:
        self._quotas = quotas
        self._prompt_builder = prompt_builder
        self._clock = clock
        self.counts = TurnCounts()
        self.logs = SessionLogs(clock=clock, count_bytes=quotas.stored_bytes.add)

    def end(
        self,
        session: Session,
        turn: SessionTurn,
        end: TurnEnd,
        *,
        rewound: SessionRewound | None,
        on_late: Callable[[], None],
    ) -> None:
        """Conclude a turn now, or once it is on disk; `on_late` is called after the latter.
        `rewound`: what readers are told with the end."""
        session.life.last_active_s = self._clock()
        if session.life.log is None:
            self._conclude(session, turn, end, rewound)
            return

        def on_written(error: Exception | None) -> None:
            if isinstance(error, NotOurs):  # what is in memory goes, and this turn with it
                self._conclude(session, turn, refused(turn, turn_moved()), None)
            else:
                durable = with_durability(end, is_durable=error is None)
                self._conclude(session, turn, durable, rewound)
            on_late()

        is_awaited = False
        with contained("a turn was not written"):
            is_awaited = self._record(session, turn, end, on_written)
        if not is_awaited:
            self._conclude(session, turn, with_durability(end, is_durable=False), rewound)

    def _record(self, session: Session, turn: SessionTurn, end: TurnEnd, on_written: Told) -> bool:
        """Write a turn; return whether its end shall wait until `on_written` is called."""
        record = record_of(turn, end, num_items=session.transcript.num_items)
        beside: Beside | None = None
        if turn.course.hooks.beside is not None:
            with contained("what belongs to a turn was not made"):
                beside = turn.course.hooks.beside(end)
        if turn.submitted is None:
            # It leaves nothing but its id, for which nobody waits.
            self.logs.record(session, record, beside=beside)
            return False
        return self.logs.record_turn(session, record, on_written, beside)

    def remove(self, session: Session, turn: SessionTurn) -> None:
        """Remove a turn that has ended or was rejected from its session."""
        if session.live is turn:
            self.counts.live -= 1
        else:
            self.counts.queued -= 1
        session.remove_turn(turn)

    def _conclude(
        self, session: Session, turn: SessionTurn, end: TurnEnd, rewound: SessionRewound | None
    ) -> None:
        if turn not in session.turns():
            return  # a write that failed was told of twice
        self.counts.ended[end.status] += 1
        self.remove(session, turn)
        session.life.last_active_s = now_s = self._clock()
        with contained("a turn's end was not told"):
            if rewound is not None:
                session.journal.append(rewound)
            end_seq = session.journal.append(end)
            session.ended.add(turn, end, end_seq=end_seq, num_items=session.transcript.num_items)
        with contained("what a turn held was not counted"):
            self._release(session, turn, now_s=now_s)
        with contained("a turn's end was not reported"):
            if self.counts.on_ended is not None:
                self.counts.on_ended(report_of(session.session_id, turn, end, ended_s=now_s))
        with contained("what follows a turn's end was not done"):
            if turn.course.hooks.on_end is not None:
                turn.course.hooks.on_end(end)

    def _release(self, session: Session, turn: SessionTurn, *, now_s: float) -> None:
        """Give back what a turn held, and count what it has made."""
        if not self._prompt_builder.cancel(turn):
            self._quotas.release_turn(session.owner, turn)
        if turn.submitted is not None:
            num_outputs = len(turn.submitted.answer.token_ids)
            self._quotas.output_rate.add(session.owner, num_outputs, now_s=now_s)
            self._quotas.rest_kv(session)
        self._quotas.recount(session)
