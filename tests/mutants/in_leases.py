"""Bugs in what a session holds: leases, slots, the façade."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

RELEASE_DROPS_TAIL = Mutant(
    "A lease given back forgets the pages it has not published.",
    "sglang#22862, #22213 (L2)",
    Edit(
        "cache.lease:KVLease.release",
        "self._drop_private(0)",
        "self._drop_private(0 if len(self._private) > 1 else 1)",
    ),
)

RELEASE_KEEPS_ROW = Mutant(
    "A lease is given back without its row.",
    "sglang#10871 (L5)",
    Edit("cache.lease:KVLease.release", "self._stores.rows.free(self.row)", "pass"),
)

OVERSHOOT_STAYS = Mutant(
    "Pages bought for positions that were never kept stay with the session.",
    "sglang#21875, #22897 (L1)",
    Edit(
        "cache.lease:KVLease.rewind",
        "self._drop_private(pages_for(target, self._stores.page_size) - self._protected_pages)",
        "pass",
    ),
)

REWIND_FREES_THE_CUT_PAGE = Mutant(
    "A rewind frees the private page that it cuts.",
    "vllm#55766 (G5)",
    Edit(
        "cache.lease:KVLease.rewind",
        "self._drop_private(pages_for(target, self._stores.page_size) - self._protected_pages)",
        "self._drop_private(target // self._stores.page_size - self._protected_pages)",
    ),
)

REWIND_KEEPS_LENGTH = Mutant(
    "A rewind frees pages and goes on to count their content as valid.",
    "sglang#22273, #22790 (A16)",
    Edit(
        "cache.lease:KVLease.rewind",
        "self.computed_len = target",
        "self.computed_len = min(self.computed_len, "
        "pages_for(target, self._stores.page_size) * self._stores.page_size)",
    ),
)

DUPLICATE_IS_FORGOTTEN = Mutant(
    "A page that the tree had already is dropped from the lease and not freed.",
    "systematic",
    Edit(
        "cache.lease:KVLease.publish",
        "stores.allocators[pool].release(freed, self.holder)",
        "pass",
    ),
)

LAST_TOKEN_IS_PUBLISHED = Mutant(
    "A page is published although its last token, just sampled, has no KV yet.",
    "vllm#49377, #52806 (A5)",
    Edit(
        "cache.lease:KVLease.publish",
        "self.computed_len // stores.page_size",
        "(self.protected_len + len(tokens)) // stores.page_size",
    ),
    Edit("cache.session_cache:SessionAwareCache._publish", ", lease.computed_len)", ")"),
)

MATCH_KEEPS_ITS_LENGTH = Mutant(
    "A match replaces private pages, and what they held is still counted as all there is.",
    "systematic",
    Edit(
        "cache.lease:KVLease.extend_match",
        "self.computed_len = self.protected_len",
        "self.computed_len = max(self.computed_len, start * self._stores.page_size)",
    ),
)

LENT_PAGES_STAY_HELD = Mutant(
    "The private pages of a running turn are counted as those of an idle session.",
    "sglang#22213, #22753 (D7)",
    Edit("cache.session_slot:SessionSlot.restore_to_req", "self.lease.lend()", "pass"),
)

CLOSE_FREES_AT_ONCE = Mutant(
    "Closing a session in mid-turn frees its pages under the turn.",
    "sglang#21875 (A2)",
    Edit("cache.session_cache:SessionAwareCache.close", "if slot.is_active:", "if False:"),
)

CLOSE_IS_FORGOTTEN = Mutant(
    "A session that was closed in mid-turn is parked when the turn ends.",
    "sglang#40250 (R6)",
    Edit(
        "cache.session_cache:SessionAwareCache.close",
        "slot.move_to(SlotState.CLOSING)",
        "pass",
    ),
)

CLOSE_FORGETS_PAGES = Mutant(
    "A closed session takes its private pages with it.",
    "sglang#23496 (L5)",
    Edit(
        "cache.session_cache:SessionAwareCache._remove",
        "slot.lease.release()",
        "self._stores.tree.unlock(slot.lease.receipt)",
    ),
)

COOLING_KEEPS_THE_LOCK = Mutant(
    "A cooled session leaves what it published locked.",
    "sglang#27024 (X1)",
    Edit(
        "cache.lease:KVLease.release",
        "self._stores.tree.unlock(self.receipt)",
        "self.holder is Holder.ACTIVE and self._stores.tree.unlock(self.receipt)",
    ),
)

FAILED_FORWARD_IS_KEPT = Mutant(
    "A turn that gave NaN leaves the history's KV that the same forwards computed.",
    "vllm#50283, #55766 (A13)",
    Edit(
        "cache.session_cache:SessionAwareCache.discard",
        "min(turn.base_len, loan.cached_len - loan.tail_len)",
        "turn.base_len",
    ),
)

FAILED_TURN_STAYS = Mutant(
    "A turn that failed leaves its tokens in the engine's history.",
    "sglang#36475 (R3)",
    Edit(
        "cache.session_cache:SessionAwareCache.discard",
        "slot.tokens.truncate(turn.base_len)",
        "pass",
    ),
)

RETRACT_COMMITS = Mutant(
    "A retracted turn leaves what it has said so far in the engine's history.",
    "sglang#40252 (A14)",
    Edit(
        "cache.session_cache:SessionAwareCache.retract",
        "slot.tokens.truncate(turn.base_len)",
        "pass",
    ),
)

RETRACT_KEEPS_PAGES = Mutant(
    "A retracted turn waits with all its pages.",
    "vllm#49439 (X3)",
    Edit(
        "cache.session_cache:SessionAwareCache.retract",
        "lease.release()\n        slot.lease = None",
        "pass",
    ),
)

CUT_HISTORY_KEEPS_KV = Mutant(
    "A turn that builds on less than the history goes on from KV of the rest.",
    "vllm#49377 (A5)",
    Edit(
        "cache.session_cache:SessionAwareCache.begin_turn",
        "lease.mark(base_len, reuse_len)",
        "lease.mark(max(base_len, lease.computed_len), reuse_len)",
    ),
)

WHOLE_PROMPT_IS_REUSED = Mutant(
    "A prompt that is there already leaves no position to compute.",
    "sglang#22684 (G6)",
    Edit(
        "cache.session_cache:SessionAwareCache.begin_turn",
        "min(context_len - 1, context_len if max_reuse_len is None else max_reuse_len)",
        "min(context_len, context_len if max_reuse_len is None else max_reuse_len)",
    ),
)

HISTORY_IS_NOT_CUT = Mutant(
    "A turn that builds on less than the history is appended to all of it.",
    "sglang#22790 (A15)",
    Edit(
        "cache.session_cache:SessionAwareCache.begin_turn",
        "slot.tokens.truncate(base_len)",
        "pass",
    ),
)

BUSY_SESSION_IS_IDLE = Mutant(
    "A session that was lent stays in the line of those to cool.",
    "tt-inference-server#2907 (R5)",
    Edit(
        "cache.session_cache:SessionAwareCache.begin_turn",
        "self.parked.remove(slot)",
        "pass",
    ),
)

IDLE_SESSION_IS_NOT_OFFERED = Mutant(
    "A session whose turn has ended is not in the line of those to cool.",
    "sglang#27024 (X1)",
    Edit(
        "cache.session_cache:SessionAwareCache._finish",
        "self.parked.add(slot)",
        "pass",
    ),
)

FREE_PAGES_ONLY = Mutant(
    "A turn that grows counts on free pages only and never evicts.",
    "vllm-ascend#16315 (X5)",
    Edit(
        "cache.room:Room.make",
        "count > ledger.num_free + ledger.num_evictable + tails",
        "count > ledger.num_free + tails",
    ),
)

PIN_COUNT_DRIFTS = Mutant(
    "What a pinned session held before is not taken off the quota's count.",
    "sglang#22753 (D7)",
    Edit(
        "cache.pinned_quota:PinnedQuota.set_row_pages",
        "held - old + new",
        "held + new",
    ),
)

PINS_ARE_UNBOUNDED = Mutant(
    "Pinning is not bounded by the quota.",
    "systematic",
    Edit(
        "cache.pinned_quota:PinnedQuota.check_room",
        "if others + wanted[index] > quota:",
        "if others + wanted[index] > 100 * quota:",
    ),
)

CANCELLED_PROMPT_IS_PUBLISHED = Mutant(
    "A turn canceled with its input counts all the pages it bought as computed.",
    "TensorRT-LLM#15018, #12933 (A7)",
    Edit(
        "cache.session_cache:SessionAwareCache.end_turn",
        "writes = lease.roll_back(",
        "lease.computed_len = min(keep_len, lease.capacity_len)\n        writes = lease.roll_back(",
    ),
)
