"""How long sessions live that nobody uses: those in a store outlive a night without a server."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from session_server import cli
from session_server.local_server import LocalServer
from session_server.sessions.store.database import Database
from tests.rig.echo_server import PROGRAM

_NIGHT_S = 10 * 3600.0


def lives(server: LocalServer) -> list[float]:
    """Of a session of the native protocol, and of one that only this process can know."""
    with httpx.Client(base_url=server.url) as http:
        native = http.post("/v1/sessions", json={}).json()
        name = http.post("/open_session", json={"capacity_of_str_len": 1000}).json()
        return [native["ttl_s"], http.get(f"/v1/sessions/{name}").json()["ttl_s"]]


def test_a_session_in_a_store_lives_for_a_day_and_others_for_a_quarter_of_an_hour(
    tmp_path: Path,
) -> None:
    store = ["--store", str(tmp_path / "store")]
    for flags, expected in (
        (store, [86_400.0, 900.0]),
        ([], [900.0, 900.0]),
        ([*store, "--session-ttl", "60"], [60.0, 60.0]),
    ):
        with LocalServer(flags, program=PROGRAM) as server:
            assert lives(server) == expected, flags


def age(directory: Path, name: str, by_s: float) -> None:
    with closing(sqlite3.connect(directory / Database.FILE)) as database, database:
        query = "UPDATE sessions SET expires = expires - ? WHERE id = ?"
        assert database.execute(query, (by_s, name)).rowcount == 1


def test_a_night_without_a_server_is_no_end_and_who_has_expired_is_counted_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, lines = tmp_path / "store", list[str]()
    flags = ["--store", str(directory)]
    with LocalServer(flags, program=PROGRAM) as server, httpx.Client(base_url=server.url) as http:
        night, week = (http.post("/v1/sessions", json={}).json()["id"] for _ in range(2))
    age(directory, night, _NIGHT_S)
    age(directory, week, 7 * 24 * 3600.0)
    assert cli.main(["doctor", "--store", str(directory)]) == 0
    assert "1 of them expired" in " ".join(capsys.readouterr().out.split())
    with LocalServer(flags, program=PROGRAM, on_line=lines.append) as server:
        assert httpx.get(f"{server.url}/v1/sessions/{night}").status_code == 200
        assert httpx.get(f"{server.url}/v1/sessions/{week}").status_code == 404
    assert any("where there are 1, and 1 that have expired" in line for line in lines), lines


def test_a_clock_that_is_a_week_ahead_at_a_start_ends_no_session_in_silence(
    tmp_path: Path,
) -> None:
    directory, lines = tmp_path / "store", list[str]()
    flags = ["--store", str(directory)]
    with LocalServer(flags, program=PROGRAM) as server, httpx.Client(base_url=server.url) as http:
        name = http.post("/v1/sessions", json={}).json()["id"]
    week_s = 7 * 24 * 3600.0
    age(directory, name, week_s)
    with closing(Database(directory)) as database:
        noted_s = database.noted_s()
        assert noted_s is not None
        with database.transaction():
            database.note_time(noted_s - week_s)
    with LocalServer(flags, program=PROGRAM, on_line=lines.append) as server:
        assert httpx.get(f"{server.url}/v1/sessions/{name}").status_code == 200
        for _ in range(50):
            if any("1 sessions on disk have expired" in line for line in lines):
                break
            time.sleep(0.1)
        else:
            pytest.fail(f"nothing was said: {lines}")
