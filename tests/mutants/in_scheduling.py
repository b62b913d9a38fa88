"""Bugs in how turns are taken in, planned, admitted and retracted."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

SALT_IS_MISSING = Mutant(
    "All tenants share one namespace of KV.",
    "CVE-2025-46570 (C5)",
    Edit(
        "session_server.engine.command_handler:CommandHandler._open",
        "command.tenant_salt, config",
        '"", config',
    ),
)

TOKENS_ARE_NOT_CHECKED = Mutant(
    "Token ids outside the vocabulary reach the model.",
    "llama.cpp#10074 (A12)",
    Edit(
        "session_server.engine.command_handler:CommandHandler._are_tokens",
        "max(tokens) < self._config.vocab_size",
        "max(tokens) <= self._config.vocab_size",
    ),
)

SENT_TWICE_RUNS_TWICE = Mutant(
    "A turn that is sent a second time is taken for a new one.",
    "vllm#23697 (R4)",
    Edit(
        "session_server.engine.command_handler:CommandHandler._submit",
        "if self._scheduler.find(command.turn_id) is not None:",
        "if False:",
    ),
)

SECOND_TURN_IS_ADMITTED = Mutant(
    "A second turn of a session that runs one is taken in.",
    "sglang#40250 (R1)",
    Edit(
        "session_server.engine.command_handler:CommandHandler._refusal",
        "if self._scheduler.turn_of(session_id) is not None:",
        "if False:",
    ),
)

TOO_LONG_IS_ADMITTED = Mutant(
    "A turn whose answer has no room in the pool is taken in.",
    "vllm#39734 (X4)",
    Edit(
        "session_server.engine.command_handler:CommandHandler._input_refusal",
        "context_len + min(1, sampling.max_tokens) > self.turn_limits.max_turn_len",
        "context_len > self.turn_limits.max_turn_len",
    ),
)

PADDING_COUNTS_AS_ROOM = Mutant(
    "The padding page counts among those that a turn may fill.",
    "sglang#23635 (A4)",
    Edit(
        "cache.views:TurnLimits.of",
        "stores.ledgers[component.pool].num_pages - 1",
        "stores.ledgers[component.pool].num_pages",
    ),
)

PINNED_COUNTS_AS_ROOM = Mutant(
    "What pinned sessions may keep counts among what a turn may fill.",
    "sglang#27024 (X2)",
    Edit(
        "cache.views:TurnLimits.of",
        "usable -= pinned.quota_pages[component.pool]",
        "pass",
    ),
)

CANCEL_OF_WAITING_IS_LOST = Mutant(
    "A cancel that comes while its turn waits has no effect.",
    "sglang#31765 (R2)",
    Edit(
        "session_server.engine.command_handler:CommandHandler._end",
        "if turn is not None:",
        "if turn is not None and turn.admission is not None:",
    ),
)

CLOSE_LEAVES_WAITING = Mutant(
    "Closing a session does not end its turn if that still waits.",
    "sglang#27024 (L11)",
    Edit(
        "session_server.engine.command_handler:CommandHandler._close",
        "if turn is not None:",
        "if turn is not None and turn.admission is not None:",
    ),
)

FLUSH_UNDER_TURNS = Mutant(
    "A flush goes ahead while turns wait.",
    "systematic",
    Edit(
        "session_server.engine.command_handler:CommandHandler._flush",
        "len(self._scheduler) == 0",
        "not self._scheduler.running",
    ),
)

SESSION_STAYS_BUSY = Mutant(
    "A turn canceled while it waits leaves its session busy.",
    "sglang#31767, #40251 (R2)",
    Edit(
        "session_server.engine.scheduler:Scheduler.remove",
        "del self._of_session[turn.request.session_id]",
        "turn.admission and self._of_session.pop(turn.request.session_id)",
    ),
)

LATE_RESULT_IS_APPLIED = Mutant(
    "The result of an admission that was taken back is applied to the next one.",
    "vllm#48245, #49620 (A8)",
    Edit(
        "session_server.engine.scheduler:Scheduler.find_attempt",
        "return turn if turn.admission.attempt == row.attempt else None",
        "return turn",
    ),
)

RETRACTED_TURN_IS_SETTLED = Mutant(
    "The result of a turn that was retracted meanwhile is counted as said.",
    "systematic",
    Edit(
        "session_server.engine.scheduler:Scheduler.find_attempt",
        "if turn is None or turn.admission is None:\n            return None\n"
        "        return turn if turn.admission.attempt == row.attempt else None",
        "if turn is not None and turn.admission is None and row.sample:\n"
        "            turn.outputs.append(1)\n"
        "        if turn is None or turn.admission is None:\n            return None\n"
        "        return turn if turn.admission.attempt == row.attempt else None",
    ),
)

RETRACTED_GOES_LAST = Mutant(
    "A retracted turn waits behind everybody, with nothing to say for its age.",
    "systematic",
    Edit(
        "session_server.engine.scheduler:Scheduler.requeue",
        "self.waiting.insert(turn)",
        "self.waiting.insert(turn)\n"
        "        line = self.waiting._lines[turn.request.tenant]._turns\n"
        "        line.append(line.pop(line.index(turn)))",
    ),
)

PROMPT_IS_PUBLISHED_AT_LAUNCH = Mutant(
    "The pages of a prompt can be matched as soon as its last chunk is launched.",
    "vllm#37152 (A6)",
    Edit(
        "session_server.engine.scheduler:Scheduler.apply",
        "applied.rows.append(row)",
        "applied.rows.append(row)\n"
        "                if turn.current_admission.computed_len + num_tokens == turn.prompt_len:\n"
        "                    self._outbox.write("
        "self._cache.record(turn.turn_id, turn.prompt_len))",
    ),
)

NOBODY_IS_RETRACTED = Mutant(
    "A running turn that needs pages never takes them from a younger one.",
    "vllm#49439 (X3)",
    Edit(
        "session_server.engine.plan_running:_reclaim",
        "younger = running[:index:-1]",
        "younger = []",
    ),
)

EVERYBODY_IS_RETRACTED = Mutant(
    "What a retracted turn gives is not counted, so its pages are asked of the next one too.",
    "vllm-ascend#16315 (X5)",
    Edit(
        "session_server.engine.plan_running:_reclaim",
        "if shortage and shortage.ask_pages(t.held_pages)",
        "if shortage.ask_pages(t.held_pages) or t",
    ),
)

NEED_IS_ROUNDED_DOWN = Mutant(
    "The plan counts whole pages only, not the one that is begun.",
    "sglang-jax#70 (G3)",
    Edit(
        "session_server.engine.plan_budget:Budget.new_pages",
        "pages_for(max(0, num_tokens - num_spare), self._page_size)",
        "max(0, num_tokens - num_spare) // self._page_size",
    ),
)

QUEUE_IS_OVERTAKEN = Mutant(
    "Turns behind one that has no room are admitted before it.",
    "systematic",
    Edit(
        "session_server.engine.plan_admission:AdmissionPass.admit",
        "elif max_bypasses > self.num_bypasses and self._may_bypass(candidate):",
        "else:",
    ),
)

PROMPTS_STOP_STREAMS = Mutant(
    "Turns that stream get no token while a prompt is computed.",
    "sglang#32549, #34058 (X6)",
    Edit(
        "session_server.engine.plan_tokens:share_tokens",
        "for turn in running if turn.num_uncomputed == 1)",
        "for turn in running if turn.num_uncomputed == 1 and not prefilling)",
    ),
)

OLDEST_HAS_NO_SHARE = Mutant(
    "Short needs are served first, so that a long prompt waits while they keep coming.",
    "vllm#53130 (X9)",
    Edit("session_server.engine.plan_tokens:_split", "first=(0, len(prefilling))", "first=()"),
)

QUEUE_LATCHES_FULL = Mutant(
    "The line of waiting turns is not looked at while any turn computes its prompt.",
    "sglang#35537 (S6)",
    Edit(
        "session_server.engine.plan_tokens:price_waiting",
        "if len(running) >= limits.num_turns:",
        "if any(t.num_uncomputed > 1 for t in running):",
    ),
)

MATCH_IS_PRICED_AS_FREE = Mutant(
    "Locking what a match finds evictable is not counted as spent.",
    "systematic",
    Edit(
        "session_server.engine.turn_queue:Quotes._quote",
        "cache.shares(tenant).lock_cost(match.evictable_pages)",
        "(0,) * len(cache.paged_pools)",
    ),
)

GUESSES_TAKE_PAGES = Mutant(
    "Drafts are planned on pages that nobody has.",
    "sglang#22897 (L1)",
    Edit(
        "session_server.engine.plan:_offer_drafts",
        "num_drafts, num_pages = min(num_drafts, max(0, turn.num_spare - 1)), 0",
        "num_pages = 0",
    ),
)

GUESSES_PASS_THE_END = Mutant(
    "A turn has drafts past the last token it may say.",
    "sglang#22651 (G4)",
    Edit(
        "session_server.engine.drafting:Drafting._draft",
        "- num_unseen - 1",
        "- num_unseen + 1",
    ),
)

QUOTE_TAKES_A_LOCK = Mutant(
    "Every look at what a waiting turn would find in the tree takes a lock.",
    "sglang#20476, #12693 (L3, L4)",
    Edit(
        "session_server.engine.turn_queue:Quotes._price",
        "match = cache.peek(",
        "cache.inspect().stores.tree.lock_root(slot.namespace)\n            match = cache.peek(",
    ),
)

CANCELLED_TURN_IS_FOUND = Mutant(
    "The results of a turn that was canceled still find it.",
    "mini-sglang#111 (D2)",
    Edit(
        "session_server.engine.scheduler:Scheduler.remove",
        "del self._turns[turn.turn_id]",
        "pass",
    ),
    Edit("session_server.engine.turn:Turn.finish", "self.admission = None", "pass"),
)

LEFT_OUT_AGAIN_AND_AGAIN = Mutant(
    "In a flood those who are not behind are left out of every forward, as long as others are.",
    "systematic",
    Edit(
        "session_server.engine.plan_tokens:_split_by_tenant",
        "may_postpone = not view.load.has_postponed",
        "may_postpone = True",
    ),
)
