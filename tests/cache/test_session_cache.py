"""The façade, verb by verb."""

from __future__ import annotations

import pytest

from cache.errors import (
    HistoryMismatch,
    NamespaceMismatch,
    OutOfPages,
    OutOfRows,
    SlotBusy,
    SlotExists,
    UnknownSession,
)
from cache.types import SlotState, TurnId
from tests.cache.audit import audit
from tests.cache.headroom import headroom
from tests.cache.kv_world import POOL, World
from tests.cache.two_sessions import ALICE, BOB, PROMPT, A, B, C, make_world, run_turn


@pytest.fixture
def world() -> World:
    return make_world()


# A session lives


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_each_turn_computes_only_what_is_new(page_size: int) -> None:
    world = make_world(page_size, num_pages=400)
    for number in range(6):
        total = len(world.histories[A])
        assert run_turn(world, A, PROMPT) == max(0, total - 1), f"turn {number}"


def test_G_every_residue_of_history_input_and_chunk_modulo_the_page() -> None:
    for history in range(1, 6):
        for new in range(1, 6):
            for chunk in (1, 2, 3, 4, 5):
                world = make_world(4, num_pages=60)
                run_turn(world, A, (PROMPT * 2)[:history], num_outputs=1)
                world.begin(A, PROMPT[:new])
                for _ in range(8):
                    world.step(A, chunk)
                world.end(A, len(world.turns[A].tokens))
                world.check()
                world.close_everything()


def test_G6_a_turn_that_is_wholly_published_still_computes_its_last_token(world: World) -> None:
    run_turn(world, A, PROMPT[:8], num_outputs=1)
    loan = world.begin(B, PROMPT[:8])
    assert loan.cached_len == 4, "whole pages before the last token"


def test_a_turn_without_input_recomputes_the_last_token_of_the_history(world: World) -> None:
    run_turn(world, A, PROMPT)
    world.begin(A, [])
    world.step(A, 64)
    world.check()


def test_asking_again_for_the_same_turn_is_the_same_answer(world: World) -> None:
    loan = world.begin(A, PROMPT)
    before = world.fingerprint()
    turn_id = world.turns[A].turn_id
    for _ in range(3):
        again = world.cache.begin_turn(A, turn_id, base_len=0, new_tokens=PROMPT)
        assert again is loan
    assert world.fingerprint() == before


def test_L5_a_turn_that_ends_on_its_first_step_gives_everything_back(world: World) -> None:
    run_turn(world, A, PROMPT, num_outputs=1)
    world.close_everything()


def test_a_turn_that_ended_before_it_computed_anything_holds_no_row(world: World) -> None:
    world.begin(A, PROMPT)
    world.end(A, 0)
    assert world.cache.slot(A).state is SlotState.COLD
    assert headroom(world.cache).free_rows == 4


# Busy, unknown, mismatched: refused, and nothing changed


def test_R1_L11_a_rejected_second_turn_disturbs_nothing_nor_does_a_third(world: World) -> None:
    world.begin(A, PROMPT)
    world.step(A, 4)
    before = world.fingerprint()
    for turn_id in (TurnId("second"), TurnId("third")):
        with pytest.raises(SlotBusy):
            world.cache.begin_turn(A, turn_id, base_len=0, new_tokens=[1])
    assert world.fingerprint() == before
    world.step(A, 64)
    world.check()


def test_one_turn_borrows_one_session(world: World) -> None:
    world.begin(A, PROMPT)
    turn_id = world.turns[A].turn_id
    with pytest.raises(SlotBusy):
        world.cache.begin_turn(B, turn_id, base_len=0, new_tokens=[1])


def test_verbs_of_a_turn_that_ended_are_refused(world: World) -> None:
    world.begin(A, PROMPT)
    turn_id = world.turns[A].turn_id
    world.end(A, 0)
    for verb in (
        lambda: world.cache.grow(turn_id, 4),
        lambda: world.cache.record(turn_id, 0),
        lambda: world.cache.end_turn(turn_id, 0),
        lambda: world.cache.retract(turn_id),
    ):
        with pytest.raises(UnknownSession):
            verb()


def test_a_turn_cannot_build_on_tokens_the_slot_does_not_hold(world: World) -> None:
    before = world.fingerprint()
    with pytest.raises(HistoryMismatch):
        world.cache.begin_turn(A, TurnId("t"), base_len=1, new_tokens=[1])
    assert world.fingerprint() == before


@pytest.mark.parametrize("num_tokens", [0, 513])
def test_a_context_that_no_row_can_hold_is_refused(world: World, num_tokens: int) -> None:
    before = world.fingerprint()
    with pytest.raises(ValueError, match="does not fit a row"):
        world.cache.begin_turn(A, TurnId("t"), base_len=0, new_tokens=[1] * num_tokens)
    assert world.fingerprint() == before


def test_L4_a_turn_refused_for_rows_leaves_no_lock_and_no_tokens() -> None:
    world = make_world(num_rows=1)
    run_turn(world, B, PROMPT)
    world.cool(B)
    world.begin(A, PROMPT)
    before = world.fingerprint()
    with pytest.raises(OutOfRows):
        world.cache.begin_turn(B, TurnId("t"), base_len=13, new_tokens=[1])
    assert world.fingerprint() == before
    world.check()


def test_an_id_is_opened_once(world: World) -> None:
    with pytest.raises(SlotExists):
        world.cache.open(A, namespace=ALICE)


# Growing


def test_pages_are_bought_all_or_not_at_all() -> None:
    world = make_world(num_pages=4)
    world.begin(A, PROMPT * 2)
    turn_id, before = world.turns[A].turn_id, world.fingerprint()
    with pytest.raises(OutOfPages):
        world.cache.grow(turn_id, 13)
    assert world.fingerprint() == before
    assert len(world.cache.grow(turn_id, 12)) == 1
    assert world.cache.grow(turn_id, 12) == []


def test_growing_evicts_what_nobody_locked_and_no_more_than_needed() -> None:
    world = make_world(num_pages=9)
    run_turn(world, A, PROMPT + PROMPT[:4])
    world.cool(A)
    run_turn(world, B, [2] * 18, num_outputs=1)
    assert world.marks["eviction"] == 1
    assert headroom(world.cache).evictable_pages[POOL] == 3
    world.close_everything()


def test_a_pool_of_locked_pages_is_out_of_pages_until_someone_cools() -> None:
    world = make_world(num_pages=7)
    run_turn(world, A, PROMPT)
    world.begin(B, [2] * 16)
    turn_id = world.turns[B].turn_id
    with pytest.raises(OutOfPages):
        world.cache.grow(turn_id, 16)
    (idle,) = world.cache.parked
    assert (idle.session_id, dict(idle.freed_pages)) == (A, {POOL: 3})
    world.cool(A)
    world.step(B, 64)
    world.check()


def test_overshoot_pages_are_freed_and_never_read() -> None:
    world = make_world()
    world.begin(A, PROMPT)
    world.step(A, 64)
    world.overshoot(A, 9)
    assert world.cache.slot(A).allocated_len == 20
    world.end(A, 11)
    assert world.cache.slot(A).allocated_len == 12
    world.begin(A, PROMPT)
    world.step(A, 64)
    world.check()


# Publishing


def test_a_prompt_is_published_when_it_is_complete_and_not_between_chunks(world: World) -> None:
    world.begin(A, PROMPT)
    world.step(A, 8)
    assert world.cache.slot(A).protected_len == 0, "A6, A7: nothing before the prompt is done"
    world.step(A, 8)
    assert world.cache.slot(A).protected_len == 8
    for _ in range(4):
        world.step(A, 1)
    assert world.cache.slot(A).protected_len == 8, "answers are published at the end"
    world.end(A, 14)
    assert world.cache.slot(A).protected_len == 12


def test_another_session_matches_a_prompt_while_its_turn_still_runs(world: World) -> None:
    world.begin(A, PROMPT)
    world.step(A, 64)
    assert world.begin(B, PROMPT).cached_len == 8


def test_two_prompts_computed_at_once_end_as_one_copy(world: World) -> None:
    for session_id in (A, B):
        world.begin(session_id, PROMPT)
    for session_id in (A, B):
        world.step(session_id, 64)
        world.check()
    assert world.marks["duplicate re-pointed"] == 1
    accounts = world.cache.accounts()[POOL]
    assert (accounts.tree_protected, accounts.active) == (2, 2)
    for session_id in (A, B):
        world.step(session_id, 1)


def test_max_reuse_len_recomputes_old_positions_and_keeps_one_copy(world: World) -> None:
    run_turn(world, A, PROMPT)
    loan = world.begin(A, [1], max_reuse_len=6)
    assert loan.cached_len == world.cache.slot(A).protected_len == 4
    world.step(A, 64)
    world.end(A, 14)
    world.check()
    assert world.cache.accounts()[POOL].tree_protected == 3


def test_a_resident_session_finds_what_another_published_after_its_history(world: World) -> None:
    run_turn(world, A, PROMPT)
    run_turn(world, B, PROMPT)
    run_turn(world, A, PROMPT * 2)
    assert world.histories[A][:13] == world.histories[B]
    assert world.begin(B, PROMPT * 2).cached_len == 32


# Ending


def test_nothing_kept_restores_the_session_exactly(world: World) -> None:
    for rounds in range(5):
        run_turn(world, A, PROMPT[: rounds + 1], num_outputs=2)
        before = world.cache.slot(A)
        world.begin(A, PROMPT)
        world.step(A, 64)
        world.step(A, 1)
        world.end(A, len(world.histories[A]))
        world.check()
        after = world.cache.slot(A)
        assert after.num_tokens == before.num_tokens
        # The last token of the history had no KV before; the turn computed it.
        assert after.committed_len == before.committed_len + 1


def test_a_cut_page_that_another_session_locked_is_recomputed(world: World) -> None:
    run_turn(world, A, PROMPT[:5], num_outputs=1)
    world.begin(A, PROMPT)
    world.step(A, 64)
    tokens = list(world.turns[A].tokens)
    world.begin(B, tokens)
    world.end(A, 6)
    assert world.cache.slot(A).committed_len == 4
    assert run_turn(world, A, [2, 2, 2]) == 4
    world.step(B, 64)
    world.check()


def test_A14_retract_commits_nothing_and_the_turn_resumes_from_what_it_published(
    world: World,
) -> None:
    run_turn(world, A, PROMPT)
    world.begin(A, PROMPT)
    for _ in range(3):
        world.step(A, 64)
    computed = world.turns[A].computed_len
    world.retract(A)
    assert len(world.cache.tokens(A)) == 13
    assert world.cache.slot(A).state is SlotState.COLD
    loan = world.begin(A, world.waiting[A])
    assert loan.cached_len == computed // 4 * 4
    world.check()


def test_L2_retracting_releases_what_was_bought_past_the_last_token(world: World) -> None:
    world.begin(A, PROMPT)
    world.step(A, 64)
    world.overshoot(A, 12)
    world.retract(A)
    accounts = world.cache.accounts()[POOL]
    assert (accounts.active, accounts.tree_evictable) == (0, 2)


def test_A13_a_turn_that_was_not_finite_leaves_no_page_behind(world: World) -> None:
    run_turn(world, A, PROMPT)
    before = world.cache.slot(A)
    world.begin(A, PROMPT)
    world.step(A, 64)
    world.discard(A)
    world.check()
    after = world.cache.slot(A)
    assert (after.num_tokens, after.committed_len) == (before.num_tokens, before.committed_len)
    assert world.cache.peek(world.cache.tokens(A), ALICE).matched_len == before.protected_len


def test_A15_a_turn_that_computed_a_chunk_and_is_cancelled_leaves_committed_in_the_history(
    world: World,
) -> None:
    run_turn(world, A, PROMPT)
    world.begin(A, PROMPT)
    world.step(A, 5)
    world.end(A, 13)
    assert world.cache.slot(A).committed_len == 13
    run_turn(world, A, PROMPT)


# Rewinding, forking, closing


@pytest.mark.parametrize("to_len", range(14))
def test_rewinding_keeps_what_is_before_and_the_tree_keeps_the_rest(to_len: int) -> None:
    world = make_world()
    run_turn(world, A, PROMPT)
    tail = world.histories[A][to_len:]
    world.rewind(A, to_len)
    world.check()
    loan = world.begin(A, tail or [1])
    assert loan.cached_len >= 8 if tail else loan.cached_len == 12


def test_a_turn_on_a_shorter_base_is_a_rewind(world: World) -> None:
    run_turn(world, A, PROMPT)
    loan = world.begin(A, [2, 2, 2], base_len=5)
    assert loan.cached_len == 4
    world.step(A, 64)
    world.check()


def test_a_session_that_is_rewound_to_nothing_holds_nothing(world: World) -> None:
    run_turn(world, A, PROMPT)
    world.rewind(A, 0)
    assert world.cache.slot(A).state is SlotState.COLD
    assert headroom(world.cache).free_rows == 4


def test_a_fork_shares_pages_and_then_goes_its_own_way(world: World) -> None:
    run_turn(world, A, PROMPT)
    world.fork(A, C)
    assert world.begin(C, [2]).cached_len == 12
    world.step(C, 64)
    run_turn(world, A, [1])
    world.check()


def test_a_fork_of_a_running_session_does_not_see_the_turn(world: World) -> None:
    run_turn(world, A, PROMPT)
    world.begin(A, PROMPT)
    world.step(A, 64)
    world.cache.fork(A, C, namespace=ALICE)
    assert world.cache.tokens(C).tolist() == world.histories[A]


def test_I19_a_session_of_another_namespace_is_not_forked(world: World) -> None:
    run_turn(world, A, PROMPT)
    with pytest.raises(NamespaceMismatch):
        world.cache.fork(A, C, namespace=BOB)
    assert C not in world.cache


def test_A2_closing_a_lent_session_waits_for_its_turn(world: World) -> None:
    world.begin(A, PROMPT)
    world.step(A, 4)
    assert world.cache.close(A) is False
    assert world.cache.close(A) is False, "closing twice is closing once"
    assert world.cache.slot(A).state is SlotState.CLOSING
    world.closing.add(A)
    with pytest.raises(SlotBusy):
        world.cache.begin_turn(A, TurnId("late"), base_len=0, new_tokens=[1])
    world.step(A, 64)
    world.end(A, 0)
    assert A not in world.cache
    assert world.cache.close(A) is True


@pytest.mark.parametrize("how", ["retract", "discard", "quarantine"])
def test_a_deferred_close_happens_however_the_turn_ends(world: World, how: str) -> None:
    world.begin(A, PROMPT)
    world.step(A, 64)
    world.close(A)
    getattr(world, how)(A)
    assert A not in world.cache
    audit(world.cache)


def test_closing_keeps_what_was_published_for_others(world: World) -> None:
    run_turn(world, A, PROMPT)
    world.close(A)
    assert world.begin(B, PROMPT).cached_len == 8
