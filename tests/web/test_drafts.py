"""Drafts over sockets and plain HTTP: what is typed so far is computed, and nothing of it stays."""

from __future__ import annotations

import asyncio

from tests.web.serving import Served, served, turn

HELLO = [{"role": "user", "content": "Hello"}]
SENTENCE = "Where is my city?"


@served()
async def test_a_sentence_is_drafted_key_by_key_and_cached_when_it_is_sent(this: Served) -> None:
    async with this.socket() as wire:
        first = await wire.turn("t1", input=HELLO)
        seq = wire.frames[-1]["seq"]
        for end in range(1, len(SENTENCE) + 1):
            await wire.send("turn.draft", draft_id=f"d{end}", input=SENTENCE[:end])
            drafted = await wire.until("turn.drafted")
            assert drafted.keys() == {"type", "draft_id", "processed", "kept", "total"}
            assert drafted["draft_id"] == f"d{end}"
            assert drafted["kept"] <= drafted["processed"] == drafted["total"]
        second = await wire.turn("t2", input=SENTENCE)
        usage = second["usage"]
        assert usage["cached_tokens"] == drafted["total"] - 1
        assert 0 < usage["drafted_tokens"] <= usage["cached_tokens"]
        assert "drafted_tokens" not in first["usage"]
        created = next(f for f in wire.frames if f.get("turn_id") == "t2")
        assert created["seq"] == seq + 1, "drafts are not in the journal"


@served()
async def test_only_the_newest_draft_is_answered(this: Served) -> None:
    this.is_held = True
    async with this.socket() as wire:
        for number in range(5):
            await wire.send("turn.draft", draft_id=f"d{number}", text="word " * (number + 1))
        await wire.send("ping", t=1)
        await wire.until("pong")
        this.is_held = False
        assert (await wire.until("turn.drafted"))["draft_id"] == "d4"
        await wire.turn("t1", text="word word word ends")
        assert [f["draft_id"] for f in wire.frames if f["type"] == "turn.drafted"] == ["d4"]


@served()
async def test_a_draft_while_a_turn_runs_is_answered_after_its_end(this: Served) -> None:
    async with this.socket() as wire:
        await wire.send("turn.create", turn_id="t1", **turn(input_ids=[7], max_tokens=200))
        await wire.until("turn.delta")
        await wire.send("turn.draft", draft_id="d1", text="and then")
        await wire.until("turn.drafted")
        kinds = [frame["type"] for frame in wire.frames]
        assert kinds.index("turn.completed") < kinds.index("turn.drafted")


@served()
async def test_a_draft_that_is_wrong_is_an_error_that_names_it(this: Served) -> None:
    async with this.socket() as wire:
        for fields in (
            {"draft_id": "d1"},
            {"draft_id": "d1", "text": "a", "input_ids": [1]},
            {"draft_id": "d1", "input_ids": [1 << 30]},
            {"draft_id": "d1", "text": "word " * 5000},
        ):
            await wire.send("turn.draft", **fields)
            assert (await wire.until("error"))["error"]["turn_id"] == "d1"
        await wire.send("turn.draft", draft_id=None, text="a")
        assert (await wire.until("error"))["error"]["param"] == "draft_id"
        await wire.send("turn.draft", text="a")
        await wire.until("error")
        await wire.send("turn.draft", draft_id=None)
        assert (await wire.turn("t1"))["type"] == "turn.completed"


@served()
async def test_a_draft_over_plain_http_is_answered_when_it_is_computed(this: Served) -> None:
    session_id = await this.open()
    path = f"/v1/sessions/{session_id}/draft"
    body = {"draft_id": "d1", "input": "Where is"}
    first = (await this.http.post(path, json=body)).json()
    assert (first["object"], first["draft_id"]) == ("draft", "d1")
    assert first["processed"] == first["total"] > first["kept"] == 0
    second = await this.http.post(path, json={"draft_id": "d2", "input": "Where is my"})
    assert 0 < second.json()["kept"] < first["total"]
    dropped = (await this.http.post(path, json={"draft_id": None})).json()
    assert (dropped["draft_id"], dropped["total"]) == (None, 0)
    end = (await this.http.post(f"/v1/sessions/{session_id}/turns", json=turn(text="a"))).json()
    assert "drafted_tokens" not in end["usage"]
    assert (await this.http.post("/v1/sessions/nobody/draft", json=body)).status_code == 404
    too_long = {"draft_id": "d3", "text": "word " * 5000}
    assert (await this.http.post(path, json=too_long)).status_code == 422


@served()
async def test_a_draft_that_another_replaced_is_answered_with_nothing(this: Served) -> None:
    this.is_held = True
    session_id = await this.open()
    path = f"/v1/sessions/{session_id}/draft"
    waiting = asyncio.create_task(this.http.post(path, json={"draft_id": "d1", "text": "a"}))
    await asyncio.sleep(0.05)
    newer = asyncio.create_task(this.http.post(path, json={"draft_id": "d2", "text": "ab"}))
    assert (await waiting).json()["total"] == 0
    this.is_held = False
    assert (await newer).json()["total"] > 0
