"""Guards of the stories: what keeps each from ending badly, taken away.

The bugs that the gate hunts with random programs are in the other files; stories use both.
"""

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
        "if self.mode is MemoryCheck.STRICT:",
        "if True:",
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

PARTIAL_PAGE_IS_PUBLISHED = Mutant(
    "A page that is not full is published with the others.",
    "sglang#20070 (G1)",
    Edit(
        "cache.lease:KVLease.publish",
        "num_pages = self.computed_len // stores.page_size - start",
        "num_pages = pages_for(self.computed_len, stores.page_size) - start",
    ),
)

QUOTE_ROUNDS_UP = Mutant(
    "A parked session's last page is priced as if it had to be bought again.",
    "sglang#20070 (G1)",
    Edit(
        "session_server.engine.view:LiveWaiting.quote",
        "return self._quote(reuse_len, -reuse_len % page_size,",
        "return self._quote(reuse_len, 0 * page_size,",
    ),
)

IDLE_KV_IS_PINNED = Mutant(
    "Sessions that nobody uses keep their KV while others wait for pages.",
    "sglang#27024 (X1)",
    Edit(
        "session_server.engine.view:LiveView.idle",
        "for session in self.cache.idle_sessions():",
        "for session in ():",
    ),
)

WAITING_KEEPS_KV = Mutant(
    "A turn that waits keeps the KV of its session from those that could run.",
    "vllm#49439 (X3)",
    Edit(
        "session_server.engine.view:LiveView.idle",
        "for session in self.cache.idle_sessions():",
        "waiting = {turn.request.session_id for turn in self.waiting_turns}\n"
        "        for session in (s for s in self.cache.idle_sessions() "
        "if s.session_id not in waiting):",
    ),
)

FIRST_COME_TAKES_ALL = Mutant(
    "The tokens of a forward go to whoever came first.",
    "sglang#34623, ATOM#1835 (X7)",
    Edit(
        "session_server.engine.plan:_Planner._share",
        "first=(0, len(long)))",
        "first=())\n        left = self._tokens\n        for i, need in enumerate(needs):\n"
        "            shares[i] = min(need, left)\n            left -= shares[i]",
    ),
)

HOG_KEEPS_THE_DOOR = Mutant(
    "While a prompt takes chunks, nobody is looked at who does not fit into what it leaves.",
    "vllm#53130 (X9)",
    Edit(
        "session_server.engine.plan:_Planner._quoted_candidates",
        "if len(self._running) >= self._limits.num_turns:",
        "if sum(t.num_uncomputed for t in self._running) >= self._limits.num_tokens:",
    ),
)

DOUBLE_FREE_PASSES = Mutant(
    "A page named twice, or free already, can be given back.",
    "vllm#42571 (D3)",
    Edit(
        "cache.pages:PageAllocator.release",
        "if page <= last or is_free[page]:",
        "if page <= NULL_PAGE:",
    ),
)

SENTINEL_PASSES = Mutant(
    "The padding page, or a page id that is none, can be given back.",
    "sglang#40250 (D4)",
    Edit(
        "cache.pages:PageAllocator.release",
        "if page <= last or is_free[page]:",
        "if page == last > NULL_PAGE or is_free[page]:",
    ),
)

SECOND_UNLOCK_PASSES = Mutant(
    "A lock receipt can be given back twice.",
    "sglang#27025 (S2)",
    Edit("cache.radix:RadixCache.unlock", "if receipt._is_released:", "if False:"),
)

GUESSES_WITHOUT_A_WAY_BACK = Mutant(
    "Turns guess although a layer cannot forget a rejected token.",
    "mlx-lm#1109 (A10)",
    Edit(
        "cache.components:can_take_back",
        "all(component.rewind_len(2, 1) == 1 for component in components)",
        "any(True for component in components)",
    ),
)
