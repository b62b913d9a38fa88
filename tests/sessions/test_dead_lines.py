"""Connections to PostgreSQL over which nothing comes any more, and nobody is told."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from typing import Any

import psycopg
import pytest

from session_server.sessions.postgres import connections, notifications
from session_server.sessions.postgres.connections import connect, open_pool, whole
from session_server.sessions.postgres.notifications import Notifications, channel_of
from tests.rig.cable import Cable, State, dial_postgres

WAIT_S = 0.5


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ANSWER_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(notifications, "_PROBE_S", WAIT_S)


def over(cable: Cable, url: str) -> str:
    """The same database at the near end of a line."""
    name = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
    return whole(f"postgresql://postgres@127.0.0.1:{cable.port}/{name}")


async def dies(cable: Cable) -> None:
    """Connections of now are dead, and new ones work."""
    await cable.pull(State.DEAD)
    await cable.pull(State.WORKS)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


def test_a_connection_over_which_no_answer_comes_is_given_up(url: str) -> None:
    async def scenario() -> None:
        async with Cable(dial_postgres(url)) as cable:
            connection = await asyncio.to_thread(connect, over(cable, url))
            await dies(cable)
            began_s = time.monotonic()
            with pytest.raises(psycopg.OperationalError, match="no answer"):
                await asyncio.to_thread(connection.execute, "SELECT 1")
            assert time.monotonic() - began_s >= WAIT_S
            assert connection.closed

    run(scenario())


def test_a_pool_replaces_connections_over_which_no_answer_comes(url: str) -> None:
    async def scenario() -> None:
        async with Cable(dial_postgres(url)) as cable:
            with open_pool(over(cable, url)) as pool:

                def ask() -> object:
                    with pool.connection() as connection:
                        return connection.execute("SELECT 1").fetchone()

                assert await asyncio.to_thread(ask) == (1,)
                await dies(cable)
                with pytest.raises(psycopg.OperationalError, match="no answer"):
                    await asyncio.to_thread(ask)
                answer: object = None
                while answer is None:  # whatever else the pool had is dead too
                    with contextlib.suppress(psycopg.OperationalError):
                        answer = await asyncio.to_thread(ask)
                assert answer == (1,)

    run(scenario())


def test_a_replica_listens_anew_where_its_connection_has_died(url: str) -> None:
    async def scenario() -> None:
        async with Cable(dial_postgres(url)) as cable:
            listener = Notifications(over(cable, url), 7)
            assert await asyncio.to_thread(listener.asked, 0.1) == []
            await dies(cable)
            await asyncio.sleep(WAIT_S)
            with pytest.raises(psycopg.OperationalError, match="no answer"):
                await asyncio.to_thread(listener.asked, 5.0)
            asking = asyncio.create_task(asyncio.to_thread(listener.asked, 20.0))
            with psycopg.connect(url, autocommit=True) as other:
                while not asking.done():
                    other.execute("SELECT pg_notify(%s, '3')", (channel_of(7),))
                    await asyncio.sleep(0.05)
            assert await asking == [3]
            listener.close()

    run(scenario())
