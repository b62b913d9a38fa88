"""What a tenant's turns get beside those of another tenant, in forwards and in order."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.types import SessionId, TurnId
from session_server.core.commands import OpenSession, SubmitTurn
from session_server.core.events import TurnStarted
from session_server.core.sampling import Grammar, SamplingParams
from session_server.engine import tenant_lines
from session_server.engine.config import MemoryCheck
from session_server.engine.plan import plan_step
from session_server.engine.plan_admission import KEPT_PLACES
from session_server.engine.plan_tokens import LAG_FORWARDS
from session_server.engine.scheduler_view import FLOOD_FORWARDS, Load
from session_server.engine.shares import (
    FLOOD_SHARES,
    MAX_SHARES,
    flooded_shares,
    share_len,
    tenant_shares,
)
from session_server.engine.tenant_lines import CREDIT_TOKENS, PRIORITY_TOKENS, TenantLines
from session_server.engine.turn import Turn, TurnClock
from tests.engine.bench import Bench
from tests.engine.crowd import Coming, Crowd
from tests.engine.plan_views import LIMITS, FakeView, running, waiting, work_of
from tests.scenarios.lines import distinct
from tests.sim.hand_engine import Sizes

ROOMY = Sizes(
    num_pages=16_000,
    page_size=4,
    num_rows=400,
    max_context_len=4096,
    max_running=16,
    chunk_tokens=64,
    memory_check=MemoryCheck.WARN,
)


def flood(crowd: Crowd, num_turns: int, *, prompt_len: int, max_new: int = 1) -> None:
    turn = Coming(prompt_len, max_new, tenant="flood")
    crowd.arrive({f"f{len(crowd.guests)}-{i}": turn for i in range(num_turns)})


def beside_flood(prompt_len: int, *tenants: str, flood_len: int, max_new: int = 1) -> Crowd:
    """A turn of a quiet tenant up to its first token, beside 200 turns of each of others, which
    have been served since it was: it is behind, by more than its prompt."""
    crowd = Crowd(ROOMY)
    crowd.bench.open("quiet before", tenant="quiet")
    lines = crowd.bench.engine.inspect().scheduler.waiting
    turn = Coming(flood_len, max_new)
    for tenant in tenants:
        many = {f"{tenant}{i}": replace(turn, tenant=tenant) for i in range(200)}
        crowd.arrive(many)
    lag = prompt_len + LAG_FORWARDS * ROOMY.chunk_tokens
    while tenants and (lines.lag("quiet") < lag or lines.load.num_full < FLOOD_FORWARDS):
        crowd.step()
    for _ in range(6):
        crowd.step()
    crowd.arrive({"quiet": Coming(prompt_len, tenant="quiet")})
    while "quiet" in crowd.live():
        crowd.step()
    return crowd


@pytest.mark.parametrize("prompt_len", [1, 8, 64, 600])
@pytest.mark.parametrize("flood_len", [4, 60, 2000])
def test_a_flood_of_another_tenant_costs_one_forward_and_an_eighth(
    prompt_len: int, flood_len: int
) -> None:
    alone = beside_flood(prompt_len, flood_len=0).num_forwards("quiet")
    crowd = beside_flood(prompt_len, "flood", flood_len=flood_len, max_new=30)
    beside = crowd.num_forwards("quiet")
    assert alone == -(-prompt_len // 64)
    assert beside <= 1 + -(-prompt_len // (64 - 64 // MAX_SHARES)), (alone, beside)
    if prompt_len <= 64:
        assert beside == 1, "nobody else is in a forward that it fits into"


@pytest.mark.parametrize("prompt_len", [1, 8, 31, 32, 48, 64, 65, 100, 128, 200, 256])
@pytest.mark.parametrize("flood_len", [60, 300, 2000])
def test_until_its_first_token_a_quiet_tenant_waits_for_half_of_its_prompt_more(
    prompt_len: int, flood_len: int
) -> None:
    budget = ROOMY.chunk_tokens
    crowd = beside_flood(prompt_len, "flood", flood_len=flood_len)
    since, num_forwards = crowd.guests["quiet"].since, crowd.num_forwards("quiet")
    # It may come just after a forward was launched, behind which none is planned.
    forwards = crowd.forwards[since - 1 : since + num_forwards]
    num_tokens = sum(given.num_tokens for forward in forwards for given in forward.values())
    shares = FLOOD_SHARES + num_forwards - (num_forwards == 1)
    assert num_tokens <= prompt_len + shares * share_len(budget)
    if prompt_len >= budget // 2:
        assert num_tokens <= 1.5 * prompt_len, (num_tokens, prompt_len)


def test_two_floods_that_are_nearly_even_are_short_for_a_third_tenant_too() -> None:
    crowd = beside_flood(64, "a", "b", flood_len=60)
    since = crowd.guests["quiet"].since
    for forward in crowd.forwards[since - 2 : since]:
        assert sum(given.num_tokens for given in forward.values()) <= FLOOD_SHARES * share_len(64)
    assert crowd.num_forwards("quiet") == 1


@pytest.mark.parametrize("prompt_len", [1, 64, 8 * 64])
def test_a_tenant_that_is_no_flood_has_whole_forwards_on_a_shared_server(prompt_len: int) -> None:
    crowd = Crowd(ROOMY)
    crowd.bench.open("other before", tenant="other")
    for i in range(3):
        crowd.arrive({f"q{i}": Coming(prompt_len, max_new=12, tenant="quiet")})
        while f"q{i}" in crowd.live():
            crowd.step()
        assert crowd.num_forwards(f"q{i}") == -(-prompt_len // 64)


def test_others_are_not_left_out_for_a_tenant_that_lacks_pages() -> None:
    hog = replace(running("hog", 40, spare=40), tenant="hog")
    new = replace(waiting("new", 5), tenant="new")
    view = FakeView(
        running=(hog,),
        waiting=(new,),
        headroom_pages=(0,),
        is_shared=True,
        load=Load(num_full=FLOOD_FORWARDS),
        served_tokens={"hog": 10_000},
    )
    plan = plan_step(view, LIMITS)
    assert work_of(plan) == {"hog": 5}, "it has the tokens that are left over"
    stuck = plan_step(replace(view, running=(replace(hog, num_spare=0),)), LIMITS)
    assert not stuck.work
    assert stuck.refuse is None
    assert not stuck.is_empty, "the next plan is another one"
    plan = plan_step(replace(view, load=stuck.load), LIMITS)
    assert work_of(plan) == {"hog": share_len(LIMITS.num_tokens) + 5}
    plan = plan_step(replace(view, headroom_pages=(9,)), LIMITS)
    assert work_of(plan) == {"new": 5}
    assert plan.load.has_postponed
    plan = plan_step(replace(view, headroom_pages=(9,), load=plan.load), LIMITS)
    assert work_of(plan) == {"hog": share_len(LIMITS.num_tokens), "new": 5}


def test_a_short_forward_of_a_flood_goes_to_one_long_turn_behind_what_is_short() -> None:
    flooding = [replace(running(f"f{i}", 40, spare=40), tenant="flood") for i in range(3)]
    view = FakeView(
        running=flooding,
        waiting=[replace(waiting("short", 1), tenant="flood")],
        headroom_pages=(9,),
        is_shared=True,
        load=Load(num_full=FLOOD_FORWARDS),
    )
    num_tokens = FLOOD_SHARES * share_len(64)
    work = work_of(plan_step(view, msgspec.structs.replace(LIMITS, num_tokens=64)))
    assert work == {"f0": num_tokens - 1, "short": 1}


def test_in_a_flood_no_forward_is_planned_behind_another() -> None:
    crowd = Crowd(ROOMY)
    crowd.bench.open("quiet before", tenant="quiet")
    flood(crowd, 200, prompt_len=60)
    in_flight = crowd.bench.engine.inspect().in_flight
    lines = crowd.bench.engine.inspect().scheduler.waiting
    while not lines.load.is_flood:
        crowd.step()
    crowd.step()
    for _ in range(20):
        crowd.step()
        assert len(in_flight) <= 1


def test_a_flood_leaves_places_to_a_tenant_that_has_none() -> None:
    crowd = Crowd(ROOMY)
    crowd.bench.open("quiet before", tenant="quiet")
    flood(crowd, 60, prompt_len=4, max_new=3000)
    for _ in range(40):
        crowd.step()
    running = crowd.bench.engine.inspect().scheduler.running
    assert len(running) == ROOMY.max_running - ROOMY.max_running // KEPT_PLACES
    crowd.arrive({"quiet": Coming(4, tenant="quiet")})
    while "quiet" in crowd.live():
        crowd.step()
    assert crowd.num_forwards("quiet") == 1


def test_a_tenant_alone_has_every_place() -> None:
    crowd = Crowd(ROOMY)
    flood(crowd, 60, prompt_len=4, max_new=3000)
    for _ in range(40):
        crowd.step()
    assert len(crowd.bench.engine.inspect().scheduler.running) == ROOMY.max_running


def test_a_flood_is_served_too_while_a_quiet_tenant_never_stops() -> None:
    crowd = Crowd(replace(ROOMY, num_in_flight=1))
    crowd.bench.open("quiet before", tenant="quiet")
    flood(crowd, 1, prompt_len=800)
    for i in range(200):
        crowd.arrive({f"q{i}": Coming(64, tenant="quiet")})
        if "f0-0" not in crowd.live():
            break
    assert crowd.num_forwards("f0-0") <= 2 * 800 // share_len(64) + 2


def test_a_turn_that_waits_for_pages_does_not_hold_up_another_tenant() -> None:
    crowd = Crowd(replace(ROOMY, num_pages=300, max_context_len=1200))
    crowd.bench.open("quiet before", tenant="quiet")
    flood(crowd, 6, prompt_len=500, max_new=200)
    for _ in range(30):
        crowd.step()
    crowd.arrive({"quiet": Coming(100, tenant="quiet")})
    while "quiet" in crowd.live():
        crowd.step()
    assert crowd.num_forwards("quiet") <= 3
    crowd.finish()


def test_a_flood_leaves_a_quiet_tenant_its_minimum_and_its_pages_to_run() -> None:
    stage = replace(ROOMY, num_pages=400, max_context_len=1200, memory_check=MemoryCheck.STRICT)
    crowd = Crowd(stage)
    crowd.bench.open("flood before", tenant="flood")
    crowd.arrive({"quiet": Coming(4 * 60, max_new=1, tenant="quiet")})
    while "quiet" in crowd.live():
        crowd.step()
    tenants = crowd.bench.cache.inspect().stores.tree.tenants
    (pool,) = crowd.bench.cache.paged_pools
    least = tenants.minimum(tenants["quiet"], pool)
    assert tenants["quiet"].held[pool] == 60 < least
    for _ in range(3):
        flood(crowd, 30, prompt_len=200, max_new=300)
        for _ in range(200):
            crowd.step()
        assert tenants["quiet"].held[pool] == 60, "idle since long before all of the others"
    crowd.arrive({"again": Coming(4 * (least - 70), max_new=4, tenant="quiet")})
    while "again" in crowd.live():
        crowd.step()
    assert crowd.num_forwards("again") <= 5
    assert crowd.bench.finished("again").num_retractions == 0


def starts_of(bench: Bench, *, cached: bool) -> list[str]:
    """The order in which turns of two tenants start, where one of them finds its prompts or not."""
    prompts = {f"{tenant}{i}": distinct(i, 60) for tenant in "ab" for i in range(6)}
    for name, prompt in prompts.items():
        bench.open(f"before {name}", salt=name[0], tenant=name[0])
        bench.open(f"of {name}", salt=name[0] if cached else name, tenant=name[0])
        if name[0] == "a":
            bench.step(
                bench.submit_command(
                    SessionId(f"before {name}"), f"first {name}", prompt, tenant=name[0]
                )
            )
            while bench.turns[TurnId(f"first {name}")].end is None:
                bench.settle()
    since = len(bench.events)
    bench.step(
        *(
            bench.submit_command(SessionId(f"of {name}"), name, prompt, tenant=name[0])
            for name, prompt in prompts.items()
        )
    )
    while any(bench.turns[TurnId(name)].end is None for name in prompts):
        bench.settle()
    return [e.turn_id for e in bench.events[since:] if isinstance(e, TurnStarted)]


def test_the_order_of_one_tenant_does_not_tell_what_another_has_cached() -> None:
    stage = replace(ROOMY, max_running=1, num_in_flight=1)
    missed = starts_of(Bench(stage), cached=False)
    found = starts_of(Bench(stage), cached=True)
    assert found == missed
    assert found[0][0] == "b", "the other has been served before"


def test_grammars_of_a_flood_leave_places_to_another_tenant() -> None:
    bench = Bench(replace(ROOMY, max_running=8))
    grammar = Grammar("regex", "a+")
    bench.step(OpenSession(session_id=SessionId("q"), tenant_salt="q", tenant="quiet"))
    for i in range(40):
        session_id = bench.open(f"f{i}", tenant="flood")
        command = bench.submit_command(session_id, f"f{i}", (1,), tenant="flood", grammar=grammar)
        bench.engine.step(bench.now_s, [command], [])
    command = bench.submit_command(SessionId("q"), "q", (1,), tenant="quiet", grammar=grammar)
    outcome = bench.engine.step(bench.now_s, [command], [])
    assert [request.turn_id for request in outcome.to_compile] == ["q"]


# The lines


def turn(tenant: str, number: int, num_tokens: int, priority: int = 0) -> Turn:
    command = SubmitTurn(
        session_id=SessionId(f"{tenant}{number}"),
        turn_id=TurnId(f"{tenant}{number}"),
        base_len=0,
        tokens=(1,) * num_tokens,
        sampling=SamplingParams(max_tokens=1, seed=1),
        tenant=tenant,
        priority=priority,
    )
    return Turn(command, order=(float(number), number), max_new=1, clock=TurnClock(0.0))


coming = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 5000), st.booleans()), max_size=40
)


@given(coming)
def test_turns_of_a_tenant_keep_their_order_and_tenants_are_served_alike(
    turns: list[tuple[str, int, bool]],
) -> None:
    lines, waiting = TenantLines(), []
    for number, (tenant, num_tokens, leaves) in enumerate(turns):
        new = turn(tenant, number, num_tokens)
        lines.insert(new)
        waiting.append(new)
        if leaves:
            lines.remove(waiting.pop(len(waiting) // 2))
    assert len(lines) == len(waiting)
    planned = list(lines)
    served = {each.request.tenant: lines.served(each.request.tenant) for each in waiting}
    for expected in planned:
        first = next(iter(lines))
        assert first is expected, "one order, however many of it are looked at"
        assert served[first.request.tenant] == min(served[t.request.tenant] for t in lines)
        lines.charge(first)
        lines.remove(first)
        served[first.request.tenant] += len(first.request.tokens)
    assert not lines
    orders = {tenant: [t.order for t in planned if t.request.tenant == tenant] for tenant in "abc"}
    assert all(each == sorted(each) for each in orders.values())


def test_a_tenant_that_was_away_comes_first_for_as_long_as_its_credit() -> None:
    lines, number = TenantLines(), 0
    for _ in range(400):
        number += 1
        lines.insert(turn("busy", number, 1000))
        lines.charge(first := next(iter(lines)))
        lines.remove(first)
    for _ in range(400):
        number += 1
        lines.insert(turn("busy", number, 1000))
        lines.insert(turn("back", number + 1000, 1000))
    num_first = 0
    while (first := next(iter(lines))).request.tenant == "back":
        lines.charge(first)
        lines.remove(first)
        num_first += 1
    assert num_first * 1000 == pytest.approx(CREDIT_TOKENS, abs=2000)


def test_who_was_served_as_little_as_counts_is_forgotten() -> None:
    lines = TenantLines()
    for number in range(1000):
        lines.insert(each := turn(f"t{number}", number, 1000))
        lines.charge(each)
        lines.remove(each)
        busy = turn("busy", number, CREDIT_TOKENS)
        lines.insert(busy)
        lines.charge(busy)
        lines.remove(busy)
    assert len(lines._served) == len(lines._paid) < 8


def test_of_many_tenants_those_are_remembered_that_were_served_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tenant_lines, "MAX_SERVED_TENANTS", 10)
    lines = TenantLines()
    for number in range(200):
        for tenant, num_tokens in (("flood", 20), (f"t{number}", 5)):
            lines.insert(each := turn(tenant, number, num_tokens))
            lines.charge(each)
            lines.remove(each)
            lines.charge_outputs(each)
    assert len(lines._served) == len(lines._paid) == 10
    assert lines.served("flood") == 200 * 20, "it gains nothing by leaving"
    lines.insert(turn("flood", 1000, 1))
    lines.insert(turn("t0", 1001, 1))
    assert next(iter(lines)).request.tenant == "t0"


def test_a_level_of_priority_is_worth_tokens_between_tenants() -> None:
    lines = TenantLines()
    lines.insert(turn("a", 1, PRIORITY_TOKENS - 1))
    for number in range(2, 6):
        lines.insert(turn("a", number, 1))
    lines.insert(turn("b", 7, PRIORITY_TOKENS, priority=1))
    lines.insert(turn("b", 8, 1, priority=1))
    lines.insert(turn("b", 9, 1, priority=1))
    names = [each.turn_id for each in lines]
    assert names[:3] == ["b7", "a1", "b8"], names


needs = st.lists(st.integers(1, 5000), min_size=1, max_size=20)


@given(needs, st.integers(1, 600), st.data())
def test_tenants_get_all_that_there_is_the_least_served_first(
    needs: list[int], budget: int, data: st.DataObject
) -> None:
    first = data.draw(st.lists(st.integers(0, len(needs) - 1), max_size=2))
    shares = tenant_shares(needs, budget, first=first)
    assert sum(shares) == min(budget, sum(needs))
    assert all(0 <= share <= need for share, need in zip(shares, needs, strict=True))
    chosen = list(dict.fromkeys([*first, *range(len(needs))]))[: min(budget, MAX_SHARES)]
    assert all(shares[i] >= min(needs[i], share_len(budget)) for i in chosen)
    most = needs[0], budget - share_len(budget) * (min(budget, MAX_SHARES) - 1)
    assert shares[0] >= min(most) or 0 not in chosen


@given(needs, st.integers(1, 600), st.data())
def test_in_a_flood_nobody_is_left_out_of_two_forwards_in_a_row(
    needs: list[int], budget: int, data: st.DataObject
) -> None:
    num_behind = data.draw(st.integers(0, len(needs)))
    first = data.draw(st.lists(st.integers(0, len(needs) - 1), max_size=2))
    may_postpone = data.draw(st.booleans())
    shares = flooded_shares(
        needs, budget, num_behind=num_behind, first=first, may_postpone=may_postpone
    )
    assert all(0 <= share <= need for share, need in zip(shares, needs, strict=True))
    behind, late = sum(needs[:num_behind]), sum(needs[num_behind:])
    num_shares = FLOOD_SHARES if num_behind == 0 else 1
    part = min(late, budget, num_shares * share_len(budget))
    if may_postpone and 0 < behind <= budget:
        assert shares == [*needs[:num_behind], *[0] * (len(needs) - num_behind)]
        return
    assert sum(shares[num_behind:]) == part, "all others together have a share or two"
    assert sum(shares[:num_behind]) == min(behind, budget - part)
    chosen = [i for i in dict.fromkeys([*first, *range(num_behind, len(needs))]) if i >= num_behind]
    for i in chosen[: min(MAX_SHARES, part)]:
        assert shares[i] >= min(needs[i], share_len(part))
