"""Data of the radix tree: nodes, lock receipts and match results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from cache.int_buffer import IntBuffer
from cache.types import Namespace, Pages, PoolName, Tokens

PagesByPool = dict[PoolName, list[int]]
"""Per pool, page ids in order of position; `NULL_PAGE` where a page was freed."""


class RadixNode:
    """Hold one edge and its end. Written by `RadixCache` only; public for audits and reports.

    `tokens`: the edge, a multiple of the page size (0 for a root); `key`: the bytes of its first
    page; `pages`: per pool, one entry per page of the edge; `lock_ref`: number of receipts whose
    path includes it; `lock_owners`: the exclusive or of their numbers, see `cache.lock_owners`. In
    bounded pools `page_locks` and `page_owners` are the same per page, and `num_evictable` counts
    the pages that are there and unlocked, see `cache.page_locks`. `version`: of the last change
    that a match over the edge depends on, see `cache.changes`. `tenant`: whose pages they are.
    """

    __slots__ = (
        "children",
        "key",
        "last_used",
        "lock_owners",
        "lock_ref",
        "num_evictable",
        "page_locks",
        "page_owners",
        "pages",
        "parent",
        "tenant",
        "tokens",
        "version",
    )

    tenant: str

    def __init__(
        self, parent: RadixNode | None, key: bytes, tokens: Tokens, pages: Mapping[PoolName, Pages]
    ) -> None:
        self.parent = parent
        self.key = key
        self.tokens = IntBuffer(tokens)
        self.pages = {pool: IntBuffer(ids) for pool, ids in pages.items()}
        self.page_locks: dict[PoolName, IntBuffer] = {}
        self.page_owners: dict[PoolName, IntBuffer] = {}
        self.num_evictable: dict[PoolName, int] = {}
        self.children: dict[bytes, RadixNode] = {}
        self.lock_ref = 0
        self.lock_owners = 0
        self.last_used = 0
        self.version = 0

    def below(self) -> Iterator[RadixNode]:
        """Yield all nodes below this one, parents first."""
        pending = list(self.children.values())
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            yield node


class Root(RadixNode):
    """Hold the root node of one namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, b"", np.empty(0, np.int32), {})
        self.namespace = namespace
        self.tenant = namespace.tenant


class LockReceipt:
    """Represent a lock on [0, length) of a path, whole pages. Written by `RadixCache` only.

    In bounded pools it locks only the pages that a forward at `length` reads, and those that a
    forward at `mark`, if set, reads, for a rollback.

    `sole_tokens`: tokens of edges that only this receipt has locked; `sole_pages`: the pages that
    only it has locked, per bounded pool. Both are updated when other receipts lock or unlock.
    """

    __slots__ = (
        "_is_released",
        "_node",
        "_number",
        "length",
        "mark",
        "namespace",
        "sole_pages",
        "sole_tokens",
    )

    def __init__(self, namespace: Namespace, root: RadixNode) -> None:
        self.namespace = namespace
        self._node = root
        self.length = 0
        self.mark: int | None = None
        self._number = -1
        self._is_released = False
        self.sole_tokens = 0
        self.sole_pages: Counter[PoolName] = Counter()


@dataclass(frozen=True, slots=True)
class Walk:
    """Describe how a match was found, to check later whether it would be found again.

    `start`: the root of `namespace`, or the node at the end of a receipt. `nodes`: the edges below
    it that the tokens follow. `next_key`: the key of a child that would extend the match; None if
    the tokens end or differ inside the last edge. `version`: of `cache.changes` at that time.
    """

    namespace: Namespace
    start: RadixNode | None
    nodes: tuple[RadixNode, ...]
    next_key: bytes | None
    version: int

    def is_current(self) -> bool:
        """Return whether nothing that it depends on has changed, given that `start` is still in the
        tree. O(edges)."""
        if any(node.version > self.version for node in self.nodes):
            return False
        last = self.nodes[-1] if self.nodes else self.start
        return last is None or self.next_key is None or self.next_key not in last.children


@dataclass(frozen=True, slots=True)
class MatchResult:
    """Describe what the tree holds of some tokens; valid until the tree changes.

    `matched_len`: tokens that a forward can continue from, whole pages only, counted from the
    receipt if one was given. `evictable_pages`: per pool, the pages that are evictable now and
    would not be once the match is locked.
    """

    matched_len: int
    evictable_pages: Mapping[PoolName, int]
    _nodes: tuple[RadixNode, ...]
    _walk: Walk

    @property
    def cache_protected_len(self) -> int:
        """Return the tokens that a lock on this match protects; always whole pages."""
        return self.matched_len


def is_evictable_leaf(node: RadixNode) -> bool:
    """Return whether a node is an unlocked leaf. False for roots and for removed nodes, which have
    no tokens."""
    return not node.children and node.lock_ref == 0 and len(node.tokens) > 0


def is_sole_leaf(node: RadixNode) -> bool:
    """Return whether a node is a leaf that exactly one receipt has locked."""
    return not node.children and node.lock_ref == 1


def has_only_tombstones(node: RadixNode) -> bool:
    """Return whether every page of a node's edge is a tombstone, in every pool."""
    return not any(ids.view().any() for ids in node.pages.values())
