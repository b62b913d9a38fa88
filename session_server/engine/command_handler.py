"""`CommandHandler`: carry out the server's commands between two steps.

A turn is refused here, before a slot, a row or a forward is touched. A command that comes twice,
late, or for a turn that has ended changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import assert_never

import numpy as np

from cache.errors import PinQuotaExceeded
from cache.types import Namespace, Retention, SlotState, TurnId
from cache.views import TurnLimits
from session_server.core.commands import (
    CancelTurn,
    CloseSession,
    CoolSession,
    DraftInput,
    DropDraft,
    EngineCommand,
    ExpectKV,
    FlushCache,
    ForgetKV,
    MeasureKV,
    OpenSession,
    ReportMemory,
    Shutdown,
    StopTurn,
    SubmitTurn,
    WarmSession,
    WriteKV,
)
from session_server.core.errors import (
    ContextTooLong,
    InternalInconsistency,
    InvalidRequest,
    ServerBusy,
    SessionBusy,
    SessionExists,
    SessionNotFound,
    SessionServerError,
    wire_error,
)
from session_server.core.events import (
    CacheFlushed,
    FinishReason,
    SessionCooled,
    SessionGone,
    SessionRefused,
    SessionWritten,
    TurnFailed,
)
from session_server.engine.context import EngineContext
from session_server.engine.guard import MemoryGuard
from session_server.engine.input_drafts import InputDrafts
from session_server.engine.kv_commands import KVCommands
from session_server.engine.scheduler import Scheduler, pin_refusal
from session_server.engine.settle import Settler
from session_server.engine.turn import Turn, TurnClock, TurnState


class CommandHandler:
    """Handle commands, between the settling of results and the next plan.

    `is_shutting_down`: a `Shutdown` was handled, so nothing more is launched.
    """

    def __init__(
        self,
        context: EngineContext,
        scheduler: Scheduler,
        *,
        settler: Settler,
        guard: MemoryGuard,
        input_drafts: InputDrafts,
    ) -> None:
        self._config, self._cache, self._watch = context.config, context.cache, context.watch
        self._outbox, self._tiers, self._scheduler = context.outbox, context.tiers, scheduler
        self._settler, self._guard = settler, guard
        self._input_drafts = input_drafts
        self._kv_commands = KVCommands(context, scheduler, input_drafts)
        self._num_submitted = 0
        self.is_shutting_down = False

    @property
    def turn_limits(self) -> TurnLimits:
        """Return what one turn may take."""
        return self._scheduler.turn_limits

    def handle(self, command: EngineCommand, now_s: float) -> None:
        """Carry out one command. A refusal is an event, never an exception."""
        match command:
            case OpenSession():
                self._open(command)
            case SubmitTurn():
                self._submit(command, now_s)
            case DraftInput():
                self._draft(command)
            case DropDraft(session_id=session_id):
                self._input_drafts.drop(session_id)
            case StopTurn(turn_id=turn_id, num_outputs=num_outputs):
                self._end(turn_id, FinishReason.STOP, num_outputs, now_s)
            case CancelTurn(turn_id=turn_id, num_outputs=num_outputs):
                self._end(turn_id, FinishReason.CANCELLED, num_outputs, now_s)
            case CloseSession():
                self._close(command, now_s)
            case WarmSession() | CoolSession() | MeasureKV() | WriteKV() | ExpectKV() | ForgetKV():
                self._kv_commands.handle(command)
            case FlushCache(request_id=request_id):
                self._flush(request_id)
            case ReportMemory():
                self._report(command, now_s)
            case Shutdown():
                self.is_shutting_down = True
                self._tiers.drain(now_s)
            case _:
                assert_never(command)

    def _open(self, command: OpenSession) -> None:
        config, session_id = self._config, command.session_id
        error: SessionServerError | None = None
        if session_id in self._cache:
            error = SessionExists(f"session {session_id} is open")
        elif len(self._cache) >= config.max_sessions:
            error = ServerBusy(f"the engine holds {config.max_sessions} sessions already")
        elif not self._are_tokens(command.tokens):
            error = InvalidRequest("a token id is outside the vocabulary", param="tokens")
        else:
            try:
                self._cache.open(
                    session_id,
                    namespace=Namespace(
                        command.tenant_salt, config.model_fingerprint, command.tenant
                    ),
                    tokens=np.array(command.tokens, dtype=np.int32),
                    retention=Retention.PINNED if command.pinned else Retention.RECLAIMABLE,
                    tenant_weight=command.tenant_weight,
                )
            except PinQuotaExceeded as refusal:
                error = pin_refusal(refusal)
        if error is not None:
            code = wire_error(error).code
            self._outbox.emit(
                SessionRefused(session_id=session_id, code=code, message=error.message)
            )

    def _submit(self, command: SubmitTurn, now_s: float) -> None:
        if self._scheduler.find(command.turn_id) is not None:
            return  # sent twice; the first one counts
        if (error := self._refusal(command)) is not None:
            self._refuse(command, error)
            return
        sampling = command.sampling
        context_len = command.base_len + len(command.tokens)
        self._num_submitted += 1
        priority_s = command.priority * self._config.priority_step_s
        turn = Turn(
            request=command,
            order=(now_s - priority_s, self._num_submitted),
            max_new=min(sampling.max_tokens, self.turn_limits.max_turn_len - context_len),
            clock=TurnClock(now_s),
            state=TurnState.WAITING if sampling.grammar is None else TurnState.COMPILING,
        )
        self._input_drafts.stop(command.session_id)
        self._scheduler.submit(turn)

    def _draft(self, command: DraftInput) -> None:
        session_id = command.session_id
        is_known = session_id in self._cache and self._scheduler.turn_of(session_id) is None
        is_whole = is_known and 0 <= command.base_len <= self._cache.slot(session_id).num_tokens
        context_len = command.base_len + len(command.tokens)
        fits = 0 < context_len <= self.turn_limits.max_turn_len
        if is_whole and fits and self._are_tokens(command.tokens):
            self._input_drafts.submit(command)
        else:
            self._input_drafts.refuse(command)

    def _refusal(self, command: SubmitTurn) -> SessionServerError | None:
        """Return why a turn is refused; None if it is accepted."""
        session_id = command.session_id
        if session_id not in self._cache:
            return SessionNotFound(f"the engine has no session {session_id}")
        if self._scheduler.turn_of(session_id) is not None:
            return SessionBusy(f"session {session_id} has a running turn")
        if len(self._scheduler) >= self._config.max_waiting + self._config.max_running:
            return ServerBusy(f"{len(self._scheduler)} turns are waiting or running")
        return self._input_refusal(command)

    def _input_refusal(self, command: SubmitTurn) -> SessionServerError | None:
        sampling = command.sampling
        slot = self._cache.slot(command.session_id)
        num_tokens = slot.num_tokens
        if command.tenant != slot.namespace.tenant:
            return InternalInconsistency("the turn is of another tenant than its session")
        if not 0 <= command.base_len <= num_tokens:
            return InternalInconsistency(
                f"the turn builds on {command.base_len} tokens, the engine holds {num_tokens}"
            )
        context_len = command.base_len + len(command.tokens)
        if context_len == 0:
            return InvalidRequest("a turn needs a token to start from", param="input")
        if sampling.seed is None:
            return InvalidRequest("a submitted turn needs a seed", param="seed")
        if not self._are_tokens(command.tokens):
            return InvalidRequest("a token id is outside the vocabulary", param="input")
        if context_len + min(1, sampling.max_tokens) > self.turn_limits.max_turn_len:
            return ContextTooLong(
                f"{context_len} tokens leave no room for an answer: a context may have "
                f"{self.turn_limits.max_turn_len} tokens. Send less, or begin a new session."
            )
        return None

    def _refuse(self, command: SubmitTurn, error: SessionServerError) -> None:
        held_len = 0
        if command.session_id in self._cache:
            held_len = self._cache.slot(command.session_id).num_tokens
        self._outbox.emit(
            TurnFailed(
                turn_id=command.turn_id,
                session_id=command.session_id,
                code=wire_error(error).code,
                message=error.message,
                history_len=min(max(0, command.base_len), held_len),
            )
        )

    def _end(
        self, turn_id: TurnId, reason: FinishReason, num_outputs: int | None, now_s: float
    ) -> None:
        turn = self._scheduler.find(turn_id)
        if turn is not None:  # else it has ended, and the command comes too late
            self._settler.finish(turn, reason, now_s, num_outputs=num_outputs)

    def _close(self, command: CloseSession, now_s: float) -> None:
        session_id = command.session_id
        turn = self._scheduler.turn_of(session_id)
        self._input_drafts.stop(session_id)
        if not command.is_deleted:
            self._tiers.note_cooling(session_id)
        if command.is_moving:
            written = SessionWritten(session_id=session_id)
            self._tiers.hand_over(session_id, now_s, partial(self._outbox.emit, written))
        self._tiers.note_close(session_id, is_deleted=command.is_deleted)
        is_gone = self._cache.close(session_id)
        if turn is not None:
            # The slot of a running turn goes in its `end_turn`; a waiting turn holds no slot.
            self._settler.finish(turn, FinishReason.CANCELLED, now_s, num_outputs=None)
            is_gone = session_id not in self._cache
        assert is_gone, "only a running turn can defer a close"
        self._watch.touch(session_id)
        self._outbox.emit(SessionGone(session_id=session_id))

    def _report(self, command: ReportMemory, now_s: float) -> None:
        if command.full:
            self._watch.audit_all()
            self._guard.audit_tiers()
        self._outbox.emit(self._guard.report(command, now_s))

    def _flush(self, request_id: int) -> None:
        is_idle = len(self._scheduler) == 0
        if is_idle:
            resident = [s.session_id for s in self._cache.slots() if s.state is SlotState.PARKED]
            self._cache.flush()
            self._tiers.clear()
            for session_id in resident:
                self._watch.touch(session_id)
                self._outbox.emit(SessionCooled(session_id=session_id))
        self._outbox.emit(CacheFlushed(request_id=request_id, done=is_idle))

    def _are_tokens(self, tokens: Sequence[int]) -> bool:
        return not tokens or (min(tokens) >= 0 and max(tokens) < self._config.vocab_size)
