"""`RadixCache`: published KV by content. Match, lock, insert, take back, evict.

A radix tree over token ids per namespace (the idea is SGLang's RadixAttention, Zheng et al. 2023),
with compressed edges that begin and end at page boundaries. A child is found by the tokens of its
first page and compared by one numpy first-difference, so matching costs one pass over the tokens,
not one step per page, and nothing relies on a hash alone.

Locks are receipts. A receipt always ends at the end of a node: locking inside an edge splits it
first, and a split puts the *new* node above, so a receipt below keeps its node and the new node
inherits the count. Whoever holds a receipt extends the tree from it, at the cost of the new tokens.

The tree books pages that enter it from a lease and leave it to one. Evicted pages are still booked
as TREE; the caller passes them on in the same call.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cache.errors import AuditFailed
from cache.int_buffer import IntBuffer
from cache.ledger import Ledger
from cache.types import Holder, Namespace, Pages, PoolName, Tokens

_MIN_LEAF_BOUND: Final = 1024

PagesByPool = dict[PoolName, list[int]]


class RadixNode:
    """One edge and its end. Written by `RadixCache` only; public for audits and reports.

    `tokens`: the edge, a multiple of the page size (0 for a root); `key`: the bytes of its first
    page; `pages`: per pool, one per page of the edge; `lock_count`: receipts whose path has it.
    """

    __slots__ = ("children", "key", "last_used", "lock_count", "pages", "parent", "tokens")

    def __init__(
        self, parent: RadixNode | None, key: bytes, tokens: Tokens, pages: Mapping[PoolName, Pages]
    ) -> None:
        self.parent = parent
        self.key = key
        self.tokens = IntBuffer(tokens)
        self.pages = {pool: IntBuffer(ids) for pool, ids in pages.items()}
        self.children: dict[bytes, RadixNode] = {}
        self.lock_count = 0
        self.last_used = 0


class _Root(RadixNode):
    """Where a namespace begins."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, b"", np.empty(0, np.int32), {})
        self.namespace = namespace


class LockReceipt:
    """Proof that [0, length) of a path is locked. Opaque: given back to the tree that made it."""

    __slots__ = ("_is_released", "_length", "_node", "namespace")

    def __init__(self, namespace: Namespace, root: RadixNode) -> None:
        self.namespace = namespace
        self._node = root
        self._length = 0
        self._is_released = False

    @property
    def length(self) -> int:
        """Tokens locked: a multiple of the page size."""
        return self._length


@dataclass(frozen=True, slots=True)
class MatchResult:
    """What the tree holds of some tokens; valid until the tree changes.

    `matched_len`: tokens matched, whole pages only; from the receipt on if one was given.
    `evictable_pages`: how many of the matched pages no lock covers, per pool: locking them takes
    that many away from what eviction could give.
    """

    matched_len: int
    evictable_pages: Mapping[PoolName, int]
    _nodes: tuple[RadixNode, ...]
    _version: int

    @property
    def cache_protected_len(self) -> int:
        """The length a lock on this match protects; page-aligned by construction."""
        return self.matched_len


class RadixCache:
    """All namespaces of one server, over all pools."""

    __slots__ = (
        "_clock",
        "_leaf_bound",
        "_leaves",
        "_ledgers",
        "_num_pushed",
        "_page_size",
        "_roots",
        "_version",
    )

    def __init__(self, page_size: int, ledgers: Mapping[PoolName, Ledger]) -> None:
        self._page_size = page_size
        self._ledgers = ledgers
        self._roots: dict[Namespace, _Root] = {}
        self._leaves: list[tuple[int, int, RadixNode]] = []
        self._leaf_bound = _MIN_LEAF_BOUND
        self._num_pushed = 0
        self._clock = 0
        self._version = 0

    def match(self, namespace: Namespace, tokens: Tokens) -> MatchResult:
        """Find the longest published prefix of `tokens`. Changes nothing, not even the LRU."""
        return self._walk(self._roots.get(namespace), tokens)

    def match_below(self, receipt: LockReceipt, tokens: Tokens) -> MatchResult:
        """The same, for the tokens that follow a locked path."""
        return self._walk(receipt._node, tokens)

    def lock_root(self, namespace: Namespace) -> LockReceipt:
        """A receipt of length 0, to be advanced."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = _Root(namespace)
        root.lock_count += 1
        return LockReceipt(namespace, root)

    def advance(self, receipt: LockReceipt, match: MatchResult) -> PagesByPool:
        """Extend a receipt over a match that began where it ends.

        Returns:
            The pages now locked in addition, in order.

        Raises:
            AuditFailed: the tree changed since the match.
        """
        if match._version != self._version:
            raise AuditFailed("a match was used after the tree had changed")
        pages: PagesByPool = {pool: [] for pool in self._ledgers}
        wanted = match.matched_len
        for found in match._nodes:
            assert found.parent is receipt._node, "a match goes on where the receipt ends"
            node = found if wanted >= len(found.tokens) else self._split(found, wanted)
            self._step_down(receipt, node)
            wanted -= len(node.tokens)
            for pool, ids in node.pages.items():
                pages[pool].extend(ids.view().tolist())
        return pages

    def insert(
        self, receipt: LockReceipt, tokens: Tokens, pages: Mapping[PoolName, Sequence[int]]
    ) -> PagesByPool:
        """Publish whole pages that follow a receipt, and lock them with it.

        Args:
            receipt: where to insert; afterwards it covers `tokens` as well.
            tokens: what the pages hold, a multiple of the page size.
            pages: one ACTIVE page of the caller per page of tokens, per pool.

        Returns:
            What the tree had already, as its own pages: they replace the first of `pages`, which
            stay with the caller. All others now belong to the tree.
        """
        assert len(tokens) % self._page_size == 0, "only whole pages are published"
        found = self.advance(receipt, self.match_below(receipt, tokens))
        num_new = len(tokens) // self._page_size - min(len(ids) for ids in found.values())
        if num_new == 0:
            return found
        fresh = {pool: np.array(ids[-num_new:], np.int32) for pool, ids in pages.items()}
        for ledger in self._ledgers.values():
            ledger.transfer(num_new, Holder.ACTIVE, Holder.TREE)
        self._append(receipt, tokens[-num_new * self._page_size :], fresh)
        return found

    def shorten(self, receipt: LockReceipt, to_len: int) -> None:
        """Let go of what lies past the last whole page of `to_len`. It stays in the tree."""
        target = to_len // self._page_size * self._page_size
        self._clock += 1
        while receipt._length > target:
            start = receipt._length - len(receipt._node.tokens)
            if start < target:
                self._split(receipt._node, target - start)
            self._step_up(receipt)

    def take_back(self, receipt: LockReceipt, to_len: int, holder: Holder) -> PagesByPool:
        """Remove pages past the last whole page of `to_len`, as far as only this receipt has them.

        Used to undo: what nobody else has locked or built on becomes private again (`holder`),
        in order, and the receipt ends before it.
        """
        target = to_len // self._page_size * self._page_size
        taken: PagesByPool = {pool: [] for pool in self._ledgers}
        while receipt._length > target:
            node = receipt._node
            if node.children or node.lock_count != 1:
                break
            num_pages = min(receipt._length - target, len(node.tokens)) // self._page_size
            for pool, ids in self._trim(node, num_pages).items():
                self._ledgers[pool].expose(num_pages)
                self._ledgers[pool].transfer(num_pages, Holder.TREE, holder)
                taken[pool] = ids + taken[pool]
            receipt._length -= num_pages * self._page_size
            if not len(node.tokens):
                assert node.parent is not None, "a root has no pages to take"
                receipt._node = node.parent
                self._detach(node)
        return taken

    def unlock(self, receipt: LockReceipt) -> None:
        """Give a receipt back, once.

        Raises:
            AuditFailed: it was given back before.
        """
        if receipt._is_released:
            raise AuditFailed("a lock receipt was released twice")
        self.shorten(receipt, 0)
        receipt._is_released = True
        root = receipt._node
        assert isinstance(root, _Root), "a receipt of length 0 ends at its root"
        root.lock_count -= 1
        self._drop_if_idle(root)

    def evict(self, pool: PoolName, num_pages: int) -> PagesByPool:
        """Remove the least recently used unlocked pages until `num_pages` of `pool` are out.

        Leaves go first, and from their tails: a long edge loses what is needed and no more.

        Raises:
            AuditFailed: fewer are evictable; the caller checks the ledger before.
        """
        evicted: PagesByPool = {name: [] for name in self._ledgers}
        while len(evicted[pool]) < num_pages:
            node = self._pop_oldest_leaf()
            wanted = num_pages - len(evicted[pool])
            trimmed = self._trim(node, min(wanted, len(node.tokens) // self._page_size))
            for name, ids in trimmed.items():
                evicted[name].extend(ids)
            if len(node.tokens):
                self._push_leaf(node)
            else:
                self._detach(node)
        return evicted

    def condemn(self, receipt: LockReceipt) -> PagesByPool:
        """Give a receipt back and remove what it locked, and all that builds on it, where no
        other receipt is in the way. The pages are the caller's, still booked as TREE.
        """
        path = self.path(receipt)
        self.unlock(receipt)
        condemned: PagesByPool = {pool: [] for pool in self._ledgers}
        top = next((node for node in path if node.lock_count == 0), None)
        if top is None:
            return condemned
        for node in _subtree(top):
            for pool, ids in node.pages.items():
                condemned[pool].extend(ids.view().tolist())
            node.tokens.truncate(0)
        self._version += 1
        self._detach(top)
        return condemned

    def path(self, receipt: LockReceipt) -> list[RadixNode]:
        """The nodes a receipt locks, root excluded, top first."""
        nodes: list[RadixNode] = []
        node = receipt._node
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def sole_pages(self, receipt: LockReceipt) -> int:
        """Pages (per pool) that would become evictable if this receipt were given back."""
        num_tokens, node = 0, receipt._node
        while node.parent is not None and node.lock_count == 1:
            num_tokens += len(node.tokens)
            node = node.parent
        return num_tokens // self._page_size

    def roots(self) -> Iterator[tuple[Namespace, RadixNode]]:
        """Every namespace that holds or locks something."""
        yield from self._roots.items()

    # Walking

    def _walk(self, start: RadixNode | None, tokens: Tokens) -> MatchResult:
        nodes: list[RadixNode] = []
        evictable = matched = 0
        page_size, node = self._page_size, start
        while node is not None and matched + page_size <= len(tokens):
            node = node.children.get(tokens[matched : matched + page_size].tobytes())
            if node is None:
                break
            common = _common_len(node.tokens.view(), tokens[matched:]) // page_size * page_size
            nodes.append(node)
            matched += common
            evictable += 0 if node.lock_count else common // page_size
            if common < len(node.tokens):
                break
        return MatchResult(
            matched_len=matched,
            evictable_pages=dict.fromkeys(self._ledgers, evictable),
            _nodes=tuple(nodes),
            _version=self._version,
        )

    def _step_down(self, receipt: LockReceipt, node: RadixNode) -> None:
        if node.lock_count == 0:
            self._protect(len(node.tokens))
        node.lock_count += 1
        receipt._node = node
        receipt._length += len(node.tokens)

    def _step_up(self, receipt: LockReceipt) -> None:
        node = receipt._node
        if node.lock_count < 1 or node.parent is None:
            raise AuditFailed("a lock was released that was not held")
        node.lock_count -= 1
        node.last_used = self._clock
        receipt._node = node.parent
        receipt._length -= len(node.tokens)
        if node.lock_count == 0:
            for ledger in self._ledgers.values():
                ledger.expose(len(node.tokens) // self._page_size)
            self._push_leaf(node)

    # Shape

    def _append(
        self, receipt: LockReceipt, tokens: Tokens, pages: Mapping[PoolName, Pages]
    ) -> None:
        """Hang `tokens` below a receipt and advance it.

        A leaf that only this receipt locks grows in place, so that a session that goes on alone
        stays one edge, however many turns it has.
        """
        self._version += 1
        node = receipt._node
        if node.parent is None or node.children or node.lock_count != 1:
            child = self._new_node(node, tokens, pages)
            node.children[child.key] = child
            self._step_down(receipt, child)
            return
        node.tokens.append(tokens)
        for pool, ids in pages.items():
            node.pages[pool].append(ids)
        self._protect(len(tokens))
        receipt._length += len(tokens)

    def _split(self, node: RadixNode, length: int) -> RadixNode:
        """Cut an edge after `length` tokens; the new upper node is returned."""
        assert node.parent is not None, "a root has no edge"
        assert 0 < length < len(node.tokens), "a cut lies inside an edge"
        assert length % self._page_size == 0, "edges are whole pages"
        self._version += 1
        num_pages = length // self._page_size
        upper = self._new_node(
            node.parent,
            node.tokens.view(0, length),
            {pool: ids.view(0, num_pages) for pool, ids in node.pages.items()},
        )
        upper.lock_count, upper.last_used = node.lock_count, node.last_used
        node.parent.children[node.key] = upper
        node.parent = upper
        node.tokens = IntBuffer(node.tokens.view(length))
        node.key = self._key(node.tokens.view())
        node.pages = {pool: IntBuffer(ids.view(num_pages)) for pool, ids in node.pages.items()}
        upper.children[node.key] = node
        return upper

    def _trim(self, node: RadixNode, num_pages: int) -> PagesByPool:
        """Cut pages off the end of a leaf; the caller detaches one that is empty then."""
        assert not node.children, "only leaves lose pages"
        self._version += 1
        keep = len(node.tokens) // self._page_size - num_pages
        cut: PagesByPool = {}
        for pool, ids in node.pages.items():
            cut[pool] = ids.view(keep).tolist()
            ids.truncate(keep)
        node.tokens.truncate(keep * self._page_size)
        return cut

    def _new_node(
        self, parent: RadixNode, tokens: Tokens, pages: Mapping[PoolName, Pages]
    ) -> RadixNode:
        node = RadixNode(parent, self._key(tokens), tokens, pages)
        node.last_used = self._clock
        return node

    def _detach(self, node: RadixNode) -> None:
        parent = node.parent
        assert parent is not None, "a root is not detached"
        assert parent.children[node.key] is node, "it hangs where it says"
        del parent.children[node.key]
        if isinstance(parent, _Root):
            self._drop_if_idle(parent)
        else:
            self._push_leaf(parent)

    def _drop_if_idle(self, root: _Root) -> None:
        if not root.children and root.lock_count == 0:
            del self._roots[root.namespace]

    def _key(self, tokens: Tokens) -> bytes:
        return tokens[: self._page_size].tobytes()

    def _protect(self, num_tokens: int) -> None:
        for ledger in self._ledgers.values():
            ledger.protect(num_tokens // self._page_size)

    # Order of eviction

    def _push_leaf(self, node: RadixNode) -> None:
        if not _is_evictable_leaf(node):
            return
        self._num_pushed += 1
        heapq.heappush(self._leaves, (node.last_used, self._num_pushed, node))
        if len(self._leaves) > self._leaf_bound:
            # Entries of leaves that were locked or grew since are stale and stay behind; dropping
            # them whenever the heap has doubled costs O(1) amortised.
            self._leaves = [entry for entry in self._leaves if _is_current(entry)]
            heapq.heapify(self._leaves)
            self._leaf_bound = max(_MIN_LEAF_BOUND, 2 * len(self._leaves))

    def _pop_oldest_leaf(self) -> RadixNode:
        while self._leaves:
            entry = heapq.heappop(self._leaves)
            if _is_current(entry):
                return entry[-1]
        raise AuditFailed("nothing is evictable, though the ledger says so")


def _is_evictable_leaf(node: RadixNode) -> bool:
    """Not for roots; a removed node has no tokens left."""
    return not node.children and node.lock_count == 0 and len(node.tokens) > 0


def _is_current(entry: tuple[int, int, RadixNode]) -> bool:
    last_used, _, node = entry
    return _is_evictable_leaf(node) and node.last_used == last_used


def _common_len(left: Tokens, right: Tokens) -> int:
    """Length of the common prefix."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _subtree(top: RadixNode) -> Iterator[RadixNode]:
    pending = [top]
    while pending:
        node = pending.pop()
        pending.extend(node.children.values())
        yield node
