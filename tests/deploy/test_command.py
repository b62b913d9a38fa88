"""`session-server cluster`, as far as it goes without Ray."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from session_server import cli
from session_server.config import Settings
from session_server.deploy import command, head
from session_server.deploy.head import (
    Head,
    Record,
    is_running,
    read_record,
    remove_record,
    stop_head,
    write_record,
)
from session_server.sessions.store.places import STATE_VARIABLE
from tests.rig.postgres import running

UNUSED_PORT = "31999"


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))


@pytest.fixture
def ray_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())


@pytest.mark.parametrize("action", ["up", "status", "down"])
def test_without_ray_it_says_what_to_install(
    action: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert cli.main(["cluster", action]) == 2
    assert "pip install 'session-server[ray]'" in capsys.readouterr().err


def test_nothing_imports_ray_before_a_cluster_is_asked_for() -> None:
    code = (
        "import sys; from session_server import cli\n"
        "try: cli.main(['cluster', '--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in sys.modules if name.partition('.')[0] in ('ray', 'torch')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.usefixtures("ray_is_there")
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--port", "0"], "--port 0"),
        (["--admin-port", "0"], "--admin-port"),
        (["--store", "/sessions"], "replicas share their sessions"),
        (["--host", "0.0.0.0"], "--allow-open"),
        (["--model-path", "/no/such"], "/no/such"),
        (["--drain-timeout", "-1"], "--drain-timeout: expected 0 to 3600"),
        (["--ssl-keyfile", "k.pem"], "--ssl-certfile"),
    ],
)
def test_what_every_replica_would_refuse_is_refused_before_ray_starts(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["cluster", "up", "--port", UNUSED_PORT, *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("session-server cluster: ")
    assert told in error


@pytest.mark.usefixtures("ray_is_there")
def test_a_port_that_is_taken_is_told_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert cli.main(["cluster", "up", "--port", str(port)]) == 1
    told = f"cannot listen on 127.0.0.1:{port}: Address already in use; pass another --port"
    assert told in capsys.readouterr().err


@pytest.mark.usefixtures("ray_is_there")
def test_a_database_that_refuses_is_told_before_ray_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with running() as postgres:
        url = postgres.url().replace("postgres@", "nobody-there@")
        assert cli.main(["cluster", "up", "--port", UNUSED_PORT, "--store", url]) == 2
    assert 'role "nobody-there" does not exist' in capsys.readouterr().err


def test_who_is_ended_while_ray_starts_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Head] = []

    def interrupt(seconds: float) -> None:
        monkeypatch.undo()
        time.sleep(seconds)  # it has its own command line by now
        raise KeyboardInterrupt

    def note(address: str, pid: int, directory: str) -> Head:
        begun.append(Head(address, pid, directory))
        return begun[0]

    monkeypatch.setattr(head, "_RAY", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(head, "Head", note)
    monkeypatch.setattr(head.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        head.start_head(1)
    assert not is_running(begun[0])
    assert not Path(begun[0].directory).exists()


@pytest.mark.usefixtures("ray_is_there")
def test_what_was_never_started_is_down_and_has_no_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["cluster", "down", "--port", UNUSED_PORT]) == 0
    assert f"no cluster was started on port {UNUSED_PORT}" in capsys.readouterr().err
    assert cli.main(["cluster", "status", "--port", UNUSED_PORT]) == 1
    assert "--address" in capsys.readouterr().err
    assert cli.main(["cluster", "status", "--port", UNUSED_PORT, "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"url": None, "replicas": []}


@pytest.mark.usefixtures("ray_is_there")
@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1", "[::1]:x"])
def test_a_ray_that_does_not_answer_is_told_at_once(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["cluster", "status", "--address", address]) == 1
    assert f"no Ray cluster answers at {address}: `ray start --head`" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["walk"], [], ["up", "--replicas", "0"], ["up", "--replicaz"]])
def test_other_words_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        cli.main(["cluster", *words])
    assert refused.value.code == 2


def test_what_was_started_is_remembered_by_its_port(tmp_path: Path) -> None:
    record = Record("http://127.0.0.1:1", "127.0.0.1:2", Head("127.0.0.1:2", 3, "/run/x"))
    write_record(1, record)
    assert (read_record(1), read_record(2)) == (record, None)
    (path,) = tmp_path.rglob("port-1.json")
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.write_text("{")
    assert read_record(1) is None
    remove_record(1)
    remove_record(1)
    assert not path.exists()


def test_only_a_process_of_ours_is_ended(tmp_path: Path) -> None:
    directory = tmp_path / "ray"
    directory.mkdir()
    argv = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(argv) as stranger, subprocess.Popen([*argv, str(directory)]) as ours:
        try:
            # A machine that was started anew gives a number to somebody else.
            assert not is_running(Head("", stranger.pid, str(directory)))
            stop_head(Head("", stranger.pid, str(tmp_path / "gone")))
            assert stranger.poll() is None
            while not is_running(Head("", ours.pid, str(directory))):
                time.sleep(0.01)  # until it runs its own program
            stop_head(Head("", ours.pid, str(directory)))
            assert not is_running(Head("", ours.pid, str(directory)))
            assert not directory.exists()
        finally:
            stranger.kill()
            ours.kill()


@pytest.mark.parametrize(
    ("store", "told"),
    [
        ("auto", "end with their replica"),
        ("none", "end with their replica"),
        ("postgresql://host/sessions", "go on in another replica"),
    ],
)
def test_what_becomes_of_sessions_is_told_as_it_is(store: str, told: str) -> None:
    settings = Settings()
    sessions = settings.sessions.model_copy(update={"store": store})
    assert command._kept_in(settings.model_copy(update={"sessions": sessions})) == told


def test_a_row_shows_what_did_not_answer() -> None:
    row = {"replica": "ab", "pid": 7, "sessions": None, "kv_use": None, "engine": "no answer"}
    assert command._shown_row(row) == ["ab", "7", "-", "-", "no answer"]
    assert command._shown_row(row | {"kv_use": 0.256})[3] == "26%"
