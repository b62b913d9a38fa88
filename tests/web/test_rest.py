"""Sessions and turns as resources."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from session_server.core.owner import ANONYMOUS
from session_server.core.session_events import TurnCancelled
from session_server.web.generation_run import GenerationRun
from session_server.web.requests import Call
from session_server.web.slim_exit_stack import SlimExitStack
from session_server.web.turns import TurnReader, session_events
from tests.web.serving import Served, served, serving, small_journal, turn

BAD_TURNS: list[tuple[str, str | None]] = [
    ("{", None),
    ("[" * 100_000, None),
    ("\ud7ff", None),
    ("[]", None),
    ("{}", "input"),
    ('{"text":"a","input_ids":[1]}', "input"),
    ('{"text":1}', "text"),
    ('{"text":"a","sampling":{"temperature":NaN}}', None),
    ('{"text":"a","sampling":{"temperature":1e400}}', "sampling.temperature"),
    ('{"text":"a","sampling":{"temperature":-1}}', "sampling.temperature"),
    ('{"text":"a","sampling":{"temperature":true}}', "sampling.temperature"),
    ('{"text":"a","sampling":{"max_tokens":"12"}}', "sampling.max_tokens"),
    ('{"text":"a","sampling":{"max_tokens":1.5}}', "sampling.max_tokens"),
    ('{"text":"a","sampling":{"max_tokens":-1}}', "sampling.max_tokens"),
    ('{"text":"a","sampling":{"max_tokens":' + "9" * 5000 + "}}", "sampling.max_tokens"),
    ('{"text":"a","sampling":{"top_p":0}}', "sampling.top_p"),
    ('{"text":"a","sampling":{"typo":1}}', "sampling.typo"),
    ('{"text":"a","sampling":{"top_logprobs":2}}', "sampling.top_logprobs"),
    ('{"text":"a","sampling":{"min_tokens":9,"max_tokens":8}}', "sampling.min_tokens"),
    ('{"text":"a","sampling":{"stop":["a",""]}}', "sampling.stop[1]"),
    ('{"text":"a","typo":1}', "typo"),
    ('{"text":"a","turn_id":"a\\u0000b"}', "turn_id"),
    ('{"text":"a","turn_id":"a\\n"}', "turn_id"),
    ('{"text":"\\ud800"}', None),
    ('{"input":[]}', "input"),
    ('{"input":[{"role":"user"}]}', "input[0].content"),
    ('{"input":[{"role":"<|system|>","content":"a"}]}', "input[0].role"),
    ('{"input_ids":[-1]}', "input_ids[0]"),
    ('{"input_ids":[1536]}', None),
    ('{"text":"a","priority":101}', "priority"),
    ('{"text":"a","on_disconnect":"explode"}', "on_disconnect"),
]


@served()
async def test_a_session_is_opened_shown_listed_changed_and_closed(this: Served) -> None:
    opened = await this.http.post(
        "/v1/sessions", json={"id": "mine", "ttl_s": 60, "metadata": {"topic": "tests"}}
    )
    assert opened.status_code == 201
    assert opened.headers["location"] == "/v1/sessions/mine"
    assert opened.json()["metadata"] == {"topic": "tests"}
    other = await this.open()

    listed = (await this.http.get("/v1/sessions", params={"limit": 2})).json()
    assert [item["id"] for item in listed["data"]] == ["mine", other]
    assert (listed["has_more"], listed["next_after"]) == (False, None)
    page = (await this.http.get("/v1/sessions", params={"limit": 1, "after": "mine"})).json()
    assert [item["id"] for item in page["data"]] == [other]

    changed = await this.http.patch("/v1/sessions/mine", json={"ttl_s": 120})
    assert changed.json()["ttl_s"] == 120
    assert changed.json()["metadata"] == {"topic": "tests"}

    assert (await this.http.delete("/v1/sessions/mine")).status_code == 200
    gone = await this.http.get("/v1/sessions/mine")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "session_not_found")


@served()
async def test_how_history_is_kept_is_the_clients_choice(this: Served) -> None:
    for history in ("append", "template"):
        opened = await this.http.post("/v1/sessions", json={"history": history})
        assert opened.status_code == 201
        assert opened.json()["history"] == history
    default = (await this.http.post("/v1/sessions", json={})).json()
    assert default["history"] == "append"
    refused = await this.http.post("/v1/sessions", json={"history": "guess"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "history"


@served()
async def test_a_session_is_rewound_edited_and_forked(this: Served) -> None:
    session_id = await this.open(id="mine")
    url = f"/v1/sessions/{session_id}"
    for text in ("Hello", "And?"):
        ended = await this.http.post(f"{url}/turns", json=turn(input=text))
        assert ended.status_code == 200
    items = (await this.http.get(f"{url}/items")).json()["data"]
    rewound = await this.http.post(f"{url}/rewind", json={"to_item": items[1]["id"]})
    assert (rewound.status_code, rewound.json()["tokens"]) == (200, items[1]["end_len"])
    forked = await this.http.post(f"{url}/fork", json={})
    assert forked.status_code == 201
    assert forked.headers["location"] == f"/v1/sessions/{forked.json()['id']}"
    edited = await this.http.patch(f"{url}/items/{items[0]['id']}", json={"content": "Hi"})
    assert edited.json()["tokens"] == 0
    left = (await this.http.get(f"{url}/items")).json()["data"]
    assert [(item["id"], item["content"]) for item in left] == [(items[0]["id"], "Hi")]
    answered = await this.http.post(f"{url}/turns", json=turn(input=[]))
    assert answered.status_code == 200
    emptied = await this.http.post(f"{url}/rewind", json={"to_item": None})
    assert emptied.json()["tokens"] == 0
    nothing = await this.http.post(f"{url}/turns", json=turn(input=[]))
    assert (nothing.status_code, nothing.json()["error"]["param"]) == (400, "input")
    missing = await this.http.patch(f"{url}/items/i_99", json={"content": "x"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "item_not_found")
    assert (await this.http.post(f"{url}/rewind", json={})).status_code == 400
    copy = (await this.http.get(f"/v1/sessions/{forked.json()['id']}/items")).json()["data"]
    assert [item["content"] for item in copy] == [item["content"] for item in items[:2]]


@served()
async def test_a_taken_id_and_a_model_that_is_not_there_are_refused(this: Served) -> None:
    await this.open(id="mine")
    taken = await this.http.post("/v1/sessions", json={"id": "mine"})
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "session_exists")
    other = await this.http.post("/v1/sessions", json={"model": "another"})
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")


@served()
async def test_an_open_repeated_with_its_key_is_one_session(this: Served) -> None:
    headers = {"Idempotency-Key": "order 66"}
    answers = [await this.http.post("/v1/sessions", json={}, headers=headers) for _ in range(3)]
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["id"] for answer in answers}) == 1
    longest = {"Idempotency-Key": "x" * 128}
    other = await this.http.post("/v1/sessions", json={}, headers=longest)
    assert other.json()["id"] != answers[0].json()["id"]
    for key in ("", "x" * 129):
        refused = await this.http.post("/v1/sessions", json={}, headers={"Idempotency-Key": key})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "idempotency-key"
    assert len((await this.http.get("/v1/sessions")).json()["data"]) == 2


@served()
async def test_a_key_used_with_another_body_is_a_conflict(this: Served) -> None:
    headers = {"Idempotency-Key": "order 66"}
    body = {"metadata": {"a": "1", "b": "2"}, "instructions": "Be brief.", "ttl_s": 60}
    first = await this.http.post("/v1/sessions", json=body, headers=headers)
    session_id = first.json()["id"]
    changed = await this.http.patch(f"/v1/sessions/{session_id}", json={"ttl_s": 90})
    assert changed.status_code == 200
    same = body | {"metadata": {"b": "2", "a": "1"}}
    again = await this.http.post("/v1/sessions", json=same, headers=headers)
    assert (again.status_code, again.json()["id"]) == (201, session_id)
    for other in ({"ttl_s": 61}, {"instructions": "Be."}, {"metadata": {}}, {"pinned": True}):
        refused = await this.http.post("/v1/sessions", json=body | other, headers=headers)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (409, "session_exists")
        assert error["param"] == "idempotency-key"


@served()
async def test_a_list_goes_on_behind_a_session_that_has_closed(this: Served) -> None:
    names = [await this.open() for _ in range(3)]
    page = (await this.http.get("/v1/sessions", params={"limit": 1})).json()
    assert page["has_more"]
    await this.http.delete(f"/v1/sessions/{names[0]}")
    params = {"limit": 2, "after": page["next_after"]}
    rest = (await this.http.get("/v1/sessions", params=params)).json()
    assert [item["id"] for item in rest["data"]] == names[1:]
    assert (rest["has_more"], rest["next_after"]) == (False, None)


@served()
async def test_names_of_other_things_are_no_session_ids(this: Served) -> None:
    for name in ("new", ".", ".."):
        refused = await this.http.post("/v1/sessions", json={"id": name})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "id")
        refused = await this.http.post("/open_session", json={"session_id": name})
        assert refused.status_code == 400
    assert await this.open(id="a:b") == "a:b"


@served()
async def test_a_turn_answers_with_text_usage_and_timings(this: Served) -> None:
    session_id = await this.open()
    path = f"/v1/sessions/{session_id}/turns"
    first = (await this.http.post(path, json=turn(input_ids=[7, 8, 9], turn_id="t1"))).json()
    assert first["status"] == "completed"
    assert first["finish_reason"] == "length"
    assert first["item"]["token_ids"] == [474] * 4
    assert first["usage"] == {
        "input_tokens": 3,
        "cached_tokens": 0,
        "cache_write_tokens": 3,
        "output_tokens": 4,
        "total_tokens": 7,
    }
    assert first["timings"]["ttft_ms"] > 0

    second = (await this.http.post(path, json=turn(input_ids=[7]))).json()
    assert second["usage"]["input_tokens"] == 8
    assert second["usage"]["cached_tokens"] == 6

    shown = (await this.http.get(f"{path}/t1")).json()
    assert shown["item"] == first["item"]
    items = (await this.http.get(f"/v1/sessions/{session_id}/items")).json()["data"]
    assert [item["role"] for item in items] == ["raw", "assistant", "raw", "assistant"]


@served()
async def test_instructions_and_messages_begin_the_conversation(this: Served) -> None:
    hello = {"role": "user", "content": "Hello"}
    session_id = await this.open(instructions="Be brief.", messages=[hello])
    answer = await this.http.post(f"/v1/sessions/{session_id}/turns", json=turn(input=[hello]))
    assert answer.status_code == 200
    items = (await this.http.get(f"/v1/sessions/{session_id}/items")).json()["data"]
    assert [item["role"] for item in items][:2] == ["system", "user"]


@served()
async def test_a_warm_up_turn_computes_its_input_and_answers_nothing(this: Served) -> None:
    path = f"/v1/sessions/{await this.open()}/turns"
    warm = (await this.http.post(path, json=turn(input_ids=[7, 8, 9], generate=False))).json()
    assert (warm["status"], warm["text"]) == ("completed", "")
    assert warm["usage"]["total_tokens"] == 3


@served()
async def test_events_of_a_turn_carry_ids_to_resume_from(this: Served) -> None:
    session_id = await this.open()
    events = await stream(this, session_id, turn(turn_id="t1"))
    kinds = [event["event"] for event in events]
    assert kinds[0] == "turn.created"
    assert kinds[-1] == "turn.completed"
    assert "turn.delta" in kinds
    ids = [int(event["id"]) for event in events]
    assert ids == sorted(set(ids))
    text = "".join(event["data"]["text"] for event in events if event["event"] == "turn.delta")
    assert text == events[-1]["data"]["item"]["content"] != ""
    assert all(event["data"]["seq"] == int(event["id"]) for event in events)


@served()
async def test_the_events_of_a_session_replay_and_go_on_live(this: Served) -> None:
    session_id = await this.open()
    await this.http.post(f"/v1/sessions/{session_id}/turns", json=turn(turn_id="t1"))
    path = f"/v1/sessions/{session_id}/events"
    async with this.http.stream("GET", path, params={"after": 0}) as answer:
        lines = answer.aiter_lines()
        first = await next_event(lines)
        assert (first["event"], first["id"]) == ("turn.created", "1")
        await this.http.delete(f"/v1/sessions/{session_id}")
        kinds: list[str] = []
        while not kinds or kinds[-1] != "session.closed":
            kinds.append((await next_event(lines))["event"])
        assert "turn.completed" in kinds


@served()
async def test_last_event_id_wins_over_after(this: Served) -> None:
    session_id = await this.open()
    await this.http.post(f"/v1/sessions/{session_id}/turns", json=turn(turn_id="t1"))
    path = f"/v1/sessions/{session_id}/events"
    headers = {"last-event-id": "1"}
    async with this.http.stream("GET", path, params={"after": 0}, headers=headers) as answer:
        assert (await next_event(answer.aiter_lines()))["id"] == "2"
    bad = await this.http.get(path, headers={"last-event-id": "x"})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "last-event-id")


@served()
async def test_an_offset_that_is_lost_is_answered_by_a_snapshot(this: Served) -> None:
    session_id = await this.open()
    await this.http.post(f"/v1/sessions/{session_id}/turns", json=turn())
    path = f"/v1/sessions/{session_id}/events"
    async with this.http.stream("GET", path, params={"after": 10_000}) as answer:
        lines = answer.aiter_lines()
        assert (await next_event(lines))["event"] == "session.resume_failed"
        snapshot = await next_event(lines)
        assert snapshot["event"] == "session.snapshot"
        assert snapshot["data"]["items"][-1]["role"] == "assistant"


def call_on(this: Served[Any]) -> Call:
    """A call of somebody without a key."""
    state = this.app.state
    return Call(
        credential=state.authenticator.authenticate(None),
        services=this.services,
        readers=state.readers,
        authenticator=state.authenticator,
        resources=SlimExitStack(),
    )


def test_events_lost_before_the_end_of_a_session_are_said_to_be_lost() -> None:
    async def test() -> None:
        async with serving(limits=small_journal(4)) as this:
            session_id = await this.open()
            call = call_on(this)
            events = session_events(call, session_id, after=0)
            this.sessions.update(ANONYMOUS, session_id, metadata={"n": "0"})
            assert (await next_chunk(events))["event"] == "session.updated"
            for number in range(9):
                this.sessions.update(ANONYMOUS, session_id, metadata={"n": str(number)})
            this.sessions.close(ANONYMOUS, session_id)
            assert (await next_chunk(events))["event"] == "session.resume_failed"
            assert (await next_chunk(events))["event"] == "session.closed"

    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.parametrize("dialect", ["ours", "sglang"])
def test_a_turn_whose_end_was_lost_with_its_session_ends_in_an_error(dialect: str) -> None:
    async def test() -> None:
        async with serving(limits=small_journal(4)) as this:
            session_id = await this.open()
            call = call_on(this)
            this.is_held = True
            path = f"/v1/sessions/{session_id}/turns"
            body = turn(turn_id="t1", on_disconnect="detach")
            asking = asyncio.create_task(this.http.post(path, json=body))
            await this.until(lambda: bool(this.sessions.get(ANONYMOUS, session_id).running_turn))
            asking.cancel()
            view = this.sessions.turn(ANONYMOUS, session_id, "t1")
            journal = this.sessions.journal(ANONYMOUS, session_id)
            with call.resources:
                reader = TurnReader(call, session_id, keep_partial=None).follow(view)
                chunks = reader.events() if dialect == "ours" else of_sglang(call, reader)
                for number in range(9):
                    this.sessions.update(ANONYMOUS, session_id, metadata={"n": str(number)})
                this.sessions.close(ANONYMOUS, session_id)
                this.is_held = False
                await this.until(lambda: journal.is_closed)
                refusal, *rest = [chunk async for chunk in chunks]
            assert (
                parse_event(refusal.decode().strip())["data"]["error"]["code"] == "session_closing"
            )
            assert rest == ([] if dialect == "ours" else [b"data: [DONE]\n\n"])

    asyncio.run(asyncio.wait_for(test(), 60))


def of_sglang(call: Call, reader: TurnReader) -> AsyncIterator[bytes]:
    nothing: Any = None
    return GenerationRun(
        call=call,
        job=nothing,
        reader=reader,
        answer=nothing,
        arrived_s=0.0,
    ).events()


async def next_chunk(events: AsyncIterator[bytes]) -> dict[str, Any]:
    return parse_event((await anext(events)).decode().strip())


@served()
async def test_a_cancelled_turn_says_what_stays(this: Served) -> None:
    session_id = await this.open()
    path = f"/v1/sessions/{session_id}/turns"
    body = turn(input_ids=[7, 8], turn_id="t1", max_tokens=4000)
    running = asyncio.create_task(this.http.post(path, json=body))
    await this.until(lambda: this.sessions.get(ANONYMOUS, session_id).seq > 3)
    cancelled = await this.http.post(f"{path}/t1/cancel", json={"keep_partial": False})
    assert cancelled.status_code == 200
    ended = (await running).json()
    assert (ended["status"], ended["item"]["status"]) == ("cancelled", "incomplete")
    assert ended["kept_partial"] is False
    assert (await this.http.get(f"{path}/t1")).json()["kept_partial"] is False
    assert (await this.http.get(f"/v1/sessions/{session_id}")).json()["tokens"] == 0

    again = await this.http.post(f"{path}/t1/cancel", json={})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "turn_not_active")
    unknown = await this.http.post(f"{path}/t9/cancel")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "turn_not_found")
    lost = (await this.http.get(f"{path}/t9")).json()["error"]
    assert lost["code"] == "turn_not_found"
    assert "send it again under its id" in lost["message"]


@served()
async def test_a_client_that_hangs_up_ends_its_turn_and_keeps_what_it_heard(this: Served) -> None:
    for accept in ("application/json", "text/event-stream"):
        session_id = await this.open()
        path = f"/v1/sessions/{session_id}/turns"
        body = turn(input_ids=[7], turn_id="t1", max_tokens=4000)
        async with httpx.AsyncClient(base_url=this.url, trust_env=False) as client:
            asking = asyncio.create_task(
                client.post(path, json=body, headers={"accept": accept}, timeout=30)
            )
            view = this.sessions.get(ANONYMOUS, session_id)
            while this.sessions.get(ANONYMOUS, session_id).seq < view.seq + 3:
                await asyncio.sleep(0.001)
            this.is_held = True
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        this.is_held = False
        while this.sessions.turn(ANONYMOUS, session_id, "t1").end is None:
            await asyncio.sleep(0.001)
        end = this.sessions.turn(ANONYMOUS, session_id, "t1").end
        assert isinstance(end, TurnCancelled)
        assert (end.reason, end.kept_partial) == ("disconnected", True)


@served()
async def test_a_turn_told_to_detach_outlives_its_client(this: Served) -> None:
    session_id = await this.open()
    this.is_held = True
    body = turn(input_ids=[7], turn_id="t1", on_disconnect="detach")
    with pytest.raises(httpx.ReadTimeout):
        await this.http.post(f"/v1/sessions/{session_id}/turns", json=body, timeout=0.1)
    await this.until(lambda: not this.server.server_state.connections)
    this.is_held = False
    again = await this.http.post(f"/v1/sessions/{session_id}/turns", json=body)
    assert again.json()["status"] == "completed"


@served()
async def test_the_same_turn_twice_is_one_turn_and_another_body_a_conflict(this: Served) -> None:
    path = f"/v1/sessions/{await this.open()}/turns"
    first = await this.http.post(path, json=turn(turn_id="t1"))
    second = await this.http.post(path, json=turn(turn_id="t1"))
    assert second.json() == first.json()
    other = await this.http.post(path, json=turn("Bye", turn_id="t1"))
    assert (other.status_code, other.json()["error"]["code"]) == (409, "turn_conflict")


@served()
async def test_a_turn_is_the_same_turn_on_every_surface(this: Served) -> None:
    """Whose default for `on_disconnect` differs: that is about the reader, not about the turn."""
    fields = turn(turn_id="t1", input_ids=[7])
    async with this.socket() as wire:
        await wire.send("turn.create", **fields)
        told = await wire.until("turn.completed")
        path = f"/v1/sessions/{wire.hello['session_id']}/turns"
        again = await this.http.post(path, json=fields)
    assert again.status_code == 200, again.text
    assert again.json()["item"] == told["item"]


@served()
async def test_a_turn_a_fault_ended_answers_with_that_fault(this: Served) -> None:
    session_id = await this.open()
    this.is_held = True
    path = f"/v1/sessions/{session_id}/turns"
    running = asyncio.create_task(this.http.post(path, json=turn(turn_id="t1")))
    await this.until(lambda: bool(this.engine.commands))
    this.engine.die()
    this.engine.come_up()
    this.is_held = False
    answer = await running
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_restarting")
    assert answer.json()["error"]["turn_id"] == "t1"


@served()
async def test_an_input_that_cannot_fit_is_refused_and_the_session_intact(this: Served) -> None:
    session_id = await this.open()
    path = f"/v1/sessions/{session_id}/turns"
    too_long = await this.http.post(path, json=turn(input_ids=[7] * 5000))
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (422, "context_too_long")
    assert (await this.http.post(path, json=turn())).status_code == 200


@served()
async def test_every_malformed_body_is_refused_in_the_documented_shape(this: Served) -> None:
    session_id = await this.open()
    headers = {"content-type": "application/json"}
    for body, param in BAD_TURNS:
        answer = await this.http.post(
            f"/v1/sessions/{session_id}/turns",
            content=body.encode("utf-8", "surrogatepass"),
            headers=headers,
        )
        assert answer.status_code == 400, (body[:80], answer.text)
        error = answer.json()["error"]
        assert set(error) >= {"type", "code", "message", "param"}
        if param is not None:
            assert error["param"] == param, (body[:80], error)
    assert (await this.http.get(f"/v1/sessions/{session_id}")).json()["turns"] == 0


@served(max_message_bytes=2048)
async def test_bodies_have_a_size_and_a_media_type(this: Served) -> None:
    session_id = await this.open()
    path = f"/v1/sessions/{session_id}/turns"
    big = await this.http.post(path, json={"text": "a" * 4096})
    assert (big.status_code, big.json()["error"]["code"]) == (413, "payload_too_large")

    async def chunks() -> Any:
        for _ in range(8):
            yield b" " * 1024

    headers = {"content-type": "application/json"}
    chunked = await this.http.post(path, content=chunks(), headers=headers)
    assert chunked.status_code == 413
    form = await this.http.post(path, content=b"text=a", headers={"content-type": "text/plain"})
    assert (form.status_code, form.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert "content-type: application/json" in form.json()["error"]["message"]


async def stream(this: Served, session_id: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a turn as events, to its end."""
    headers = {"accept": "text/event-stream"}
    answer = await this.http.post(f"/v1/sessions/{session_id}/turns", json=body, headers=headers)
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [parse_event(block) for block in answer.text.split("\n\n") if block]


def parse_event(block: str) -> dict[str, Any]:
    """One event as its fields, the data decoded."""
    fields = dict(line.split(": ", 1) for line in block.split("\n"))
    return fields | {"data": json.loads(fields["data"])}


async def next_event(lines: Any) -> dict[str, Any]:
    """The next event of a stream, heartbeats skipped."""
    block: list[str] = []
    async for line in lines:
        if line and not line.startswith(":"):
            block.append(line)
        elif block:
            return parse_event("\n".join(block))
    raise AssertionError("the stream ended")
