"""Engines with several pools: each of them in turn the one that is short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cache.types import SessionId, TurnId, pages_for
from session_server.core.events import SessionCooled
from tests.cache.headroom import headroom
from tests.engine.bench import Bench
from tests.sim.hand_engine import Sizes
from tests.sim.layers import POOLS, LayerKind, Layers, Mixture

WINDOW = 8
FULL, WINDOWED = POOLS[LayerKind.FULL], POOLS[LayerKind.WINDOW]
MIXTURES = (Mixture.FULL_AND_WINDOW, Mixture.WINDOW, Mixture.LATENT, Mixture.FULL_AND_RECURRENT)
STAGE = Sizes(chunk_tokens=8, num_rows=8, max_running=4, max_context_len=200)


def prompt(name: int, length: int) -> tuple[int, ...]:
    """Tokens that no other name begins with."""
    return tuple(1 + (name * 13 + i * i) % 31 for i in range(length))


def stage(mixture: Mixture, *, num_pages: int, window_pages: int | None = None) -> Sizes:
    return replace(STAGE, num_pages=num_pages, layers=Layers(mixture, WINDOW, window_pages))


def talk(bench: Bench, *, num_sessions: int, num_turns: int, length: int) -> None:
    """Sessions that grow side by side, all turns of a round submitted at once."""
    histories = {bench.open(f"s{i}"): prompt(i, 0) for i in range(num_sessions)}
    for turn in range(num_turns):
        commands = []
        for i, (session_id, history) in enumerate(histories.items()):
            tokens = prompt(i + turn, length)
            commands.append(
                bench.submit_command(
                    session_id, f"{session_id}.{turn}", tokens, base_len=len(history), max_tokens=6
                )
            )
            histories[session_id] = history + tokens
        bench.run(*commands, max_steps=20_000)
        for session_id, history in histories.items():
            name = f"{session_id}.{turn}"
            bench.expect(name, history)
            histories[session_id] = history + tuple(bench.tokens(name))
            assert bench.finished(name).history_len == len(histories[session_id])
    bench.close_all()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_in_a_pool_too_small_for_all_everybody_says_what_a_lone_turn_says(
    mixture: Mixture, page_size: int
) -> None:
    small = stage(mixture, num_pages=pages_for(150, page_size))
    bench = Bench(replace(small, page_size=page_size))
    talk(bench, num_sessions=5, num_turns=4, length=20)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_where_the_window_pool_is_short_windows_are_asked_for(page_size: int) -> None:
    """Full attention has room for everybody, the windows have it for a turn and a half."""
    window_pages = 3 * pages_for(WINDOW, page_size) + pages_for(16, page_size) + 3
    roomy = stage(
        Mixture.FULL_AND_WINDOW, num_pages=pages_for(900, page_size), window_pages=window_pages
    )
    bench = Bench(replace(roomy, page_size=page_size))
    talk(bench, num_sessions=5, num_turns=4, length=20)
    assert bench.engine.counters.coolings > 0


def test_where_full_attention_is_short_full_pages_are_asked_for() -> None:
    bench = Bench(stage(Mixture.FULL_AND_WINDOW, num_pages=30, window_pages=300))
    talk(bench, num_sessions=5, num_turns=4, length=20)
    assert bench.engine.counters.coolings > 0


def test_idle_sessions_that_hold_all_windows_give_them_to_a_turn() -> None:
    bench = Bench(stage(Mixture.FULL_AND_WINDOW, num_pages=400, window_pages=16))
    names = [f"idle{i}" for i in range(7)]
    for i, name in enumerate(names):
        bench.run(bench.submit_command(bench.open(name), name, prompt(i, 20)))
    left = headroom(bench.cache)
    assert left.pages(WINDOWED) < 9, "a long turn takes nine"
    assert left.pages(FULL) > 300
    newcomer = bench.open("new")
    bench.run(bench.submit_command(newcomer, "new", prompt(50, 60), max_tokens=30))
    bench.expect("new", prompt(50, 60))
    assert any(isinstance(event, SessionCooled) for event in bench.events)
    bench.close_all()


def test_a_session_with_no_full_page_of_its_own_is_not_cooled_for_full_pages() -> None:
    """Its history is the beginning of another's; only the window at its end is its own."""
    bench = Bench(stage(Mixture.FULL_AND_WINDOW, num_pages=30, window_pages=300))
    beginning = prompt(1, 20)
    for name, tokens in (("short", beginning), ("long", beginning + prompt(2, 20))):
        command = bench.submit_command(bench.open(name), name, tokens, max_tokens=0)
        bench.run(command)
    freed = {idle.session_id: dict(idle.freed_pages) for idle in bench.cache.parked}
    assert freed["short"] == {FULL: 0, WINDOWED: 2}
    bench.run(bench.submit_command(bench.open("new"), "new", prompt(50, 90)))
    cooled = [e.session_id for e in bench.events if isinstance(e, SessionCooled)]
    assert cooled == ["long"]
    assert bench.cache.slot(SessionId("short")).committed_len == 20
    bench.close_all()


@pytest.mark.parametrize("num_in_flight", [1, 2])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_turn_takes_no_more_of_a_window_pool_than_it_was_priced_at(
    page_size: int, num_in_flight: int
) -> None:
    """Of any length, beyond what its session held before it."""
    roomy = stage(Mixture.FULL_AND_WINDOW, num_pages=300)
    bench = Bench(replace(roomy, page_size=page_size, num_in_flight=num_in_flight))
    session_id = bench.open("s")
    bench.run(bench.submit_command(session_id, "first", prompt(1, 30)))
    slot = bench.cache.slot(session_id)
    before = slot.protected_pages[WINDOWED] + slot.private_pages[WINDOWED]
    component = next(c for c in bench.cache.inspect().stores.components if c.pool == WINDOWED)
    assert before <= component.parked_pages(10_000)
    most = component.running_pages(10_000, num_in_flight * bench.sizes.chunk_tokens)
    seen = 0
    outcome = bench.step(
        bench.submit_command(session_id, "t", prompt(2, 80), base_len=30, max_tokens=60)
    )
    while len(bench.runner) or not outcome.is_blocked:
        outcome = bench.settle() if outcome.is_blocked else bench.step()
        if bench.turns[TurnId("t")].end is None:
            slot = bench.cache.slot(session_id)
            seen = max(seen, slot.protected_pages[WINDOWED] + slot.private_pages[WINDOWED])
    bench.expect("t", prompt(1, 30)[:30] + prompt(2, 80))
    assert before < seen <= before + most
    assert most - (seen - before) <= 2 + pages_for(WINDOW, page_size), "and not much less"
    bench.close_all()


# How long a turn may become


def test_a_turn_over_windows_alone_is_as_long_as_a_context() -> None:
    bench = Bench(stage(Mixture.WINDOW, num_pages=20))
    assert bench.engine.max_turn_len == bench.sizes.max_context_len == 200
    bench.run(bench.submit_command(bench.open("s"), "t", prompt(1, 150), max_tokens=50))
    assert bench.finished("t").history_len == 200
    bench.expect("t", prompt(1, 150))
    bench.close_all()


@pytest.mark.parametrize(
    ("mixture", "num_pages", "window_pages", "most"),
    [
        (Mixture.FULL_AND_WINDOW, 20, None, 80),
        (Mixture.FULL_AND_WINDOW, 400, 20, 200),
        (Mixture.FULL_AND_WINDOW, 400, 9, 36),
        (Mixture.LATENT, 20, None, 80),
        (Mixture.WINDOW, 9, None, 36),
    ],
)
def test_what_never_fits_is_refused_at_once(
    mixture: Mixture, num_pages: int, window_pages: int | None, most: int
) -> None:
    bench = Bench(stage(mixture, num_pages=num_pages, window_pages=window_pages))
    assert bench.engine.max_turn_len == most
    session_id = bench.open("s")
    bench.run(bench.submit_command(session_id, "long", prompt(1, most), max_tokens=1))
    assert bench.failed("long").code == "context_too_long"
    bench.run(bench.submit_command(session_id, "fits", prompt(1, most - 1), max_tokens=9))
    assert bench.finished("fits").history_len == most
    bench.expect("fits", prompt(1, most - 1))
    bench.close_all()


def test_pinned_sessions_keep_their_part_of_every_pool() -> None:
    """A quota of half of the largest pool is half of each."""
    small = stage(Mixture.FULL_AND_WINDOW, num_pages=100, window_pages=40)
    bench = Bench(replace(small, pinned_quota_pages=50))
    assert bench.cache._pinned.quota_pages == {FULL: 50, WINDOWED: 20}
