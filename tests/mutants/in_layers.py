"""Bugs in bounded pools: windows, their locks, tombstones, pages by the pool."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

WINDOW_IS_ONE_SHORT = Mutant(
    "A window is taken to see one position fewer than its layers read.",
    "systematic",
    Edit(
        "cache.components:SlidingWindow.first_page",
        "length - self._window + 1",
        "length - self._window + 2",
    ),
)

HOLES_ARE_READ = Mutant(
    "A forward goes on where pages of its window are gone.",
    "systematic",
    Edit(
        "cache.components:SlidingWindow.continuable_len",
        "np.count_nonzero(seen) == len(seen)",
        "True",
    ),
)

WINDOW_STAYS = Mutant(
    "What the window has passed is never given back while a turn runs.",
    "systematic",
    Edit("cache.lease:KVLease.release_passed", "if dead:", "if False:"),
)

WINDOW_GOES_EARLY = Mutant(
    "The first page that a window still reads is given back.",
    "systematic",
    Edit(
        "cache.lease:KVLease.release_passed",
        "min(first, start + len(private))",
        "min(first + (first > 0), start + len(private))",
    ),
)

PASSED_PAGE_STAYS_IN_THE_ROW = Mutant(
    "A page that the window has passed is given back, and the row goes on to name it.",
    "systematic",
    Edit(
        "cache.lease:KVLease.release_passed",
        "stores.rows.clear(pool, self.row, begin, end)",
        "pass",
    ),
)

PASSED_PAGE_GOES_TWICE = Mutant(
    "A page that the window has passed is given back, and again at the end.",
    "systematic",
    Edit(
        "cache.lease:KVLease.release_passed",
        "private[begin - start : end - start] = [NULL_PAGE] * (end - begin)",
        "pass",
    ),
)

REWIND_IGNORES_WINDOWS = Mutant(
    "A session is cut to where its window is gone, and goes on from there.",
    "systematic",
    Edit(
        "cache.lease:KVLease.rewound_len",
        "for component in self._stores.bounded.values():",
        "for component in ():",
    ),
)

UNLOCKED_PAGE_STAYS_IN_THE_ROW = Mutant(
    "A row goes on to name pages of the tree that its window has passed and nobody holds.",
    "systematic",
    Edit(
        "cache.lease:KVLease._clear_unlocked_entries",
        "for component in self._stores.bounded.values():",
        "for component in ():",
    ),
)

MARK_IS_HELD_AT_REST = Mutant(
    "A parked session holds the window that its last turn began at.",
    "systematic",
    Edit(
        "cache.lease:KVLease.unmark",
        "self._stores.tree.mark(self.receipt, None)",
        "pass",
    ),
)

MARK_IS_NOT_LOCKED = Mutant(
    "The window that a running turn began at can be evicted.",
    "systematic",
    Edit(
        "cache.page_locks:PageLocks._locked_slices",
        "if receipt.mark is not None:",
        "if False:",
    ),
)

WINDOW_LOCK_IS_NOT_BOOKED = Mutant(
    "Pages of a locked window count as evictable.",
    "systematic",
    Edit(
        "cache.page_locks:PageLocks._lock_pages",
        "self._tenants.protect(node.tenant, pool, num_evictable)",
        "pass",
    ),
)

WINDOW_UNLOCK_IS_NOT_BOOKED = Mutant(
    "Pages of a window that is let go stay protected.",
    "systematic",
    Edit(
        "cache.page_locks:PageLocks._unlock_pages",
        "self._tenants.protect(node.tenant, pool, -num_evictable)",
        "pass",
    ),
)

SHARED_WINDOW_IS_UNLOCKED = Mutant(
    "The first of two sessions that lets go of a window counts it as free to go.",
    "systematic",
    Edit(
        "cache.page_locks:PageLocks._unlock_pages",
        "tenant, pool, -num_evictable)",
        "tenant, pool, -np.count_nonzero(node.page_locks[pool].view(start, end) <= 1))",
    ),
)

LOCKED_WINDOW_IS_EVICTED = Mutant(
    "Eviction takes pages of a window that one session has locked.",
    "systematic",
    Edit(
        "cache.page_locks:PageLocks.take_oldest",
        "(node.page_locks[pool].view() == 0)",
        "(node.page_locks[pool].view() <= 1)",
    ),
)

TOMBSTONE_NAMES_ITS_PAGE = Mutant(
    "An evicted page of a window is free and still in the tree.",
    "systematic",
    Edit(
        "cache.page_locks:PageLocks.take_oldest",
        "node.pages[pool].put(index, NULL_PAGE)",
        "pass",
    ),
)

HEALED_PAGE_IS_NOT_BOOKED = Mutant(
    "A page that fills a tombstone stays in its session's account.",
    "systematic",
    Edit(
        "cache.radix:RadixCache._fill_tombstones",
        "self._ledgers[pool].transfer(1, Holder.ACTIVE, Holder.TREE)",
        "pass",
    ),
)

TOMBSTONES_ARE_NOT_FILLED = Mutant(
    "Who computes again what is a tombstone loses its page to it.",
    "systematic",
    Edit("cache.radix:RadixCache.insert", "self._fill_tombstones(nodes, pages)", "pass"),
)

TOMBSTONES_ARE_MATCHED = Mutant(
    "A path is matched to its end, whether its last window is there or not.",
    "systematic",
    Edit(
        "cache.radix:RadixCache._match_result",
        "max(0, self._locks.continuable(receipt, walk.nodes, start + matched) - start)",
        "matched",
    ),
)

TOMBSTONES_ARE_PUBLISHED_AS_PAGES = Mutant(
    "Pages that were given back before their edge was published are booked with it.",
    "systematic",
    Edit(
        "cache.radix:RadixCache.insert",
        "ledger.transfer(num_pages, Holder.ACTIVE, Holder.TREE)",
        "ledger.transfer(len(fresh[pool]), Holder.ACTIVE, Holder.TREE)",
    ),
)

TOMBSTONES_ARE_TAKEN_BACK_AS_PAGES = Mutant(
    "A canceled turn that takes its pages back from the tree is booked the tombstones too.",
    "systematic",
    Edit(
        "cache.radix:RadixCache.unpublish",
        "self._ledgers[pool].transfer(num_taken, Holder.TREE, holder)",
        "self._ledgers[pool].transfer(len(ids), Holder.TREE, holder)",
    ),
)

SPLIT_LOSES_PAGE_LOCKS = Mutant(
    "The upper half of a split does not inherit the locks of its pages.",
    "systematic",
    Edit(
        "cache.page_locks:split_locks",
        "upper.page_locks[pool] = IntBuffer(locks.view(0, num_pages))",
        "upper.page_locks[pool] = IntBuffer([0] * num_pages)",
    ),
)

GROWN_EDGE_IS_LOCKED = Mutant(
    "Pages that an edge grows by begin with a lock that nobody gives back.",
    "systematic",
    Edit(
        "cache.page_locks:append_locks",
        "node.page_locks[pool].append(unlocked_counts(pages))",
        "node.page_locks[pool].append(unlocked_counts(pages) + bool(len(node.page_locks[pool])))",
    ),
)

ONE_POOL_IS_COUNTED = Mutant(
    "The plan takes what is free in the first pool for what is free in each.",
    "systematic",
    Edit(
        "cache.views:Headroom.of",
        "for pool, each in ledgers\n",
        "for pool, each in [next(iter(ledgers))] * len(ledgers)\n",
    ),
)

WINDOW_POOLS_BOUND_NOTHING = Mutant(
    "A turn is taken in that a pool of windows is too small for.",
    "systematic",
    Edit(
        "cache.views:TurnLimits.of",
        "if not component.is_bounded or component.parked_pages(row_pages) + most > usable:",
        "if not component.is_bounded:",
    ),
)

PINS_FILL_SMALL_POOLS = Mutant(
    "The quota of pinned sessions is as many pages of every pool, however small.",
    "systematic",
    Edit(
        "cache.pinned_quota:PinnedQuota.__init__",
        "pool: pages * num_pages // most",
        "pool: num_pages",
    ),
)

PROBE_LOOKS_BEHIND_THE_WINDOW = Mutant(
    "A page is looked at whose beginning was computed from pages that are gone.",
    "systematic",
    Edit(
        "cache.content:_content",
        "slot.lease.rewound_len(start) < start",
        "False",
    ),
)

SHORT_POOL_IS_NOT_ASKED_FOR = Mutant(
    "Sessions give way that have nothing of what is short, and the others do not.",
    "systematic",
    Edit(
        "session_server.engine.shortage:Shortage.ask_pages",
        "not any(lack > 0 and num > 0 for lack, num in pairs)",
        "any(lack > 0 and num > 0 for lack, num in pairs)",
    ),
)
