"""Bugs in the tree of published pages and its locks."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

LOCK_SKIPS_ITSELF = Mutant(
    "A lock counts on the path above a node and not on the node itself.",
    "mini-sglang#52 (S4)",
    Edit(
        "cache.radix:RadixCache._lock_node",
        "node.lock_ref += 1",
        "receipt._node.lock_ref += receipt._node.parent is not None",
    ),
    Edit(
        "cache.radix:RadixCache._unlock_node",
        "if node.lock_ref < 1 or node.parent is None:\n"
        '            raise AuditFailed("a lock was released that was not held")\n'
        "        node.lock_ref -= 1",
        "node.parent.lock_ref -= node.parent.parent is not None",
    ),
)

SPLIT_LOSES_LOCKS = Mutant(
    "The upper half of a split does not inherit the locks.",
    "sglang#21875, #38480 (S1)",
    Edit(
        "cache.radix:RadixCache._split",
        "upper.lock_ref, upper.last_used = node.lock_ref, node.last_used",
        "upper.last_used = node.last_used",
    ),
)

SPLIT_KEEPS_KEY = Mutant(
    "The lower half of a split stays registered under the key of the whole.",
    "sglang#36696 (S5)",
    Edit("cache.radix:RadixCache._split", "node.key = self._key(node.tokens.view())\n", "pass\n"),
)

SPLIT_MIXES_PAGES = Mutant(
    "The lower half of a split keeps the last pages one page too early.",
    "systematic",
    Edit(
        "cache.radix:RadixCache._split",
        "IntBuffer(ids.view(num_pages))",
        "IntBuffer(ids.view(num_pages - 1, len(ids) - 1))",
    ),
)

SPLIT_ORPHANS_THE_UPPER = Mutant(
    "The lower half of a split still says that its parent is the node above both.",
    "sglang#24153, #29291 (S3)",
    Edit("cache.radix:RadixCache._split", "node.parent = upper", "pass"),
)

LOCK_COVERS_WHOLE_EDGE = Mutant(
    "A match that ends inside an edge locks and reuses all of it.",
    "bytedance-iaas/sglang#508 (L10)",
    Edit(
        "cache.radix:RadixCache._lock_path",
        "found if length >= len(found.tokens) else self._split(found, length)",
        "found",
    ),
)

FIRST_PAGE_IS_ENOUGH = Mutant(
    "An edge found by its first page is taken as matched without comparing the rest.",
    "llama.cpp#27148 (C1)",
    Edit(
        "cache.radix:RadixCache._walk",
        "_common_len(node.tokens.view(), tokens[matched:])",
        "min(len(node.tokens), len(tokens) - matched)",
    ),
)

MATCH_ENDS_IN_A_PAGE = Mutant(
    "A match is not cut to whole pages.",
    "sglang#20070 (G1)",
    Edit(
        "cache.radix:RadixCache._walk",
        "tokens[matched:]) // page_size * page_size",
        "tokens[matched:])",
    ),
)

KEYS_COLLIDE = Mutant(
    "Children are found by a hash of their first page, and the tokens are not compared.",
    "CVE-2025-25183 (C4)",
    Edit("cache.radix:RadixCache._key", ".tobytes()", "[-1:].tobytes()"),
    Edit(
        "cache.radix:RadixCache._walk",
        "tokens[matched : matched + page_size].tobytes()",
        "tokens[matched + page_size - 1 : matched + page_size].tobytes()",
    ),
    Edit(
        "cache.radix:_common_len",
        "first = int(differs.argmax()) if length else 0",
        "return length\n    first = 0",
    ),
)

EVICTION_IGNORES_LOCKS = Mutant(
    "A leaf that somebody has locked can be evicted.",
    "own prototype",
    Edit("cache.radix_node:is_evictable_leaf", " and node.lock_ref == 0", ""),
)

EVICTION_TAKES_THE_HEAD = Mutant(
    "Cutting pages off the end of an edge frees those of its beginning.",
    "systematic",
    Edit(
        "cache.radix:RadixCache._trim", "ids.view(keep).tolist()", "ids.view(0, num_pages).tolist()"
    ),
)

EVICTION_FORGETS_PARENTS = Mutant(
    "A node whose last child was evicted is never offered for eviction itself.",
    "systematic",
    Edit("cache.radix:RadixCache._detach", "self._push_leaf(parent)", "pass"),
)

UNLOCK_FORGETS_LEAVES = Mutant(
    "A leaf whose last lock is given back is never offered for eviction.",
    "systematic",
    Edit("cache.radix:RadixCache._unlock_node", "self._push_leaf(node)", "pass"),
)

UNLOCK_FREES_THE_LAST_NODE = Mutant(
    "Giving a receipt back unlocks the last node of its path alone.",
    "sglang#22213 (S2)",
    Edit(
        "cache.radix:RadixCache.unlock",
        "self.shorten(receipt, 0)",
        "self.shorten(receipt, max(0, receipt.length - len(receipt._node.tokens)))\n"
        "        while receipt._node.parent is not None:\n"
        "            receipt._node = receipt._node.parent",
    ),
)

UNDO_IGNORES_OTHER_LOCKS = Mutant(
    "Undoing a turn takes published pages back although another session has locked them.",
    "sglang#21875 (A2)",
    Edit(
        "cache.radix:RadixCache.unpublish",
        " or not is_sole_leaf(receipt._node):\n"
        "            return taken\n"
        "        with self._locks.relocking(receipt):\n"
        "            while receipt.length > target and is_sole_leaf(node := receipt._node):",
        " or receipt._node.children:\n"
        "            return taken\n"
        "        with self._locks.relocking(receipt):\n"
        "            while receipt.length > target and not (node := receipt._node).children:",
    ),
)

UNDO_MIXES_NODES = Mutant(
    "Undoing a turn over several nodes gives their pages back in the wrong order.",
    "systematic",
    Edit(
        "cache.radix:RadixCache.unpublish",
        "taken[pool] = ids + taken[pool]",
        "taken[pool] = taken[pool] + ids",
    ),
)

REWIND_ROUNDS_UP = Mutant(
    "A rewind keeps the published page that it cuts.",
    "sglang#20070 (G1)",
    Edit(
        "cache.lease:KVLease.rewound_len",
        "reach -= reach % page_size",
        "reach += -reach % page_size",
    ),
)

PUBLISHED_PAGES_STAY_PRIVATE = Mutant(
    "Pages that enter the tree stay counted as private ones.",
    "sglang#35470 (D6)",
    Edit(
        "cache.radix:RadixCache.insert",
        "ledger.transfer(num_pages, Holder.ACTIVE, Holder.TREE)",
        "ledger._accounts[Holder.TREE] += num_new",
    ),
)

APPEND_IGNORES_NEIGHBOURS = Mutant(
    "A leaf grows in place although another session has locked it as it was.",
    "systematic",
    Edit(
        "cache.radix:RadixCache._append",
        "node.parent is None or not is_sole_leaf(node)",
        "node.parent is None or node.children",
    ),
)

SHARED_EDGE_COUNTS_AS_OWN = Mutant(
    "An edge that a second session locks still counts as what cooling the first would give back.",
    "systematic",
    Edit("cache.radix:RadixCache._lock_node", "elif node.lock_ref == 1:", "elif False:"),
)

SHARED_WINDOW_COUNTS_AS_OWN = Mutant(
    "Pages that a second session locks still count as what cooling the first would give back.",
    "systematic",
    Edit("cache.page_locks:PageLocks._credit_sole_owners", "if is_alone.any():", "if sign > 0:"),
)

LEFT_EDGE_IS_NOBODYS = Mutant(
    "An edge that all sessions but one let go of does not count as what the last gives back.",
    "systematic",
    Edit("cache.radix:RadixCache._unlock_node", "elif node.lock_ref == 1:", "elif False:"),
)
