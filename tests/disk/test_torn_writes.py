"""What a store told to be on disk is there after any crash, whatever the disk had not synced."""

from __future__ import annotations

import errno
import sqlite3
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from session_server.sessions.store.database import Database
from session_server.sessions.store.lock import StoreUnusable
from session_server.sessions.store.records import Damaged
from session_server.sessions.store.session_store import SessionStore
from tests.depth import at_depth
from tests.disk.campaign import IN_MEMORY
from tests.disk.recording import Kind, environment
from tests.disk.seeded import FAILING, KILLED, READING, WRITING
from tests.disk.simulated_disk import SimulatedDisk, write_image
from tests.disk.store_history import entry_of
from tests.disk.store_runs import (
    FAULTS,
    STORE,
    WANTED,
    Recorded,
    crashed,
    failed,
    recorded,
    watched_disk,
)
from tests.rig.decisions import Decisions

SEED = 1
LEAST = at_depth(4, proof=30)
"""Points at which a store with a bug is crashed for each thing that goes on; 4 find them all."""
OF_THE_SECOND = 1000
"""What is asked of the process after one that was killed has greater numbers."""


@cache
def a_life() -> Recorded:
    return recorded(seed=SEED)


def test_nothing_that_was_told_to_be_on_disk_is_lost_by_a_crash() -> None:
    report = crashed(a_life(), Decisions(SEED), share=0.05, least=4)
    assert not report.problems, report.problems[0]
    assert set(report.saw) >= WANTED, WANTED - set(report.saw)
    assert report.num_images > 5 * report.num_points


@pytest.mark.parametrize(
    "killed_at",
    at_depth(
        [1, 6, 45, 51, 53, 56, 90, 300],
        proof=[1, 3, 6, 20, 45, 50, 51, 52, 53, 54, 56, 90, 300],
    ),
)
def test_what_a_process_that_was_killed_had_not_synced_is_not_believed(killed_at: int) -> None:
    record = recorded(seed=SEED, killed_at=killed_at)
    report = crashed(record, Decisions(SEED, killed_at), share=0.002, least=1)
    assert not report.problems, report.problems[0]


@pytest.mark.parametrize("killed_at", range(90, 250, at_depth(81, proof=9)))
def test_what_the_system_could_not_write_is_not_built_on(killed_at: int) -> None:
    """The next process sees it, a sync says that all is well, and a crash takes it away."""
    record = recorded(seed=SEED, killed_at=killed_at)
    opened = 0
    for at, each in enumerate(record.done):
        if each.kind is Kind.NOTE and each.note.get("phase") not in (None, "writing"):
            opened = at
        if each.kind is Kind.NOTE and each.note.get("asked", (0,))[0] > OF_THE_SECOND:
            break
    failed_syncs = [
        replace(record.done[opened], kind=Kind.SYNC, inode=inode, error=errno.EIO)
        for inode in {each.inode for each in record.done[:opened] if each.kind is Kind.WRITE}
    ]
    done = [*record.done[:opened], *failed_syncs, *record.done[opened : opened + 150]]
    record = Recorded(record.root, done)
    report = crashed(record, Decisions(SEED, killed_at), share=0.2, least=1, may_fail=True)
    assert not report.problems, report.problems[0]


@cache
def first_call_of_a_migration() -> int:
    done = iter(recorded(seed=SEED, killed_at=1 << 40).done)
    next(each for each in done if each.kind is Kind.NOTE and each.note.get("phase") == "migration")
    return next(each.site for each in done if each.kind is not Kind.NOTE)


@pytest.mark.parametrize("num_calls", range(1, 20, at_depth(6, proof=3)))
def test_a_process_may_be_killed_while_it_brings_a_store_to_this_version(num_calls: int) -> None:
    site = first_call_of_a_migration()
    record = recorded(seed=SEED, killed_at=site + num_calls)
    report = crashed(record, Decisions(SEED, site), share=0.002, least=1)
    assert not report.problems, report.problems[0]
    assert report.saw["migration"]


SLOWLY_FOUND = ("put in two commits", "vacuum by a rename")
"""Half a minute of crashes: `make prove` looks for them, too."""


@pytest.mark.parametrize(
    "bug", at_depth([bug for bug in WRITING if bug not in SLOWLY_FOUND], proof=[*WRITING])
)
def test_a_bug_of_what_ran_before_a_crash_is_found(bug: str) -> None:
    report = crashed(recorded(seed=SEED, bug=bug), Decisions(SEED), share=0.1, least=LEAST)
    assert report.problems


LAST_FOUND = {"what was left is believed": 65, "only a new directory is synced": 4}


@pytest.mark.parametrize("bug", KILLED)
def test_a_bug_where_a_process_was_killed_is_found(bug: str) -> None:
    assert any(
        crashed(
            recorded(seed=SEED, bug=bug, killed_at=site), Decisions(SEED), share=0.01, least=2
        ).problems
        for site in (LAST_FOUND[bug], 4, 6, *range(60, 66))
    )


def test_a_bug_of_what_opens_the_files_after_a_crash_is_found() -> None:
    with READING["log removed"].apply():
        report = crashed(a_life(), Decisions(SEED), share=0.1, least=4)
    assert report.problems


def wrong_entries(image: dict[str, bytes | None], place: Path) -> bool:
    """Return whether a store gives an entry that was never written."""
    write_image(image, place)
    try:
        store = SessionStore.in_directory(place / STORE, model=b"model")
    except StoreUnusable:
        return False
    try:
        for row in store._database.walk(None):
            try:
                entries = [entry for part, _ in store.slices(row) for entry in part]
            except Damaged:
                continue
            if any(entry != entry_of(entry.turns[0].key) for entry in entries):
                return True
    except (sqlite3.Error, Damaged):
        return False
    finally:
        store._database.close()
    return False


def num_rotten(directory: Path) -> int:
    """Change one byte of a database, wherever that is, a few hundred times; return how often a
    store gives what was never written."""
    disk, chance = SimulatedDisk(a_life().root), Decisions(SEED, "rot")
    for done in a_life().done:
        if done.kind is not Kind.NOTE:
            disk.apply(done)
    image = dict(disk.image(lambda _, pending: pending.whole))
    file = f"{STORE}/sessions.sqlite3"
    data = image[file]
    assert data is not None
    num_wrong = 0
    for number in range(300):
        place = chance.between(
            4096, len(data) - 1
        )  # the first page says what SQLite's file this is
        changed = bytes([data[place] ^ 1 << chance.below(8)])
        image[file] = data[:place] + changed + data[place + 1 :]
        num_wrong += wrong_entries(image, directory / str(number))
    return num_wrong


def test_a_byte_that_has_changed_on_disk_is_noticed_and_one_that_is_believed_is_found() -> None:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as right:
        assert num_rotten(Path(right)) == 0
    with (
        tempfile.TemporaryDirectory(dir=IN_MEMORY) as wrong,
        READING["checksum of entries ignored"].apply(),
    ):
        assert num_rotten(Path(wrong)) > 0


@pytest.mark.parametrize("name", FAULTS)
def test_a_store_lives_through_calls_that_fail_and_loses_nothing(name: str) -> None:
    chance = Decisions(SEED, name)
    sites = [
        *range(1, 60, at_depth(28, proof=7)),
        *(chance.between(60, 700) for _ in range(at_depth(3, proof=12))),
    ]
    report = failed(name, sites, chance, share=0.003)
    assert not report.problems, report.problems[0]
    assert report.saw["a call failed"]


@pytest.mark.parametrize("bug", FAILING)
def test_a_bug_where_calls_fail_is_found(bug: str) -> None:
    # Each was last found at the first of them.
    is_of_names = bug == "a failed sync of names"
    name = "EIO once" if is_of_names else "a full disk"
    sites = (38, *range(34, 42)) if is_of_names else (100, *range(60, 200, 20))
    assert failed(name, sites, Decisions(SEED, bug), share=0.02, bug=bug).problems


def test_a_database_that_cannot_be_opened_to_write_is_not_opened_to_read() -> None:
    program = """
from pathlib import Path
from session_server.sessions.store.database import Database
from session_server.sessions.store.lock import StoreUnusable
try:
    database = Database(Path("store"))
except StoreUnusable as error:
    print("refused", error)
else:
    with database.transaction():
        database.delete(1)
    print("writes")
"""
    with watched_disk() as watched:
        Database(watched.root / "store").close()
        with environment(watched.environment):
            said = set()
            for site in range(12):
                watched.forget()
                watched.fail(errno.EMFILE, {Kind.OPEN, Kind.CREATE}, first=site, most=1)
                command = [sys.executable, "-c", program]
                told = subprocess.check_output(command, text=True, cwd=watched.root)
                said.add(told.split()[0])
        assert said == {"refused", "writes"}
