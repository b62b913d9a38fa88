"""Guards of the stories: what keeps each from ending badly, taken away.

The bugs that the gate hunts with random programs are in the other files; stories use both.
"""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

REFUSAL_CLEARS_MARKER = Mutant(
    "Refusing a second turn forgets that the session has one.",
    "sglang#40250 (R1)",
    Edit(
        "session_server.engine.command_handler:CommandHandler._refuse",
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
    "A forward holds a view of the history instead of a copy.",
    "sglang#8056 (R10)",
    Edit(
        "cache.int_buffer:IntBuffer.copy",
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
        "session_server.engine.command_handler:CommandHandler._submit",
        "max_new=min(sampling.max_tokens,",
        "max_new=min(self.__dict__.setdefault(command.session_id, sampling.max_tokens),",
    ),
)

STOP_KEEPS_OVERSHOOT = Mutant(
    "What was sampled after a stop string stays in the history.",
    "am17an/llama.cpp#20 (R12), sglang#22897 (G4)",
    Edit(
        "session_server.engine.command_handler:CommandHandler.handle",
        "self._end(turn_id, FinishReason.STOP, num_outputs, now_s)",
        "self._end(turn_id, FinishReason.STOP, 1 << 30, now_s)",
    ),
)

CANCEL_WAITS_FOR_THE_DEVICE = Mutant(
    "A cancel is carried out only when nothing is in flight.",
    "llama.cpp#24496 (E2), am17an/llama.cpp#20 (R12)",
    Edit(
        "session_server.engine.command_handler:CommandHandler._end",
        "if turn is not None:",
        "if turn is not None and not (turn.admission and turn.admission.num_sampling):",
    ),
)

RECOMPUTES_HISTORY = Mutant(
    "A turn computes its whole context, though its session has the KV.",
    "vllm#52471 (E5)",
    Edit(
        "session_server.engine.turn_queue:max_reuse",
        "return None",
        "return 0",
    ),
)

REFUSES_NO_LONG_TURN = Mutant(
    "A turn is measured against the model's context, not against the pool.",
    "vllm#39734, #1534 (X4)",
    Edit(
        "session_server.engine.command_handler:CommandHandler._input_refusal",
        "if context_len + min(1, sampling.max_tokens) > self.turn_limits.max_turn_len:",
        "if context_len + min(1, sampling.max_tokens) > self._cache.max_context_len:",
    ),
)

OUTPUT_OUTGROWS_POOL = Mutant(
    "A turn may say more than the pool holds.",
    "sglang#27024 (X2)",
    Edit(
        "session_server.engine.command_handler:CommandHandler._submit",
        "self.turn_limits.max_turn_len - context_len",
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
        "session_server.engine.command_handler:CommandHandler._open",
        "len(self._cache) >= config.max_sessions",
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
        "slot.check_not_busy()",
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

WINDOW_PAGE_STAYS_PRIVATE = Mutant(
    "A page behind the window is freed and stays in its lease.",
    "streaming_session.py of sglang 0.5.23 (G2)",
    Edit(
        "cache.lease:KVLease.release_passed",
        "private[begin - start : end - start] = [NULL_PAGE] * (end - begin)",
        "pass",
    ),
)

WINDOW_PAGE_STAYS_IN_ROW = Mutant(
    "A page behind the window is freed and stays in its row.",
    "sglang#27586, vllm#42273 (A17)",
    Edit(
        "cache.lease:KVLease.release_passed",
        "stores.rows.clear(pool, self.row, begin, end)",
        "pass",
    ),
)

QUOTE_ROUNDS_UP = Mutant(
    "A parked session's last page is priced as if it had to be bought again.",
    "sglang#20070 (G1)",
    Edit(
        "session_server.engine.turn_queue:Quotes._quote",
        "pages_for(soon_len, page_size) - pages_for(held_len, page_size)",
        "pages_for(soon_len - held_len, page_size)",
    ),
)

IDLE_KV_IS_PINNED = Mutant(
    "Sessions that nobody uses keep their KV while others wait for pages.",
    "sglang#27024 (X1)",
    Edit(
        "session_server.engine.view:LiveView.idle",
        "for session in self.cache.parked:",
        "for session in ():",
    ),
)

WAITING_KEEPS_KV = Mutant(
    "A turn that waits keeps the KV of its session from those that could run.",
    "vllm#49439 (X3)",
    Edit(
        "session_server.engine.view:LiveView.idle",
        "for session in self.cache.parked:",
        "waiting = {turn.request.session_id for turn in self.queue}\n"
        "        for session in (s for s in self.cache.parked "
        "if s.session_id not in waiting):",
    ),
)

FIRST_COME_TAKES_ALL = Mutant(
    "The tokens of a forward go to whoever came first.",
    "sglang#34623, ATOM#1835 (X7)",
    Edit(
        "session_server.engine.plan_tokens:_split",
        "first=(0, len(prefilling)), share=share)",
        "first=())\n    left = num_tokens\n    for i, need in enumerate(needs):\n"
        "        shares[i] = min(need, left)\n        left -= shares[i]",
    ),
)

HOG_KEEPS_THE_DOOR = Mutant(
    "While a prompt takes chunks, nobody is looked at who does not fit into what it leaves.",
    "vllm#53130 (X9)",
    Edit(
        "session_server.engine.plan_tokens:price_waiting",
        "if len(running) >= limits.num_turns:",
        "if sum(t.num_uncomputed for t in running) >= limits.num_tokens:",
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

REFUSAL_FREES_THE_SESSION = Mutant(
    "Refusing a turn forgets the one that runs.",
    "sglang#40250 (R1)",
    Edit(
        "session_server.sessions.manager:SessionManager._new_turn",
        "raise SessionBusy(NOT_ENDED)",
        'session.live = None\n                raise SessionBusy("")',
    ),
)

CANCELLED_STAYS_IN_LINE = Mutant(
    "A turn that ends while it waits stays in its session's line.",
    "sglang#31765 (R2)",
    Edit("session_server.sessions.session:Session.remove_turn", "self.queue.remove(turn)", "pass"),
)

DISCONNECT_STOPS_NOBODY = Mutant(
    "The turns of a client that has gone run on.",
    "sglang#36475 (R3), llama.cpp#24496 (E2)",
    Edit(
        "session_server.web.readers:Readers._cancel_bound",
        "for turn_id, keep_partial in session_readers.bound_turns.items():",
        "for turn_id, keep_partial in ():",
    ),
)

ENGINE_KNOWS_CLIENTS_IDS = Mutant(
    "The engine knows a turn by the id its client chose.",
    "vllm#23697, #27987 (R4)",
    Edit(
        "session_server.sessions.manager:SessionManager._new_turn",
        "item_id=session.transcript.new_item_id(),",
        "item_id=session.transcript.new_item_id(), engine_id=request.turn_id,",
    ),
)

RID_IS_FORGOTTEN_BY_NAME = Mutant(
    "A request that ends is forgotten by its name, whoever has that name now.",
    "vllm#10583 (R4)",
    Edit(
        "session_server.web.generation_run:SGLangState.remove",
        "if turns.get(rid) == turn:",
        "if rid in turns:",
    ),
)

CLOSING_ID_IS_FREE = Mutant(
    "A session may be opened under the id of one that has not closed yet.",
    "sglang#40250 (R6)",
    Edit(
        "session_server.sessions.manager:SessionManager._check_open",
        "self._sessions.check_free(owner, request.session_id)",
        "pass",
    ),
)

DISCONNECT_STOPS_WHO_RUNS = Mutant(
    "The disconnect of a client stops the turn that runs, whosever it is.",
    "ik_llama.cpp#1929 (R7)",
    Edit(
        "session_server.web.readers:Readers._cancel_bound",
        "owner, session_id, turn_id, keep_partial",
        "owner, session_id, None, keep_partial",
    ),
)

RID_MATCHES_A_PREFIX = Mutant(
    "An abort hits every request whose name begins with the one given.",
    "SGLang's scheduler.abort_request, sglang#25561 (R8)",
    Edit(
        "session_server.web.generation_run:SGLangState.turns_of",
        "[turns[rid]] if rid in turns else []",
        "[turn for name, turn in turns.items() if name.startswith(rid)]",
    ),
)

ALL_TURNS_LOOK_ALIKE = Mutant(
    "A reader of one turn takes the end of any turn for its own.",
    "vllm#53861, vllm-omni#5383 (R9)",
    Edit(
        "session_server.web.turns:belongs_to",
        'getattr(entry, "turn_id", None) == turn_id',
        'hasattr(entry, "turn_id")',
    ),
)

FIRST_LIMITS_STAY = Mutant(
    "The sampling of a session's first turn is kept for the others.",
    "vllm-omni#5603 (R11)",
    Edit(
        "session_server.sessions.turn_flow:TurnFlow._submit_to_engine",
        "fit_sampling(turn.request.sampling, prompt, max_len)",
        "fit_sampling(self.__dict__.setdefault(session.session_id, turn.request.sampling),"
        " prompt, max_len)",
    ),
)

NAMES_ARE_GLUED = Mutant(
    "The tree knows a namespace by its parts written one after another.",
    "vllm#3264, #30931 (C3), sglang#24638",
    Edit(
        "cache.radix:RadixCache.lock_root",
        "root = self._roots.get(namespace)",
        "root = next((r for n, r in self._roots.items() if n.tenant_salt + n.model_fingerprint"
        " == namespace.tenant_salt + namespace.model_fingerprint), None)",
    ),
)

KEYS_ARE_TRUSTED = Mutant(
    "A page is found by a short hash of its tokens, and not compared with them.",
    "CVE-2025-25183 (C4)",
    Edit(
        "cache.radix:RadixCache._key",
        "tokens[: self._page_size].tobytes()",
        "bytes([int(tokens[: self._page_size].sum()) % 251])",
    ),
    Edit(
        "cache.radix:RadixCache._walk",
        "node = node.children.get(tokens[matched : matched + page_size].tobytes())",
        "node = node.children.get(self._key(tokens[matched : matched + page_size]))",
    ),
    Edit(
        "cache.radix:_common_len",
        "differs = left[:length] != right[:length]",
        "differs = np.cumsum(left[:length]) != np.cumsum(right[:length])\n    differs[:3] = False",
    ),
)

HITS_GO_FIRST = Mutant(
    "Turns whose beginning is cached are admitted before others.",
    "arXiv 2409.20002 (C5)",
    Edit(
        "session_server.engine.view:LiveView.waiting",
        "return (LiveWaiting(self, turn) for turn in self.queue)",
        "queue = [LiveWaiting(self, turn) for turn in self.queue]\n"
        "        return sorted(queue, key=lambda one: one.quote().num_uncomputed)",
    ),
)

SESSIONS_SHARE_WHAT_THEY_SAY = Mutant(
    "Sessions of one owner share prefixes whatever the server was told.",
    "CVE-2025-46570 (C5)",
    Edit(
        "session_server.sessions.salts:TenantSalts.salt_of",
        "if self._share_prefixes:",
        "if True:",
    ),
)

FRESH_STATE_IS_READ = Mutant(
    "A session begins with what lies in the page of states that stands for none.",
    "vllm#56524, CVE-2026-53923 (C7)",
    Edit(
        "session_server.attention.recurrent:Sources.read",
        "return past if self.fresh is None else past.index_fill_(0, self.fresh, 0.0)",
        "return past",
    ),
)

BUGS_ARE_TOLD = Mutant(
    "The text of an exception of ours goes to the client.",
    "CVE-2026-22778 (C8)",
    Edit(
        "session_server.web.refusals:error_response",
        "return _response(internal_error_body(), 500, {})",
        "return _response(HttpRefusal(500, str(error)).body, 500, {})",
    ),
)

ANSWERS_PILE_UP = Mutant(
    "A connection owes its peer as many answers as it asks for.",
    "vllm#56094 (E1)",
    Edit(
        "session_server.protocol.session_protocol:SessionProtocol.receive_frame",
        "if len(self._outbox) >= MAX_OUTBOX_FRAMES:",
        "if False:",
    ),
)

TOKENS_WITHOUT_END = Mutant(
    "The engine is asked for as many tokens as the client asks for.",
    "CVE-2026-34756 (E3)",
    Edit(
        "session_server.sessions.prompt:fit_sampling",
        "max_tokens = min(sampling.max_tokens, max_len - prompt.context_len)",
        "max_tokens = sampling.max_tokens",
    ),
)

OWNERS_OPEN_WITHOUT_END = Mutant(
    "An owner may open as many sessions as the server holds.",
    "sglang#27024 (E4)",
    Edit(
        "session_server.sessions.budget:OwnerBudget.check",
        "if held > allowed:",
        "if False:",
    ),
)

NOTHING_EXPIRES = Mutant(
    "Sessions that nobody closes stay.",
    "sglang#27024 (E4)",
    Edit(
        "session_server.sessions.deadlines:Deadlines.pop_expired",
        "elif session.expires_s < now_s:",
        "elif False:",
    ),
)

SENDS_THE_WHOLE_HISTORY = Mutant(
    "Every turn sends the engine the whole conversation.",
    "vllm#52471 (E5)",
    Edit(
        "session_server.sessions.engine_copies:EngineCopies.base_len",
        "min(common if known is None else min(known, common), prompt.context_len - 1)",
        "0 * common",
    ),
)

NOBODY_IS_LET_GO = Mutant(
    "A connection waits for its peer to read as long as that takes.",
    "vllm#56094 (E1)",
    Edit(
        "session_server.web.unread_output:UnreadOutput._check",
        "if still_unread >= num_bytes:",
        "if False:",
    ),
)

HEADERS_WITHOUT_END = Mutant(
    "A request may have as many headers as its client likes.",
    "CVE-2025-48956 (E3)",
    Edit(
        "session_server.web.http_guard:GuardedHttp.on_header",
        " or self._size.num_headers > MAX_HEADERS",
        "",
    ),
)

FRAMES_ARE_TRUSTED = Mutant(
    "What the parser raises ends the connection.",
    "CVE-2025-48956 (E3)",
    Edit(
        "session_server.protocol.session_protocol:SessionProtocol._decode",
        "except (msgspec.MsgspecError, ValueError, RecursionError) as error:",
        "except RecursionError as error:",
    ),
)

DEAD_ENGINE_IS_UP = Mutant(
    "An engine that has died still counts as there.",
    "vllm#39863, #21728, #36451 (E6)",
    Edit("session_server.sessions.engine_link:EngineLink._mark_down", "self.is_up = False", "pass"),
)

EXIT_STATUS_IS_ZERO = Mutant(
    "A server whose engine was given up says that all went well.",
    "vllm#48966 (E7)",
    Edit(
        "session_server.serving:_serve_on",
        "return EXIT_FAILED if server.engine_failed.done() else EXIT_OK",
        "return EXIT_OK",
    ),
)

VIOLATIONS_DO_NOT_SHOW = Mutant(
    "The server says that it is well whatever the memory checker found.",
    "sglang#35270 (E8)",
    Edit(
        "session_server.web.admin:is_healthy",
        "sample.check_violations == 0",
        "sample.check_violations >= 0",
    ),
)
