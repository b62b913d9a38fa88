"""A session of a shared store that another replica asks for just before a turn comes here: it has
left and is back when the turn is submitted, with another journal."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from functools import partial

import pytest

from session_server.core.owner import ANONYMOUS, Owner
from session_server.protocol.session_protocol import CloseCode
from session_server.sessions.manager import SessionManager
from session_server.sessions.postgres.database import PostgresDatabase
from session_server.sessions.salts import TenantSalts
from session_server.sessions.store.lease import ReplicaLease
from session_server.sessions.store.session_store import SessionStore
from session_server.web.socket_peer import FrameQueue, SocketPeer
from tests.rig.postgres import running
from tests.sessions.paper_engine import PaperEngine
from tests.web.realtime_client import realtime
from tests.web.serving import WORD, Served, model_text, serving_over, turn
from tests.web.test_admin_stored import Check, run


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(is_synced=False) as postgres:
        yield postgres.new_database()


@contextlib.asynccontextmanager
async def replica(url: str) -> AsyncIterator[Served]:
    """A server of a shared store. Each session is asked for once, when its first turn comes."""
    engine = PaperEngine(vocab_size=1536, eos_ids=(4,), next_token=lambda context: WORD)
    manager = SessionManager(engine, model_text(), salts=TenantSalts(bytes(32)))
    database = PostgresDatabase(url)
    lease = ReplicaLease(database, address="http://here", lease_s=30.0)
    lease.join()
    store = SessionStore(database, model=b"model", wall=lease.wall_s, lease=lease)
    store.start(asyncio.get_running_loop())
    manager.store_in(store)
    load, left = manager.load, set[str]()

    async def load_late(owner: Owner, session_id: str) -> None:
        session = manager._sessions.find(owner, session_id)
        is_read = manager.exits.count_readers(owner, session_id) > 0
        if session is not None and is_read and session_id not in left:
            left.add(session_id)
            manager.exits.give_up(session, is_lost=False)
        await load(owner, session_id)

    manager.load = load_late  # type: ignore[method-assign]
    try:
        async with serving_over(engine, manager) as this:
            yield this
    finally:
        await store.close()


def served(url: str, check: Check) -> None:
    async def serve() -> None:
        async with replica(url) as this:
            await check(this)

    run(serve)


@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
def test_a_turn_is_read_where_it_runs(url: str, accept: str) -> None:
    async def check(this: Served) -> None:
        path, body = f"/v1/sessions/{await this.open()}/turns", turn(turn_id="t1")
        answer = await this.http.post(path, json=body, headers={"accept": accept})
        assert answer.status_code == 200, answer.text
        assert "completed" in answer.text, answer.text
        assert (await this.http.post(path, json=body)).json()["status"] == "completed"

    served(url, check)


def test_a_turn_of_sglang_is_read_where_it_runs(url: str) -> None:
    async def check(this: Served) -> None:
        body = {
            "input_ids": [7, 8, 9],
            "sampling_params": {"max_new_tokens": 3, "temperature": 0},
            "session_params": {"id": await this.open()},
        }
        answer = await this.http.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["meta_info"]["completion_tokens"] == 3

    served(url, check)


def test_a_completion_is_read_where_it_runs(url: str) -> None:
    async def check(this: Served) -> None:
        body = {"model": "paper", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        body["session_id"] = await this.open()
        answer = await this.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text

    served(url, check)


def test_a_socket_that_does_not_read_where_a_turn_would_run_is_told_so(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_writable, flush = asyncio.Event(), SocketPeer.flush

    async def flush_slowly(peer: SocketPeer, waiting: FrameQueue) -> None:
        await is_writable.wait()
        await flush(peer, waiting)

    monkeypatch.setattr(SocketPeer, "flush", flush_slowly)

    async def check(this: Served) -> None:
        session_id, bound = await this.open(), {"on_disconnect": "cancel"}
        is_writable.set()
        async with this.socket(session_id) as wire:
            epoch, this.is_held = wire.hello["epoch"], True
            is_writable.clear()
            await wire.send("turn.create", turn_id="t1", **turn(**bound))
            found = partial(this.sessions._sessions.find, ANONYMOUS, session_id)
            await this.until(lambda: (at := found()) is not None and at.journal.epoch != epoch)
            is_writable.set()
            told = await wire.receive()
            assert told["error"]["code"] == "session_moved", told
            assert await wire.close_code() == CloseCode.RESTART
        this.is_held = False
        async with this.socket(session_id) as wire:
            assert (await wire.turn("t1", **bound))["type"] == "turn.completed"

    served(url, check)


def test_a_conversation_that_does_not_read_where_it_would_go_on_goes_on_after_1012(
    url: str,
) -> None:
    async def check(this: Served) -> None:
        session_id = await this.open()
        async with realtime(this.url, f"?session_id={session_id}") as wire:
            await wire.say("Hello")
            await wire.send("response.create")
            assert await wire.close_code() == CloseCode.RESTART
        await this.until(lambda: this.sessions.stats().live_turns == 0)
        items = await this.http.get(f"/v1/sessions/{session_id}/items")
        assert items.json()["data"] == [], "what nobody reads"
        async with realtime(this.url, f"?session_id={session_id}") as wire:
            await wire.say("Hello")
            assert (await wire.answer())["status"] != "failed"

    served(url, check)
