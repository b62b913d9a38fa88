"""Replicas that share a database, simulated: a short run, which says the same every time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from session_server.sessions.postgres import connections, leases
from session_server.sessions.store.lease import LEASE_S, RENEWALS
from tests.depth import at_depth
from tests.sim_replicas import fleet, link, server
from tests.sim_replicas.command import COVERED_FROM, Totals, play_seeds
from tests.sim_replicas.simulation import Report, run

STEPS = at_depth(40_000, proof=COVERED_FROM)


def test_replicas_keep_what_they_have_told(record_property: Callable[[str, object], None]) -> None:
    totals, seed = Totals(), 0
    while totals.steps < STEPS:
        (outcome,) = play_seeds([seed])
        assert isinstance(outcome, Report), (
            f"{outcome}; python -m tests.sim_replicas --seeds {seed}"
        )
        totals.add(outcome)
        seed += 1
    record_property("simulated", {"steps of replicas": totals.steps})
    if totals.steps >= COVERED_FROM:
        assert not totals.missed


def test_a_seed_says_everything_twice_the_same() -> None:
    first, second = run(3, max_steps=1500), run(3, max_steps=1500)
    assert first == second
    assert first.steps > 1500


def test_no_thread_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise AssertionError(f"{thread.name} is started")

    monkeypatch.setattr(threading.Thread, "start", start)
    run(1, max_steps=500)


def test_a_hundred_replicas_share_a_database() -> None:
    reached = run(MANY, max_steps=8000, num_replicas=100).coverage
    assert all(reached[each] for each in ("partition", "lease lost", "taken from one that is over"))


MANY = 0
"""A seed with partitions that last longer than a lease."""


def test_sessions_of_lost_replicas_are_served_again() -> None:
    measured = fleet.measure(9)
    assert len(measured.moved_s) == 3 * fleet.SESSIONS_EACH
    assert max(measured.moved_s) < LEASE_S + 2.0
    assert measured.moved["replica buried"] == measured.num_lost == 3
    renewals_s = measured.counts["renewed"] / fleet.MEASURED_S
    assert renewals_s == pytest.approx(9 * RENEWALS / LEASE_S, rel=0.05)
    assert measured.counts["log write"] == pytest.approx(measured.counts["turns"], rel=0.05)


def test_bounds_are_those_of_postgresql() -> None:
    assert server.MAX_REPLICAS == leases.MAX_REPLICAS
    assert server.IDLE_TIMEOUT_S == connections.IDLE_TIMEOUT_S
    assert server.LOCK_WAIT_S == connections.LOCK_WAIT_S
    assert link.UNANSWERED_S == connections.UNANSWERED_TIMEOUT_S
