"""Tails: what is computed behind a history at rest is kept, given up and dropped like nothing."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from cache.types import Retention, SessionId, SlotState
from tests.cache.headroom import headroom
from tests.cache.kv_world import NUM_TOKEN_IDS, Mixture, World, make_cache
from tests.cache.player import Player, act
from tests.cache.two_sessions import ALICE, PROMPT, A, B, make_world, run_turn
from tests.depth import at_depth

DRAFT = [2, 1, 0, 2, 1, 1, 0, 2, 2, 0]


def test_a_turn_keeps_what_it_has_in_common_with_a_draft() -> None:
    world = make_world()
    run_turn(world, A, PROMPT)
    history = len(world.histories[A])
    world.draft(A, DRAFT, 64)
    world.check()
    loan = world.begin(A, [*DRAFT[:6], 1, 0])
    assert loan.cached_len == history + 6
    assert loan.tail_len == loan.cached_len - (history - 1)
    world.step(A, 64)
    world.end(A, len(world.turns[A].tokens))
    world.check()
    assert world.cache.slot(A).num_tokens == history + 9


def test_a_draft_that_is_typed_computes_each_token_once() -> None:
    world = make_world()
    run_turn(world, A, PROMPT)
    history = len(world.histories[A])
    for length in range(1, len(DRAFT) + 1):
        world.draft(A, DRAFT[:length], 64)
        world.check()
    corrected = [*DRAFT[:5], 0, 1]
    view = world.cache.tails.begin(A, history, corrected)
    assert view.computed_len == history + 5


def test_an_abandoned_draft_leaves_nothing() -> None:
    world = make_world()
    run_turn(world, A, PROMPT)
    run_turn(world, B, [0, 0, 1])
    tree, before = world._num_tree_pages(), world.cache.accounts()
    world.draft(A, DRAFT, 3)
    assert world.cache.accounts() != before
    world.drop_draft(A)
    world.check()
    assert world._num_tree_pages() == tree, "a draft is not published"
    assert world.cache.accounts() == before
    assert world.cache.slot(A).num_tokens == len(world.histories[A])
    assert not world.cache.tails.num_pages.total()


def test_pages_of_drafts_are_the_first_to_go() -> None:
    """A turn that needs them takes those of the oldest draft, and nobody is cooled or evicted."""
    world = make_world(num_pages=14)
    for session_id in (A, B):
        run_turn(world, session_id, PROMPT[:5], num_outputs=1)
    for session_id in (A, B):
        world.draft(session_id, [*DRAFT, *DRAFT], 64)
    free = headroom(world.cache)
    tree = world._num_tree_pages()
    c = SessionId("c")
    world.open(c, ALICE)
    world.begin(c, [1] * 20)
    world.device.apply(world.cache.grow(world.turns[c].turn_id, 20))
    world.check()
    after = headroom(world.cache)
    assert free.pages(world.pool) - after.pages(world.pool) == 5
    assert world._num_tree_pages() == tree
    slots = world.cache.inspect().slots
    assert slots[A].tail is None, "the oldest goes first"
    assert slots[A].state is slots[B].state is SlotState.PARKED
    assert slots[B].tail is not None, "and no more than is needed"


def test_a_draft_takes_free_pages_only() -> None:
    world = make_world(num_pages=9)
    run_turn(world, A, PROMPT, num_outputs=1)
    run_turn(world, B, [2] * 9, num_outputs=1)
    tree = world._num_tree_pages()
    world.draft(A, DRAFT, 1)
    assert world.marks["no page for a draft"]
    world.check()
    assert world._num_tree_pages() == tree
    assert world.cache.slot(B).state is SlotState.PARKED


def test_a_cold_session_that_a_draft_warmed_is_the_first_to_be_cooled() -> None:
    world = make_world(num_rows=2)
    run_turn(world, A, PROMPT)
    run_turn(world, B, [0, 1])
    world.cool(A)
    world.draft(A, DRAFT, 64)
    world.check()
    assert next(iter(world.cache.parked)).session_id == A
    world.cool(A)
    world.check()
    assert world.cache.slot(A).num_tokens == len(world.histories[A])


def test_pinning_protects_no_row_and_no_page_for_a_draft() -> None:
    """A pinned session that was cold holds nothing of its quota: it is cooled before all others."""
    world = World(make_cache(num_rows=2, pinned_quota_pages=8), page_size=4)
    world.open(A, ALICE, PROMPT, Retention.PINNED)
    world.open(B, ALICE)
    run_turn(world, B, PROMPT)
    world.draft(A, DRAFT, 64)
    world.check()
    assert world.cache.slot(A).state is SlotState.PARKED
    assert [each.session_id for each in world.cache.parked] == [A, B]
    world.drop_draft(A)
    world.check()
    assert [each.session_id for each in world.cache.parked] == [B]
    world.draft(A, DRAFT, 64)
    run_turn(world, A, [*DRAFT, 1])
    assert [each.session_id for each in world.cache.parked] == [B], "a turn's are protected"


def test_what_a_draft_cuts_off_a_pinned_history_no_longer_counts_for_its_quota() -> None:
    """A draft behind a rewind cuts the history at once; with nothing left of it, its row goes."""
    world = World(make_cache(num_rows=2, pinned_quota_pages=5), page_size=4)
    world.open(A, ALICE, (), Retention.PINNED)
    run_turn(world, A, PROMPT)
    for kept in (4, 0):
        del world.histories[A][kept:]
        world.draft(A, DRAFT, 64)
        world.check()
        assert world.cache._pinned.pages_of(A) == (kept // 4,), "nor does the tail"
        world.drop_draft(A)
        world.check()
        assert world.cache._pinned.pages_of(A) == (kept // 4,)
    assert world.cache.slot(A).state is SlotState.COLD
    world.open(B, ALICE, (), Retention.PINNED)
    run_turn(world, B, PROMPT)


def test_a_session_that_only_a_draft_warmed_is_cold_again_without_it() -> None:
    world = make_world()
    run_turn(world, A, PROMPT)
    world.cool(A)
    world.cache.flush()
    world.draft(A, DRAFT, 64)
    world.drop_draft(A)
    world.check()
    assert world.cache.slot(A).state is SlotState.COLD
    assert headroom(world.cache).free_rows == 4


def test_a_turn_that_fails_gives_back_the_draft_that_it_took() -> None:
    world = make_world(page_size=1)
    run_turn(world, A, PROMPT)
    before = world.cache.slot(A)
    world.draft(A, DRAFT, 64)
    world.begin(A, DRAFT)
    world.step(A, 64)
    world.discard(A)
    world.check()
    assert world.cache.slot(A) == before


@pytest.mark.parametrize("mixture", ["full", "full + window", "window", "full + recurrent"])
def test_a_turn_that_says_something_else_finds_a_session_that_a_draft_warmed_cold(
    mixture: Mixture,
) -> None:
    """Also when it is rolled back: a window that it has passed by then is lost, as without it."""
    world = World(make_cache(mixture=mixture), page_size=4)
    plain = World(make_cache(mixture=mixture), page_size=4)
    for each in (world, plain):
        each.open(A, ALICE)
        run_turn(each, A, PROMPT)
        each.cool(A)
    world.draft(A, DRAFT, 64)
    assert world.cache.slot(A).state is SlotState.PARKED
    for each in (world, plain):
        loan = each.begin(A, [0, *DRAFT, *DRAFT])
        assert loan.tail_len == 0
        each.step(A, 64)
        each.check()
        each.end(A, each.turns[A].base_len)
        each.check()
    assert world.cache.slot(A) == plain.cache.slot(A)
    assert world.cache.accounts() == plain.cache.accounts()


def test_a_result_that_comes_late_is_not_recorded() -> None:
    world = make_world()
    run_turn(world, A, PROMPT)
    tails, history = world.cache.tails, len(world.histories[A])
    view = tails.begin(A, history, DRAFT)
    tails.grow(A, history + 4)
    tails.drop(A)
    assert not tails.record(A, view.tail, history + 4)
    again = tails.begin(A, history, DRAFT)
    assert not tails.record(A, view.tail, history + 4)
    assert again.computed_len <= history


def test_a_quote_counts_the_draft_that_the_turn_will_keep() -> None:
    world = make_world()
    run_turn(world, A, PROMPT)
    history = len(world.histories[A])
    world.draft(A, DRAFT, 64)
    new = np.array([*DRAFT[:3], 0], np.int32)
    assert world.cache.kept_len(A, history, new, history + 3) == history + 3
    assert world.cache.kept_len(A, history, new, history + 1) == history + 1


class DraftingPlayer(Player):
    """A player whose sessions draft as well, mostly what they said last with another end."""

    def draft(self, random: Random) -> None:
        session_id = random.choice(self.idle)
        self._draft(session_id, random)
        if random.random() < 0.4 and self.world.cache.inspect().slots[session_id].tail:
            self._say_what_was_drafted(session_id, random)

    def _draft(self, session_id: SessionId, random: Random) -> None:
        if session_id in self.world.waiting or len(self.world.histories[session_id]) > 64:
            return
        tokens = self.world.drafts.get(session_id, [])
        tokens = tokens[: random.randint(0, len(tokens))]
        tokens = tokens + [random.randrange(NUM_TOKEN_IDS) for _ in range(random.randint(1, 9))]
        self.world.draft(session_id, tokens[:40], random.choice([1, 3, 64]))

    def drop_draft(self, random: Random) -> None:
        self.world.drop_draft(random.choice(self.idle))

    def _say_what_was_drafted(self, session_id: SessionId, random: Random) -> None:
        if self.world.cache.slot(session_id).retention.name == "PINNED":
            return
        said = self.world.drafts[session_id]
        tokens = [*said[: random.randint(0, len(said))], random.randrange(NUM_TOKEN_IDS)]
        loan = self.world.begin(session_id, tokens)
        self.world._mark("turn keeps a draft", loan.tail_len > 0)


@pytest.mark.parametrize(
    "mixture", ["full", "full + window", "latent", "window", "full + recurrent"]
)
@pytest.mark.parametrize("page_size", at_depth([4], proof=[1, 4, 16]))
def test_walks_with_drafts_end_with_every_page_back(page_size: int, mixture: Mixture) -> None:
    reached: Counter[str] = Counter()
    for seed in range(at_depth(2, proof=30)):
        player, random = DraftingPlayer(page_size, mixture=mixture), Random(seed)
        for _ in range(250):
            roll = random.random()
            if player.idle and roll < 0.25:
                player.draft(random)
            elif player.idle and roll < 0.3:
                player.drop_draft(random)
            else:
                act(player, random)
            player.world.check()
        player.world.close_everything()
        reached.update(player.world.marks)
    wanted = {"draft computed", "draft dropped", "turn keeps a draft", "no page for a draft"}
    assert wanted <= reached.keys(), reached
