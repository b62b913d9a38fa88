"""C: what one session or tenant learns of another one."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch

from cache.errors import NamespaceMismatch
from cache.pool.recurrent import StatePool
from cache.session_cache import SessionAwareCache
from cache.spec import CacheSpec, Capacity, LayerGroup, LayerKind
from cache.types import NULL_PAGE, Namespace, PoolName, SessionId, StateMoves, TurnId
from session_server.attention.base import AttentionMeta, Span
from session_server.attention.recurrent import RecurrentBackend
from session_server.core.events import TurnStarted
from session_server.core.owner import Owner
from session_server.sessions.salts import TenantSalts
from tests.engine.bench import Bench
from tests.mutants.guards import (
    BUGS_ARE_TOLD,
    FRESH_STATE_IS_READ,
    HITS_GO_FIRST,
    KEYS_ARE_TRUSTED,
    NAMES_ARE_GLUED,
    SESSIONS_SHARE_WHAT_THEY_SAY,
)
from tests.mutants.in_books import DELTA_IS_A_VIEW
from tests.mutants.in_radix import FIRST_PAGE_IS_ENOUGH
from tests.mutants.in_scheduling import SALT_IS_MISSING
from tests.mutants.in_sessions import OWNERS_SHARE_A_SALT
from tests.scenarios.lines import PROMPT, cancel, close, distinct
from tests.scenarios.registry import scenario
from tests.sessions.world import World, turn
from tests.sim.hand_engine import Sizes
from tests.web.serving import Served, served

POOL = PoolName("full")


@scenario("C1", FIRST_PAGE_IS_ENOUGH)
def test_c1_a_fresh_session_is_given_kv_of_its_own_tokens_only() -> None:
    bench = Bench(Sizes(page_size=4))
    old, fresh = bench.open("old"), bench.open("fresh")
    bench.run(bench.submit_command(old, "a", PROMPT, max_tokens=6))
    bench.run(close("old"))
    alike = (*PROMPT[:6], *distinct(5, 14))
    bench.run(bench.submit_command(fresh, "b", alike))
    bench.expect("b", alike)
    assert bench.finished("b").cached_tokens == 4
    bench.close_all()


@scenario("C2", DELTA_IS_A_VIEW)
def test_c2_what_a_forward_was_given_does_not_change_before_it_is_executed() -> None:
    bench = Bench(Sizes(page_size=1, num_pages=24, num_rows=2, chunk_tokens=64))
    doomed, other = bench.open("doomed"), bench.open("other")
    bench.step(bench.submit_command(doomed, "a", distinct(1, 20), max_tokens=3))
    (launched,) = bench.batches
    given = [(write.row, write.start, write.pages.tolist()) for write in launched.table_writes]
    bench.step(cancel("a", None))
    bench.step(bench.submit_command(other, "b", distinct(2, 9), max_tokens=3))
    kept = [(write.row, write.start, write.pages.tolist()) for write in launched.table_writes]
    assert kept == given
    bench.run()
    bench.expect("b", distinct(2, 9))
    bench.close_all()


@scenario("C3", NAMES_ARE_GLUED)
def test_c3_kv_belongs_to_tenant_and_model_and_the_two_never_spell_another_pair() -> None:
    spaces = [
        Namespace("a", "m"),
        Namespace("am", ""),
        Namespace("", "am"),
        Namespace("a", "mm"),
        Namespace("am", "m"),
        Namespace("b", "m"),
    ]
    cache = SessionAwareCache(
        CacheSpec((LayerGroup(POOL, LayerKind.FULL, (0,), 1, 1, 4),), 4),
        Capacity({POOL: 64}, 16, 64),
    )
    for index, namespace in enumerate(spaces):
        for repeat in range(2):
            session_id, turn_id = SessionId(f"s{index}.{repeat}"), TurnId(f"t{index}.{repeat}")
            cache.open(session_id, namespace=namespace)
            loan = cache.begin_turn(session_id, turn_id, base_len=0, new_tokens=PROMPT)
            assert loan.cached_len == (16 if repeat else 0), namespace
            cache.grow(turn_id, len(PROMPT))
            cache.record(turn_id, len(PROMPT))
            cache.end_turn(turn_id, len(PROMPT))
    for one, other in product(spaces, spaces):
        if one != other:
            with pytest.raises(NamespaceMismatch):
                cache.fork(SessionId(f"s{spaces.index(one)}.0"), SessionId("copy"), namespace=other)


@scenario("C4", KEYS_ARE_TRUSTED)
def test_c4_pages_of_equal_keys_are_told_apart_by_their_tokens() -> None:
    """A sum of tokens is a hash for which collisions are easily written."""
    bench = Bench(Sizes(page_size=4))
    one, two = bench.open("one"), bench.open("two")
    bench.run(bench.submit_command(one, "a", (1, 2, 3, 4, 9, 9, 9, 9, 5)))
    crafted = (4, 3, 2, 1, 9, 9, 9, 9, 5)
    bench.run(bench.submit_command(two, "b", crafted))
    bench.expect("b", crafted)
    assert bench.finished("b").cached_tokens == 0
    bench.close_all()


@scenario("C5", SALT_IS_MISSING)
def test_c5_another_tenant_s_prompt_is_no_faster_than_a_new_one() -> None:
    bench = Bench()
    one, two, three = (bench.open(name, salt=salt) for name, salt in ("1a", "2b", "3a"))
    bench.run(bench.submit_command(one, "a", PROMPT))
    for session_id, name, num_cached in ((two, "b", 0), (three, "c", 16)):
        bench.run(bench.submit_command(session_id, name, PROMPT))
        bench.expect(name, PROMPT)
        assert bench.finished(name).cached_tokens == num_cached
        num_computed = sum(
            row.num_tokens for batch in bench.batches for row in batch.rows if row.turn_id == name
        )
        assert num_computed == len(PROMPT) - num_cached + 3
    bench.close_all()


@scenario("C5", HITS_GO_FIRST)
def test_c5_who_goes_first_does_not_depend_on_what_others_have_cached() -> None:
    bench = Bench(Sizes(max_running=1))
    warm = bench.open("warm")
    bench.run(bench.submit_command(warm, "warm", distinct(3, 12)))
    commands = []
    for i in range(4):
        session_id = bench.open(f"s{i}")
        commands.append(bench.submit_command(session_id, f"t{i}", distinct(i, 12), max_tokens=2))
    bench.run(*commands)
    started = [e.turn_id for e in bench.events if isinstance(e, TurnStarted)][1:]
    assert started == ["t0", "t1", "t2", "t3"]
    assert bench.finished("t3").cached_tokens > 0
    bench.close_all()


@scenario("C5", OWNERS_SHARE_A_SALT)
def test_c5_owners_have_namespaces_that_nobody_can_name() -> None:
    with World() as world:
        for owner in ("a", "b"):
            for name in ("same", "other"):
                world.open(session_id=name, owner=owner)
                world.submit(name, turn("1"), owner=owner)
        world.engine.run()
        salts = list(world.engine.salts.values())
        assert [left == right for left, right in pairwise(salts)] == [True, False, True]
        assert not {"a", "b"} & set(salts)


@scenario("C5", SESSIONS_SHARE_WHAT_THEY_SAY)
def test_c5_told_to_share_no_prefixes_two_sessions_of_one_owner_share_none() -> None:
    salts = TenantSalts(bytes(16), share_prefixes=False)
    names = [salts.salt_of(Owner(owner), name) for owner in "ab" for name in ("one", "two")]
    assert len(set(names)) == 4


@scenario("C7", FRESH_STATE_IS_READ)
def test_c7_a_state_begins_at_zero_whatever_lay_in_its_pages() -> None:
    group = LayerGroup(
        PoolName("state"), LayerKind.RECURRENT, (0,), 0, 0, 4, state_shapes=((3, 2),)
    )
    pool = StatePool(group, num_pages=3, device=torch.device("cpu"))
    backend, taps = RecurrentBackend(pool), torch.ones(4, 2)

    def begin(page: int) -> list[list[float]]:
        row = Span(1, 0, 1, 0, StateMoves(NULL_PAGE, ((1, page),)))
        plan = backend.plan(AttentionMeta((row,), {}))
        said: list[list[float]] = plan.convolve(0, torch.ones(1, 2), taps, None).tolist()
        return said

    clean = begin(1)
    for page in range(3):  # the padding page, too: padding writes there
        for part in pool.page(page):
            part.fill_(7.0)
    assert begin(2) == clean


@scenario("C8", BUGS_ARE_TOLD)
@served()
async def test_c8_a_bug_of_ours_tells_a_client_nothing(this: Served) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("KVLease at 0x7f21c8d1, prompt 'plover'")

    this.sessions.list = fail  # type: ignore[method-assign]
    answer = await this.http.get("/v1/sessions")
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "type": "server_error",
        "code": "internal_error",
        "message": "Internal server error.",
        "param": None,
    }
    assert "plover" not in answer.text
