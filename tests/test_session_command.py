"""`session-server sessions`: what a store has is shown, moved and deleted."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from session_server import cli
from session_server.core.errors import SessionNotFound
from session_server.core.owner import ANONYMOUS
from session_server.sessions.store.database import Database
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


def test_a_session_is_shown_by_how_its_id_begins(disk: Disk, name: str, capsys: Shown) -> None:
    status, said, _ = sessions(capsys, disk.directory, "show", name[:12])
    assert status == 0
    assert said.startswith("user: question 0\nassistant: ")
    assert "question 3" not in said
    assert "another question" in said
    status, _, told = sessions(capsys, disk.directory, "show", "s_")
    assert status == 1
    assert "2 sessions have an id" in told
    assert "owner, stranger" in told


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
    with other.world():
        pass  # a server makes the store
    status, told, _ = sessions(capsys, other.directory, "import", str(path), "--owner", "owner")
    assert (status, told.split()[:2]) == (0, ["imported", f"{name},"])
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
    assert sessions(capsys, disk.directory, "show", name)[0] == 0
    for words in (("delete", name), ("vacuum",), ("import", __file__)):
        status, _, told = sessions(capsys, disk.directory, *words)
        assert (status, "another server has it open" in told) == (1, True)
    server.close()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("show",), "show takes ID"),
        (("list", "x"), "list takes no id"),
        (("delete",), "delete takes ID, one or more"),
    ],
)
def test_wrong_arguments_are_told(
    disk: Disk, capsys: Shown, words: tuple[str, ...], told: str
) -> None:
    assert sessions(capsys, disk.directory, *words) == (2, "", f"session-server sessions: {told}\n")


def test_no_store_is_made_by_looking(tmp_path: Path, capsys: Shown) -> None:
    status, _, told = sessions(capsys, tmp_path / "none", "list")
    assert (status, "is no store" in told) == (1, True)
    assert not (tmp_path / "none").exists()


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
        (("export", name, str(path)), f"{path}: file exists"),
        (("import", str(tmp_path / "no")), f"{tmp_path / 'no'}: no such file or directory"),
    ):
        status, _, error = sessions(capsys, disk.directory, *words)
        assert (status, error) == (1, f"session-server sessions: {told}\n")


def test_what_a_client_said_cannot_command_the_terminal_that_shows_it(
    disk: Disk, capsys: Shown
) -> None:
    with disk.world() as world:
        name = world.create(is_stored=True)
        world.run(name, turn("t", "a\x1b]0;title\x07\x9b2J\r\u202eb\tc\nd"))
    status, said, _ = sessions(capsys, disk.directory, "show", name)
    assert status == 0
    assert said.startswith("user: a\\x1b]0;title\\x07\\x9b2J\\r\\u202eb\tc\nd\n")


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"answer_len": 10**6},
        {"num_open": -1},
        {"token_ids": [-1]},
        {"answer_ends": [[10**6, 1]]},
        {"answer_ends": [[0, 10**6]]},
        {"surplus": 1},
        {"items": [{}]},
    ],
)
def test_a_file_that_is_no_session_changes_nothing(
    disk: Disk, name: str, *, capsys: Shown, tmp_path: Path, change: dict[str, object]
) -> None:
    _, exported, _ = sessions(capsys, disk.directory, "export", name)
    path = tmp_path / "file.json"
    path.write_text(json.dumps(json.loads(exported) | change))
    status, _, told = sessions(capsys, disk.directory, "import", str(path), "--id", "new")
    assert status == 1
    assert told.startswith("session-server sessions: ")
    assert "Traceback" not in told
    assert "new" not in sessions(capsys, disk.directory, "list")[1]
