"""Who gives when memory is short: the tenant with most for its weight, and nobody's minimum before
another's excess."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.checker import find_violations
from cache.errors import OutOfPages
from cache.session_cache import SessionAwareCache
from cache.tenants import Account
from cache.types import Namespace, PoolName, SessionId, TurnId, pages_for
from tests.cache.kv_world import make_cache
from tests.cache.work import count_calls

PAGE = 4
NUM_PAGES = 64
TENANTS = "abc"
POOL = make_cache().paged_pools[0]


def make(num_pages: int = NUM_PAGES) -> SessionAwareCache:
    return make_cache(page_size=PAGE, num_pages=num_pages, num_rows=40, max_context_len=256)


def open_session(cache: SessionAwareCache, name: str, *, weight: int | None = None) -> SessionId:
    session_id = SessionId(name)
    tenant = name[0]
    namespace = Namespace(f"salt of {tenant}", "m", tenant)
    cache.open(session_id, namespace=namespace, tenant_weight=weight)
    return session_id


def keep(
    cache: SessionAwareCache, name: str, num_tokens: int, *, weight: int | None = None
) -> None:
    """Run a turn of a new session and leave it parked with what it computed."""
    session_id, turn_id = open_session(cache, name, weight=weight), TurnId(f"turn of {name}")
    tokens = [sum(map(ord, name)) * 1000 + i for i in range(num_tokens)]
    cache.begin_turn(session_id, turn_id, base_len=0, new_tokens=tokens)
    cache.grow(turn_id, num_tokens)
    cache.record(turn_id, num_tokens)
    cache.end_turn(turn_id, num_tokens)


def account(cache: SessionAwareCache, tenant: str) -> Account:
    return cache.inspect().stores.tree.tenants[tenant]


def held(cache: SessionAwareCache, tenant: str) -> int:
    return account(cache, tenant).held[POOL]


def minimum(cache: SessionAwareCache, tenant: str) -> int:
    return cache.inspect().stores.tree.tenants.minimum(account(cache, tenant), POOL)


def evict(cache: SessionAwareCache, num_pages: int) -> None:
    cache.inspect().stores.evict(POOL, num_pages)
    assert not find_violations(cache)


def test_the_tenant_with_most_gives_first_whoever_was_used_last() -> None:
    cache = make()
    keep(cache, "a1", 8)
    for i in range(6):
        keep(cache, f"b{i}", 16)
    flush_sessions(cache)
    evict(cache, 10)
    assert (held(cache, "a"), held(cache, "b")) == (2, 14), "though a's were used longest ago"


def test_shares_go_by_weight() -> None:
    cache = make()
    keep(cache, "a1", 80, weight=900)
    keep(cache, "b1", 40, weight=100)
    flush_sessions(cache)
    evict(cache, 1)
    assert (held(cache, "a"), held(cache, "b")) == (20, 9)


def test_a_minimum_is_half_of_the_least_that_a_share_can_be() -> None:
    cache = make()
    open_session(cache, "a1", weight=500)
    assert minimum(cache, "a") == 0, "a tenant alone has everything"
    open_session(cache, "b1", weight=500)
    assert minimum(cache, "a") == (NUM_PAGES - 1) // 4
    open_session(cache, "c1", weight=500)
    assert minimum(cache, "a") == (NUM_PAGES - 1) // 8
    cache.close(SessionId("b1"))
    assert minimum(cache, "c") == (NUM_PAGES - 1) // 8, "as it is, until a quarter is left"
    cache.close(SessionId("c1"))
    assert minimum(cache, "a") == 0
    cache.close(SessionId("a1"))
    assert cache.num_tenants == 0


def test_what_a_minimum_keeps_is_no_headroom_while_others_can_give() -> None:
    cache = make()
    keep(cache, "a1", 4 * 10)
    cache.cool(SessionId("a1"))
    keep(cache, "b1", 4 * 30)
    keep(cache, "b2", 4 * 20)
    assert cache.headroom().pages == (3,), "b has 50 pages parked, so a's ten are kept"
    assert [s.session_id for s in cache.parked] == ["b1", "b2"]
    assert cache.parked.count() == (2, {POOL: 50 - minimum(cache, "b")})
    given = [s.freed_pages[POOL] for s in cache.parked]
    assert given == [30, 50 - 30 - minimum(cache, "b")], "what b's own minimum keeps is not given"
    cache.cool(SessionId("b1"))
    cache.cool(SessionId("b2"))
    assert cache.headroom().pages == (63,), "nobody is parked, so that one turn may have everything"


def test_a_tenant_within_its_minimum_gives_rows_and_no_pages() -> None:
    cache = make()
    keep(cache, "a1", 4 * 5)
    keep(cache, "a2", 4 * 5)
    keep(cache, "b1", 4 * 40)
    parked = [(s.session_id, s.freed_pages[POOL]) for s in cache.parked]
    assert parked == [("b1", 40 - minimum(cache, "b")), ("a1", 0), ("a2", 0)]


def test_what_is_copied_back_ahead_of_a_plan_takes_nothing_that_a_minimum_keeps() -> None:
    class Everything:
        def longest_len(self, start: int) -> int:
            return len(tokens)

        def is_worth(self, start: int, end: int) -> bool:
            return True

    cache = make()
    keep(cache, "b1", 64)
    a = open_session(cache, "a1")
    cache.cool(SessionId("b1"))
    kept, namespace = minimum(cache, "b"), cache.slot(a).namespace
    assert held(cache, "b") >= kept
    tokens = np.arange((NUM_PAGES - 8) * PAGE, dtype=np.int32)
    with pytest.raises(OutOfPages):
        cache.copies.begin_in(namespace, tokens, Everything(), is_ahead=True)
    tokens = tokens[: (NUM_PAGES - 1 - kept) * PAGE]
    assert cache.copies.begin_in(namespace, tokens, Everything(), is_ahead=True) is not None
    assert held(cache, "b") == kept
    assert not find_violations(cache)


def test_its_own_minimum_is_there_for_a_tenant_that_comes_back() -> None:
    cache = make()
    keep(cache, "a1", 4 * 10)
    cache.cool(SessionId("a1"))
    keep(cache, "b1", 4 * 40)
    share = cache.shares("a")
    assert share.is_guarding
    assert share.lock_cost({POOL: 10}) == (0,)
    assert cache.shares("b").lock_cost({POOL: 0}) == (0,)
    assert cache.shares("b").reserved_pages == (minimum(cache, "a") - 10,)
    headroom = cache.headroom().pages
    cache.begin_turn(SessionId("a1"), TurnId("t"), base_len=40, new_tokens=[1, 2, 3])
    assert cache.headroom().pages == headroom
    assert not find_violations(cache)


def test_one_tenant_that_comes_and_goes_does_not_change_what_others_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, num_counted = make(), 0
    for number in range(64):
        open_session(cache, f"{chr(1000 + number)}1", weight=16)
    tenants = cache.inspect().stores.tree.tenants
    recount = tenants._recount

    def counted(account: Account, pool: PoolName) -> None:
        nonlocal num_counted
        num_counted += 1
        recount(account, pool)

    monkeypatch.setattr(tenants, "_recount", counted)
    for _ in range(50):
        open_session(cache, "x1", weight=16)
        cache.close(SessionId("x1"))
    assert num_counted <= 64 + 4 * 50, "all of them once"
    assert minimum(cache, chr(1000)) == 63 * 16 // (2 * 2048)
    for number in range(64):
        cache.close(SessionId(f"{chr(1000 + number)}1"))
        total = 16 * (63 - number)
        assert tenants.num_present < 2 or total <= tenants._unit <= 4 * total
    assert num_counted <= 2 * 64 + 6 * 64 + 4 * 50


def test_what_headroom_costs_does_not_grow_with_the_tenants_that_are_parked() -> None:
    def cost(num_tenants: int) -> int:
        cache = make(num_pages=400)
        for number in range(num_tenants):
            keep(cache, f"{chr(1000 + number)}1", 4)
        keep(cache, "a1", 4 * 2)
        cache.close(SessionId("a1"))
        open_session(cache, "b1")
        return count_calls(lambda: (cache.headroom(), cache.shares("b").reserved_pages))

    assert cost(30) == cost(3)


def test_a_tenant_without_sessions_keeps_no_minimum() -> None:
    cache = make()
    for tenant in "abc":
        keep(cache, f"{tenant}1", 4 * 2)
        cache.close(SessionId(f"{tenant}1"))
    keep(cache, "d1", 4 * 30)
    assert cache.num_tenants == 1
    assert minimum(cache, "d") == 0, "it is alone, whatever others have left in the tree"
    keep(cache, "e1", 4 * 20)
    tenants = cache.inspect().stores.tree.tenants
    assert [minimum(cache, tenant) for tenant in "abcde"] == [0, 0, 0, 15, 15]
    assert (tenants.guarded[POOL], tenants.unheld[POOL]) == (0, 0)
    assert cache.shares("d").is_guarding
    assert cache.shares("d").reserved_pages == (0,)
    assert cache.headroom().pages == (63 - 50,), "what they have left is there for others"
    open_session(cache, "a2")
    assert minimum(cache, "a") == 63 // 8
    assert (tenants.guarded[POOL], tenants.unheld[POOL]) == (2, 63 // 8 - 2), "it came back"
    cache.close(SessionId("a2"))
    assert (tenants.guarded[POOL], tenants.unheld[POOL]) == (0, 0)
    assert not find_violations(cache)


def test_a_tenant_that_is_gone_gives_what_it_has_most_of_and_is_forgotten_with_it() -> None:
    cache = make()
    keep(cache, "a1", 4 * 20)
    cache.close(SessionId("a1"))
    keep(cache, "b1", 4 * 18)
    cache.cool(SessionId("b1"))
    open_session(cache, "c1")
    for _ in range(22):
        evict(cache, 1)
    assert (held(cache, "a"), held(cache, "b")) == (1, 15), "b has a minimum, and a has none"
    evict(cache, 1)
    assert "a" not in dict(cache.inspect().stores.tree.tenants.items())
    assert held(cache, "b") == minimum(cache, "b") == 15


def flush_sessions(cache: SessionAwareCache) -> None:
    """Leave everything to be evicted."""
    for session_id in cache.parked.session_ids():
        cache.cool(session_id)


Op = tuple[str, int]
ops = st.lists(
    st.tuples(st.sampled_from(["keep", "cool", "close", "evict", "open"]), st.integers(0, 10_000)),
    max_size=60,
)


@given(ops)
def test_pressure_takes_by_weight_and_minimums_last(steps: list[Op]) -> None:
    cache, names = make(), list[str]()
    ledger = cache.inspect().stores.ledgers[POOL]
    for number, (op, draw) in enumerate(steps):
        tenant = TENANTS[draw % 3]
        if op == "keep" and len(cache.parked.session_ids()) < 30:
            num_tokens = 1 + draw % 60
            if sum(cache.headroom().pages) > pages_for(num_tokens, PAGE):
                names.append(f"{tenant}{number}")
                keep(cache, names[-1], num_tokens, weight=[None, 100, 900][draw % 5 % 3])
        elif op == "open":
            names.append(f"{tenant}{number}")
            open_session(cache, names[-1])
        elif op == "cool" and names:
            cache.cool(SessionId(names[draw % len(names)]))
        elif op == "close" and names:
            cache.close(SessionId(names.pop(draw % len(names))))
        elif op == "evict" and ledger.num_evictable:
            check_eviction(cache, 1 + draw % ledger.num_evictable)
        assert not find_violations(cache)
        check_giving(cache)


def check_giving(cache: SessionAwareCache) -> None:
    """Nobody has borrowed a session: minimums are kept for whoever is parked with more than its."""
    tenants = cache.inspect().stores.tree.tenants
    parked = {session_id[0] for session_id in cache.parked.session_ids()}
    giving = [tenant for tenant in parked if tenants.excess(tenant, POOL) > 0]
    assert cache.parked.is_guarding == (tenants.num_present > 1 and len(giving) > 0)
    if len(tenants) > 1:
        assert tenants.num_giving[POOL] == len(giving)


def check_eviction(cache: SessionAwareCache, num_pages: int) -> None:
    tenants = cache.inspect().stores.tree.tenants
    before = {name: (a, a.held[POOL], a.guarded[POOL]) for name, a in tenants.items()}
    minimums = {name: tenants.minimum(a, POOL) for name, a in tenants.items()}
    cache.inspect().stores.evict(POOL, num_pages)
    lost = {name: held - a.held[POOL] for name, (a, held, _) in before.items()}
    assert sum(lost.values()) == num_pages
    can_give = {n: a for n, (a, _, _) in before.items() if a.evictable(POOL) > a.guarded[POOL]}
    for name, (giver, held, _) in before.items():
        if not lost[name]:
            continue
        for other in can_give.values():
            assert held * other.weight >= other.held[POOL] * giver.weight
        if giver.held[POOL] < minimums[name]:
            assert not can_give.keys() - {name}, "another could have given"
