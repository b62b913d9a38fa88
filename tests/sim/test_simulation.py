"""The simulator itself: it repeats itself exactly, and it finds bugs that are put in."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cache.lease import KVLease
from cache.radix import RadixCache
from cache.radix_node import RadixNode
from cache.types import PoolName
from tests.sim.config import Front, draw_config
from tests.sim.configs import rich_config
from tests.sim.failure import SimFailure
from tests.sim.faults import FaultRates, OneFault, Site
from tests.sim.padding import GraphPlaces
from tests.sim.simulation import replay, run, simulate
from tests.sim.trace import Trace


def failure_of(seed: int) -> SimFailure | None:
    try:
        run(seed)
    except SimFailure as failure:
        return failure
    return None


@pytest.mark.parametrize("front", Front)
def test_a_seed_says_everything_twice_the_same(front: Front) -> None:
    seed = next(seed for seed in range(100) if draw_config(seed).front is front)
    assert_repeats(seed)


def test_ids_are_the_same_in_every_run_of_a_seed() -> None:
    """They decide which page of a session is probed, and here what happens next."""
    assert_repeats(1_000_093)


def assert_repeats(seed: int) -> None:
    first, second = run(seed), run(seed)
    assert first == second
    assert first.coverage == second.coverage
    assert first.steps > 100


def test_a_whole_server_is_simulated_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real threads would take real time, and faults that strike in virtual time never would."""

    def start(thread: threading.Thread) -> None:
        raise AssertionError(f"{thread.name} is started")

    monkeypatch.setattr(threading.Thread, "start", start)
    reached = simulate(
        rich_config(1, Front.WIRE, faults=FaultRates(tokenizer_slow=500)), max_steps=1000
    ).coverage
    assert reached["fault tokenizer_slow"]
    assert reached["turn failed: tokenize_failed"] + reached["refused: tokenize_failed"]


def test_a_planned_fault_is_written_into_the_trace(tmp_path: Path) -> None:
    config = rich_config(1, Front.WIRE, only_fault=OneFault(Site.ENGINE_DEATH, 5))
    Trace(config).write(tmp_path / "trace.jsonl")
    assert Trace.read(tmp_path / "trace.jsonl").config == config


def test_a_step_limit_still_lets_everything_end_and_counts_the_pages() -> None:
    report = run(3, max_steps=50)
    assert 50 <= report.steps < 500


def test_a_session_may_be_closed_by_its_client_just_before_all_are() -> None:
    opened = {"op": "open", "c": 0, "s": "s1", "pinned": False, "ttl_s": None}
    closing = {"op": "send", "c": 0, "frame": {"type": "session.close"}, "hold": True}
    reached = replay(Trace(rich_config(1, Front.WIRE), [opened, closing])).coverage
    assert reached["session closed: client"] == 1


def test_many_refusals_to_one_client_are_no_standstill() -> None:
    opened = {"op": "open", "c": 0, "s": "s1", "pinned": False, "ttl_s": None}
    asking = {"op": "send", "c": 0, "frame": {"type": "turn.cancel", "turn_id": "t"}, "hold": True}
    config = rich_config(1, Front.WIRE)
    config = replace(config, habits=replace(config.habits, socket_frames=2))
    # The last is not held, so that all are let in before the session is closed.
    reached = replay(Trace(config, [opened, *[asking] * 199, asking | {"hold": False}])).coverage
    assert reached["refused: turn_not_found"] == 200


@pytest.mark.parametrize(
    ("seed", "max_steps"),
    [
        pytest.param(21_418, 60, id="a window has passed the page before a cut"),
        pytest.param(5_186, 1_000, id="accepted drafts published with the prompt are shared"),
    ],
)
def test_what_a_cut_may_cost_is_no_violation(seed: int, max_steps: int) -> None:
    assert run(seed, max_steps=max_steps).coverage["turn"] > 0


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
    pages_of = RadixCache._pages_of

    def shuffled(self: RadixCache, nodes: Sequence[RadixNode]) -> dict[PoolName, list[int]]:
        return {pool: pages[::-1] for pool, pages in pages_of(self, nodes).items()}

    monkeypatch.setattr(RadixCache, "_pages_of", shuffled)
    failures = [failure for seed in range(12) if (failure := failure_of(seed)) is not None]
    messages = [failure.message for failure in failures if failure.layer == "content"]
    assert len(failures) > 6
    assert messages
    assert all("position" in message and "page" in message for message in messages)


def test_padding_that_keeps_the_places_of_an_earlier_batch_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a graph whose inputs are not zeroed behind a batch."""
    monkeypatch.setattr(GraphPlaces, "pad", lambda self, held, first: None)
    failures = [failure for seed in range(12) if (failure := failure_of(seed)) is not None]
    assert [failure.layer for failure in failures].count("content") > 6
