"""A match stands until something it depends on changes, and other changes leave it alone."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from cache.radix_node import MatchResult
from cache.session_cache import SessionAwareCache
from cache.types import Holder, Namespace, SessionId, Tokens
from tests.cache.kv_world import MIXTURES, NAMESPACES, POOL, Mixture, make_cache
from tests.cache.plain_turns import run_turn
from tests.cache.player import DOCUMENTS, Player, act
from tests.cache.work import count_calls


def found(match: MatchResult) -> tuple[int, dict[str, int]]:
    return match.matched_len, dict(match.evictable_pages)


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_match_that_stands_is_what_would_be_found(page_size: int, mixture: Mixture) -> None:
    num_stood = num_fallen = 0
    for seed in range(2):
        player, random = Player(page_size, mixture=mixture), Random(seed)
        cache = player.world.cache
        kept: list[tuple[Tokens, Namespace, MatchResult, int]] = []
        for _ in range(150):
            tokens = np.array(random.choice(DOCUMENTS)[: random.randint(1, 40)], np.int32)
            namespace = random.choice(NAMESPACES)
            match = cache.peek(tokens, namespace)
            kept = [*kept[-9:], (tokens, namespace, match, cache.match_version)]
            act(player, random)
            for tokens, namespace, match, version in kept:
                fresh = found(cache.peek(tokens, namespace))
                if cache.match_version == version:
                    assert found(match) == fresh
                elif cache.is_current(match):
                    assert found(match) == fresh
                    num_stood += 1
                else:
                    num_fallen += 1
        player.world.close_everything()
    assert num_stood > 50
    assert num_fallen > 50


def make_cold() -> tuple[SessionAwareCache, MatchResult]:
    """A history of 100 tokens in the tree that no session has locked, and its match."""
    cache = make_cache(4, num_pages=184, num_rows=20, max_context_len=200)
    cache.open(SessionId("s"), namespace=NAMESPACES[0])
    run_turn(cache, SessionId("s"), [1, 2] * 50)
    cache.cool(SessionId("s"))
    return cache, cache.peek(np.array([1, 2] * 50 + [0], np.int32), NAMESPACES[0])


def test_what_happens_elsewhere_leaves_a_match_alone() -> None:
    cache, match = make_cold()
    assert match.matched_len == 100
    version = cache.match_version
    for number, namespace in enumerate((NAMESPACES[1], NAMESPACES[0], NAMESPACES[0])):
        name = SessionId(f"other{number}")
        cache.open(name, namespace=namespace)
        run_turn(cache, name, [2, number, 1] * 12)
        cache.cool(name)
    assert cache.match_version > version
    assert cache.is_current(match)
    assert count_calls(lambda: cache.is_current(match)) < 12


def test_who_builds_on_the_same_history_brings_a_match_down() -> None:
    cache, match = make_cold()
    cache.open(SessionId("t"), namespace=NAMESPACES[0])
    run_turn(cache, SessionId("t"), [1, 2] * 60)
    assert not cache.is_current(match), "there is more to find, and less of it can be evicted"


def test_eviction_of_its_end_brings_a_match_down() -> None:
    cache, match = make_cold()
    for pool, pages in cache.inspect().stores.tree.evict(POOL, 1).items():
        cache.inspect().stores.allocators[pool].release(pages, Holder.TREE)
    assert not cache.is_current(match)
    assert cache.peek(np.array([1, 2] * 50 + [0], np.int32), NAMESPACES[0]).matched_len == 96
