"""Whatever names a long session that is on disk alone, others are served while it is read."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from session_server.core.owner import ANONYMOUS
from session_server.sessions.store.session_store import ENTRIES_AT_ONCE
from session_server.sessions.transcript import Transcript
from tests.sessions.slices import Slices
from tests.web.realtime_client import realtime
from tests.web.serving import Served, turn
from tests.web.test_admin_sessions import URL, rows
from tests.web.test_admin_stored import run, served_from

NUM_TURNS = ENTRIES_AT_ONCE + 4
KEY = {"Idempotency-Key": "mine"}

Way = Callable[[Served, "Names"], Awaitable[Any]]


class Names:
    """Sessions of many entries, one opened with a key, and what has such sessions: a chain of
    responses, by the id of the last one, with what each has said, and a conversation."""

    session: str
    keyed: str
    response: str
    conversation: str
    items: tuple[str, ...] = ()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Names]:
    """A store with long sessions."""
    directory, names = tmp_path_factory.mktemp("stored") / "store", Names()

    async def fill() -> None:
        async with served_from(directory) as this:
            names.session = await this.open(id="long")
            opened = await this.http.post("/v1/sessions", json={}, headers=KEY)
            names.keyed = opened.json()["id"]
            names.conversation = (await post(this, "/v1/conversations"))["id"]
            names.response = (await respond(this))["id"]
            for _ in range(NUM_TURNS):
                await over_chat(this, names)
                await post(this, f"/v1/sessions/{names.keyed}/turns", **turn(max_tokens=2))
                after = names.response
                made = await respond(this, previous_response_id=after)
                names.response = made["id"]
                names.items += (made["output"][0]["id"],)
                await respond(this, conversation=names.conversation)

    run(fill)
    return directory, names


async def post(this: Served, path: str, **body: Any) -> Any:
    answer = await this.http.post(path, json=body)
    assert answer.is_success, answer.text
    return answer.json()


async def respond(this: Served, **fields: Any) -> Any:
    body = {"model": "paper", "input": "Hello", "max_output_tokens": 2, **fields}
    return await post(this, "/v1/responses", **body)


async def over_rest(this: Served, names: Names) -> None:
    assert (await this.http.get(f"/v1/sessions/{names.session}")).is_success


async def over_items(this: Served, names: Names) -> None:
    assert (await this.http.get(f"/v1/sessions/{names.session}/items")).is_success


async def over_turns(this: Served, names: Names) -> None:
    await post(this, f"/v1/sessions/{names.session}/turns", **turn(max_tokens=2))


async def over_update(this: Served, names: Names) -> None:
    answer = await this.http.patch(f"/v1/sessions/{names.session}", json={"metadata": {"a": "b"}})
    assert answer.is_success, answer.text


async def over_rewind(this: Served, names: Names) -> None:
    await post(this, f"/v1/sessions/{names.session}/rewind", to_item=None)


async def over_fork(this: Served, names: Names) -> None:
    await post(this, f"/v1/sessions/{names.session}/fork")


async def over_key(this: Served, names: Names) -> None:
    answer = await this.http.post("/v1/sessions", json={}, headers=KEY)
    assert answer.json()["id"] == names.keyed


async def over_events(this: Served, names: Names) -> None:
    url = f"/v1/sessions/{names.session}/events"
    async with this.http.stream("GET", url, params={"after": 1}) as answer:
        assert answer.is_success
        await anext(answer.aiter_lines())


async def over_socket(this: Served, names: Names) -> None:
    async with this.socket(names.session) as wire:
        assert wire.hello["session_id"] == names.session


async def over_realtime_session(this: Served, names: Names) -> None:
    async with realtime(this.url, f"?session_id={names.session}"):
        pass


async def over_realtime_conversation(this: Served, names: Names) -> None:
    async with realtime(this.url, f"?conversation_id=conv_{names.session}"):
        pass


async def over_chat(this: Served, names: Names) -> None:
    said = [{"role": "user", "content": "Hello"}]
    body = {"model": "paper", "messages": said, "max_tokens": 2, "session_id": names.session}
    await post(this, "/v1/chat/completions", **body)


async def over_completions(this: Served, names: Names) -> None:
    body = {"model": "paper", "prompt": "Hello", "max_tokens": 2}
    await post(this, "/v1/completions", **body, session_params={"id": names.session})


async def over_sglang(this: Served, names: Names) -> None:
    sampling = {"max_new_tokens": 2}
    body = {"text": "Hello", "sampling_params": sampling, "session_params": {"id": names.session}}
    await post(this, "/generate", **body)


async def over_response(this: Served, names: Names) -> None:
    await respond(this, previous_response_id=names.response)


async def over_conversation(this: Served, names: Names) -> None:
    await respond(this, conversation=names.conversation)


async def over_count(this: Served, names: Names) -> None:
    body = {"model": "paper", "input": "Hello", "previous_response_id": names.response}
    await post(this, "/v1/responses/input_tokens", **body)


async def over_compaction(this: Served, names: Names) -> None:
    body = {"model": "paper", "previous_response_id": names.response}
    await post(this, "/v1/responses/compact", **body)


async def by_operator(this: Served, names: Names) -> None:
    (row,) = await rows(this, match=names.session)
    await post(this, f"{URL}/{row['id']}/fork")


async def over_stream(this: Served, names: Names) -> None:
    """A response is read again whose session has left the memory: its events are gone with it."""
    last = await respond(this, previous_response_id=names.response)
    assert unload(this)
    url = f"/v1/responses/{last['id']}"
    answer = await this.http.get(url, params={"stream": True})
    assert answer.is_success, answer.text


def unload(this: Served) -> bool:
    this.sessions._sessions.by_use.in_hand = None
    return this.sessions.exits._unload_one(ANONYMOUS, of_others=True)


WAYS: list[Way] = [
    *(over_rest, over_items, over_turns, over_update, over_rewind, over_fork, over_key),
    *(over_events, over_socket, over_realtime_session, over_realtime_conversation, over_chat),
    *(over_completions, over_sglang, over_response, over_conversation, over_count),
    *(over_compaction, over_stream, by_operator),
]


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> Slices:
    slices, apply = Slices(), Transcript.apply

    def counted(said: Transcript, change: Any) -> None:
        slices.count()
        apply(said, change)

    monkeypatch.setattr(Transcript, "apply", counted)
    return slices


@pytest.mark.parametrize("way", WAYS)
def test_a_long_session_is_read_in_slices(
    tmp_path: Path, filled: tuple[Path, Names], entries: Slices, way: Way
) -> None:
    directory, names = filled
    shutil.copytree(directory, tmp_path / "store")

    async def check() -> None:
        async with served_from(tmp_path / "store") as this, entries.watched():
            await way(this, names)
            assert this.sessions.stats().loaded_sessions == 1

    run(check)
    assert entries.total >= NUM_TURNS
    assert entries.most <= ENTRIES_AT_ONCE


def test_what_a_request_refers_to_is_read_in_slices(
    tmp_path: Path, filled: tuple[Path, Names]
) -> None:
    """A request may have thousands of references, each to what another response has said."""
    directory, names = filled
    shutil.copytree(directory, tmp_path / "store")
    reads = Slices()

    async def check() -> None:
        async with served_from(tmp_path / "store") as this, reads.watched():
            store = this.sessions._flow.conclusion.logs.store
            assert store is not None
            store._database._reader.set_trace_callback(lambda _query: reads.count())
            said = [{"type": "item_reference", "id": item} for item in names.items]
            await respond(this, input=said, store=False)

    run(check)
    assert reads.total > NUM_TURNS
    assert reads.most < NUM_TURNS / 2
