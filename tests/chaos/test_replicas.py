"""Replicas that share a store lose nothing, double nothing and tell nothing that another denies."""

from __future__ import annotations

import pytest

from tests.chaos import partitions, replicas
from tests.depth import at_depth


@pytest.mark.timeout(900)
def test_what_was_told_outlives_kills_pauses_and_handovers() -> None:
    report, waits = replicas.run(
        3, kills=at_depth(3, proof=60), lease_s=3.0, pace_s=1.5, num_clients=6
    )
    print("\n".join(waits))
    assert not report.problems, "\n".join(report.problems)


@pytest.mark.timeout(900)
def test_a_replica_that_is_parted_from_its_database_answers_for_nothing_and_comes_back() -> None:
    report, waits = partitions.run(
        3, cuts=at_depth(3, proof=40), lease_s=3.0, pace_s=1.0, num_clients=4
    )
    print("\n".join(waits))
    assert not report.problems, "\n".join(report.problems)
