"""`session-server doctor --store`: what is wrong with a store is found, and nothing is changed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from session_server import cli
from session_server.core.kv_place import KV_DIRECTORY, KV_REFUSED
from session_server.sessions.store import examination
from session_server.sessions.store.database import Database
from tests.sessions.test_store import LOSSES, contents, spoil
from tests.sessions.test_stored_dialects import desk, restore_version_1
from tests.sessions.test_stored_sessions import Disk
from tests.sessions.world import OWNER, turn

Shown = pytest.CaptureFixture[str]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Sessions with a history that was changed."""
    disk = Disk(tmp_path / "store")
    with disk.world() as world:
        for owner in ("one", "two"):
            world.create(owner=owner, is_stored=True, session_id="empty")
        for number in range(3):
            name = world.create(is_stored=True, session_id=f"talk{number}")
            for each in range(3):
                world.run(name, turn(f"t{each}", f"question {each}"))
            world.manager.edits.rewind(OWNER, name, world.manager.snapshot(OWNER, name).items[1].id)
    return disk.directory


def examined(store: Path, capsys: Shown) -> tuple[int, dict[str, tuple[str, str, str]]]:
    """The exit status, and of each topic the verdict, what was found and what to do."""
    status = cli.main(["doctor", "--store", str(store), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is (status == 0)
    findings = report["findings"]
    return status, {
        each["topic"]: (each["verdict"], each["found"], each["advice"]) for each in findings
    }


def change(store: Path, *statements: str) -> None:
    with sqlite3.connect(store / Database.FILE) as database:
        for statement in statements:
            database.execute(statement)
    database.close()


@pytest.mark.parametrize("state", ["closed", "killed", "served"])
def test_a_store_that_is_whole_is_found_well(store: Path, state: str, capsys: Shown) -> None:
    server = Database(store) if state != "closed" else None
    if state == "killed":
        assert server is not None
        change(store, "UPDATE sessions SET num_uses = 7")
        shutil.copytree(store, store.parent / "left")
        server.close()
        store = store.parent / "left"
    before = contents(store)
    status, found = examined(store, capsys)
    assert contents(store) == before
    assert status == 0
    assert {verdict for verdict, _, _ in found.values()} == {"good"}
    assert set(found) == {"files", "schema", "database", "sessions", "records", "disk"}
    assert found["sessions"][1].startswith("5 with ")
    if state == "served":
        assert server is not None
        server.close()


NUMBER = "(SELECT number FROM sessions WHERE id = 'talk1')"
DAMAGES: dict[str, tuple[list[str], str, str]] = {
    "a bit of an entry": (
        [
            "UPDATE entries SET entry = CAST(entry || x'00' AS BLOB)"
            f" WHERE session = {NUMBER} AND position = 1"
        ],
        "sessions",
        "talk1 of owner (the checksum of an entry does not match)",
    ),
    "an entry": (
        [f"DELETE FROM entries WHERE session = {NUMBER} AND position = 2"],
        "sessions",
        "talk1",
    ),
    "settings": (["UPDATE sessions SET settings = x'00' WHERE id = 'talk1'"], "sessions", "talk1"),
    "a number": (["UPDATE sessions SET num_tokens = 1 WHERE id = 'talk1'"], "sessions", "of 1)"),
    "an order": (
        [
            f"UPDATE entries SET position = 9 WHERE session = {NUMBER} AND position = 0",
        ],
        "sessions",
        "talk1",
    ),
    "an orphan": (["DELETE FROM sessions WHERE id = 'talk1'"], "entries", "entries of sessions"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_named_with_what_to_do(store: Path, name: str, capsys: Shown) -> None:
    statements, topic, words = DAMAGES[name]
    change(store, *statements)
    before = contents(store)
    status, found = examined(store, capsys)
    assert contents(store) == before
    assert status == 1
    verdict, said, advice = found[topic]
    assert verdict == "wrong"
    assert words in said
    assert advice
    assert "disk" in found, "the rest is examined too"


def test_no_more_faults_are_named_than_a_reader_needs(
    store: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "MAX_NAMED", 2)
    change(store, "UPDATE sessions SET settings = x'00'")
    _, found = examined(store, capsys)
    assert "5 damaged" in found["sessions"][1]
    assert found["sessions"][1].endswith("and 3 more")


@pytest.mark.parametrize("how", LOSSES)
def test_a_store_without_its_content_is_found_wrong(store: Path, how: str, capsys: Shown) -> None:
    spoil(store / Database.FILE, how)
    before = contents(store)
    status, found = examined(store, capsys)
    assert contents(store) == before
    assert status == 1
    verdict, said, _ = found["store"]
    assert verdict == "wrong"
    assert str(store / Database.FILE) in said
    assert f"mv {store}" in said


def test_a_page_that_is_changed_is_found(store: Path, capsys: Shown) -> None:
    path = store / Database.FILE
    data = bytearray(path.read_bytes())
    for start in range(4096, len(data), 4096):
        data[start : start + 2] = b"\xff\xff"
    path.write_bytes(data)
    status, found = examined(store, capsys)
    assert status == 1
    assert "wrong" in {verdict for verdict, _, _ in found.values()}


def make_link(store: Path) -> None:
    (store / Database.FILE).rename(store.parent / "elsewhere")
    (store / Database.FILE).symlink_to(store.parent / "elsewhere")


def make_later(store: Path) -> None:
    change(store, "PRAGMA user_version = 99")


FILES: list[tuple[Callable[[Path], object], str, str, str]] = [
    (lambda store: (store / Database.FILE).chmod(0o644), "files", "warning", "open to other users"),
    (lambda store: store.chmod(0o755), "files", "warning", "open to other users"),
    (make_link, "files", "wrong", "links"),
    (make_later, "store", "wrong", "version 99"),
    (lambda store: (store / Database.FILE).unlink(), "store", "wrong", "gone"),
    (shutil.rmtree, "store", "wrong", "is no store: `serve --store"),
    (lambda store: change(store, "PRAGMA application_id = 1"), "store", "wrong", "no store"),
]


@pytest.mark.parametrize("case", FILES)
def test_files_are_examined_before_what_is_in_them(
    store: Path, case: tuple[Callable[[Path], object], str, str, str], capsys: Shown
) -> None:
    spoils, topic, verdict, words = case
    spoils(store)
    status, found = examined(store, capsys)
    assert found[topic][0] == verdict
    assert words in found[topic][1]
    assert status == (verdict == "wrong")


def test_nothing_is_good_of_what_is_no_store(tmp_path: Path, capsys: Shown) -> None:
    (tmp_path / "file").touch()
    for place, told in ((tmp_path / "typo", "is no store"), (tmp_path / "file", "is a file")):
        status, found = examined(place, capsys)
        assert (status, [*found]) == (1, ["store"])
        assert told in found["store"][1]


def test_a_store_that_may_not_be_read_is_found_wrong(
    store: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))

    monkeypatch.setattr(os, "listdir", refuse)
    status, found = examined(store, capsys)
    assert (status, [*found]) == (1, ["store"])
    assert f"{store}: permission denied for user " in found["store"][1]


def test_a_store_of_another_user_is_a_warning(
    store: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    def can_write(path: Path, mode: int, *, effective_ids: bool) -> bool:
        return not (effective_ids and mode == os.W_OK and path.name == Database.FILE)

    monkeypatch.setattr(os, "access", can_write)
    status, found = examined(store, capsys)
    assert (status, found["files"][0]) == (0, "warning")
    assert "cannot write" in found["files"][1]
    assert "chown" in found["files"][2]


def test_what_takes_room_is_told_apart_beside_a_server_too(store: Path, capsys: Shown) -> None:
    kv = store / KV_DIRECTORY
    (kv / KV_REFUSED).mkdir(parents=True, mode=0o700)
    kv.chmod(0o700)
    for name in ("a", "b"):
        (kv / name).write_bytes(bytes(1500))
    server = Database(store)
    change(store, "UPDATE sessions SET num_uses = 7")
    size, log = (os.path.getsize(store / f"{Database.FILE}{end}") for end in ("", "-wal"))
    assert log > 0
    _, found = examined(store, capsys)
    assert found["files"][1].startswith(
        f"in {store}: database {size:,} bytes, its log {log:,}, 2 others "
    )
    assert found["kv"][1] == "2 files, 3,000 bytes"
    (kv / KV_REFUSED / "c").write_bytes(bytes(7))
    assert examined(store, capsys)[1]["kv"][1] == "2 files, 3,000 bytes; 1 refused, 7 bytes"
    server.close()


def test_a_disk_that_is_nearly_full_is_a_warning(
    store: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "MIN_FREE_BYTES", 1 << 62)
    status, found = examined(store, capsys)
    assert (status, found["disk"][0]) == (0, "warning")


@pytest.mark.parametrize("variables", [{}, {"FORCE_COLOR": "1", "COLUMNS": "60"}])
def test_ids_and_commands_are_printed_whole(
    store: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    """To be copied, on a terminal too."""
    name = "s_" + "4f233f3b" * 8
    change(store, f"UPDATE sessions SET id = '{name}', num_tokens = 1 WHERE id = 'talk1'")
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert cli.main(["doctor", "--store", str(store)]) == 1
    said, told = capsys.readouterr()
    assert f"{name} of owner (" in said
    command = f"session-server sessions delete {name} --store {store}"
    assert f"`{command}`" in said
    assert "sessions and records: 0" not in told
    assert cli.main(command.split()[1:]) == 0
    capsys.readouterr()
    assert cli.main(["doctor", "--store", str(store)]) == 0


@pytest.fixture
def dialects(tmp_path: Path) -> Path:
    """Responses, and a conversation."""
    disk = Disk(tmp_path / "store")
    with desk(disk) as this:
        first = this.ask("one", conversation=this.converse("hello"))
        this.ask("two", first)
    return disk.directory


def test_responses_and_conversations_are_examined(dialects: Path, capsys: Shown) -> None:
    before = contents(dialects)
    status, found = examined(dialects, capsys)
    assert contents(dialects) == before
    assert status == 0
    assert {verdict for verdict, _, _ in found.values()} == {"good"}
    said = "1 kept conversations, 2 responses; every checksum matches"
    assert found["records"][1] == said


RECORD = "(SELECT number FROM records WHERE id = 'resp_one')"
OF_RECORDS: dict[str, tuple[str, str, str]] = {
    "a bit of a part": (
        f"UPDATE parts SET part = CAST(part || x'00' AS BLOB) WHERE record = {RECORD}",
        "records",
        "resp_one of owner (the checksum of a part does not match)",
    ),
    "a part": (f"DELETE FROM parts WHERE record = {RECORD}", "records", "resp_one of owner"),
    "a head": (
        "DELETE FROM parts WHERE position = 0 AND record ="
        " (SELECT number FROM records WHERE id = 'conv_1')",
        "records",
        "conv_1 of owner (its first part is missing)",
    ),
    "an orphan": ("DELETE FROM records WHERE id = 'conv_1'", "parts", "parts of records that"),
}


@pytest.mark.parametrize("name", OF_RECORDS)
def test_what_is_damaged_of_records_is_named(dialects: Path, name: str, capsys: Shown) -> None:
    statement, topic, words = OF_RECORDS[name]
    change(dialects, statement)
    before = contents(dialects)
    status, found = examined(dialects, capsys)
    assert contents(dialects) == before
    assert status == 1
    verdict, said, advice = found[topic]
    assert (verdict, bool(advice)) == ("wrong", True)
    assert words in said
    assert found["sessions"][0] == "good"


def test_a_store_of_an_earlier_version_is_told_and_not_walked(
    tmp_path: Path, capsys: Shown
) -> None:
    restore_version_1(tmp_path / "store")
    before = contents(tmp_path / "store")
    status, found = examined(tmp_path / "store", capsys)
    assert contents(tmp_path / "store") == before
    assert status == 0
    assert found["schema"][:2] == ("warning", "version 1, before 3")
    assert not {"sessions", "records", "database"} & set(found)
