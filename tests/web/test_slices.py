"""What is long is encoded in slices, on every surface, and is the same there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from session_server.core.owner import ANONYMOUS
from session_server.protocol import growing_json, scores
from session_server.sessions.views import OpenRequest
from session_server.web import rest, slices
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


def test_few_long_values_are_encoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    num_running: list[int] = []
    running: set[object] = set()

    async def run_in_slices(steps: Iterator[None]) -> None:
        running.add(steps)
        num_running.append(len(running))
        for _ in steps:
            await asyncio.sleep(0)
        running.remove(steps)

    async def run() -> None:
        monkeypatch.setattr(slices, "run_in_slices", run_in_slices)
        values = range(3 * growing_json.SLICE_LENGTH)
        results = await asyncio.gather(*(slices.encode_list(values) for _ in range(20)))
        assert all(json.loads(bytes(each)) == list(values) for each in results)

    asyncio.run(run())
    assert max(num_running) == slices.ENCODED_AT_ONCE


@pytest.mark.parametrize(("max_bytes", "lengths"), [(19, [1] * 3), (20, [2, 1]), (21, [2, 1])])
def test_a_page_holds_what_fits_its_bytes_and_at_least_one_value(
    max_bytes: int, lengths: list[int]
) -> None:
    async def run() -> list[list[int]]:
        values, pages = ["1234567", "2345678", "3" * 50], []
        while values:
            encoded, count = await slices.encode_page(values, max_bytes=max_bytes)
            pages.append(json.loads(bytes(encoded)))
            assert pages[-1] == values[:count]
            values = values[count:]
        return pages

    assert [len(page) for page in asyncio.run(run())] == lengths


@served()
async def test_a_list_of_large_metadata_is_short_and_goes_on(this: Served) -> None:
    """A thousand sessions of eight thousand control characters each were one body of 50 MB."""
    metadata = {f"k{number}": "\x01" * 512 for number in range(16)}
    names = [
        this.sessions.open(ANONYMOUS, OpenRequest(metadata=metadata)).session_id for _ in range(60)
    ]
    seen: list[str] = []
    params: dict[str, str | int] = {"limit": 1000}
    while params.get("after", "") is not None:
        answer = await this.http.get("/v1/sessions", params=params)
        assert len(answer.content) < rest.MAX_PAGE_BYTES + 200
        page = answer.json()
        seen += [session["id"] for session in page["data"]]
        assert page["has_more"] == (page["next_after"] is not None)
        params["after"] = page["next_after"]
    assert seen == names


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
