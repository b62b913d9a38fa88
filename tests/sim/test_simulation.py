"""The simulator itself: it repeats itself exactly, and it finds bugs that are put in."""

from __future__ import annotations

import pytest

from cache.lease import KVLease
from cache.radix import LockReceipt, MatchResult, RadixCache
from session_server.sim import SimFailure, run


def failure_of(seed: int) -> SimFailure | None:
    try:
        run(seed)
    except SimFailure as failure:
        return failure
    return None


def test_a_seed_says_everything_twice_the_same() -> None:
    first, second = run(7), run(7)
    assert first == second
    assert first.coverage == second.coverage
    assert first.steps > 100


def test_a_step_limit_still_lets_everything_end_and_counts_the_pages() -> None:
    report = run(3, max_steps=50)
    assert 50 <= report.steps < 500


def test_a_bug_put_in_is_found_and_replayable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tail that is dropped instead of released (sglang#22862)."""
    monkeypatch.setattr(KVLease, "_drop_private", lambda self, num_kept: None)
    failures = [failure for seed in range(20) if (failure := failure_of(seed)) is not None]
    assert {failure.layer for failure in failures} <= {"ledger", "pair", "audit", "crash"}
    assert len(failures) > 10
    assert all(failure.trace.ops for failure in failures)


def test_corrupt_content_is_named_by_row_position_and_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A match that gives the pages in another order than the tokens."""
    advance = RadixCache.advance

    def shuffled(
        self: RadixCache, receipt: LockReceipt, match: MatchResult
    ) -> dict[object, list[int]]:
        return {pool: pages[::-1] for pool, pages in advance(self, receipt, match).items()}

    monkeypatch.setattr(RadixCache, "advance", shuffled)
    failures = [failure for seed in range(12) if (failure := failure_of(seed)) is not None]
    messages = [failure.message for failure in failures if failure.layer == "content"]
    assert len(failures) > 6
    assert messages
    assert all("position" in message and "page" in message for message in messages)
