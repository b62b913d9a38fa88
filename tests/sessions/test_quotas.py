from __future__ import annotations

import pytest

from session_server.core.errors import QuotaExceeded, ServerBusy
from session_server.core.owner import Owner
from session_server.sessions.quotas import QuotaLimits, Quotas


def test_sessions_are_bounded_per_owner_and_in_all() -> None:
    quotas = Quotas(QuotaLimits(sessions=3, owner_sessions=2))
    for _ in range(2):
        quotas.take_session(Owner("a"))
    with pytest.raises(QuotaExceeded):
        quotas.take_session(Owner("a"))
    quotas.take_session(Owner("b"))
    with pytest.raises(ServerBusy):
        quotas.take_session(Owner("b"))
    quotas.give_session(Owner("a"))
    quotas.take_session(Owner("b"))


def test_turns_are_bounded_per_owner_and_in_all() -> None:
    quotas = Quotas(QuotaLimits(turns=3, owner_turns=2))
    for _ in range(2):
        quotas.take_turn(Owner("a"))
    with pytest.raises(QuotaExceeded):
        quotas.take_turn(Owner("a"))
    quotas.take_turn(Owner("b"))
    with pytest.raises(ServerBusy):
        quotas.take_turn(Owner("c"))
    quotas.give_turn(Owner("a"))
    quotas.take_turn(Owner("c"))


def test_a_rate_refills_steadily_and_one_large_turn_is_slow_not_impossible() -> None:
    quotas = Quotas(QuotaLimits(owner_input_tokens_per_min=60))
    quotas.charge_input(Owner("a"), 600, now_s=0.0)
    for now_s in (0.0, 300.0, 540.0):
        with pytest.raises(QuotaExceeded):
            quotas.charge_input(Owner("a"), 1, now_s=now_s)
    quotas.charge_input(Owner("a"), 1, now_s=541.0)
    quotas.charge_input(Owner("b"), 60, now_s=541.0)


def test_a_clock_that_steps_back_charges_nobody() -> None:
    quotas = Quotas(QuotaLimits(owner_input_tokens_per_min=60))
    quotas.charge_input(Owner("a"), 30, now_s=1000.0)
    quotas.charge_input(Owner("a"), 30, now_s=0.0)


def test_an_owner_that_holds_nothing_costs_nothing() -> None:
    quotas = Quotas(QuotaLimits(owner_input_tokens_per_min=60))
    for index in range(100):
        owner = Owner(str(index))
        quotas.take_session(owner)
        quotas.take_turn(owner)
        quotas.charge_input(owner, 30, now_s=0.0)
        quotas.give_turn(owner)
        quotas.give_session(owner)
    assert len(quotas._shares) == 100
    quotas.forget_idle(31.0)
    assert len(quotas._shares) == 0
