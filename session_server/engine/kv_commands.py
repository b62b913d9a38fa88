"""`KVCommands`: carry out the commands about where KV is, which no turn belongs to."""

from __future__ import annotations

from typing import assert_never

import numpy as np

from cache.types import Namespace, SessionId
from session_server.core.commands import (
    CoolSession,
    ExpectKV,
    ForgetKV,
    MeasureKV,
    WarmSession,
    WriteKV,
)
from session_server.core.events import KVForgotten, KVMeasured, KVWritten, SessionCooled
from session_server.engine.context import EngineContext
from session_server.engine.input_drafts import InputDrafts
from session_server.engine.scheduler import Scheduler

KVCommand = WarmSession | CoolSession | MeasureKV | WriteKV | ExpectKV | ForgetKV


class KVCommands:
    """Move KV, measure it and forget it, for sessions at rest."""

    def __init__(
        self, context: EngineContext, scheduler: Scheduler, input_drafts: InputDrafts
    ) -> None:
        self._config, self._cache, self._watch = context.config, context.cache, context.watch
        self._outbox, self._tiers, self._scheduler = context.outbox, context.tiers, scheduler
        self._input_drafts = input_drafts

    def handle(self, command: KVCommand) -> None:
        """Carry out one command."""
        match command:
            case WarmSession(session_id=session_id):
                self._warm(session_id)
            case CoolSession():
                self._cool(command)
            case MeasureKV():
                self._measure(command)
            case WriteKV():
                self._write(command)
            case ExpectKV(files=files):
                self._tiers.expect(files)
            case ForgetKV():
                self._forget(command)
            case _:
                assert_never(command)

    def _cool(self, command: CoolSession) -> None:
        session_id = command.session_id
        if session_id not in self._cache or self._scheduler.turn_of(session_id) is not None:
            return
        self._input_drafts.stop(session_id)
        if command.is_ahead_of_turn:
            self._tiers.note_turn(session_id)
        else:
            self._tiers.note_cooling(session_id)
        self._cache.cool(session_id)
        self._watch.touch(session_id)
        if not command.is_ahead_of_turn:
            self._outbox.emit(SessionCooled(session_id=session_id))

    def _measure(self, command: MeasureKV) -> None:
        namespace = Namespace(command.tenant_salt, self._config.model_fingerprint, command.tenant)
        tokens = np.frombuffer(command.tokens, "<i4").astype(np.int32)

        def tell(copied_len: int) -> None:
            held_len = max(copied_len, self._cache.peek(tokens, namespace).matched_len)
            if command.session_id in self._cache:
                # Of a session that is resident the tail too, and what a draft has computed.
                new_tokens, most = tokens[command.base_len :], len(tokens) - 1
                kept_len = self._cache.kept_len(
                    command.session_id, command.base_len, new_tokens, most
                )
                held_len = max(held_len, kept_len)
            self._outbox.emit(
                KVMeasured(request_id=command.request_id, held_len=held_len, copied_len=copied_len)
            )

        self._tiers.measure(namespace, tokens, tell)

    def _write(self, command: WriteKV) -> None:
        request_id, emit = command.request_id, self._outbox.emit
        self._tiers.write(
            command.session_id,
            lambda written: emit(KVWritten(request_id=request_id, **written._asdict())),
            cut=command.cut,
        )

    def _warm(self, session_id: SessionId) -> None:
        if session_id in self._cache and self._scheduler.turn_of(session_id) is None:
            self._tiers.warm(session_id)

    def _forget(self, command: ForgetKV) -> None:
        namespace = Namespace(command.tenant_salt, self._config.model_fingerprint, command.tenant)
        tokens = np.frombuffer(command.tokens, "<i4").astype(np.int32)
        number, emit = command.number, self._outbox.emit
        self._tiers.forget(
            namespace,
            tokens,
            command.num_kept,
            None
            if number is None
            else lambda is_gone: emit(KVForgotten(number=number, is_gone=is_gone)),
        )
