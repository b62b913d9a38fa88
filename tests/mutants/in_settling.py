"""Bugs in what is launched, and in what is made of its results."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

SAMPLER_IS_NOT_STARTED = Mutant(
    "A turn that is admitted again does not tell the sampler who it is.",
    "vllm-omni#5603 (R11)",
    Edit(
        "session_server.engine.turn:Turn.admit",
        "Admission(loan, self.num_admissions, loan.cached_len)",
        "Admission(loan, self.num_admissions, loan.cached_len, 0, self.num_admissions > 1)",
    ),
)

ADMISSIONS_ARE_ALIKE = Mutant(
    "Every admission of a turn has the same number.",
    "vllm#38624 (A8)",
    Edit(
        "session_server.engine.turn:Turn.admit",
        "self.num_admissions += 1",
        "self.num_admissions = 1",
    ),
)

RELAUNCH_SKIPS = Mutant(
    "After a forward that failed a turn goes on behind it.",
    "systematic",
    Edit(
        "session_server.engine.turn:Turn.discard_in_flight",
        "admission.launched_len = admission.computed_len",
        "pass",
    ),
)

RELAUNCH_COUNTS_LOST_TOKENS = Mutant(
    "After a forward that failed a turn goes on counting on the token it was to give.",
    "systematic",
    Edit("session_server.engine.turn:Turn.discard_in_flight", "admission.num_sampling = 0", "pass"),
)

RELAUNCH_TRUSTS_SAMPLER = Mutant(
    "After a forward that failed the sampler is taken to remember the turn.",
    "systematic",
    Edit(
        "session_server.engine.turn:Turn.discard_in_flight",
        "admission.is_sampler_started = False",
        "pass",
    ),
)

LAST_LEN_IS_ONE_FURTHER = Mutant(
    "A turn computes the position of its last token too.",
    "sglang#22651 (G4)",
    Edit(
        "session_server.engine.turn:Turn.max_computed_len",
        "max(0, self.max_new - 1)",
        "self.max_new",
    ),
)

WRITES_GO_LOST = Mutant(
    "Page table deltas of a step that launches nothing are forgotten.",
    "sglang#27586 (A17)",
    Edit(
        "session_server.engine.context:Outbox.take_events",
        "events, self._events = self._events, []",
        "events, self._events = self._events, []\n        self._table_writes = []",
    ),
)

WRITES_ARE_REVERSED = Mutant(
    "Page table deltas of one forward reach the device newest first.",
    "systematic",
    Edit(
        "session_server.engine.context:Outbox.take_changes",
        "tuple(self._table_writes)",
        "tuple(self._table_writes[::-1])",
    ),
)

RESULTS_BY_RANK = Mutant(
    "Results are dealt to the turns still alive by rank.",
    "mlx-lm#965 (A18)",
    Edit(
        "session_server.engine.settle:Settler.settle",
        "zip(batch.rows, result.row_results(), strict=True)",
        "zip([r for r in batch.rows if self._scheduler.find_attempt(r)] or batch.rows,"
        " result.row_results(), strict=False)",
    ),
)

NAN_IS_SETTLED = Mutant(
    "A row that gave NaN is settled like any other.",
    "vllm#50283, #55766 (A13)",
    Edit(
        "session_server.engine.settle:Settler.settle",
        "if not outcome.finite:",
        "if not outcome.finite and row.sample:",
    ),
)

RETRACTED_COUNTS_AS_KEPT = Mutant(
    "A turn canceled after a retraction says that the engine holds what it had said.",
    "sglang#40252 (A14)",
    Edit(
        "session_server.engine.settle:Settler.finish",
        "        if turn.state is TurnState.RUNNING:\n            if num_outputs is not None:",
        "        if turn.state is TurnState.WAITING and num_outputs is not None and turn.outputs:\n"
        "            history_len = turn.prompt_len + num_outputs\n"
        "        if turn.state is TurnState.RUNNING:\n            if num_outputs is not None:",
    ),
)

CANCEL_KEEPS_UNHEARD = Mutant(
    "A turn that ends early keeps every token it has said, heard or not.",
    "systematic",
    Edit(
        "session_server.engine.settle:Settler.finish",
        "min(num_outputs, len(turn.outputs))",
        "len(turn.outputs)",
    ),
)

CANCEL_KEEPS_INPUT = Mutant(
    "A turn canceled to leave nothing leaves its input.",
    "sglang#36475 (R3)",
    Edit(
        "session_server.engine.settle:Settler.finish",
        "if num_outputs is not None:\n                num_kept = min(num_outputs, ",
        "if True:\n                num_kept = min(num_outputs or 0, ",
    ),
)

POSITION_OF_LAST_TOKEN = Mutant(
    "After a forward the position of its newest token counts as computed too.",
    "sglang#22897 (G4)",
    Edit(
        "session_server.engine.settle:Settler._settle_row",
        "max(0, len(token_ids) - 1)",
        "len(token_ids) * (row.num_drafts > 0)",
    ),
)

REJECTED_GUESSES_COUNT = Mutant(
    "Positions of rejected drafts count as computed.",
    "mlx-lm#1109 (A10)",
    Edit(
        "session_server.engine.settle:Settler._settle_row",
        "computed_len = row.start + num_certain + max(0, len(token_ids) - 1)",
        "computed_len = row.start + row.num_tokens",
    ),
)

REJECTED_GUESSES_STAY_LAUNCHED = Mutant(
    "The next forward begins behind drafts that were rejected.",
    "systematic",
    Edit(
        "session_server.engine.settle:Settler._settle_drafts",
        "turn.current_admission.launched_len -= row.num_drafts - num_right",
        "pass",
    ),
)

STOP_AMONG_GUESSES_IS_MISSED = Mutant(
    "A stop token among accepted drafts does not end the turn.",
    "systematic",
    Edit(
        "session_server.engine.settle:Settler._until_stop",
        "return token_ids[: index + 1]",
        "return token_ids",
    ),
)

STOP_AMONG_GUESSES_IS_DROPPED = Mutant(
    "A stop token among accepted drafts is not said.",
    "systematic",
    Edit(
        "session_server.engine.settle:Settler._until_stop",
        "return token_ids[: index + 1]",
        "return token_ids[: max(index, 1)]",
    ),
)

MIN_TOKENS_MISCOUNTED_IN_GUESSES = Mutant(
    "Accepted drafts are not counted towards the least number of tokens.",
    "systematic",
    Edit(
        "session_server.engine.settle:Settler._until_stop",
        "len(turn.outputs) + index + 1",
        "len(turn.outputs) + 1",
    ),
)

MIN_TOKENS_PLUS_ONE = Mutant(
    "A stop token has to come one token later than the least number allows.",
    "systematic",
    Edit(
        "session_server.engine.settle:Settler._is_stop",
        "num_outputs < sampling.min_tokens",
        "num_outputs <= sampling.min_tokens",
    ),
)

MAX_TOKENS_PLUS_ONE = Mutant(
    "A turn says one token more than it may.",
    "vllm-omni#5603 (R11)",
    Edit(
        "session_server.engine.settle:Settler._finish_if_done",
        "num_outputs >= turn.max_new",
        "num_outputs > turn.max_new",
    ),
)

EOS_CANNOT_BE_IGNORED = Mutant(
    "The end token of the model ends a turn that asked to go on.",
    "systematic",
    Edit("session_server.engine.settle:Settler._is_stop", "not sampling.ignore_eos and ", ""),
)

SCORES_START_OVER = Mutant(
    "After a retraction prompt logprobs are computed again.",
    "systematic",
    Edit(
        "session_server.engine.turn:Turn.next_prompt_logprob_position",
        "wanted_from + self.num_prompt_logprobs - 1",
        "wanted_from + self.num_prompt_logprobs * (self.clock.num_retractions == 0) - 1",
    ),
)

NEIGHBOURS_ARE_SUSPECTS = Mutant(
    "Turns of a forward that failed are tried again together, so one takes all with it.",
    "systematic",
    Edit(
        "session_server.engine.engine:Engine._next_batch",
        "retry_alone[:1] if retry_alone else",
        "retry_alone if retry_alone else",
    ),
)

SUSPECT_IS_NOT_CLEARED = Mutant(
    "A turn whose second try went well is still under suspicion.",
    "systematic",
    Edit(
        "session_server.engine.settle:Settler._settle_row",
        "self.retry_alone.remove(turn)",
        "turn.clock",
    ),
)

LATE_RESULT_IS_RECORDED = Mutant(
    "What a forward gave for a turn that has ended is written to the cache all the same.",
    "sglang#36926 (L6)",
    Edit(
        "session_server.engine.settle:Settler.settle",
        "self._counters.overshoots += 1",
        "self._counters.overshoots += 1\n"
        "                self._cache.record(row.turn_id, row.start + row.num_tokens)",
    ),
)
