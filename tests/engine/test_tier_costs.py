"""KV is copied where that takes less time than computing it, as far as that was measured."""

from __future__ import annotations

import pytest

from session_server.engine.tiers.costs import Route, TierCosts

MIB = 1 << 20


@pytest.mark.parametrize("route", Route)
def test_one_slow_copy_does_not_end_all_copying(route: Route) -> None:
    costs, load = TierCosts(), {route: 32 * MIB}
    costs.note_prefill(1000, 1.0)
    costs.note_copy(route, 32 * MIB, 10.0)  # ten times slower than computing
    for _ in range(50):
        assert not costs.is_worth(1000, load)
        assert not costs.is_worth(1000, load), "to ask changes nothing"
        costs.forgive(1000, load)
    for _ in range(150):
        costs.forgive(1000, load)
    assert costs.is_worth(1000, load)
    costs.note_copy(route, 32 * MIB, 0.1)
    assert costs.is_worth(1000, load)


def test_what_takes_longer_to_order_than_to_compute_says_nothing_about_copies() -> None:
    costs = TierCosts()
    costs.note_prefill(1000, 0.1)
    costs.note_copy(Route.IN, MIB, 1.0)
    assert not costs.is_worth(1, {Route.IN: 100})
    costs.forgive(1, {Route.IN: 100})
    assert costs.bytes_per_s == {Route.IN: MIB}


def test_each_route_takes_its_own_time() -> None:
    """Of a file all is read, however little of it is copied."""
    costs = TierCosts()
    costs.note_prefill(1000, 1.0)
    costs.note_copy(Route.READ, 64 * MIB, 0.5)
    costs.note_copy(Route.IN, 64 * MIB, 0.05)
    assert costs.is_worth(600, {Route.READ: 64 * MIB, Route.IN: 64 * MIB})
    assert not costs.is_worth(500, {Route.READ: 64 * MIB, Route.IN: 64 * MIB})
    assert costs.is_worth(500, {Route.READ: 32 * MIB, Route.IN: 64 * MIB})
    assert costs.is_worth(60, {Route.IN: 64 * MIB})
    assert not costs.is_worth(100, {Route.READ: 64 * MIB, Route.IN: MIB})
