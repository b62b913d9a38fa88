"""Nobody is told the id of a session that a crash could take back."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from session_server.sessions.store.database import Database
from tests.sessions.test_store import hang_until
from tests.web.serving import Served, turn
from tests.web.test_admin_stored import run, served_from


async def over_socket(this: Served) -> str:
    async with this.socket() as wire:
        session_id: str = wire.hello["session_id"]
        return session_id


async def over_rest(this: Served) -> str:
    return await this.open()


async def over_chat(this: Served) -> str:
    body = {
        "model": "paper",
        "messages": [{"role": "user", "content": "Hello"}],
        "session_id": "named",
        "stream": True,
        "max_tokens": 2,
    }
    async with this.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        await anext(answer.aiter_lines())
        return "named"


async def over_sglang(this: Served) -> str:
    answer = await this.http.post("/open_session", json={"streaming": True})
    session_id: str = answer.json()
    return session_id


@pytest.mark.parametrize("opens", [over_socket, over_rest, over_chat, over_sglang])
def test_a_session_is_told_of_once_it_is_on_disk(tmp_path: Path, opens: Any) -> None:
    async def check() -> None:
        async with served_from(tmp_path) as this:
            store = this.sessions._flow.conclusion.logs.store
            assert store is not None
            goes_on = threading.Event()
            hang_until(goes_on, store)
            opening = asyncio.create_task(opens(this))
            while not this.sessions.stats().sessions:
                await asyncio.sleep(0.001)
            for _ in range(5):  # others are served meanwhile
                assert (await this.http.get("/v1/models")).is_success
            assert not opening.done()
            goes_on.set()
            session_id = await opening
            reader = Database(tmp_path, is_read_only=True)
            assert reader.find("anonymous", session_id) is not None
            reader.close()

    run(check)


def fail(_database: Database) -> None:
    raise OSError("no disk")


def on_disk(directory: Path) -> set[str]:
    """The ids of what another process would find."""
    with closing(Database(directory, is_read_only=True)) as reader:
        sessions = [row.session_id for row in reader.walk(None)]
        return {*sessions, *(row.record_id for row in reader.records())}


@pytest.mark.parametrize("is_failing", [False, True])
def test_a_deletion_is_durable_once_it_is_on_disk_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_failing: bool
) -> None:
    """What a client was told is gone must not come back with the next process."""
    paths = list[str]()

    async def begin() -> None:
        async with served_from(tmp_path) as this:
            for name in ("read", "unread"):
                await this.open(id=name)
                paths.append(f"/v1/sessions/{name}")
                body = {"input": "Hello", "model": "paper", "max_output_tokens": 2}
                said = await this.http.post("/v1/responses", json=body)
                paths.append(f"/v1/responses/{said.json()['id']}")
                kept = await this.http.post("/v1/conversations", json={})
                paths.append(f"/v1/conversations/{kept.json()['id']}")

    async def check() -> None:
        async with served_from(tmp_path) as this:
            for path in paths[:3]:
                assert (await this.http.get(path)).status_code == 200
            if is_failing:
                monkeypatch.setattr(Database, "_check_files", fail)
            for path in paths:
                told = (await this.http.delete(path)).json()
                assert told["durable"] is not is_failing, path
                assert (path.rsplit("/", 1)[1] in on_disk(tmp_path)) is is_failing
                assert (await this.http.get(path)).status_code == 404

    run(begin)
    run(check)


def test_a_turn_that_was_written_late_is_durable_over_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        async with served_from(tmp_path) as this:
            await this.open(id="mine")
            store = this.sessions._flow.conclusion.logs.store
            assert store is not None
            with monkeypatch.context() as failing:
                failing.setattr(Database, "_check_files", fail)
                path = "/v1/sessions/mine/turns"
                told = (await this.http.post(path, json={"turn_id": "t1", **turn()})).json()
                assert told["durable"] is False
            while not (await this.http.get("/v1/sessions/mine")).json()["durable"]:
                await asyncio.sleep(0.01)  # the next tick writes it
            assert (await this.http.get(f"{path}/t1")).json() == told | {"durable": True}

    run(check)


def test_a_turn_sent_again_whose_answer_was_rewound_is_refused_in_words(tmp_path: Path) -> None:
    """Another process has no journal that holds its end, and the history has it no more."""
    path, body = "/v1/sessions/mine/turns", {"turn_id": "t1", **turn()}

    async def begin() -> None:
        async with served_from(tmp_path) as this:
            await this.open(id="mine")
            assert (await this.http.post(path, json=body)).json()["durable"]
            await this.http.post("/v1/sessions/mine/rewind", json={"to_item": None})

    async def check() -> None:
        async with served_from(tmp_path) as this:
            refused = await this.http.post(path, json=body)
            assert refused.status_code == 404
            assert refused.json()["error"]["code"] == "turn_not_found"
            streamed = await this.http.post(path, json=body, headers={"accept": EVENTS})
            event, data = streamed.text.strip().split("\n")
            assert event == "event: error"
            error = json.loads(data.removeprefix("data: "))["error"]
            assert (error["code"], error["turn_id"]) == ("turn_not_found", "t1")

    run(begin)
    run(check)


async def by_chat(this: Served) -> Any:
    return (await this.http.post("/v1/chat/completions", json=CHAT)).json()["durable"]


async def by_chunks(this: Served) -> Any:
    answer = await this.http.post("/v1/chat/completions", json=CHAT | {"stream": True})
    chunks = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    said = [json.loads(chunk) for chunk in chunks if chunk != "[DONE]"]
    (durable,) = [chunk["durable"] for chunk in said if "durable" in chunk]
    return durable


async def by_sglang(this: Served) -> Any:
    name = (await this.http.post("/open_session", json={"streaming": True})).json()
    body = {"text": "Hello", "sampling_params": {"max_new_tokens": 2}}
    answer = await this.http.post("/generate", json=body | {"session_params": {"id": name}})
    return answer.json()["meta_info"]["durable"]


async def by_conversation(this: Served) -> Any:
    made = (await this.http.post("/v1/conversations", json={"items": [ITEM]})).json()
    path = f"/v1/conversations/{made['id']}"
    shown = (await this.http.get(path)).json()
    changed = (await this.http.post(path, json={"metadata": {"k": "v"}})).json()
    assert made["durable"] == shown["durable"] == changed["durable"]
    return made["durable"]


async def by_session(this: Served) -> Any:
    opened = (await this.http.post("/v1/sessions", json={})).json()
    ended = (await this.http.post(f"/v1/sessions/{opened['id']}/turns", json=turn())).json()
    rewind = f"/v1/sessions/{opened['id']}/rewind"
    rewound = (await this.http.post(rewind, json={"to_item": None})).json()
    assert opened["durable"] == ended["durable"] == rewound["durable"]
    return opened["durable"]


EVENTS = "text/event-stream"
ITEM = {"role": "user", "content": "Hello"}
CHAT = {"model": "paper", "messages": [ITEM], "session_id": "named", "max_tokens": 2}


@pytest.mark.parametrize("ask", [by_chat, by_chunks, by_sglang, by_conversation, by_session])
def test_every_dialect_says_whether_what_it_answers_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Any
) -> None:
    async def check() -> None:
        async with served_from(tmp_path / "store") as this:
            assert await ask(this) is True
            (tmp_path / "store" / "sessions.sqlite3-wal").unlink()
            assert await ask(this) is False
            assert (await this.http.get("/health")).json() == {"status": "store_failing"}
        async with served_from(tmp_path / "relaxed", durability="relaxed") as this:
            assert await ask(this) is False
            assert (await this.http.get("/health")).json() == {"status": "ok"}

    run(check)


def test_nothing_is_told_to_be_gone_from_a_disk_that_nobody_waits_for(tmp_path: Path) -> None:
    async def check() -> None:
        async with served_from(tmp_path, durability="relaxed") as this:
            asked = {"model": "paper", "input": "Hello", "max_output_tokens": 2}
            response = (await this.http.post("/v1/responses", json=asked)).json()["id"]
            kept = (await this.http.post("/v1/conversations", json={"items": [ITEM]})).json()["id"]
            ended = await this.http.post("/v1/chat/completions", json=CHAT)
            assert ended.status_code == 200
            for path in ("sessions/named", f"responses/{response}", f"conversations/{kept}"):
                told = (await this.http.delete(f"/v1/{path}")).json()
                assert told["durable"] is False, path

    run(check)


def test_a_store_that_cannot_be_read_is_told_to_fail(tmp_path: Path) -> None:
    async def check() -> None:
        async with served_from(tmp_path) as this:
            assert (await this.http.get("/health")).json() == {"status": "ok"}
            os.truncate(tmp_path / "sessions.sqlite3", 0)
            assert (await this.http.get("/v1/sessions/none")).status_code == 503
            assert (await this.http.get("/health")).json() == {"status": "store_failing"}

    run(check)
