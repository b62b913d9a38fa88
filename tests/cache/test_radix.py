"""The tree of published pages: matching, locks that survive splits, eviction."""

from __future__ import annotations

import numpy as np
import pytest

from cache.errors import AuditFailed
from cache.ledger import Ledger
from cache.radix import RadixCache
from cache.radix_node import LockReceipt, RadixNode
from cache.types import Holder, Namespace, PoolName, Tokens

POOL = PoolName("full")
ALICE, BOB = Namespace("alice", "model"), Namespace("bob", "model")


class Tree:
    """A tree of pages of two tokens, and pages to publish."""

    def __init__(self, num_pages: int = 64) -> None:
        self.ledger = Ledger(POOL, num_pages)
        self.radix = RadixCache(2, {POOL: self.ledger})
        self.next_page = 1

    def publish(self, text: str, namespace: Namespace = ALICE) -> LockReceipt:
        """Insert from the root; the receipt stays locked."""
        receipt = self.radix.lock_root(namespace)
        self.extend(receipt, text)
        return receipt

    def extend(self, receipt: LockReceipt, text: str) -> list[int]:
        num_pages = len(text) // 2
        pages = list(range(self.next_page, self.next_page + num_pages))
        self.next_page += num_pages
        self.ledger.transfer(num_pages, Holder.FREE, Holder.ACTIVE)
        found = self.radix.insert(receipt, ids(text), {POOL: pages})[POOL]
        self.ledger.transfer(len(found), Holder.ACTIVE, Holder.FREE)
        return found

    def lock(self, text: str, namespace: Namespace = ALICE) -> LockReceipt:
        receipt = self.radix.lock_root(namespace)
        self.radix.advance(receipt, self.radix.match_prefix(namespace, ids(text)))
        return receipt

    def evict(self, num_pages: int) -> list[int]:
        pages = self.radix.evict(POOL, num_pages)[POOL]
        self.ledger.transfer(len(pages), Holder.TREE, Holder.FREE)
        return pages

    def matched(self, text: str, namespace: Namespace = ALICE) -> int:
        return self.radix.match_prefix(namespace, ids(text)).matched_len

    def edges(self) -> dict[str, int]:
        """Edge text to lock count."""
        pending = [child for _, root in self.radix.roots() for child in root.children.values()]
        edges = {}
        while pending:
            node = pending.pop()
            edges[text_of(node)] = node.lock_ref
            pending += node.children.values()
        return edges


def ids(text: str) -> Tokens:
    return np.array([ord(letter) for letter in text], np.int32)


def text_of(node: RadixNode) -> str:
    return "".join(chr(token) for token in node.tokens.view().tolist())


@pytest.fixture
def tree() -> Tree:
    return Tree()


def test_an_empty_tree_matches_nothing_and_remembers_nothing(tree: Tree) -> None:
    assert tree.matched("abcd") == 0
    assert not list(tree.radix.roots())


@pytest.mark.parametrize(
    ("text", "length"),
    [("abcdef", 6), ("abcdefgh", 6), ("abcdxx", 4), ("abcxxx", 2), ("xbcdef", 0)],
)
def test_a_match_is_the_longest_prefix_of_whole_pages(tree: Tree, text: str, length: int) -> None:
    tree.publish("abcdef")
    assert tree.matched(text) == length


def test_C3_I14_namespaces_never_match_each_other(tree: Tree) -> None:
    tree.publish("abcd", ALICE)
    assert tree.matched("abcd", BOB) == 0
    assert tree.matched("abcd", Namespace("alice", "another model")) == 0


def test_matching_changes_nothing(tree: Tree) -> None:
    tree.radix.unlock(tree.publish("abcdef"))
    tree.radix.match_prefix(ALICE, ids("abcdxx"))
    assert tree.edges() == {"abcdef": 0}


def test_locking_inside_an_edge_splits_it_and_covers_only_the_match(tree: Tree) -> None:
    tree.radix.unlock(tree.publish("abcdef"))
    receipt = tree.lock("abcdxx")
    assert receipt.length == 4
    assert tree.edges() == {"abcd": 1, "ef": 0}
    assert tree.ledger.num_evictable == 1


def test_L10_a_lock_inside_a_split_edge_is_released_whole(tree: Tree) -> None:
    receipt = tree.publish("abcdefgh")
    shorter = tree.lock("abcdxx")
    shortest = tree.lock("abxx")
    assert tree.edges() == {"ab": 3, "cd": 2, "efgh": 1}
    tree.radix.unlock(receipt)
    assert tree.edges() == {"ab": 2, "cd": 1, "efgh": 0}
    tree.radix.unlock(shorter)
    tree.radix.unlock(shortest)
    assert tree.edges() == {"ab": 0, "cd": 0, "efgh": 0}
    assert tree.ledger.num_evictable == 4


def test_S1_a_receipt_still_extends_its_own_path_after_a_split(tree: Tree) -> None:
    receipt = tree.publish("abcdef")
    tree.lock("abxx")
    tree.extend(receipt, "gh")
    assert tree.matched("abcdefgh") == 8


def test_S4_a_locked_node_is_never_evicted_its_unlocked_tail_is(tree: Tree) -> None:
    tree.radix.unlock(tree.publish("abcdefgh"))
    tree.lock("abcdxx")
    assert len(tree.evict(2)) == 2
    with pytest.raises(AuditFailed):
        tree.radix.evict(POOL, 1)
    assert tree.matched("abcdefgh") == 4


def test_S3_a_receipt_is_given_back_once(tree: Tree) -> None:
    receipt = tree.publish("abcd")
    tree.radix.unlock(receipt)
    with pytest.raises(AuditFailed):
        tree.radix.unlock(receipt)


def test_S5_children_are_found_under_their_own_first_page_after_a_split(tree: Tree) -> None:
    tree.publish("abcdef")
    tree.publish("abcdxx")
    assert [tree.matched(text) for text in ("abcdef", "abcdxx", "abcd")] == [6, 6, 4]


def test_an_insert_keeps_the_pages_the_tree_already_has(tree: Tree) -> None:
    tree.publish("abcd")
    receipt = tree.radix.lock_root(ALICE)
    assert tree.extend(receipt, "abcdef") == [1, 2]
    assert tree.radix.match_prefix(ALICE, ids("abcdef")).matched_len == receipt.length == 6
    assert tree.ledger.snapshot().tree_protected == 3


def test_a_session_alone_stays_one_edge_however_many_turns(tree: Tree) -> None:
    receipt = tree.publish("ab")
    for text in ("cd", "ef", "gh"):
        tree.extend(receipt, text)
    assert tree.edges() == {"abcdefgh": 1}


def test_an_edge_that_others_locked_does_not_grow_under_them(tree: Tree) -> None:
    receipt, other = tree.publish("ab"), tree.lock("ab")
    tree.extend(receipt, "cd")
    assert tree.edges() == {"ab": 2, "cd": 1}
    tree.radix.unlock(receipt)
    assert (tree.edges()["cd"], other.length) == (0, 2)


def test_the_least_recently_used_leaf_goes_first_and_from_its_tail(tree: Tree) -> None:
    old, new = tree.publish("abcdef"), tree.publish("xxyyzz")
    tree.radix.unlock(old)
    tree.radix.unlock(new)
    assert tree.evict(2) == [2, 3]
    assert (tree.matched("abcdef"), tree.matched("xxyyzz")) == (2, 6)
    tree.evict(2)
    assert (tree.matched("abcdef"), tree.matched("xxyyzz")) == (0, 4)


def test_using_a_path_again_saves_it_from_eviction(tree: Tree) -> None:
    first, second = tree.publish("abcd"), tree.publish("xxyy")
    tree.radix.unlock(first)
    tree.radix.unlock(second)
    tree.radix.unlock(tree.lock("abcd"))
    tree.evict(2)
    assert (tree.matched("abcd"), tree.matched("xxyy")) == (4, 0)


def test_a_parent_is_evicted_only_after_its_children(tree: Tree) -> None:
    for text in ("abcdef", "abcdxx"):
        tree.radix.unlock(tree.publish(text))
    tree.evict(2)
    assert tree.edges() == {"abcd": 0}
    tree.evict(2)
    assert not list(tree.radix.roots()), "an empty namespace is forgotten"


def test_shortening_a_lock_leaves_the_pages_to_match_again(tree: Tree) -> None:
    receipt = tree.publish("abcdef")
    tree.radix.shorten(receipt, 3)
    assert receipt.length == 2
    assert tree.edges() == {"ab": 1, "cdef": 0}
    assert tree.matched("abcdef") == 6


def test_taking_back_removes_what_only_this_receipt_has(tree: Tree) -> None:
    receipt = tree.publish("abcdef")
    assert tree.radix.unpublish(receipt, 3, Holder.ACTIVE) == {POOL: [2, 3]}
    assert (receipt.length, tree.edges()) == (2, {"ab": 1})
    assert tree.ledger.snapshot().active == 2


def test_taking_back_goes_over_several_edges_in_order(tree: Tree) -> None:
    receipt = tree.publish("abcdef")
    tree.radix.unlock(tree.lock("abxx"))
    tree.radix.unlock(tree.lock("abcdxx"))
    assert tree.radix.unpublish(receipt, 0, Holder.ACTIVE) == {POOL: [1, 2, 3]}
    assert tree.edges() == {}


@pytest.mark.parametrize("others", ["abcdef", "abcdefgh", "abcd"])
def test_what_another_has_locked_or_built_on_is_not_taken_back(tree: Tree, others: str) -> None:
    receipt, other = tree.publish("abcdef"), tree.publish(others)
    tree.radix.unpublish(receipt, 0, Holder.ACTIVE)
    assert tree.matched("abcdefgh") == len(others)
    assert receipt.length == min(6, len(others)), "what nobody else has was taken"
    assert other.length == len(others)


def test_condemned_pages_take_what_builds_on_them_along(tree: Tree) -> None:
    receipt = tree.publish("abcd")
    tree.radix.unlock(tree.publish("abcdef"))
    shared = tree.lock("abxx")
    assert sorted(tree.radix.remove_path(receipt)[POOL]) == [2, 5]
    assert tree.edges() == {"ab": 1}
    assert shared.length == 2


def test_a_match_is_not_used_after_the_tree_changed(tree: Tree) -> None:
    tree.publish("abcd")
    receipt = tree.radix.lock_root(ALICE)
    match = tree.radix.match_prefix(ALICE, ids("abcd"))
    tree.publish("abxx")
    with pytest.raises(AuditFailed, match="after the tree had changed"):
        tree.radix.advance(receipt, match)


def test_a_match_says_what_locking_it_takes_from_eviction(tree: Tree) -> None:
    tree.radix.unlock(tree.publish("abcdef"))
    tree.lock("abxx")
    match = tree.radix.match_prefix(ALICE, ids("abcdxx"))
    assert (match.cache_protected_len, match.evictable_pages) == (4, {POOL: 1})


def test_S5_C4_equal_first_pages_are_compared_to_the_end_not_hashed(tree: Tree) -> None:
    tree.publish("ab" * 10)
    assert tree.matched("ab" * 4 + "ax" + "ab" * 5) == 8


def test_stale_entries_do_not_pile_up_in_the_order_of_eviction(tree: Tree) -> None:
    tree.radix.unlock(tree.publish("abcd"))
    for _ in range(5000):
        tree.radix.unlock(tree.lock("abcd"))
    assert len(tree.radix.tenants[""].leaves._offers) < 2000
    assert tree.evict(2) == [1, 2]
