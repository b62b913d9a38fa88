"""KV is copied where that takes less time than computing it, as far as that was measured."""

from __future__ import annotations

import pytest

from session_server.engine.tiers.costs import TierCosts

MIB = 1 << 20


@pytest.mark.parametrize("from_disk", [False, True])
def test_one_slow_copy_does_not_end_all_copying(from_disk: bool) -> None:
    costs = TierCosts()
    costs.note_prefill(1000, 1.0)
    costs.note_copy(32 * MIB, 10.0, from_disk=from_disk)  # ten times slower than computing
    asked = [costs.is_worth(1000, 32 * MIB, from_disk=from_disk) for _ in range(200)]
    assert not any(asked[:50])
    assert asked[-1]
    costs.note_copy(32 * MIB, 0.1, from_disk=from_disk)
    assert costs.is_worth(1000, 32 * MIB, from_disk=from_disk)


def test_what_takes_longer_to_order_than_to_compute_says_nothing_about_copies() -> None:
    costs = TierCosts()
    costs.note_prefill(1000, 0.1)
    costs.note_copy(MIB, 1.0, from_disk=False)
    assert not any(costs.is_worth(1, 100, from_disk=False) for _ in range(1000))
    assert costs.host_per_s == MIB
