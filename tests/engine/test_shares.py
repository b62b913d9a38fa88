"""How one forward is shared: what each can count on, whoever else is there."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from session_server.engine.shares import MAX_SHARES, fair_shares, share_len

NEEDS = st.lists(
    st.one_of(st.integers(1, 12), st.integers(1, 400), st.sampled_from([1000, 10**6])), max_size=40
)


@settings(max_examples=1000)
@given(needs=NEEDS, budget=st.integers(1, 600), second=st.integers(0, 40))
@example(needs=[1000] + [2] * 30, budget=64, second=1)
def test_shares_spend_the_budget_and_keep_what_they_promise(
    needs: list[int], budget: int, second: int
) -> None:
    shares = fair_shares(needs, budget, first=(0, second))
    assert sum(shares) == min(budget, sum(needs))
    assert all(0 <= share <= need for share, need in zip(shares, needs, strict=True))
    for rank, index in enumerate(dict.fromkeys((0, second))):
        if index < len(needs) and rank < budget:
            assert shares[index] >= min(needs[index], share_len(budget))
    for index, need in enumerate(needs):
        if budget >= MAX_SHARES and shares[index] < min(need, share_len(budget)):
            smaller = [s for i, s in enumerate(shares) if i != index and needs[i] <= need]
            assert 2 * sum(smaller) >= budget, "only those that are sooner done go before it"


@pytest.mark.parametrize(
    ("needs", "budget", "expected"),
    [
        ([100], 16, [16]),
        ([1000, 5], 16, [11, 5]),
        ([1000, 20], 32, [16, 16]),
        ([1000, 5, 500], 16, [6, 5, 5]),
        ([1000, 1000, 1000], 16, [6, 5, 5]),
        ([1000, 3, 3, 3], 64, [55, 3, 3, 3]),
        ([1000, *[3] * 20], 64, [10, *[3] * 18, 0, 0]),
    ],
)
def test_small_needs_are_met_and_large_ones_share_the_rest(
    needs: list[int], budget: int, expected: list[int]
) -> None:
    shares = fair_shares(needs, budget, first=(0, 1))
    assert sorted(shares, reverse=True) == expected


def test_however_large_the_others_are_a_small_need_has_the_same_share() -> None:
    for size in (10, 1000, 10**6):
        for num_hogs in (1, 5, 100):
            shares = fair_shares([size] * num_hogs + [8], 64, first=(0, num_hogs // 2))
            assert shares[-1] == 8
