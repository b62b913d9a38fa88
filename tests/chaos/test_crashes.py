"""Servers killed at random moments lose nothing that clients were told is on disk."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from session_server.local_server import LocalServer
from tests.chaos.crashes import Report, Town, crashes
from tests.chaos.responders import crash_responders
from tests.depth import at_depth
from tests.rig.decisions import Decisions
from tests.rig.processes import ENGINE

WANTED = (
    "turn.completed",
    "turn.failed",
    "told that it is on disk",
    "asked again",
    "asked for twice",
    "connection lost",
    "rewound",
    "updated",
    "server SIGKILL",
    "engine killed",
    "exit 0",
)


@pytest.mark.timeout(600)
def test_what_was_told_to_be_on_disk_outlives_every_kill(tmp_path: Path) -> None:
    town = Town(tmp_path / "store", Report(), Decisions(3))
    report = asyncio.run(crashes(town, cycles=at_depth(4, proof=100)))
    assert not report.problems, "\n".join(report.problems)
    missing = [name for name in WANTED if not report.saw[name]]
    assert not missing, f"never happened: {missing}; saw {dict(report.saw)}"


def lose_a_turn(store: Path) -> None:
    """What no crash may do."""
    with sqlite3.connect(store / "sessions.sqlite3") as other:
        last = "(SELECT num_entries - 1 FROM sessions WHERE number = entries.session)"
        other.execute(f"DELETE FROM entries WHERE position > 0 AND position = {last}")
        other.execute(
            "UPDATE sessions SET num_entries ="
            " (SELECT count(*) FROM entries WHERE session = sessions.number)"
        )
    other.close()


@pytest.mark.timeout(300)
def test_the_clients_notice_a_turn_that_is_lost(tmp_path: Path) -> None:
    town = Town(tmp_path / "store", Report(), Decisions(4), between=lose_a_turn)
    report = asyncio.run(crashes(town, cycles=3))
    assert report.problems, dict(report.saw)


@pytest.mark.timeout(600)
def test_what_clients_of_openai_were_told_outlives_every_kill(tmp_path: Path) -> None:
    store, chance = tmp_path / "store", Decisions(6)
    town = Town(store, Report(), chance, serve=LocalServer, engine=ENGINE, num_told=60)
    saw = asyncio.run(crash_responders(town, cycles=at_depth(3, proof=60)))
    assert not town.report.problems, "\n".join(town.report.problems)
    wanted = ("shown again", "asked again", "conversed", "deleted", "connection lost", "exit 0")
    assert not [name for name in wanted if not saw[name]], dict(saw)


@pytest.mark.timeout(300)
def test_the_clients_of_openai_notice_what_is_lost(tmp_path: Path) -> None:
    store, chance = tmp_path / "store", Decisions(7)
    town = Town(store, Report(), chance, between=lose_records, serve=LocalServer, num_told=20)
    asyncio.run(crash_responders(town, cycles=1))
    assert any("found" in problem for problem in town.report.problems)


def lose_records(store: Path) -> None:
    """What no crash may do either."""
    with sqlite3.connect(store / "sessions.sqlite3") as other:
        other.execute("DELETE FROM records WHERE number % 2")
    other.close()


@pytest.mark.timeout(300)
def test_the_clients_notice_an_end_that_is_told_too_early(tmp_path: Path) -> None:
    flags = ("--durability", "relaxed")
    town = Town(tmp_path / "store", Report(), Decisions(5), flags)
    report = asyncio.run(crashes(town, cycles=1))
    assert any("is not on disk" in problem for problem in report.problems)
