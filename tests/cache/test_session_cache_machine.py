"""Programs of verbs against the façade, audited after each, with the KV echo as oracle.

A program that never evicts proves nothing about eviction: both tests count what they reach and
fail when something interesting never happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import product
from random import Random
from typing import ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.cache.free_lists import Allocation
from tests.cache.kv_world import Mixture
from tests.cache.player import INTERESTING, Player, act
from tests.depth import at_depth

RARE = {
    "deferred close",
    "duplicate re-pointed",
    "fork match",
    "page taken back",
    "pin quota refusal",
    "resident extends its match",
    "rollback to a window",
}
"""Too rare for short programs, whose draws depend on which modules the process has imported; the
walks reach them."""

MIN_WALKS, MAX_WALKS = at_depth(3, proof=30), 30
"""Walks end when everything was reached, but are so many at least and at most."""

ALLOCATIONS: tuple[Allocation, Allocation] = ("lifo", "extent")

RANDOMS = st.randoms(use_true_random=False)


class SessionCacheMachine(RuleBasedStateMachine):
    """The player's actions as rules, so that a failing program shrinks."""

    page_size = 4
    mixture: Mixture = "full"
    reached: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        # Programs are short, so the pool is smaller than the walks have it.
        self.player = Player(
            self.page_size, num_pages=2 + 40 // self.page_size, mixture=self.mixture
        )

    @rule(random=RANDOMS)
    def open(self, random: Random) -> None:
        self.player.open(random)

    @rule(random=RANDOMS)
    def fork(self, random: Random) -> None:
        self.player.fork(random)

    @rule(random=RANDOMS)
    def close(self, random: Random) -> None:
        self.player.close(random)

    @rule(random=RANDOMS)
    def quarantine(self, random: Random) -> None:
        self.player.quarantine(random)

    @precondition(lambda self: self.player.idle)
    @rule(random=RANDOMS)
    def begin(self, random: Random) -> None:
        self.player.begin(random)

    @precondition(lambda self: self.player.idle)
    @rule(random=RANDOMS)
    def whole_turn(self, random: Random) -> None:
        self.player.whole_turn(random)

    @precondition(lambda self: self.player.idle)
    @rule(random=RANDOMS)
    def rewind_or_cool(self, random: Random) -> None:
        random.choice([self.player.rewind, self.player.cool])(random)

    @precondition(lambda self: self.player.running)
    @rule(random=RANDOMS)
    def step(self, random: Random) -> None:
        self.player.step(random)

    @precondition(lambda self: self.player.running)
    @rule(random=RANDOMS)
    def step_all(self, random: Random) -> None:
        self.player.step_all(random)

    @precondition(lambda self: self.player.running)
    @rule(random=RANDOMS)
    def overshoot(self, random: Random) -> None:
        self.player.overshoot(random)

    @precondition(lambda self: self.player.running)
    @rule(random=RANDOMS)
    def end(self, random: Random) -> None:
        self.player.end(random)

    @precondition(lambda self: self.player.running)
    @rule(random=RANDOMS)
    def retract_or_discard(self, random: Random) -> None:
        random.choice([self.player.retract, self.player.discard])(random)

    @precondition(lambda self: self.player.running)
    @rule(random=RANDOMS)
    def refuse_what_is_busy(self, random: Random) -> None:
        self.player.refuse_what_is_busy(random)

    @invariant()
    def books_balance_and_cells_hold_the_histories(self) -> None:
        self.player.world.check()

    def teardown(self) -> None:
        self.player.world.close_everything()
        type(self).reached.update(self.player.world.marks)


IN_BOUNDED_POOLS = frozenset({"rollback to a window", "tombstone", "window slid"})
STATEFUL = frozenset({"match cut back", "snapshot gone"})
OF_MIXTURE: Mapping[Mixture, frozenset[str]] = {
    "full": frozenset(),
    "full + window": IN_BOUNDED_POOLS,
    "latent": frozenset(),
    "window": IN_BOUNDED_POOLS,
    "full + recurrent": STATEFUL,
}
"""What happens only in bounded pools."""


PAGED = list(zip(OF_MIXTURE, (16, 1, 16, 4, 4), strict=True))
"""One page size for each mixture; the walks below take the other pairs."""


@pytest.mark.parametrize(
    ("mixture", "page_size"), at_depth(PAGED, proof=list(product(OF_MIXTURE, (1, 4, 16))))
)
def test_no_program_of_verbs_loses_a_page_or_misreads_a_history(
    mixture: Mixture, page_size: int
) -> None:
    class Machine(SessionCacheMachine):
        reached: ClassVar[Counter[str]] = Counter()

    Machine.page_size, Machine.mixture = page_size, mixture
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=at_depth(80, proof=100),
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert_reached(Machine.reached, (INTERESTING | OF_MIXTURE[mixture]) - RARE)


@pytest.mark.parametrize(
    ("page_size", "mixture"),
    at_depth(
        [(1, "full + window"), (4, "full + window"), (16, "window")],
        proof=list(product((1, 4, 16), ("full + window", "window"))),
    ),
)
def test_long_walks_over_layers_that_forget_end_with_every_page_back(
    page_size: int, mixture: Mixture
) -> None:
    walk(page_size, mixture, INTERESTING | IN_BOUNDED_POOLS)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_long_walks_over_states_end_with_every_page_back(page_size: int) -> None:
    # A page of one token is never cut, and so has no end inside of a launch to be kept.
    on_the_way = {"state on the way"} if page_size > 1 else set()
    walk(page_size, "full + recurrent", INTERESTING | STATEFUL | on_the_way)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_long_walks_under_pressure_end_with_every_page_back(page_size: int) -> None:
    # With one token per page no page is ever cut, so none is kept for a rollback.
    cut_and_kept = {"page set aside"} if page_size > 1 else set()
    walk(page_size, "full", INTERESTING | cut_and_kept)


def walk(page_size: int, mixture: Mixture, expected: frozenset[str]) -> None:
    """Walk through random actions, the world checked after each, until all expected was reached."""
    reached: Counter[str] = Counter()
    for seed in range(MAX_WALKS):
        if seed >= MIN_WALKS and expected <= reached.keys():
            break
        player = Player(page_size, allocation=ALLOCATIONS[seed % 2], mixture=mixture)
        random = Random(seed)
        for _ in range(300):
            act(player, random)
            player.world.check()
        player.world.close_everything()
        reached.update(player.world.marks)
    assert_reached(reached, expected)


def assert_reached(reached: Counter[str], expected: frozenset[str] | set[str]) -> None:
    missing = sorted(expected - set(reached))
    assert not missing, f"never happened: {missing}; reached {dict(reached)}"
