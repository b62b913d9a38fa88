"""How a server opens a store that others share when it starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from session_server import shared_store
from session_server.config import Settings
from session_server.sessions.postgres import database
from session_server.sessions.postgres.connections import shown
from session_server.sessions.postgres.database import PostgresDatabase
from session_server.sessions.store.lock import StoreAway, StoreUnusable


def start(url: str) -> str:
    """Open a store, as a server that starts does, and return where it is."""

    async def main() -> str:
        store = await shared_store.open_once_there(Settings(), url, model=b"tokenizer")
        store.start(asyncio.get_running_loop())
        await store.close()
        return store.place

    return asyncio.run(main())


def test_a_server_that_starts_waits_for_a_database_that_is_there_later(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_store, "_LOOK_S", 0.01)
    attempts: list[str] = []

    def opening(given: str, **options: object) -> PostgresDatabase:
        attempts.append(given)
        where = "postgresql://u:secret@/x?host=/nowhere" if len(attempts) < 4 else given
        return PostgresDatabase(where, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(database, "PostgresDatabase", opening)
    assert start(url) == shown(url)
    assert len(attempts) == 4
    assert caplog.text.count("the start waits up to 60 s for it") == 1
    assert "does it listen?" in caplog.text
    assert "secret" not in caplog.text


def test_a_server_whose_database_does_not_come_says_what_it_has_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_store, "START_WAIT_S", 0.0)
    with pytest.raises(StoreAway, match=r"/nowhere.*is PostgreSQL there, and does it listen"):
        start("postgresql:///x?host=/nowhere")


@pytest.mark.parametrize(
    "spoilt", [lambda url: url.replace("/test_", "/gone_"), lambda _url: "sqlite:///sessions.db"]
)
def test_a_server_waits_for_no_database_that_waiting_does_not_help(
    url: str, spoilt: Callable[[str], str]
) -> None:
    with pytest.raises(StoreUnusable) as refused:
        start(spoilt(url))
    assert not isinstance(refused.value, StoreAway)
