"""Replicas that share a database, simulated: a short run, which says the same every time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from session_server.sessions.postgres import connections, leases
from tests.depth import at_depth
from tests.sim_replicas import link, server
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


def test_many_replicas_share_a_database() -> None:
    assert run(MANY, max_steps=3000).coverage["taken from nobody"]


MANY = 369
"""A seed of sixty-four replicas."""


def test_bounds_are_those_of_postgresql() -> None:
    assert server.MAX_REPLICAS == leases.MAX_REPLICAS
    assert server.IDLE_TIMEOUT_S == connections.IDLE_TIMEOUT_S
    assert server.LOCK_WAIT_S == connections.LOCK_WAIT_S
    assert link.UNANSWERED_S == connections.UNANSWERED_TIMEOUT_S
