"""When an engine that died is started again, and when it is given up."""

from __future__ import annotations

import pytest

from session_server.engine_host.restarts import RestartPolicy, Restarts

POLICY = RestartPolicy(backoff_first_s=0.5, backoff_max_s=30.0, stable_s=60.0, max_failures=5)


def test_fifty_deaths_with_turns_in_between_keep_the_pause_short() -> None:
    restarts = Restarts(POLICY)
    for _ in range(50):
        restarts.note_death(3.0, has_finished_turn=True)
        assert restarts.pause_s < 5.0
        assert not restarts.is_given_up


def test_the_pause_doubles_with_every_failure_in_a_row_up_to_a_bound() -> None:
    restarts = Restarts(RestartPolicy(max_failures=100))
    pauses = []
    for _ in range(8):
        restarts.note_death(3.0, has_finished_turn=False)
        pauses.append(restarts.pause_s)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


@pytest.mark.parametrize("lived_s", [59.9, 60.0])
def test_a_long_life_ends_the_row(lived_s: float) -> None:
    restarts = Restarts(POLICY)
    for _ in range(5):
        restarts.note_failed_start()
    assert not restarts.is_given_up
    restarts.note_death(lived_s, has_finished_turn=False)
    assert restarts.is_given_up == (lived_s < POLICY.stable_s)
