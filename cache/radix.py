"""`RadixCache`: find, lock, insert, remove and evict published KV by its tokens.

A radix tree over token ids per namespace, as in SGLang's RadixAttention (Zheng et al. 2023), with
compressed edges that begin and end at page boundaries. A lock is a receipt that ends at the end of
a node: locking inside an edge splits it first, and the *new* node goes above, so receipts keep
theirs. In bounded pools locks are per page, see `cache.page_locks`.

The tree books the pages that enter it from a lease or return to one. Evicted pages are still booked
as TREE; the caller transfers them in the same call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from cache.changes import Changes
from cache.components import Component
from cache.errors import AuditFailed
from cache.int_buffer import IntBuffer
from cache.ledger import Ledger
from cache.lock_owners import LockOwners, Tally
from cache.page_locks import PageLocks, append_locks, init_locks, split_locks, truncate_locks
from cache.radix_node import (
    LockReceipt,
    MatchResult,
    PagesByPool,
    RadixNode,
    Root,
    Walk,
    has_only_tombstones,
    is_evictable_leaf,
    is_sole_leaf,
)
from cache.tenants import Tenants
from cache.types import NULL_PAGE, Holder, Namespace, Pages, PoolName, Tokens


class RadixCache:
    """Hold the published pages of all namespaces and pools of one server."""

    def __init__(
        self,
        page_size: int,
        ledgers: Mapping[PoolName, Ledger],
        components: Sequence[Component] = (),
        changes: Changes | None = None,
    ) -> None:
        """Create an empty tree. Without `components` no pool is bounded."""
        self._page_size = page_size
        self._ledgers = ledgers
        self._changes = changes if changes is not None else Changes()
        bounded = [c for c in components if c.is_bounded]
        self._owners = LockOwners()
        self.tenants = Tenants(ledgers, [c.pool for c in bounded])
        self._locks = PageLocks(
            page_size,
            ledgers,
            bounded,
            changes=self._changes,
            owners=self._owners,
            tenants=self.tenants,
        )
        self._unbounded_ledgers = {
            pool: ledgers[pool] for pool in ledgers if pool not in self._locks.pools
        }
        self._roots: dict[Namespace, Root] = {}
        self._clock = 0

    def match_prefix(self, namespace: Namespace, tokens: Tokens) -> MatchResult:
        """Return the longest published prefix of `tokens` that a forward can continue from. Changes
        nothing, not even the order of eviction.
        """
        return self._match(namespace, None, tokens)

    def match_after(self, receipt: LockReceipt, tokens: Tokens) -> MatchResult:
        """Return the longest published continuation of a locked path by `tokens`."""
        return self._match(receipt.namespace, receipt, tokens)

    def is_current(self, match: MatchResult) -> bool:
        """Return whether matching again would give the same. O(edges of the match)."""
        walk = match._walk
        return walk.start is self._roots.get(walk.namespace) and walk.is_current()

    def lock_root(self, namespace: Namespace) -> LockReceipt:
        """Return a receipt of length 0, to be advanced."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Root(namespace)
            self.tenants.add_root(namespace.tenant)
        root.lock_ref += 1
        self._changes.record_node(root)
        receipt = LockReceipt(namespace, root)
        self._owners.register(receipt)
        return receipt

    def advance(self, receipt: LockReceipt, match: MatchResult) -> PagesByPool:
        """Extend a receipt over a match that begins where it ends; return the pages locked in
        addition, in order of position.

        Raises:
            AuditFailed: the tree changed since the match, so its nodes may be split or removed.
        """
        if match._walk.version != self._changes.version:
            raise AuditFailed("a match was used after the tree had changed")
        with self._locks.relocking(receipt):
            nodes = self._lock_path(receipt, match._nodes, match.matched_len)
        return self._pages_of(nodes)

    def insert(
        self, receipt: LockReceipt, tokens: Tokens, pages: Mapping[PoolName, Sequence[int]]
    ) -> PagesByPool:
        """Publish whole pages that follow a receipt, and lock them with it.

        Args:
            receipt: where to insert; afterwards it covers `tokens` as well.
            tokens: what the pages hold, a multiple of the page size.
            pages: one ACTIVE page of the caller per page of tokens, per pool; `NULL_PAGE` where it
                was freed.

        Returns:
            The tree's pages of the tokens it knew before, in order: its own, which replace the
            first of `pages` (those stay with the caller), or the caller's where they filled a
            tombstone. All other `pages` now belong to the tree.
        """
        assert len(tokens) % self._page_size == 0, "only whole pages are published"
        with self._locks.relocking(receipt):
            nodes = self._lock_path(receipt, *self._walk(receipt._node, tokens))
            self._fill_tombstones(nodes, pages)
            found = self._pages_of(nodes)
            num_new = len(tokens) // self._page_size - sum(map(self._num_pages, nodes))
            if num_new:
                fresh = {pool: np.array(ids[-num_new:], np.int32) for pool, ids in pages.items()}
                for pool, ledger in self._ledgers.items():
                    num_pages = int(np.count_nonzero(fresh[pool]))
                    ledger.transfer(num_pages, Holder.ACTIVE, Holder.TREE)
                    self.tenants.add(receipt.namespace.tenant, pool, num_pages)
                self._append(receipt, tokens[-num_new * self._page_size :], fresh)
        self._locks.offer(receipt._node)
        return found

    def mark(self, receipt: LockReceipt, length: int | None) -> None:
        """Also lock what a forward at this length reads, until None is given."""
        if {length, receipt.mark} <= {None, receipt.length}:
            receipt.mark = length  # a forward at the receipt's length reads the same locked pages
            return
        with self._locks.relocking(receipt):
            receipt.mark = length

    def shorten(self, receipt: LockReceipt, to_len: int) -> None:
        """Unlock what lies past the last whole page of `to_len`. It stays in the tree."""
        target = to_len // self._page_size * self._page_size
        if receipt.length <= target:
            return
        self._clock += 1  # all nodes unlocked by one call are equally old
        with self._locks.relocking(receipt):
            if receipt.mark is not None and receipt.mark > target:
                receipt.mark = None
            while receipt.length > target:
                start = receipt.length - len(receipt._node.tokens)
                if start < target:
                    self._split(receipt._node, target - start)
                self._unlock_node(receipt)

    def unpublish(self, receipt: LockReceipt, to_len: int, holder: Holder) -> PagesByPool:
        """Undo `insert`: move pages past the last whole page of `to_len` back to `holder`.

        Stops, from the end, at an edge that another receipt has locked or built on. Returns the
        pages in order of position; the receipt ends before them.
        """
        # What lies before the mark was there before the turn: it is not the turn's to remove.
        target = max(to_len, receipt.mark or 0) // self._page_size * self._page_size
        taken: PagesByPool = {pool: [] for pool in self._ledgers}
        if receipt.length <= target or not is_sole_leaf(receipt._node):
            return taken
        with self._locks.relocking(receipt):
            while receipt.length > target and is_sole_leaf(node := receipt._node):
                num_pages = min(receipt.length - target, len(node.tokens)) // self._page_size
                for pool, ids in self._trim(node, num_pages).items():
                    if pool in self._unbounded_ledgers:  # `relocking` has unlocked the others
                        self.tenants.protect(node.tenant, pool, -num_pages)
                    num_taken = int(np.count_nonzero(ids))
                    self._ledgers[pool].transfer(num_taken, Holder.TREE, holder)
                    self.tenants.add(node.tenant, pool, -num_taken)
                    taken[pool] = ids + taken[pool]
                receipt.length -= num_pages * self._page_size
                self._owners.add_tokens(receipt._number, -num_pages * self._page_size)
                if not len(node.tokens):
                    assert node.parent is not None, "a root has no pages to take"
                    receipt._node = node.parent
                    self._detach(node)
        return taken

    def unlock(self, receipt: LockReceipt) -> None:
        """Unlock the whole path of a receipt, which must not be used afterwards.

        Raises:
            AuditFailed: it was unlocked before.
        """
        if receipt._is_released:
            raise AuditFailed("a lock receipt was released twice")
        self.shorten(receipt, 0)
        receipt._is_released = True
        self._owners.unregister(receipt)
        root = receipt._node
        assert isinstance(root, Root), "a receipt of length 0 ends at its root"
        root.lock_ref -= 1
        self._changes.record_node(root)
        self._drop_if_idle(root)

    def evict(self, pool: PoolName, num_pages: int) -> PagesByPool:
        """Remove unlocked pages until `num_pages` of `pool` are out: of the tenant that has most
        for its weight those that were least recently used.

        Leaves go first, from their tails: a long edge loses what is needed and no more. In a
        bounded pool single pages go, wherever they are on their edge, and leave tombstones.

        Raises:
            AuditFailed: fewer are evictable; the caller checks the ledger before.
        """
        evicted: PagesByPool = {name: [] for name in self._ledgers}
        while (wanted := num_pages - len(evicted[pool])) > 0:
            account, most = self.tenants.next_to_give(pool)
            wanted = max(1, min(wanted, most))
            if pool in self._unbounded_ledgers:
                self._cut_leaf(account.leaves.pop(), wanted, evicted)
                continue
            node, pages = self._locks.take_oldest(account, pool, wanted)
            evicted[pool] += pages
            if is_evictable_leaf(node) and not node.pages[pool].view().any():
                # No match can end in a leaf that has no page of this pool left.
                self._cut_leaf(node, self._num_pages(node), evicted)
        return evicted

    def remove_path(self, receipt: LockReceipt) -> PagesByPool:
        """Unlock a receipt and remove the nodes that only it had locked, with all nodes below;
        return their pages, still booked as TREE.
        """
        path = self.path(receipt)
        self.unlock(receipt)
        # Locks cover whole paths, so below an unlocked node no node is locked.
        removed: PagesByPool = {pool: [] for pool in self._ledgers}
        top = next((node for node in path if node.lock_ref == 0), None)
        if top is None:
            return removed
        nodes = (top, *top.below())
        for node in nodes:
            for pool, ids in node.pages.items():
                removed[pool] += filter(None, ids.view().tolist())
                ids.truncate(0)
        for pool, pages in removed.items():
            self.tenants.add(top.tenant, pool, -len(pages))
        self._detach(top)
        for node in nodes:
            truncate_locks(node, 0)
            node.tokens.truncate(0)
            node.parent = None
            self._changes.record_content(node)
        return removed

    def path(self, receipt: LockReceipt, start: int = 0) -> list[RadixNode]:
        """Return the nodes a receipt locks, root excluded, top first.

        With `start` only those that reach beyond that many tokens of the path.
        """
        nodes: list[RadixNode] = []
        node, end = receipt._node, receipt.length
        while node.parent is not None and end > start:
            nodes.append(node)
            end -= len(node.tokens)
            node = node.parent
        return nodes[::-1]

    def sole_pages(self, receipt: LockReceipt) -> dict[PoolName, int]:
        """Return the pages per pool that unlocking this receipt would make evictable. O(pools)."""
        kept = dict.fromkeys(self._unbounded_ledgers, receipt.sole_tokens // self._page_size)
        return kept | {pool: receipt.sole_pages[pool] for pool in self._locks.pools}

    def tally(self, receipt: LockReceipt, tally: Tally | None) -> None:
        """Add what a receipt alone has locked to a tally, and keep it up to date; None ends it."""
        self._owners.assign(receipt, tally)

    def tallied_pages(self, tally: Tally) -> dict[PoolName, int]:
        """Return the sum of `sole_pages` over the receipts of a tally. O(pools)."""
        kept = dict.fromkeys(self._unbounded_ledgers, tally.num_tokens // self._page_size)
        return kept | {pool: tally.num_pages[pool] for pool in self._locks.pools}

    def is_root(self, node: RadixNode) -> bool:
        """Return whether a namespace begins at this node."""
        return isinstance(node, Root) and self._roots.get(node.namespace) is node

    def roots(self) -> Iterator[tuple[Namespace, RadixNode]]:
        """Yield every namespace that has nodes or receipts, with its root."""
        yield from self._roots.items()

    # Walking

    def _walk(self, start: RadixNode | None, tokens: Tokens) -> tuple[list[RadixNode], int]:
        """Return the edges below `start` along `tokens`, and the tokens of whole common pages."""
        nodes: list[RadixNode] = []
        page_size, node, matched = self._page_size, start, 0
        while node is not None and matched + page_size <= len(tokens):
            node = node.children.get(tokens[matched : matched + page_size].tobytes())
            if node is None:
                break
            common = _common_len(node.tokens.view(), tokens[matched:]) // page_size * page_size
            nodes.append(node)
            matched += common
            if common < len(node.tokens):
                break  # the tokens differ, or end, inside this edge
        return nodes, matched

    def _match(
        self, namespace: Namespace, receipt: LockReceipt | None, tokens: Tokens
    ) -> MatchResult:
        start = self._roots.get(namespace) if receipt is None else receipt._node
        nodes, matched = self._walk(start, tokens)
        end = matched + self._page_size
        ends_with_edge = matched == sum(len(node.tokens) for node in nodes)
        # A child under this key would make the match longer, see `Walk.is_current`.
        next_key = self._key(tokens[matched:]) if ends_with_edge and end <= len(tokens) else None
        walk = Walk(namespace, start, tuple(nodes), next_key, self._changes.version)
        return self._match_result(receipt, walk, matched)

    def _match_result(self, receipt: LockReceipt | None, walk: Walk, matched: int) -> MatchResult:
        start = receipt.length if receipt is not None else 0
        if self._locks and walk.nodes:
            # Cut the match to where no page that the next forward reads is a tombstone.
            matched = max(0, self._locks.continuable(receipt, walk.nodes, start + matched) - start)
        used: list[RadixNode] = []
        evictable = at = 0
        for node in walk.nodes:
            if at >= matched:
                break  # edges past the cut stay in `walk`: a change there may extend the match
            used.append(node)
            common = min(len(node.tokens), matched - at)
            evictable += 0 if node.lock_ref else common // self._page_size
            at += common
        unlocked = dict.fromkeys(self._unbounded_ledgers, evictable)
        if self._locks:
            unlocked |= self._locks.num_unlocked(used, start, start + matched)
        return MatchResult(matched, unlocked, tuple(used), walk)

    def _lock_path(
        self, receipt: LockReceipt, nodes: Sequence[RadixNode], length: int
    ) -> list[RadixNode]:
        """Lock these edges with a receipt; the last one is split where `length` ends."""
        passed = []
        for found in nodes:
            assert found.parent is receipt._node, "a match goes on where the receipt ends"
            node = found if length >= len(found.tokens) else self._split(found, length)
            self._lock_node(receipt, node)
            if node is not found:
                self._push_leaf(found)  # the lower part may have only tombstones now
            length -= len(node.tokens)
            passed.append(node)
        return passed

    def _pages_of(self, nodes: Sequence[RadixNode]) -> PagesByPool:
        pages: PagesByPool = {pool: [] for pool in self._ledgers}
        for node in nodes:
            for pool, ids in node.pages.items():
                pages[pool].extend(ids.view().tolist())
        return pages

    def _fill_tombstones(
        self, nodes: Sequence[RadixNode], pages: Mapping[PoolName, Sequence[int]]
    ) -> None:
        """Fill tombstones with the caller's pages, which hold the same tokens."""
        for pool in self._locks.pools:
            at = 0
            for node in nodes:
                for index, has in enumerate(node.pages[pool].view().tolist()):
                    if has == NULL_PAGE and (page := pages[pool][at + index]):
                        self._ledgers[pool].transfer(1, Holder.ACTIVE, Holder.TREE)
                        self.tenants.add(node.tenant, pool, 1)
                        self._locks.fill_tombstone(node, pool, index, page)
                at += self._num_pages(node)

    def _lock_node(self, receipt: LockReceipt, node: RadixNode) -> None:
        self._changes.record_node(node)
        if node.lock_ref == 0:
            self._changes.record_content(node)  # fewer pages of a match can be evicted now
            self._protect(node, len(node.tokens))
            self._owners.add_tokens(receipt._number, len(node.tokens))
        elif node.lock_ref == 1:
            # One owner is left in the exclusive or; with a second lock it is not alone any more.
            self._owners.add_tokens(node.lock_owners, -len(node.tokens))
        node.lock_ref += 1
        node.lock_owners ^= receipt._number
        receipt._node = node
        receipt.length += len(node.tokens)

    def _unlock_node(self, receipt: LockReceipt) -> None:
        node = receipt._node
        self._changes.record_node(node)
        if node.lock_ref < 1 or node.parent is None:
            raise AuditFailed("a lock was released that was not held")
        node.lock_ref -= 1
        node.lock_owners ^= receipt._number
        node.last_used = self._clock
        receipt._node = node.parent
        receipt.length -= len(node.tokens)
        if node.lock_ref == 0:
            self._changes.record_content(node)
            self._protect(node, -len(node.tokens))
            self._owners.add_tokens(receipt._number, -len(node.tokens))
            self._push_leaf(node)
        elif node.lock_ref == 1:
            self._owners.add_tokens(node.lock_owners, len(node.tokens))
        self._locks.offer(node)

    # Shape

    def _append(
        self, receipt: LockReceipt, tokens: Tokens, pages: Mapping[PoolName, Pages]
    ) -> None:
        """Append `tokens` below a receipt and advance it.

        A leaf that only this receipt locks grows in place, so an unshared session stays one edge,
        however many turns it has.
        """
        node = receipt._node
        if node.parent is None or not is_sole_leaf(node):
            child = self._new_node(node, tokens, pages)
            node.children[child.key] = child
            self._lock_node(receipt, child)
            return
        self._changes.record_content(node)
        node.tokens.append(tokens)
        for pool, ids in pages.items():
            node.pages[pool].append(ids)
        for pool in node.page_locks:
            append_locks(node, pool, pages[pool])
        self._owners.add_tokens(receipt._number, len(tokens))
        self._protect(node, len(tokens))
        receipt.length += len(tokens)

    def _split(self, node: RadixNode, length: int) -> RadixNode:
        """Cut an edge after `length` tokens and return the new upper node."""
        assert node.parent is not None, "a root has no edge"
        assert 0 < length < len(node.tokens), "a cut lies inside an edge"
        assert length % self._page_size == 0, "edges are whole pages"
        self._changes.record_content(node)
        num_pages = length // self._page_size
        upper = self._new_node(
            node.parent,
            node.tokens.view(0, length),
            {pool: ids.view(0, num_pages) for pool, ids in node.pages.items()},
        )
        upper.lock_ref, upper.last_used = node.lock_ref, node.last_used
        upper.lock_owners = node.lock_owners
        node.parent.children[node.key] = upper
        node.parent = upper
        node.tokens = IntBuffer(node.tokens.view(length))
        node.key = self._key(node.tokens.view())
        node.pages = {pool: IntBuffer(ids.view(num_pages)) for pool, ids in node.pages.items()}
        upper.children[node.key] = node
        split_locks(upper, node, num_pages)
        self._locks.offer(upper)
        return upper

    def _trim(self, node: RadixNode, num_pages: int) -> PagesByPool:
        """Cut pages off the end of a leaf; the caller detaches it if it is empty then."""
        assert not node.children, "only leaves lose pages"
        self._changes.record_content(node)
        keep = len(node.tokens) // self._page_size - num_pages
        cut: PagesByPool = {}
        for pool, ids in node.pages.items():
            cut[pool] = ids.view(keep).tolist()
            ids.truncate(keep)
        truncate_locks(node, keep)
        node.tokens.truncate(keep * self._page_size)
        return cut

    def _new_node(
        self, parent: RadixNode, tokens: Tokens, pages: Mapping[PoolName, Pages]
    ) -> RadixNode:
        node = RadixNode(parent, self._key(tokens), tokens, pages)
        node.tenant = parent.tenant
        init_locks(node, self._locks.pools)
        node.last_used = self._clock
        self._changes.record_node(node)
        return node

    def _cut_leaf(self, node: RadixNode, num_pages: int, evicted: PagesByPool) -> None:
        """Evict up to `num_pages` pages from the end of a leaf, in every pool."""
        trimmed = self._trim(node, min(num_pages, self._num_pages(node)))
        for pool, ids in trimmed.items():
            evicted[pool] += filter(None, ids)
            self.tenants.add(node.tenant, pool, -sum(map(bool, ids)))
        if len(node.tokens):
            self._push_leaf(node)
        else:
            self._detach(node)

    def _detach(self, node: RadixNode) -> None:
        parent = node.parent
        assert parent is not None, "a root is not detached"
        assert parent.children[node.key] is node, "it hangs where it says"
        del parent.children[node.key]
        node.parent = None
        self._changes.record_content(node)
        if isinstance(parent, Root):
            self._drop_if_idle(parent)
        else:
            self._push_leaf(parent)

    def _drop_if_idle(self, root: Root) -> None:
        if not root.children and root.lock_ref == 0:
            del self._roots[root.namespace]
            self.tenants.remove_root(root.tenant)
            self._changes.record_node(root)

    def _key(self, tokens: Tokens) -> bytes:
        return tokens[: self._page_size].tobytes()

    def _num_pages(self, node: RadixNode) -> int:
        return len(node.tokens) // self._page_size

    def _protect(self, node: RadixNode, num_tokens: int) -> None:
        for pool in self._unbounded_ledgers:
            self.tenants.protect(node.tenant, pool, num_tokens // self._page_size)

    # Order of eviction

    def _push_leaf(self, node: RadixNode) -> None:
        if not is_evictable_leaf(node):
            return
        # With bounded pools only, eviction never asks for leaves: remove an empty one now.
        if not self._unbounded_ledgers and has_only_tombstones(node):
            self._trim(node, self._num_pages(node))
            self._detach(node)
            return
        self.tenants[node.tenant].leaves.offer(node)


def _common_len(left: Tokens, right: Tokens) -> int:
    """Return the length of the common prefix of two token arrays."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
