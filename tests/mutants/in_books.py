"""Bugs in ledgers, free lists and rows."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

DEBIT_FORGOTTEN = Mutant(
    "Pages that change hands are counted at their new holder and at their old one.",
    "sglang#35270 (D6)",
    Edit("cache.ledger:Ledger.transfer", "self._accounts[source] -= num_pages", "pass"),
)

EXPOSE_FORGETS_PAGES = Mutant(
    "What a last lock leaves stays counted as protected.",
    "systematic",
    Edit("cache.ledger:Ledger.unprotect", "self._num_protected -= num_pages", "pass"),
)

EXPOSE_COUNTS_ONE_PAGE = Mutant(
    "What a last lock leaves is counted as one page, however long the edge is.",
    "sglang-jax#70 (G3)",
    Edit("cache.ledger:Ledger.unprotect", "-= num_pages", "-= min(num_pages, 1)"),
)

CUT_LOSES_THE_REST = Mutant(
    "What is left of a run of free pages behind the piece taken from it is forgotten.",
    "systematic",
    Edit("cache.pages:Extents._cut", "length - offset - count)", "0)"),
)

RUN_SWALLOWS_ITS_NEIGHBOUR = Mutant(
    "A run of pages given back is one page longer in the free list.",
    "systematic",
    Edit("cache.pages:Extents.put_back", "end = page + 1", "end = page + 1 + (page > start)"),
)

RUN_LOSES_ITS_END = Mutant(
    "Two runs of pages given back at once: the free list keeps the second alone.",
    "systematic",
    Edit("cache.pages:Extents.put_back", "self._join(start, end)\n                start", "start"),
)

PADDING_PAGE_IS_FREE = Mutant(
    "Page 0 is in the free list, and a session gets it.",
    "sglang#40250 (D4)",
    Edit(
        "cache.pages:Extents.__init__",
        "self._add(NULL_PAGE + 1, num_pages - NULL_PAGE - 1)",
        "self._add(NULL_PAGE, num_pages)",
    ),
    Edit("cache.pages:PageAllocator.__init__", "self._is_free[NULL_PAGE] = 0", "pass"),
)

PADDING_ROW_IS_FREE = Mutant(
    "Row 0 is handed out, the one that padded batches read and write.",
    "sglang#24243, #26292 (A4)",
    Edit(
        "cache.req_to_token:ReqToTokenPool.__init__",
        "range(num_rows, NULL_ROW, -1)",
        "range(num_rows, NULL_ROW - 1, -1)",
    ),
    Edit("cache.req_to_token:ReqToTokenPool.alloc", " or row == NULL_ROW", ""),
)

ROW_IS_FREED_TWICE = Mutant(
    "A row given back is in the free list twice.",
    "sglang-jax#982 (D1)",
    Edit(
        "cache.req_to_token:ReqToTokenPool.free",
        "self._free_rows.append(row)",
        "self._free_rows += [row, row]",
    ),
)

ROW_IS_NOT_REPOINTED = Mutant(
    "A row keeps naming the pages that were freed because the tree had the same tokens.",
    "own prototype",
    Edit("cache.req_to_token:ReqToTokenPool.repoint", "entries[:] = pages", "pass"),
)

DEVICE_IS_NOT_REPOINTED = Mutant(
    "The host re-points a row, and tells the device its old pages.",
    "sglang#27586, vllm#42273 (A17)",
    Edit(
        "cache.req_to_token:ReqToTokenPool.repoint",
        "entries[:] = pages\n        return TableWrite(pool, row, start, entries.copy())",
        "told = entries.copy()\n        entries[:] = pages\n"
        "        return TableWrite(pool, row, start, told)",
    ),
)

DELTA_IS_A_VIEW = Mutant(
    "A page table delta is a window on the host's table, which changes before the device reads it.",
    "llama.cpp#28056 (C2)",
    Edit("cache.req_to_token:ReqToTokenPool.write", "entries.copy()", "entries"),
)

CLEAR_SPARES_THE_LAST = Mutant(
    "Clearing entries of a row leaves the last one.",
    "systematic",
    Edit("cache.req_to_token:ReqToTokenPool.clear", "end - start)[:]", "end - start)[:-1]"),
)

RECOUNT_MISSES_A_TURN = Mutant(
    "A recount in slices is not told of sessions whose turns go on.",
    "systematic",
    Edit(
        "cache.session_cache:SessionAwareCache._changing_turn",
        "self._stores.changes.record_session(turn.slot.session_id)",
        "pass",
    ),
)

RECOUNT_MISSES_A_SPLIT = Mutant(
    "A recount in slices is not told that an edge is split.",
    "systematic",
    Edit("cache.radix:RadixCache._split", "self._changes.record_content(node)", "pass"),
)

RECOUNT_KEEPS_WHAT_WAS = Mutant(
    "A recount in slices adds what an edge holds now to what it held before.",
    "systematic",
    Edit("cache.recount:Recount._visit_node", "self._add_node(node, was, -1)", "pass"),
)
