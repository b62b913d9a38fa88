"""`session-server sessions`: what a store has is shown, moved and deleted."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import closing
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
from msgspec import structs

from session_server import cli
from session_server.config import Settings
from session_server.core.errors import SessionNotFound
from session_server.core.os_errors import user_name
from session_server.core.owner import ANONYMOUS
from session_server.session_command import shown_time
from session_server.sessions.store.database import Database
from session_server.sessions.store.lock import StoreIsBusy, StoreUnusable
from session_server.sessions.store.session_file import MAX_TTL_S
from session_server.web.key_file import grants_of
from tests.sessions.test_stored_sessions import Disk, state_of
from tests.sessions.world import OWNER, completed, turn

Shown = pytest.CaptureFixture[str]


def sessions(capsys: Shown, store: Path, *words: str) -> tuple[int, str, str]:
    status = cli.main(["sessions", *words, "--store", str(store)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "store")


@pytest.fixture
def name(disk: Disk) -> str:
    """A session with a history that was changed."""
    disk.now_s = 4e9  # it does not expire while the test runs
    with disk.world() as world:
        name = world.create(is_stored=True, metadata={"a": "b"}, idempotency_key="key")
        for number in range(4):
            world.run(name, turn(f"t{number}", f"question {number}"))
        items = world.manager.snapshot(OWNER, name).items
        world.manager.edits.rewind(OWNER, name, items[3].id)
        world.run(name, turn("other", "another question"))
        world.create(owner="name:stranger", is_stored=True)
    return name


def test_sessions_are_listed_with_what_they_are(disk: Disk, name: str, capsys: Shown) -> None:
    status, table, _ = sessions(capsys, disk.directory, "list")
    assert status == 0
    rows = [line.split() for line in table.splitlines() if "s_" in line]
    assert [row[:3] for row in rows if row[0] == name] == [[name, "owner", "5"]]
    assert len(rows) == 2
    _, mine, _ = sessions(capsys, disk.directory, "list", "--owner", "stranger")
    assert name not in mine


@pytest.mark.parametrize(
    ("left_s", "shown"), [(-1, "expired"), (61, "1 min"), (7000, "117 min"), (86_400, "24 h")]
)
def test_how_long_a_session_has_is_shown_in_minutes_or_hours(left_s: float, shown: str) -> None:
    assert shown_time(left_s) == shown


def test_a_session_is_shown_by_how_its_id_begins(disk: Disk, name: str, capsys: Shown) -> None:
    status, said, _ = sessions(capsys, disk.directory, "show", name[:12])
    assert status == 0
    assert said.startswith("user: question 0\nassistant: ")
    assert "question 3" not in said
    assert "another question" in said
    status, _, told = sessions(capsys, disk.directory, "show", "s_")
    assert status == 1
    assert "more than one session has the id s_, or one that begins so" in told
    assert " of owner, " in told
    assert " of stranger" in told
    assert sessions(capsys, disk.directory, "show", name, "--owner", "stranger")[0] == 1


def test_a_session_goes_on_in_another_store_token_for_token(
    disk: Disk, name: str, capsys: Shown, tmp_path: Path
) -> None:
    with disk.world() as world:
        state = state_of(world, name)
        reference = completed(world.run(name, turn("next")))
        world.manager.edits.rewind(OWNER, name, state["items"][-1].id)  # type: ignore[index]
    path = tmp_path / "talk.json"
    assert sessions(capsys, disk.directory, "export", name, str(path))[0] == 0
    assert path.stat().st_mode & 0o777 == 0o600
    other = Disk(tmp_path / "other")
    other.now_s = disk.now_s
    status, told, _ = sessions(capsys, other.directory, "import", str(path), "--owner", "owner")
    assert " for owner, 6 turns, " in told
    assert other.directory.stat().st_mode & 0o777 == 0o700, "as a server makes one"
    assert (status, told.split()[:2]) == (0, ["imported", name])
    status, _, told = sessions(capsys, other.directory, "import", str(path), "--owner", "owner")
    assert (status, "pass --id ID" in told) == (1, True)
    words = ("import", str(path), "--owner", "owner", "--id", "copy")
    assert sessions(capsys, other.directory, *words)[0] == 0
    other.now_s = 1_000_000.0
    with other.world() as world:
        for each in (name, "copy"):
            assert world.history(each) == state["tokens"]
            assert world.manager.snapshot(OWNER, each).items == state["items"]
            assert world.submit(each, turn("t0", "question 0")).status == "completed"
            assert completed(world.run(each, turn("again"))).outcome.token_ids == (
                reference.outcome.token_ids
            )


def test_sessions_are_deleted_and_their_space_is_given_back(
    disk: Disk, name: str, capsys: Shown
) -> None:
    assert sessions(capsys, disk.directory, "delete", name) == (0, f"deleted {name}\n", "")
    assert sessions(capsys, disk.directory, "vacuum")[0] == 0
    disk.now_s = 1_000_000.0
    with disk.world() as world, pytest.raises(SessionNotFound):
        world.manager.get(OWNER, name)


def test_a_store_is_read_beside_a_server_and_not_changed(
    disk: Disk, name: str, capsys: Shown
) -> None:
    server = Database(disk.directory)
    server.lock.serve()
    assert sessions(capsys, disk.directory, "show", name)[0] == 0
    _, exported, _ = sessions(capsys, disk.directory, "export", name)
    (disk.directory.parent / "talk.json").write_text(exported)
    talk = str(disk.directory.parent / "talk.json")
    for words, advice in (
        (("delete", name), "DELETE /v1/sessions/ID"),
        (("vacuum",), "stop that server"),
        (("import", talk, "--id", "fresh"), "another --store"),
    ):
        status, _, told = sessions(capsys, disk.directory, *words)
        assert (status, "a server has it open" in told, told.count("\n")) == (1, True, 1)
        assert advice in told
    server.close()


def test_a_store_is_copied_beside_its_server_and_goes_on_from_the_copy(
    disk: Disk, name: str, capsys: Shown, tmp_path: Path
) -> None:
    copy = Disk(tmp_path / "again")
    path = copy.directory / Database.FILE
    copy.directory.mkdir(mode=0o755)
    copy.now_s = disk.now_s
    with disk.world() as world:
        tokens = world.history(name)
        assert sessions(capsys, disk.directory, "backup", str(path))[0] == 0
        assert path.stat().st_mode & 0o777 == 0o600
        assert [each.name for each in copy.directory.iterdir()] == [Database.FILE]
        world.run(name, turn("later"))
        status, _, told = sessions(capsys, disk.directory, "backup", str(path))
        assert (status, "exists" in told) == (1, True)
    with copy.world() as world:
        assert world.history(name) == tokens
    assert copy.directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("action", ["export", "backup"])
def test_a_file_that_cannot_all_be_written_is_not_left(
    disk: Disk, name: str, *, capsys: Shown, tmp_path: Path, action: str
) -> None:
    path = tmp_path / "talk"
    words = ("export", name, str(path)) if action == "export" else ("backup", str(path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handled = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
    try:
        status, _, told = sessions(capsys, disk.directory, *words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handled)
    assert (status, told.count("\n")) == (1, 1)
    assert str(path) in told
    assert not path.exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("show",), "show takes ID"),
        (("show", ""), "show takes ID"),
        (("export", "", "talk.json"), "export takes ID, and FILE perhaps"),
        (("list", "x"), "list takes no id"),
        (("delete",), "delete takes ID, one or more"),
        (("list", "--id", "x"), "list takes no --id"),
        (("vacuum", "--owner", "x"), "vacuum takes no --owner"),
    ],
)
def test_wrong_arguments_are_told(
    disk: Disk, capsys: Shown, words: tuple[str, ...], told: str
) -> None:
    assert sessions(capsys, disk.directory, *words) == (2, "", f"session-server sessions: {told}\n")


def test_an_empty_owner_or_id_is_none(disk: Disk, name: str, capsys: Shown, tmp_path: Path) -> None:
    file = str(tmp_path / "talk.json")
    assert sessions(capsys, disk.directory, "export", name, file)[0] == 0
    other = tmp_path / "other"
    told = sessions(capsys, other, "import", file, "--id", "")[2]
    assert told.startswith("session-server sessions: '': a session id has ")
    with pytest.raises(SystemExit):
        sessions(capsys, other, "import", file, "--owner", "")
    assert "argument --owner: it is empty" in capsys.readouterr().err


def test_no_store_is_made_by_looking(tmp_path: Path, capsys: Shown) -> None:
    status, _, told = sessions(capsys, tmp_path / "none", "list")
    assert (status, "is no store" in told) == (1, True)
    (tmp_path / "rubbish").touch()
    assert sessions(capsys, tmp_path / "none", "import", str(tmp_path / "rubbish"))[0] == 1
    assert not (tmp_path / "none").exists()


def test_a_store_that_is_a_file_or_lost_its_database_is_told_as_that(
    disk: Disk, name: str, *, capsys: Shown, tmp_path: Path
) -> None:
    path = tmp_path / "talk.json"
    assert sessions(capsys, disk.directory, "export", name, str(path))[0] == 0
    for words in (("list",), ("import", str(path))):
        status, _, told = sessions(capsys, path, *words)
        assert (status, "is a file, not a directory" in told, told.count("\n")) == (1, True, 1)
    (disk.directory / Database.FILE).unlink()
    for words in (("list",), ("import", str(path))):
        status, said, told = sessions(capsys, disk.directory, *words)
        assert (status, said) == (1, "")
        assert f"{Database.FILE} is gone: put a backup in its place" in told


def test_a_list_without_sessions_says_so(disk: Disk, name: str, capsys: Shown) -> None:
    assert name
    told = f"no sessions of bob in {disk.directory}\n"
    assert sessions(capsys, disk.directory, "list", "--owner", "bob") == (0, "", told)


def test_who_has_no_permission_is_told(
    disk: Disk, name: str, *, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))

    monkeypatch.setattr(os, "open", refuse)
    for words in (("delete", name), ("list",)):
        status, _, told = sessions(capsys, disk.directory, *words)
        assert status == 1
        assert told.endswith(
            f"permission denied for user {user_name()}; pass a --store that it can write\n"
        )


def test_the_store_is_that_of_a_server_on_the_default_port(
    disk: Disk, name: str, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(disk.directory.parent))
    assert cli.main(["sessions", "list"]) == 1
    assert "pass --store DIR" in capsys.readouterr().err
    stores = disk.directory.with_name("session-server")
    stores.mkdir()
    disk.directory.rename(stores / "port-8000")
    assert cli.main(["sessions", "list"]) == 1
    assert f"pass --store {stores / 'port-8000'}" in capsys.readouterr().err
    (stores / "port-8000").rename(stores / "port-30000")
    assert cli.main(["sessions", "list"]) == 0
    assert name in capsys.readouterr().out
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.delenv("HOME")
    assert cli.main(["sessions", "list"]) == 1
    assert "no home directory" in capsys.readouterr().err


def change(disk: Disk, statement: str, *values: object) -> None:
    """Change a store behind its back."""
    with closing(Database(disk.directory)) as database, database.transaction():
        database._writer.execute(statement, values)


def test_only_whole_ids_are_deleted(disk: Disk, name: str, capsys: Shown) -> None:
    status, _, told = sessions(capsys, disk.directory, "delete", name, name[:20])
    assert status == 1
    assert f"give all of it to delete {name} of owner" in told
    assert name in sessions(capsys, disk.directory, "list")[1], "all of them or none"
    status, _, told = sessions(capsys, disk.directory, "delete", "other")
    assert (status, "no session has the id other: `session-server sessions list`" in told) == (
        1,
        True,
    )
    with disk.world() as world:
        for owner in ("name:one", "name:two"):
            world.create(owner=owner, is_stored=True, session_id="same")
    status, _, told = sessions(capsys, disk.directory, "delete", "same")
    assert (status, "same of one, same of two" in told) == (1, True)
    words = ("delete", "same", "same", "--owner", "one")
    assert sessions(capsys, disk.directory, *words) == (0, "deleted same\n", "")
    assert sessions(capsys, disk.directory, "show", "same", "--owner", "two")[0] == 0


def test_a_session_is_found_without_a_look_at_the_others(disk: Disk, name: str) -> None:
    with closing(Database(disk.directory)) as database:
        (row,) = database.named(None, name, name, limit=9)
        with database.transaction():
            for number in range(1, 300):
                other = structs.replace(row, number=number, session_id=f"{name}{number}")
                database.put(other, b"")
        looks = [0]

        def count() -> None:
            looks[0] += 1

        database._reader.set_progress_handler(count, 1)
        for owner_id in (None, OWNER.owner_id):
            assert database.named(owner_id, name, name, limit=9) == [row]
            assert len(database.named(owner_id, name, f"{name}~", limit=9)) == 9
        assert looks[0] < 4 * 300, "steps of SQLite's machine"


def test_a_store_that_is_listed_is_free_while_nobody_reads_what_is_printed(
    disk: Disk, name: str
) -> None:
    """A pager may show the first page for hours."""
    with closing(Database(disk.directory)) as database:
        (row,) = database.named(None, name, name, limit=9)
        with database.transaction():
            for number in range(1, 10_001):
                database.put(
                    structs.replace(row, number=number, session_id=f"n{number}", num_entries=0), b""
                )
    command = [sys.executable, "-m", "session_server", "sessions", "list"]
    command += ["--store", str(disk.directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listing:
        assert listing.stdout is not None
        head, first = listing.stdout.readline(), listing.stdout.readline()
        Database(disk.directory).close()  # as a server that begins
        ids = [line.split()[0] for line in listing.stdout]
    assert listing.returncode == 0
    assert [line.split()[0] for line in (head, first)] == ["id", "n1"]
    assert ids[:9_999] == [f"n{number}" for number in range(2, 10_001)]
    assert len(ids) == 10_001


@pytest.mark.parametrize("words", [("delete", "NAME"), ("vacuum",)])
def test_a_server_can_tell_that_a_command_changes_its_store(
    disk: Disk, name: str, *, capsys: Shown, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """It waits then, and does not go on without what it has told to be durable."""
    refused = list[type[Exception]]()

    def begin_a_server(_database: Database) -> None:
        monkeypatch.undo()
        try:
            Database(disk.directory)
        except StoreUnusable as error:
            refused.append(type(error))

    monkeypatch.setattr(Database, "_check_files", begin_a_server)
    monkeypatch.setattr(Database, "vacuum", begin_a_server)
    words = tuple(word.replace("NAME", name) for word in words)
    assert sessions(capsys, disk.directory, *words)[0] == 0
    assert refused == [StoreIsBusy]


def test_what_is_damaged_is_not_shown_as_if_it_were_whole(
    disk: Disk, name: str, capsys: Shown, tmp_path: Path
) -> None:
    place = f"session = (SELECT number FROM sessions WHERE id = '{name}')"
    change(disk, f"DELETE FROM entries WHERE {place} AND position = 3")
    for words in (("show", name), ("export", name, str(tmp_path / "talk.json"))):
        status, said, told = sessions(capsys, disk.directory, *words)
        assert (status, said) == (1, "")
        assert f"{name} is damaged" in told
        assert f"session-server doctor --store {disk.directory}" in told
    assert not (tmp_path / "talk.json").exists()


def test_one_with_damaged_settings_is_listed_and_deleted_with_the_others(
    disk: Disk, name: str, capsys: Shown
) -> None:
    change(disk, "UPDATE sessions SET settings = x'00' WHERE id = ?", name)
    status, table, _ = sessions(capsys, disk.directory, "list")
    (line,) = (line for line in table.splitlines() if name in line)
    assert (status, "damaged" in line, len(table.splitlines())) == (0, True, 3)
    assert sessions(capsys, disk.directory, "delete", name)[0] == 0


def test_the_store_is_found_as_serve_finds_it(
    disk: Disk, name: str, *, capsys: Shown, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SESSION_SERVER_SESSIONS__STORE", str(disk.directory))
    assert cli.main(["sessions", "list"]) == 0
    assert name in capsys.readouterr().out
    assert cli.main(["doctor", "--json", "--store"]) == 0
    assert str(disk.directory) in capsys.readouterr().out
    monkeypatch.delenv("SESSION_SERVER_SESSIONS__STORE")
    file = tmp_path / "server.toml"
    file.write_text(f"[sessions]\nstore = '{disk.directory}'\n")
    assert cli.main(["sessions", "list", "--config", str(file)]) == 0
    assert name in capsys.readouterr().out
    assert cli.main(["doctor", "--store", "--config", str(file), "--json"]) == 0
    assert str(disk.directory) in capsys.readouterr().out
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    stores = tmp_path / "session-server"
    stores.mkdir()
    disk.directory.rename(stores / "port-21750")
    monkeypatch.setenv("SESSION_SERVER_HTTP__PORT", "21750")
    assert cli.main(["sessions", "list"]) == 0
    assert name in capsys.readouterr().out
    monkeypatch.setenv("SESSION_SERVER_HTTP__PORT", "x")
    assert cli.main(["sessions", "list"]) == 1
    assert "SESSION_SERVER_HTTP__PORT: expected" in capsys.readouterr().err


def test_no_store_at_all_is_told(capsys: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["sessions", "list", "--store", "none"]) == 1
    told = "the store is none, which keeps no sessions: pass --store DIR"
    assert capsys.readouterr().err == f"session-server sessions: {told}\n"
    monkeypatch.setenv("SESSION_SERVER_SESSIONS__STORE", "none")
    assert cli.main(["doctor", "--store", "--json"]) == 1
    assert told in capsys.readouterr().out


def test_an_owner_is_the_name_of_a_key(
    disk: Disk, name: str, *, capsys: Shown, tmp_path: Path
) -> None:
    path = tmp_path / "talk.json"
    assert sessions(capsys, disk.directory, "export", name, str(path), "--owner", "owner")[0] == 0
    assert sessions(capsys, disk.directory, "import", str(path), "--owner", "alice")[0] == 0
    assert sessions(capsys, disk.directory, "import", str(path))[0] == 0
    grants = grants_of("alice sha256:" + "0" * 64, "a file")
    with closing(Database(disk.directory, is_read_only=True)) as database:
        for owner_id in (grants["0" * 64].owner_id, ANONYMOUS.owner_id):
            assert database.find(owner_id, name) is not None
    _, table, _ = sessions(capsys, disk.directory, "list")
    owners = {line.split()[1] for line in table.splitlines() if name in line}
    assert owners == {"owner", "alice", "anonymous"}
    for owner in owners:
        _, mine, _ = sessions(capsys, disk.directory, "list", "--owner", owner)
        assert [line.split()[1] for line in mine.splitlines() if "s_" in line] == [owner]
    assert sessions(capsys, disk.directory, "delete", name, "--owner", "alice")[0] == 0


def test_what_the_system_refuses_is_told_in_words(
    disk: Disk, name: str, *, capsys: Shown, tmp_path: Path
) -> None:
    path = tmp_path / "talk.json"
    path.touch()
    for words, told in (
        (
            ("export", name, str(path)),
            f"{path}: file exists: name another file, or remove that one",
        ),
        (("import", str(tmp_path / "no")), f"{tmp_path / 'no'}: no such file or directory"),
    ):
        status, _, error = sessions(capsys, disk.directory, *words)
        assert (status, error) == (1, f"session-server sessions: {told}\n")


def test_what_a_client_said_cannot_command_the_terminal_that_shows_it(
    disk: Disk, capsys: Shown
) -> None:
    with disk.world() as world:
        name = world.create(is_stored=True)
        world.run(name, turn("t", "a\x1b]0;title\x07\x9b2J\r\u202eb\tc\nassistant: d"))
    status, said, _ = sessions(capsys, disk.directory, "show", name)
    assert status == 0
    assert said.startswith("user: a\\x1b]0;title\\x07\\x9b2J\\r\\u202eb\tc\n    assistant: d\n")


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"answer_len": 10**6},
        {"answer_len": 2**31},
        {"num_open": -1},
        {"num_open": 10**6},
        {"num_made": 1},
        {"token_ids": [-1]},
        {"token_ids": [1 << 31]},
        {"answers": [{"item": 10**6, "end": 1, "is_end_replaced": False}]},
        {"answers": [{"item": 0, "end": 1, "is_end_replaced": False}] * 2},
        {"items.0.role": "king"},
        {"items.0": {"role": "raw", "end_len": 10**6}},
        {"ended_turns.0.input_tokens": 1 << 32},
        {"ended_turns.0.index": -1},
        {"ended_turns.0.kind": "vanished"},
        {"ended_turns.0.first_token_ms": 1e300},
        {"ended_turns.0.id_digest": "0"},
        {"settings.ttl_s": 1e12},
        {"settings.ttl_s": 0},
        {"settings.created_s": 1e300},
        {"settings.now_s": 1e300},
        {"settings.now_s": -1},
        {"settings.metadata": {"k": "v" * 200_000}},
        {"settings.metadata": {f"{number}": "" for number in range(17)}},
        {"settings.history": "append", "answers.0.end": 10**6},
        {"surplus": 1},
        {"settings.surplus": 1},
        {"items": [{}]},
    ],
)
def test_a_file_that_is_no_session_changes_nothing(
    disk: Disk, name: str, *, capsys: Shown, tmp_path: Path, change: dict[str, object]
) -> None:
    _, exported, _ = sessions(capsys, disk.directory, "export", name)
    path, file = tmp_path / "file.json", json.loads(exported)
    for place, value in change.items():
        *outer, last = (int(key) if key.isdigit() else key for key in place.split("."))
        holder = reduce(getitem, outer, file)
        holder[last] = holder[last] | value if isinstance(last, int) else value
    path.write_text(json.dumps(file))
    status, _, told = sessions(capsys, disk.directory, "import", str(path), "--id", "fresh")
    assert status == 1
    assert told.startswith("session-server sessions: ")
    assert "Traceback" not in told
    assert "fresh" not in sessions(capsys, disk.directory, "list")[1]


def test_every_value_of_a_file_has_a_name(disk: Disk, name: str, capsys: Shown) -> None:
    """It is read by people, and the log may change how it writes the same."""
    file = json.loads(sessions(capsys, disk.directory, "export", name)[1])
    assert file["version"] == 2
    assert file["settings"].keys() == {
        *("ttl_s", "metadata", "is_pinned", "history", "created_s", "now_s")
    }
    lists = {key for key, value in file.items() if isinstance(value, list)}
    assert lists == {"token_ids", "items", "tools", "answers", "ended_turns"}
    assert all(isinstance(each, dict) for key in ("items", "answers") for each in file[key])
    assert file["ended_turns"][0]["kind"] in ("stop", "length")


def test_a_file_may_have_the_longest_time_to_live_that_a_server_gives() -> None:
    schema = Settings.model_json_schema()["$defs"]["SessionOptions"]["properties"]["ttl_s"]
    assert MAX_TTL_S in (kind.get("maximum") for kind in schema["anyOf"])
