"""Bugs in what the server does with sessions: turns in order, journals, answers, the wire."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

OWNERS_SHARE_A_SALT = Mutant(
    "The namespace of KV does not depend on whose session it is.",
    "CVE-2025-46570 (C5)",
    Edit("session_server.sessions.salts:TenantSalts.salt_of", "owner.owner_id.encode()", 'b""'),
)

LAST_TURN_GOES_FIRST = Mutant(
    "Turns that wait in a session run in the order opposite to that of their arrival.",
    "systematic",
    Edit(
        "session_server.sessions.turn_flow:TurnFlow.enqueue",
        "session.queue.append(turn)",
        "session.queue.insert(0, turn)",
    ),
)

UNSENT_TURN_GOES_LAST = Mutant(
    "A turn that the engine could not take goes to the end of its session's line.",
    "systematic",
    Edit(
        "session_server.sessions.turn_flow:TurnFlow._submit_to_engine",
        "session.queue.insert(0, turn)",
        "session.queue.append(turn)",
    ),
)

TOKENS_AFTER_CANCEL = Mutant(
    "What a turn says between a cancel and its end is told and kept.",
    "sglang#36475 (R3)",
    Edit(
        "session_server.sessions.turn_flow:TurnFlow._on_tokens",
        "if turn.phase is not TurnPhase.RUNNING:",
        "if turn.phase is TurnPhase.ENDED:",
    ),
)

CANCELLED_TURN_IS_COMMITTED = Mutant(
    "A turn canceled to leave nothing goes into the history.",
    "sglang#40252 (A14)",
    Edit(
        "session_server.sessions.turn_ends:is_kept",
        "and end.kept_partial",
        "",
    ),
)

FAILED_TURN_IS_COMMITTED = Mutant(
    "A turn that failed goes into the history.",
    "sglang#36552 (R3)",
    Edit(
        "session_server.sessions.turn_ends:is_kept",
        "isinstance(end, TurnCompleted)",
        "isinstance(end, TurnCompleted | TurnFailedEntry)",
    ),
)

COPY_OUTLIVES_ENGINE = Mutant(
    "After a restart the server goes on building on what the old engine held.",
    "systematic",
    Edit(
        "session_server.sessions.engine_link:EngineLink._mark_down",
        "self.generation += 1",
        "pass",
    ),
)

LIVE_TURN_OUTLIVES_ENGINE = Mutant(
    "A turn that ran when the engine died gets no end.",
    "vllm#39863 (E6)",
    Edit(
        "session_server.sessions.turn_flow:TurnFlow.on_engine_lost",
        "for each in lost.values()",
        "for each in ()",
    ),
)

COPY_IS_TRUSTED_TOO_FAR = Mutant(
    "What the engine holds of a turn that left nothing counts as history.",
    "sglang#22790 (A15)",
    Edit(
        "session_server.sessions.engine_copies:EngineCopies.note_kept",
        "session.copy.set_known_len(min(known_len, same_len), self._link.generation)",
        "session.transcript._tokens.extend([0] * (known_len - same_len))",
    ),
)

ENDED_TURN_HOLDS_QUOTA = Mutant(
    "A turn that has ended is still counted against its owner.",
    "lmdeploy#1788 (L8)",
    Edit(
        "session_server.sessions.turn_conclusion:TurnConclusion._release",
        "self._quotas.release_turn(session.owner, turn)",
        "pass",
    ),
)

REFUSED_TURN_HOLDS_QUOTA = Mutant(
    "A turn that was refused is still counted against its owner.",
    "systematic",
    Edit(
        "session_server.sessions.turn_flow:TurnFlow._refuse",
        "self._quotas.release_turn(session.owner, turn)",
        "pass",
    ),
)

CLOSED_SESSION_HOLDS_QUOTA = Mutant(
    "A session that was closed is still counted against its owner.",
    "sglang#27024 (E4)",
    Edit(
        "session_server.sessions.exits:SessionExits.finish",
        "self.parts.quotas.release_session(session)",
        "pass",
    ),
)

CLOSED_SESSION_STAYS_IN_ENGINE = Mutant(
    "The engine is not told that a session is closed.",
    "sglang#21875 (L9)",
    Edit(
        "session_server.sessions.engine_copies:EngineCopies.close",
        "if is_known:\n            self.send_close(",
        "if not is_known:\n            self.send_close(",
    ),
)

CLOSE_FORGETS_THE_LINE = Mutant(
    "Closing a session ends its running turn and not those that wait.",
    "sglang#27024 (L11)",
    Edit(
        "session_server.sessions.exits:SessionExits.close",
        "(*session.queue, *([session.live] if session.live else []))",
        "([session.live] if session.live else [])",
    ),
)

BUSY_SESSION_EXPIRES = Mutant(
    "A session expires while a turn of it runs.",
    "tt-inference-server#2907 (R5)",
    Edit(
        "session_server.sessions.deadlines:Deadlines.pop_expired",
        "if not session.is_idle:",
        "if False:",
    ),
)

SAME_TURN_RUNS_AGAIN = Mutant(
    "A turn sent again after its end runs a second time.",
    "vllm#27987 (R4)",
    Edit(
        "session_server.sessions.manager:SessionManager.submit",
        "if ended is not None:",
        "if False:",
    ),
)

OTHER_TURN_IS_TAKEN_FOR_IT = Mutant(
    "Another request under a used turn id is answered with the old turn.",
    "vllm#15041 (R4)",
    Edit("session_server.sessions.turn:check_same_request", "if known != digest:", "if False:"),
)

CANCEL_TAKES_A_PREFIX = Mutant(
    "A turn is found by the beginning of its id.",
    "sglang#25561 (R8)",
    Edit(
        "session_server.sessions.session:Session.find",
        "turn.request.turn_id == turn_id",
        "turn.request.turn_id.startswith(turn_id)",
    ),
)

UNSENT_IS_LOST = Mutant(
    "A cancel or close that the engine cannot take at the moment is forgotten.",
    "llama.cpp#24496 (E2)",
    Edit(
        "session_server.sessions.engine_link:EngineLink.send_or_queue",
        "self._unsent.append(command)",
        "pass",
    ),
)

UNSENT_IS_OVERTAKEN = Mutant(
    "New commands go to the engine before those that it could not take.",
    "systematic",
    Edit(
        "session_server.sessions.engine_link:EngineLink.send",
        "self.resend()",
        "pass",
    ),
)

TEXT_GOES_ON_AFTER_STOP = Mutant(
    "What comes after a stop string in the same tokens is kept.",
    "systematic",
    Edit(
        "session_server.sessions.answer:Answer.feed",
        "if self.is_over:\n                break",
        "pass",
    ),
)

HELD_BACK_TEXT_IS_LOST = Mutant(
    "Text held back because a stop string might begin in it is not given out at the end.",
    "systematic",
    Edit(
        "session_server.sessions.turn_flow:TurnFlow._flush_text",
        "if text or reasoning or calls:",
        "if not text and (reasoning or calls):",
    ),
)

LAST_OUTPUT_IS_NOT_COMMITTED = Mutant(
    "The last token of an answer is missing in the history.",
    "sglang#22897 (G4)",
    Edit(
        "session_server.sessions.transcript:Transcript.commit",
        "self._tokens.extend(output)",
        "self._tokens.extend(output[:-1])",
    ),
)

REPLACED_TOKENS_STAY = Mutant(
    "Tokens that a turn replaces stay in the history before those that replace them.",
    "vllm#53156 (A5)",
    Edit(
        "session_server.sessions.transcript:Transcript.commit",
        "del self._tokens[prompt.keep_len :]",
        "pass",
    ),
)

JOURNAL_SKIPS_A_NUMBER = Mutant(
    "The number of an entry that ends a turn is one too high.",
    "systematic",
    Edit(
        "session_server.sessions.journal:Journal.append",
        "self._last_seq += 1",
        "self._last_seq += 1 + isinstance(entry, TurnCancelled)",
    ),
)

JOURNAL_TELLS_TWICE = Mutant(
    "A reader far behind gets the entry it has already.",
    "vllm#53861 (R9)",
    Edit(
        "session_server.sessions.journal:Journal.read",
        "found.append(self._entries[index])",
        "found.append(self._entries[max(index - 1, 0)] if start >= 0 else self._entries[index])",
    ),
)

JOURNAL_LEAVES_ONE_OUT = Mutant(
    "A reader that is nearly up to date misses the newest entry but one.",
    "systematic",
    Edit(
        "session_server.sessions.journal:Journal.read",
        "start -= len(self._entries)",
        "start -= len(self._entries) - (num_new > 1)",
    ),
)

LOST_ENTRIES_ARE_NOT_SAID = Mutant(
    "A reader whose next entries were dropped is given the oldest ones left.",
    "systematic",
    Edit(
        "session_server.sessions.journal:Journal.read",
        "if not self.first_seq - 1 <= after_seq <= self._last_seq:",
        "if self._entries:\n            after_seq = max(after_seq, self.first_seq - 1)\n"
        "        if not self.first_seq - 1 <= after_seq <= self._last_seq:",
    ),
)

READERS_SLEEP_ON = Mutant(
    "The entry that ends a session wakes no reader.",
    "vllm-omni#5383 (R9)",
    Edit(
        "session_server.sessions.journal:Journal.append",
        "self._notify_listeners()",
        "if not self._is_closed:\n            self._notify_listeners()",
    ),
)

JOURNAL_BYTES_DRIFT = Mutant(
    "Entries that are dropped still count against the journal's bytes.",
    "llama.cpp#25740 (L12)",
    Edit(
        "session_server.sessions.journal:Journal.drop_oldest",
        "self._num_bytes -= dropped.num_bytes",
        "pass",
    ),
)

DROPPED_ENTRIES_STAY_IN_THE_SUM = Mutant(
    "Entries that are dropped still count against the bytes of all journals.",
    "systematic",
    Edit(
        "session_server.sessions.journal:Journal.drop_oldest",
        "self._replay.remove(dropped.num_bytes)",
        "pass",
    ),
)

DELTAS_ARE_GLUED = Mutant(
    "The last words of a turn are told after its end.",
    "vllm#53861 (R9)",
    Edit(
        "session_server.protocol.frames:coalesce",
        "if run and not (",
        "if delta is None:\n            yield seq, entry\n"
        "            continue\n        if run and not (",
    ),
)

FRAMES_ARE_SENT_AGAIN = Mutant(
    "Frames handed out stay in the outbox.",
    "systematic",
    Edit(
        "session_server.protocol.frame_queue:FrameQueue.take_frames",
        "del self._outbox[:num_taken]",
        "del self._outbox[: max(1, num_taken - 1)]",
    ),
)

JOURNAL_IS_UNBOUNDED = Mutant(
    "A journal keeps every entry.",
    "llama.cpp#25740 (L12)",
    Edit(
        "session_server.sessions.journal:Journal.trim",
        "if not self._is_over() or self.oldest_s is None:",
        "if True:",
    ),
)

ENDED_TURNS_ARE_NOT_COUNTED = Mutant(
    "What ended turns leave with their session is counted nowhere.",
    "llama.cpp#25740 (L12)",
    Edit(
        "session_server.sessions.turn_conclusion:TurnConclusion._release",
        "self._quotas.recount(session)",
        "pass",
    ),
)

ENDED_TURN_IS_FORGOTTEN = Mutant(
    "A turn runs again when it is sent again after many others.",
    "vllm#27987 (R4)",
    Edit(
        "session_server.sessions.ended_turns:EndedTurns.find",
        "self._records.get(key_of(turn_id))",
        "dict(list(self._records.items())[-8:]).get(key_of(turn_id))",
    ),
)

SCORES_STAY_COUNTED = Mutant(
    "What a turn held while it ran stays counted when it has ended.",
    "systematic",
    Edit(
        "session_server.sessions.quotas:Quotas.release_turn",
        "self.turn_bytes.add(owner, -turn.held_bytes)",
        "pass",
    ),
)
