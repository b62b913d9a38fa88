"""Bugs in the life of a turn: intake, scheduler, settling, batches."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

REFUSAL_CLEARS_MARKER = Mutant(
    "Refusing a second turn forgets that the session has one.",
    "sglang#40250 (R1)",
    Edit(
        "session_server.engine.intake:Intake._refuse",
        "held_len = 0\n",
        "held_len = 0\n        self._scheduler._of_session.pop(command.session_id, None)\n",
    ),
)

QUEUED_CANCEL_KEEPS_MARKER = Mutant(
    "A turn that ends while it waits stays its session's turn.",
    "sglang#31765, #31767, #40251 (R2)",
    Edit(
        "session_server.engine.scheduler:Scheduler.remove",
        "del self._of_session[turn.request.session_id]",
        "turn.state is TurnState.WAITING or self._of_session.pop(turn.request.session_id)",
    ),
)

CANCEL_KEEPS_UNDELIVERED = Mutant(
    "A cancelled turn keeps every token the engine has, not those the client was given.",
    "sglang#36475, #36552 (R3)",
    Edit(
        "session_server.engine.settle:Settler.finish",
        "num_kept = min(num_outputs, len(turn.outputs))",
        "num_kept = len(turn.outputs)",
    ),
)

LATE_RESULT_COUNTS = Mutant(
    "The result of a launch is applied to whichever turn has its session now.",
    "sglang#36475 (R3), #36926 (L6)",
    Edit(
        "session_server.engine.scheduler:Scheduler.find_incarnation",
        "turn = self._turns.get(row.turn_id)",
        "turn = next((t for t in self.running if t.borrowed.row == row.row), None)",
    ),
)

DUPLICATE_IS_A_SECOND_TURN = Mutant(
    "A turn that is sent twice is taken for another one.",
    "vllm#23697, #27987 (R4)",
    Edit(
        "session_server.engine.intake:Intake._submit",
        "return  # sent twice: the first goes on",
        "pass",
    ),
)

CANCEL_BY_PREFIX = Mutant(
    "A cancel finds a turn by the beginning of its id.",
    "SGLang's scheduler.abort_request, sglang#25561 (R8)",
    Edit(
        "session_server.engine.scheduler:Scheduler.find",
        "return self._turns.get(turn_id)",
        "return next((t for i, t in self._turns.items() if i.startswith(turn_id)), None)",
    ),
)

LAUNCH_SHARES_HISTORY = Mutant(
    "A launch holds a view of the history instead of a copy.",
    "sglang#8056 (R10)",
    Edit(
        "cache.session_slot:TokenLog.copy",
        "return self.view(start, end).copy()",
        "return self.view(start, end)",
    ),
)

SAMPLER_OUTLIVES_ITS_TURN = Mutant(
    "The sampler of a session's first turn goes on in the second.",
    "vllm-omni#5603 (R11)",
    Edit(
        "session_server.engine.batching:make_row",
        "sampling=None if admission.is_sampler_started",
        "sampling=None if admission.is_sampler_started or turn.request.base_len",
    ),
)

LIMIT_OUTLIVES_ITS_TURN = Mutant(
    "The output limit of a session's first turn holds for the second.",
    "vllm-omni#5603 (R11)",
    Edit(
        "session_server.engine.intake:Intake._submit",
        "max_new=min(sampling.max_tokens,",
        "max_new=min(self.__dict__.setdefault(command.session_id, sampling.max_tokens),",
    ),
)

STOP_KEEPS_OVERSHOOT = Mutant(
    "What was sampled after a stop string stays in the history.",
    "am17an/llama.cpp#20 (R12), sglang#22897 (G4)",
    Edit(
        "session_server.engine.intake:Intake.obey",
        "self._end(turn_id, FinishReason.STOP, num_outputs, now_s)",
        "self._end(turn_id, FinishReason.STOP, 1 << 30, now_s)",
    ),
)

CANCEL_WAITS_FOR_THE_DEVICE = Mutant(
    "A cancel is carried out only when nothing is in flight.",
    "llama.cpp#24496 (E2), am17an/llama.cpp#20 (R12)",
    Edit(
        "session_server.engine.intake:Intake._end",
        "if turn is not None:",
        "if turn is not None and not (turn.admission and turn.admission.num_sampling):",
    ),
)

GUESSES_OUTLIVE_THEIR_TURN = Mutant(
    "Pages bought for guesses that nobody has verified stay with the session.",
    "sglang#21875, #22897 (L1), am17an/llama.cpp#20 (R12)",
    Edit(
        "cache.lease:KVLease.rewind",
        "self._drop_private(pages_for(target, self._stores.page_size) - self._protected_pages)",
        "pass",
    ),
)

REUSES_WHOLE_CONTEXT = Mutant(
    "A match may cover the whole prompt.",
    "sglang#22684 (G6)",
    Edit(
        "cache.session_cache:SessionAwareCache.begin_turn",
        "min(context_len - 1,",
        "min(context_len,",
    ),
)

RECOMPUTES_HISTORY = Mutant(
    "A turn computes its whole context, though its session has the KV.",
    "vllm#52471 (E5)",
    Edit(
        "session_server.engine.view:max_reuse",
        "return None",
        "return 0",
    ),
)

REFUSES_NO_LONG_TURN = Mutant(
    "A turn is measured against the model's context, not against the pool.",
    "vllm#39734, #1534 (X4)",
    Edit(
        "session_server.engine.intake:Intake._input_refusal",
        "if context_len + min(1, sampling.max_tokens) > self.max_turn_len:",
        "if context_len + min(1, sampling.max_tokens) > self._cache.max_context_len:",
    ),
)

OUTPUT_OUTGROWS_POOL = Mutant(
    "A turn may say more than the pool holds.",
    "sglang#27024 (X2)",
    Edit(
        "session_server.engine.intake:Intake._submit",
        "self.max_turn_len - context_len",
        "self._cache.max_context_len - context_len",
    ),
)

RESULTS_WAIT_FOR_THE_QUEUE = Mutant(
    "Results are taken in only when nobody waits.",
    "vllm#45388, #45387 (X8)",
    Edit(
        "session_server.engine.engine:Engine.step",
        "for result in results:",
        "self.__dict__.setdefault('late', []).extend(results)\n"
        "        while self.late and not self._scheduler.waiting:\n"
        "            result = self.late.pop(0)",
    ),
)

ONE_NAMESPACE_FOR_ALL = Mutant(
    "KV of all tenants is kept in one namespace.",
    "CVE-2025-46570 (C5)",
    Edit(
        "session_server.engine.intake:Intake._open",
        "Namespace(command.tenant_salt, settings.model_fingerprint)",
        "Namespace('', settings.model_fingerprint)",
    ),
)

SESSIONS_WITHOUT_END = Mutant(
    "The engine opens as many sessions as it is asked for.",
    "sglang#27024 (E4)",
    Edit(
        "session_server.engine.intake:Intake._open",
        "len(self._cache) >= settings.max_sessions",
        "len(self._cache) >= 1 << 30",
    ),
)

VIOLATION_KILLS_THE_SERVER = Mutant(
    "A disagreement of the books raises in service too.",
    "sglang#35270 (E8)",
    Edit(
        "session_server.engine.memory:MemoryWatch._note",
        "if violations and self._mode is MemoryCheck.STRICT:",
        "if violations:",
    ),
)

COOLS_WHAT_IS_LENT = Mutant(
    "A session is cooled although a turn has borrowed it meanwhile.",
    "tenstorrent/tt-inference-server#2907 (R5)",
    Edit(
        "cache.session_cache:SessionAwareCache.cool",
        "slot.refuse_if_busy()",
        "pass",
    ),
)

FREES_UNDER_A_TURN = Mutant(
    "A close frees what a running turn still uses.",
    "sglang#40250, #21875 (R6)",
    Edit(
        "cache.session_cache:SessionAwareCache.close",
        "if slot.is_active:",
        "if False:",
    ),
)
