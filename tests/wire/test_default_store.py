"""A server that is told of no store keeps sessions in the user's state directory, by its port."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from session_server.config import EngineSettings, Settings
from session_server.engine_host.process import EngineProcess
from session_server.local_server import LocalServer
from session_server.sessions.store import lock
from session_server.sessions.store.database import Database
from session_server.sessions.store.lock import StoreIsBusy
from session_server.sessions.store.places import default_directory
from session_server.wiring import make_engine, opened_store, with_store
from tests.web.serving import model_text
from tests.wire.test_restart import free_port

NOT_KEPT = "sessions end with this server"


def opened(environment: dict[str, str], **settings: Any) -> Path | None:
    """Where a server with these settings keeps sessions, opened once."""
    port = settings.pop("port", 30000)

    async def run() -> Path | None:
        of_all = Settings.model_validate({"http": {"port": port}, "sessions": settings})
        async with opened_store(of_all, model_text(), environment) as store:
            return None if store is None else store.directory

    return asyncio.run(run())


def test_no_test_keeps_anything_in_the_home_of_whoever_runs_it() -> None:
    directory = default_directory(os.environ, 30000)
    assert directory is not None
    assert directory.is_relative_to(tempfile.gettempdir())
    # Servers of the demo, the benchmarks and the chat keep nothing, and those of tests inherit it.
    seen = "import os, sys; print(*sys.argv, 'listening on http://' + os.environ['XDG_STATE_HOME'])"
    with LocalServer(program=(sys.executable, "-c", seen)) as server:
        assert directory.is_relative_to(server.url.removeprefix("http://"))
        assert "--store none" in server.last_lines


def test_each_port_has_a_store_that_is_its_users_alone(tmp_path: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path / "home")}
    before = os.umask(0)
    try:
        kept = opened(state)
    finally:
        os.umask(before)
    assert kept == tmp_path / "state" / "session-server" / "port-30000"
    made = [kept, kept.parent, kept.parent.parent]
    assert [oct(path.stat().st_mode & 0o777) for path in made] == ["0o700"] * 3
    assert {oct(path.stat().st_mode & 0o777) for path in kept.iterdir()} == {"0o600"}
    assert opened(state, port=8000) == kept.with_name("port-8000")
    assert opened(state, port=0) is None  # nobody comes back to a port that was free by chance
    assert opened(state, store="none") is None
    assert opened({"HOME": state["HOME"], "XDG_STATE_HOME": "relative"}) == (
        tmp_path / "home/.local/state/session-server/port-30000"
    )
    assert opened({}) is None


def test_a_default_server_starts_without_a_store_that_it_cannot_have_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert opened({"XDG_STATE_HOME": str(tmp_path / "file")}) is None
        state = {"XDG_STATE_HOME": str(tmp_path)}
        kept = opened(state)
        assert kept is not None
        held = Database(kept)
        held.lock.serve()  # another server, on another address of this port
        assert opened(state) is None
        held.close()
    told = [record.getMessage() for record in caplog.records]
    assert all(NOT_KEPT in line for line in told)
    assert str(tmp_path / "file") in told[0]
    assert "another server has it open" in told[1]


def test_a_server_waits_for_a_command_that_reads_its_store_and_does_not_start_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would serve 404 for what it has told to be durable, and keep nothing."""
    state = {"XDG_STATE_HOME": str(tmp_path)}
    kept = opened(state)
    assert kept is not None
    reader, looks = Database(kept, is_read_only=True), list[float]()
    sleep = asyncio.sleep

    async def pass_time(delay_s: float) -> None:
        looks.extend([delay_s] if delay_s else [])
        if len(looks) == 3:
            reader.close()
        await sleep(0)

    monkeypatch.setattr(lock.asyncio, "sleep", pass_time)
    with caplog.at_level(logging.WARNING):
        assert opened(state) == kept
    assert len(looks) == 3
    assert [record.getMessage() for record in caplog.records] == [
        f"waiting for 30 s at most: --store {kept}: a command has it open, such as "
        "doctor or sessions vacuum"
    ]
    with closing(Database(kept, is_read_only=True)):
        with pytest.raises(StoreIsBusy):
            opened(state)
        assert sum(looks[3:]) == lock.COMMANDS_WAIT_S


@pytest.mark.timeout(180)
def test_sessions_of_a_default_server_are_there_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers at once, each with its own; one is killed, and started again while a command
    reads its store."""
    ports = [free_port(), free_port()]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def serve(port: int, on_line: Callable[[str], None] | None = None) -> LocalServer:
        flags = ["--port", str(port), "--store", "auto", "--threads", "1"]
        return LocalServer(flags, on_line=on_line)

    def http(server: LocalServer) -> httpx.Client:
        return httpx.Client(base_url=server.url, trust_env=False)

    with serve(ports[0]) as killed, serve(ports[1]) as other:
        with http(killed) as client:
            made = client.post("/v1/sessions", json={}).json()
            assert made["durable"] is True
        with http(other) as client:
            assert client.get(f"/v1/sessions/{made['id']}").status_code == 404
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        reader = Database(tmp_path / f"session-server/port-{ports[0]}", is_read_only=True)

        def close_reader(line: str) -> None:
            if "a command has it open" in line:
                reader.close()

        with serve(ports[0], close_reader) as again, http(again) as client:
            assert client.get(f"/v1/sessions/{made['id']}").status_code == 200
    stores = sorted(path.name for path in (tmp_path / "session-server").iterdir())
    assert stores == sorted(f"port-{port}" for port in ports)


def test_an_engine_is_told_of_the_store_that_is_open_and_of_no_other(tmp_path: Path) -> None:
    """Its files of KV lie there: in no store that another server has open."""

    @asynccontextmanager
    async def serving(**settings: Any) -> AsyncIterator[Any]:
        of_all = Settings.model_validate(settings)
        environment = {"XDG_STATE_HOME": str(tmp_path)}
        async with opened_store(of_all, model_text(), environment) as store:
            engine = make_engine(with_store(of_all, store))
            assert isinstance(engine, EngineProcess)
            yield EngineSettings.model_validate_json(engine._settings.settings).sessions.store

    async def run() -> None:
        async with serving() as place:
            assert place == tmp_path / "session-server" / "port-30000"
            async with serving() as other:
                assert other == "none"
        async with serving(http={"port": 0}) as place:
            assert place == "none"
        async with serving(sessions={"store": tmp_path / "none"}) as place:
            assert place == tmp_path / "none"

    asyncio.run(run())
