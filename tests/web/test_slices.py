"""What is long is encoded in slices, on every surface, and is the same there."""

from __future__ import annotations

import asyncio
import json

import pytest

from session_server.protocol import growing_json, scores
from session_server.web import slices
from tests.web.serving import Served, served, turn


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "SCORES_AT_ONCE", 2)
    monkeypatch.setattr(growing_json, "SLICE_LENGTH", 2)


def test_others_go_on_between_two_slices() -> None:
    async def run() -> list[int]:
        num_turns = 0

        async def others() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        values = range(3 * growing_json.SLICE_LENGTH)
        array = growing_json.GrowingArray()
        await slices.run_in_slices(array.extend_in_slices(values, lambda value: num_turns))
        task.cancel()
        turns: list[int] = json.loads(bytes(array.value()))
        return turns

    turns = asyncio.run(run())
    assert len(turns) == 3 * growing_json.SLICE_LENGTH
    assert turns[:: growing_json.SLICE_LENGTH] == [0, 1, 2]


@pytest.mark.usefixtures("few_at_once")
def test_many_scores_are_told_alike_on_every_surface() -> None:
    @served()
    async def test(this: Served) -> None:
        session_id = await this.open()
        path = f"/v1/sessions/{session_id}"
        body = turn(input_ids=[7], turn_id="t", max_tokens=9)
        body["sampling"] |= {"logprobs": True}
        async with this.socket(session_id) as wire:
            posted = (await this.http.post(f"{path}/turns", json=body)).json()
            told = await wire.until("turn.completed")
            await wire.send("turn.create", **body)
            repeated = await wire.until("turn.completed")
        shown = (await this.http.get(f"{path}/turns/t")).json()
        events = (
            await this.http.post(
                f"{path}/turns", json=body, headers={"accept": "text/event-stream"}
            )
        ).text
        assert posted["item"]["logprobs"] == [{"token_id": 474, "logprob": -0.5, "top": []}] * 9
        assert posted["item"] == told["item"] == repeated["item"] == shown["item"]
        assert events.count('{"token_id":474') == 2 * 9, "once as deltas, once in the end"

    test()


@pytest.mark.usefixtures("few_at_once")
def test_a_long_conversation_is_listed_whole() -> None:
    @served()
    async def test(this: Served) -> None:
        session_id = await this.open()
        for number in range(4):
            await this.http.post(f"/v1/sessions/{session_id}/turns", json=turn(f"text {number}"))
        items = (await this.http.get(f"/v1/sessions/{session_id}/items")).json()["data"]
        assert [item["content"] for item in items[::2]] == [f"text {n}" for n in range(4)]
        async with this.bare_socket(session_id, "?after=0&epoch=another") as wire:
            snapshot = await wire.until("session.snapshot")
        assert snapshot["items"] == items

    test()
