from __future__ import annotations

import pytest

from session_server.core.errors import QuotaExceeded, ServerBusy
from session_server.core.owner import Owner
from session_server.sessions.budget import OwnerBudget

ALONE = Owner("alone")
"""Its share is the whole."""


def of_many(name: str) -> Owner:
    return Owner(name, share=0.9)


def test_the_total_is_bounded_to_the_unit() -> None:
    budget = OwnerBudget("bytes", 100)
    budget.take(ALONE, 99)
    budget.check(ALONE, 1)
    with pytest.raises(ServerBusy, match="would hold 101 bytes of 100"):
        budget.take(ALONE, 2)
    budget.take(ALONE, 1)
    with pytest.raises(ServerBusy):
        budget.take(ALONE, 1)
    assert (budget.total, budget.held_by(ALONE)) == (100, 100)


def test_an_owner_limit_is_bounded_to_the_unit() -> None:
    budget = OwnerBudget("bytes", 100, owner_limit=50)
    budget.take(ALONE, 50)
    with pytest.raises(QuotaExceeded, match="would hold 51 bytes, and may hold 50"):
        budget.take(ALONE, 1)
    budget.take(Owner("other"), 50)
    with pytest.raises(ServerBusy):
        budget.take(Owner("third"), 1)


def test_one_of_many_owners_holds_its_share_and_no_more() -> None:
    budget = OwnerBudget("bytes", 1000)
    budget.take(of_many("a"), 900)
    with pytest.raises(QuotaExceeded):
        budget.take(of_many("a"), 1)


def test_the_reserve_is_for_owners_that_hold_little() -> None:
    budget = OwnerBudget("bytes", 1000)
    budget.take(of_many("hog"), 800)
    budget.take(of_many("second"), 100)
    for owner, amount in (("hog", 1), ("second", 1), ("small", 11)):
        with pytest.raises(QuotaExceeded):
            budget.take(of_many(owner), amount)
    for index in range(10):
        budget.take(of_many(f"small {index}"), 10)
    assert budget.total == 1000
    with pytest.raises(ServerBusy):
        budget.take(of_many("late"), 1)


def test_an_exempt_owner_is_counted_and_not_refused() -> None:
    budget = OwnerBudget("sessions", 10, owner_limit=2)
    budget.take(Owner("a"), 2)
    probe = Owner("probe", is_exempt=True)
    budget.take(probe, 9)
    assert (budget.total, budget.held_by(probe)) == (11, 9)
    with pytest.raises(ServerBusy):
        budget.check(Owner("b"), 1)


def test_a_limit_too_small_to_share_still_serves_each_owner() -> None:
    budget = OwnerBudget("sessions", 1)
    budget.take(of_many("a"))
    with pytest.raises(ServerBusy):
        budget.take(of_many("b"))


def test_what_is_given_back_is_there_again_and_its_owner_forgotten() -> None:
    budget = OwnerBudget("bytes", 10)
    budget.take(ALONE, 10)
    budget.add(ALONE, -10)
    assert (budget.total, budget.owners) == (0, frozenset())
    budget.take(Owner("b"), 10)
    with pytest.raises(AssertionError, match="given back twice"):
        budget.add(ALONE, -1)


def test_more_than_a_share_is_the_owner_s_fault_even_if_the_server_is_full() -> None:
    budget = OwnerBudget("bytes", 1000)
    budget.take(of_many("hog"), 900)
    half = Owner("half", share=0.5)
    with pytest.raises(ServerBusy):
        budget.take(half, 500)
    with pytest.raises(QuotaExceeded, match="501 bytes, and may hold 500"):
        budget.take(half, 501)
