"""Replicas that share a store lose nothing, double nothing and tell nothing that another denies."""

from __future__ import annotations

import pytest

from session_server.sessions.store.records import EndRecord, LogEntry, encode_entry
from tests.chaos import partitions, replicas
from tests.chaos.crashes import Report
from tests.chaos.ledger import Ledger, Row
from tests.depth import at_depth
from tests.sessions.test_store import ENTRY


@pytest.mark.timeout(900)
def test_what_was_told_outlives_kills_pauses_and_handovers() -> None:
    report, waits = replicas.run(
        3, kills=at_depth(3, proof=60), lease_s=3.0, pace_s=1.5, num_clients=6
    )
    print("\n".join(waits))
    check(report)


@pytest.mark.timeout(900)
def test_a_replica_that_is_parted_from_its_database_answers_for_nothing_and_comes_back() -> None:
    report, waits = partitions.run(
        3, cuts=at_depth(3, proof=40), lease_s=3.0, pace_s=1.0, num_clients=4
    )
    print("\n".join(waits))
    check(report)


SURE = ("turn.completed", "adoptions", "leases lost")
"""What happens in a short run too, on a machine of whatever speed; `PROVE=1` wants all of it."""


def check(report: Report) -> None:
    missed = set(at_depth(SURE, proof=())) & {name for name in SURE if not report.saw[name]}
    of_chance = at_depth("never happened: ", proof="nothing")
    problems = [problem for problem in report.problems if not problem.startswith(of_chance)]
    assert not (problems := [*problems, *missed]), "\n".join(problems)


TURN = EndRecord(7, b"digest", "stop", "", 1, 0, 5, 4, 3, 2, 1, -1.0)
DATA = encode_entry(LogEntry(ENTRY.change))
ENDS = encode_entry(LogEntry(ENTRY.change, (TURN,)))


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([(1, 0, 1, DATA), (1, 2, 1, DATA)], "positions have a gap"),
        ([(1, 0, 2, DATA), (1, 1, 1, DATA)], "epochs fall"),
        ([(1, 0, 1, ENDS), (1, 1, 2, ENDS)], "ended again"),
        ([(1, 0, 1, DATA)], "1 entries are there, of 2"),
        ([(1, 0, 1, DATA), (1, 1, 3, DATA)], "an entry of epoch 3 in epoch 2"),
        ([(1, 0, 1, DATA), (1, 1, 2, DATA), (2, 0, 1, DATA)], "which is not there"),
    ],
)
def test_the_ledger_says_what_cannot_be_there(entries: list[Row], problem: str) -> None:
    num_bytes = sum(len(entry) for session, _, _, entry in entries if session == 1)
    found = [*Ledger([(1, "s1", 2, num_bytes, 2)], entries).problems()]
    assert len(found) == 1, found
    assert problem in found[0]


def test_the_ledger_lets_a_turn_that_failed_run_again() -> None:
    failed = encode_entry(ENTRY)
    entries = [(1, 0, 1, failed), (1, 1, 2, failed)]
    assert not [*Ledger([(1, "s1", 2, 2 * len(failed), 2)], entries).problems()]
