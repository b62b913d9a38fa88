"""Run turns: queue -> tokens -> engine -> terminal entry -> the next turn.

The server decides outcomes and the engine carries them out. A stop string found or a cancel
accepted decides what stays, whatever the engine still reports. Every accepted turn therefore gets
exactly one terminal entry, and the history always matches that entry.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from itertools import chain, takewhile
from typing import Final, assert_never

from session_server.core.commands import SubmitTurn
from session_server.core.errors import (
    WIRE_ERRORS,
    EngineRestarting,
    EngineUnavailable,
    SessionNotFound,
    SessionServerError,
)
from session_server.core.events import (
    FinishReason,
    PrefillProgressed,
    PromptLogprobsComputed,
    TokensProduced,
    TurnEvent,
    TurnFailed,
    TurnFinished,
    TurnStarted,
    TurnTimings,
)
from session_server.core.ids import TurnId
from session_server.core.sampling import SamplingParams
from session_server.core.session_events import (
    CancelReason,
    SessionRewound,
    TurnCreated,
    TurnDelta,
    TurnEnd,
    TurnProgress,
)
from session_server.sessions.answer import Answer
from session_server.sessions.answer_grammar import held_behind_thought
from session_server.sessions.backlog import SLICE, Backlog
from session_server.sessions.bugs import BUG_CODE, BUG_MESSAGE, contained, log_bug
from session_server.sessions.engine_copies import EngineCopies
from session_server.sessions.engine_link import EngineLink
from session_server.sessions.footprint import entry_bytes, logprob_bytes
from session_server.sessions.prompt import Prompt, fit_sampling
from session_server.sessions.quotas import Quotas, SessionLimits
from session_server.sessions.residents import Residents
from session_server.sessions.salts import TenantSalts
from session_server.sessions.session import Session
from session_server.sessions.tokenizing import PromptBuilder, PromptOutcome
from session_server.sessions.turn import (
    BugFound,
    CancelAccepted,
    SessionTurn,
    StopFound,
    SubmittedTurn,
    TurnCounts,
    TurnPhase,
)
from session_server.sessions.turn_conclusion import TurnConclusion
from session_server.sessions.turn_ends import (
    cancelled,
    completed,
    failed,
    is_kept,
    refused,
)
from session_server.sessions.turn_names import TurnName
from session_server.sessions.verdicts import decide, end_by, submitted_of
from session_server.text.model_text import ModelText

_UNKNOWN_SESSION: Final = WIRE_ERRORS[SessionNotFound].code

RETRY_TOKENS: Final = 1 << 16
"""Tokens of history sent to an engine at a time; the last history may exceed it."""


class TurnFlow:
    """Run the turns of all sessions, one at a time in each.

    `on_idle` is called whenever a session has no running or waiting turn left.
    """

    def __init__(
        self,
        link: EngineLink,
        text: ModelText,
        *,
        limits: SessionLimits,
        quotas: Quotas,
        clock: Callable[[], float],
        salts: TenantSalts,
    ) -> None:
        self._link = link
        self._text = text
        self._quotas = quotas
        self._clock = clock
        self._sent: dict[TurnId, tuple[Session, SessionTurn]] = {}
        self.prompt_builder = PromptBuilder(text, limits)
        self.copies = EngineCopies(link, salts)
        self.on_idle: Callable[[Session], None] = lambda _session: None
        self.conclusion = TurnConclusion(quotas, self.prompt_builder, clock=clock)
        self.backlog = Backlog()
        self.residents = Residents(quotas)
        self._waiting: dict[Session, None] = {}
        """Sessions whose next turn waits for an engine that takes it, in order."""

    @property
    def counts(self) -> TurnCounts:
        """Return the turns that are live, wait and have ended."""
        return self.conclusion.counts

    def enqueue(self, session: Session, turn: SessionTurn) -> None:
        """Append a turn to its session's queue, and start it if it is also first and needs no
        check of its grammar."""
        session.queue.append(turn)
        self.counts.queued += 1
        on_checked = partial(self._on_checked, session, turn)
        with self._contained(session, turn):
            if not self.prompt_builder.check(session.owner, turn, on_checked):
                turn.phase = TurnPhase.CHECKING
        self.start_next(session)

    def _on_checked(
        self, session: Session, turn: SessionTurn, error: SessionServerError | None
    ) -> None:
        if turn.phase is not TurnPhase.CHECKING:
            self._quotas.release_turn(session.owner, turn)  # canceled during the check
            return
        turn.phase = TurnPhase.WAITING
        turn.course.checked_s = self._clock()
        self.counts.checks["passed" if error is None else "refused"] += 1
        if error is not None:
            self._refuse(session, turn, error)
        self.start_next(session)

    def start_next(self, session: Session) -> None:
        """Start the next turn if there is one and none is live."""
        while session.live is None and session.queue:
            turn = session.queue[0]
            if turn.phase in (TurnPhase.CHECKING, TurnPhase.ENDED):
                break  # of one that ends others may be told first, and come here
            if self._link.is_gone:
                self._refuse(session, turn, EngineUnavailable("there is no engine"))
            elif not self._link.is_up:
                self._waiting[session] = None
                break
            else:
                del session.queue[0]
                session.live = turn
                self.counts.queued -= 1
                self.counts.live += 1
                turn.phase = TurnPhase.PREPARING
                turn.course.begun_s = self._clock()
                with self._contained(session, turn):
                    self._prepare(session, turn)
                if turn.phase is TurnPhase.WAITING:
                    break  # the engine did not accept it; `retry` tries again
        self._accept_waiting(session)
        if session.live is not None or not session.queue:
            self._waiting.pop(session, None)
        if session.is_idle:
            self.on_idle(session)

    def retry(self) -> None:
        """Start turns that the engine could not accept, as long as it accepts them, a slice at a
        time: so many turns, or turns of so many tokens of history."""
        num_tokens = 0
        for _ in range(min(SLICE, len(self._waiting))):
            session = next(iter(self._waiting))
            del self._waiting[session]
            self.start_next(session)
            if session in self._waiting:
                return
            num_tokens += len(session.transcript)
            if num_tokens >= RETRY_TOKENS:
                break
        if self._waiting:
            self.backlog.defer(self.retry)

    def cancel(
        self,
        session: Session,
        *turns: SessionTurn,
        keep_partial: bool,
        reason: CancelReason,
        moved: SessionServerError | None = None,
    ) -> None:
        """Decide that turns end early; none of them starts meanwhile. Does nothing for a turn whose
        outcome is already decided. `moved`: what those fail with that have not begun."""
        for turn in turns:
            match turn.phase:
                case TurnPhase.CHECKING | TurnPhase.WAITING | TurnPhase.PREPARING:
                    self._accept(session, turn, 0)
                    end = cancelled(turn, kept=False, reason=reason, timings=None)
                    self._end(session, turn, end if moved is None else refused(turn, moved))
                case TurnPhase.RUNNING:
                    with self._contained(session, turn):
                        self._flush_text(session, turn)
                        self._link.send_or_queue(decide(turn, CancelAccepted(keep_partial, reason)))
                case TurnPhase.ENDING | TurnPhase.ENDED:
                    pass
                case _:
                    assert_never(turn.phase)
        self.start_next(session)

    def on_turn_event(self, event: TurnEvent) -> None:
        """Process an engine event about a turn; ignore events about turns that have ended."""
        found = self._sent.get(event.turn_id)
        if found is None:
            return
        session, turn = found
        is_over = isinstance(event, TurnFinished | TurnFailed)
        with self._contained(session, turn, is_over=is_over):
            self._take_event(session, turn, event)
        if is_over:
            self.start_next(session)

    def _take_event(self, session: Session, turn: SessionTurn, event: TurnEvent) -> None:
        match event:
            case TokensProduced():
                self._on_tokens(session, turn, event)
            case TurnStarted():
                self._on_started(session, turn, event)
            case PrefillProgressed(computed=computed, total=total):
                if turn.phase is TurnPhase.RUNNING:
                    cached = submitted_of(turn).cached_tokens
                    turn_id = turn.request.turn_id
                    session.journal.append(TurnProgress(turn_id, computed, cached, total))
            case PromptLogprobsComputed(logprobs=logprobs):
                submitted_of(turn).prompt_logprobs.extend(logprobs)  # `reserve` has counted them
            case TurnFinished():
                self._on_finished(session, turn, event)
            case TurnFailed():
                self._on_failed(session, turn, event)
            case _:
                assert_never(event)

    def on_engine_lost(self, *, will_restart: bool) -> None:
        """Fail the turns of a dead engine, in slices; sessions keep their tokens, waiting turns
        wait on.

        Sessions without a live turn and without KV need no work: the generation number already
        invalidates what the dead engine held of them.
        """
        error = (
            EngineRestarting("the engine restarts; the session is intact: send the turn again")
            if will_restart
            else EngineUnavailable("there is no engine")
        )
        lost, self._sent = self._sent, {}
        fails = (partial(self._fail_lost, *each, error) for each in lost.values())
        self.backlog.run(chain(fails, self.residents.lose_all(), (self.retry,)))

    def _fail_lost(self, session: Session, turn: SessionTurn, error: SessionServerError) -> None:
        if turn.phase is not TurnPhase.ENDED:
            with self._contained(session, turn, is_over=True):
                self._settle(session, turn, None, failure=error)
            self.start_next(session)

    def on_refused(self, session: Session, code: str, message: str) -> None:
        """End the live turn of a session that the engine refused to open."""
        session.copy.set_known_len(None, self._link.generation)
        turn = session.live
        if turn is None or turn.submitted is None or turn.phase is TurnPhase.ENDED:
            return
        with self._contained(session, turn, is_over=True):
            if turn.submitted.verdict is not None:
                self._settle(session, turn, None, failure=None)
            else:
                self._end(session, turn, failed(turn, code=code, message=message))
        self.start_next(session)

    # -- what nobody expects

    def _contained(
        self, session: Session, turn: SessionTurn, *, is_over: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Fail a turn for which the block raises what it should not. `is_over`: the engine is done
        with the turn."""
        fail = partial(self._fail, session, turn, is_over=is_over)
        return contained("a turn failed", fail)

    def _fail(self, session: Session, turn: SessionTurn, *, is_over: bool) -> None:
        if turn.phase is TurnPhase.ENDED:
            return  # its conclusion contains what it meets
        if turn.phase in (TurnPhase.RUNNING, TurnPhase.ENDING) and not is_over:
            # Its end follows when the engine has let go of it.
            self._link.send_or_queue(decide(turn, BugFound()))
            return
        if session.live is turn:
            self._quotas.release(session, turn)
        self._accept(session, turn, 0)
        self._end(session, turn, failed(turn, code=BUG_CODE, message=BUG_MESSAGE))

    # -- from waiting to sent

    def _accept(self, session: Session, turn: SessionTurn, position: int) -> None:
        """Accept a turn: from here on it is certain to get a terminal entry."""
        if turn.is_accepted:
            return
        turn.created_seq = session.journal.append(TurnCreated(turn.request.turn_id, position))
        turn.accepted.set_result(None)

    def _accept_waiting(self, session: Session) -> None:
        """Accept waiting turns in order, up to one that may still be rejected."""
        live = session.live
        if live is not None:
            if live.phase is TurnPhase.PREPARING and not live.is_accepted:
                return
            self._accept(session, live, 0)
        # Turns are accepted in order, so those that are left wait last.
        new = list(takewhile(lambda turn: not turn.is_accepted, reversed(session.queue)))
        first = (live is not None) + len(session.queue) - len(new)
        checked = takewhile(lambda turn: turn.phase is not TurnPhase.CHECKING, reversed(new))
        for position, turn in enumerate(checked, first):
            self._accept(session, turn, position)

    def _refuse(self, session: Session, turn: SessionTurn, error: SessionServerError) -> None:
        """Fail a turn that cannot run; one that was not accepted leaves no trace."""
        if turn.is_accepted:
            self._end(session, turn, refused(turn, error))
            return
        turn.phase = TurnPhase.ENDED
        turn.accepted.set_result(error)
        self.conclusion.remove(session, turn)
        self._quotas.release_turn(session.owner, turn)

    def _prepare(self, session: Session, turn: SessionTurn) -> None:
        def on_built(outcome: PromptOutcome) -> None:
            if turn.phase is not TurnPhase.PREPARING:
                self._quotas.release_turn(session.owner, turn)  # canceled during the build
                return
            with self._contained(session, turn):
                self._on_prompt(session, turn, outcome)
            if turn in session.queue:
                # The engine accepts nothing now. Trying again at once would loop forever.
                self._accept_waiting(session)
            else:
                self.start_next(session)

        assert self._link.ready is not None, "a turn before the engine was ever ready"
        state = session.transcript.state(turn.request.input)
        max_len = self._link.ready.max_turn_len
        build, ahead = self.prompt_builder.build, partial(self.copies.prefill, session, turn)
        outcome = build(session.owner, state, turn, on_built, max_len=max_len, ahead=ahead)
        if outcome is not None:
            self._on_prompt(session, turn, outcome)

    def _on_prompt(self, session: Session, turn: SessionTurn, outcome: PromptOutcome) -> None:
        if isinstance(outcome, SessionServerError):
            self._refuse(session, turn, outcome)
        else:
            self._submit_to_engine(session, turn, outcome)

    def _submit_to_engine(self, session: Session, turn: SessionTurn, prompt: Prompt) -> None:
        assert session.live is turn, "another turn of the session is live"
        assert self._link.ready is not None, "a turn before the engine was ever ready"
        max_len = self._link.ready.max_turn_len
        try:
            sampling = fit_sampling(turn.request.sampling, prompt, max_len)
            sampling = held_behind_thought(self._text, prompt, sampling)
            self._quotas.reserve(session, turn, prompt, sampling, now_s=self._clock())
        except SessionServerError as error:
            self._refuse(session, turn, error)
            return
        turn.item_id = prompt.continued.item_id if prompt.continued else turn.item_id
        turn.submitted = self._make_submitted(session, turn, prompt, sampling=sampling)
        turn.phase = TurnPhase.RUNNING
        turn.course.sent_s = self._clock()
        self._sent[turn.engine_id] = (session, turn)
        try:
            self._send(session, turn, sampling)
        except Exception as error:
            del self._sent[turn.engine_id]
            turn.submitted, turn.phase = None, TurnPhase.PREPARING
            self._quotas.release(session, turn)
            if not isinstance(error, EngineUnavailable):
                raise
            # The engine died without an event so far, or accepts nothing at the moment. The turn
            # returns to the head of the queue, for the next engine or the next tick.
            session.live = None
            turn.phase = TurnPhase.WAITING
            session.queue.insert(0, turn)
            self.counts.live -= 1
            self.counts.queued += 1
            self._waiting[session] = None

    def _make_submitted(
        self, session: Session, turn: SessionTurn, prompt: Prompt, *, sampling: SamplingParams
    ) -> SubmittedTurn:
        """Return the state of a turn about to be sent, with `sampling` as clipped for the
        engine."""
        assert self._link.ready is not None
        end_ids = set(sampling.stop_token_ids)
        if sampling.grammar is not None or not sampling.ignore_eos:
            end_ids.update(self._link.ready.eos_token_ids)
        options, min_tokens = turn.request.text, sampling.min_tokens
        answer = Answer(self._text, options, prompt, end_ids=end_ids, min_tokens=min_tokens)
        return SubmittedTurn(prompt, answer, self.copies.base_len(session, prompt))

    def _send(self, session: Session, turn: SessionTurn, sampling: SamplingParams) -> None:
        submitted = submitted_of(turn)
        self.copies.open(session, submitted.base_len)
        name = TurnName(session.copy.session_id, turn.request.turn_id, is_draft=False)
        self.copies.names.add(turn.engine_id, name)
        self._link.send(
            SubmitTurn(
                session_id=session.copy.session_id,
                turn_id=turn.engine_id,
                base_len=submitted.base_len,
                tokens=session.transcript.context(submitted.prompt, submitted.base_len),
                sampling=sampling,
                priority=turn.request.priority,
                tenant=self.copies.tag_of(session),
            )
        )

    # -- from sent to ended

    def _on_started(self, session: Session, turn: SessionTurn, event: TurnStarted) -> None:
        submitted = submitted_of(turn)
        if submitted.is_started:
            return  # started again after a retraction
        submitted.is_started = True
        submitted.cached_tokens = event.cached_tokens
        submitted.drafted_tokens = event.drafted_tokens
        self.residents.mark_resident(session)
        if turn.phase is TurnPhase.RUNNING:
            cached, total = event.cached_tokens, event.prompt_tokens
            session.journal.append(TurnProgress(turn.request.turn_id, cached, cached, total))

    def _on_tokens(self, session: Session, turn: SessionTurn, event: TokensProduced) -> None:
        if turn.phase is not TurnPhase.RUNNING:
            return
        if turn.course.first_token_s is None:
            turn.course.first_token_s = self._clock()
        submitted = submitted_of(turn)
        pieces, num_taken = submitted.answer.feed(event.token_ids, event.logprobs)
        delta = TurnDelta(
            turn.request.turn_id,
            turn.item_id,
            pieces.text,
            event.token_ids[:num_taken],
            event.logprobs[:num_taken],
            pieces.reasoning,
            pieces.tool_calls,
        )
        num_bytes = entry_bytes(delta)
        session.journal.append(delta, num_bytes)
        num_bytes -= logprob_bytes(delta.logprobs)  # `reserve` counted these
        self._quotas.add_turn_bytes(session.owner, turn, num_bytes)
        if submitted.answer.is_over:
            self._link.send_or_queue(decide(turn, StopFound(submitted.answer.matched)))

    def _flush_text(self, session: Session, turn: SessionTurn) -> None:
        """Journal what was held back for a stop string or markup, which nothing can complete
        now."""
        text, reasoning, calls = submitted_of(turn).answer.finish()
        if text or reasoning or calls:
            ids = turn.request.turn_id, turn.item_id
            session.journal.append(TurnDelta(*ids, text, (), (), reasoning, calls))

    def _on_finished(self, session: Session, turn: SessionTurn, event: TurnFinished) -> None:
        submitted = submitted_of(turn)
        submitted.cached_tokens = event.cached_tokens
        turn.course.num_retractions = event.num_retractions
        end: TurnEnd
        self.copies.note_turn(session, submitted, event.history_len)
        if submitted.verdict is not None:
            self._settle(session, turn, event.timings, failure=None)
        elif event.reason is FinishReason.CANCELLED:
            # This server sent no cancel, so the engine canceled the turn while it shuts down.
            end = cancelled(turn, kept=False, reason="session_closed", timings=event.timings)
            self._end(session, turn, end)
        else:
            self._flush_text(session, turn)
            matched: int | str | None = submitted.answer.matched or event.matched_token
            is_stop = submitted.answer.matched is not None or event.reason is FinishReason.STOP
            end = completed(turn, is_stop=is_stop, matched=matched, timings=event.timings)
            self._end(session, turn, end)

    def _on_failed(self, session: Session, turn: SessionTurn, event: TurnFailed) -> None:
        submitted = submitted_of(turn)
        is_known = event.code != _UNKNOWN_SESSION
        known_len = min(event.history_len, submitted.base_len) if is_known else None
        self.copies.note_turn(session, submitted, known_len)
        if submitted.verdict is not None:
            self._settle(session, turn, None, failure=None)
            return
        self._end(session, turn, failed(turn, code=event.code, message=event.message))

    def _settle(
        self,
        session: Session,
        turn: SessionTurn,
        timings: TurnTimings | None,
        *,
        failure: SessionServerError | None,
    ) -> None:
        """End a turn by its verdict, or with `failure` if it has none."""
        verdict = submitted_of(turn).verdict
        if verdict is not None:
            self._end(session, turn, end_by(turn, verdict, timings))
        else:
            assert failure is not None, "an undecided turn settled without a cause"
            self._refuse(session, turn, failure)

    def _end(self, session: Session, turn: SessionTurn, end: TurnEnd) -> None:
        """End an accepted turn; the only way in which one ends."""
        assert turn.phase is not TurnPhase.ENDED, "a turn ended twice"
        turn.phase = TurnPhase.ENDED
        self._sent.pop(turn.engine_id, None)
        rewound: SessionRewound | None = None
        if turn.submitted is not None:
            try:
                rewound = self._commit(session, turn, turn.submitted, kept=is_kept(end))
            except Exception as error:  # noqa: BLE001 - it ends all the same
                log_bug("a turn was not kept", error)
                end = failed(turn, code=BUG_CODE, message=BUG_MESSAGE)
                self.copies.note_kept(session, turn.submitted.base_len)
        on_late = partial(self.start_next, session)
        self.conclusion.end(session, turn, end, rewound=rewound, on_late=on_late)

    def _commit(
        self, session: Session, turn: SessionTurn, submitted: SubmittedTurn, *, kept: bool
    ) -> SessionRewound | None:
        """Update the history, and the length that the engine holds of it, to what stays. Return
        what readers are told before the turn's end: items that they hold are replaced by the whole
        conversation of this turn."""
        num_items, rewound = submitted.prompt.num_items, None
        if kept and num_items is not None and num_items < session.transcript.num_items:
            last = session.transcript.item(num_items - 1).id if num_items else None
            keep_len = submitted.prompt.keep_len
            rewound = SessionRewound(last, keep_len, min(keep_len, submitted.base_len))
        if kept:
            session.transcript.commit(
                submitted.prompt,
                turn.request.turn_id,
                turn.item_id,
                output=submitted.answer.token_ids,
                said=submitted.answer.message,
            )
        self.copies.note_kept(session, len(session.transcript) if kept else submitted.base_len)
        return rewound
