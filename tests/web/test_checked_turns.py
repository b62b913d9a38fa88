"""Turns whose grammar is checked: they are counted, found by a cancel, and gone with their
client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from session_server.core.owner import ANONYMOUS
from session_server.sessions.quotas import QuotaLimits
from tests.web.serving import Served, served, serving, turn
from tests.web.test_responses import JSON_OBJECT, held_checks, num_sessions
from tests.web.test_responses_socket import lanes_of

SAMPLING = {"temperature": 0, "max_tokens": 4, "regex": "a+"}
MODEL = {"model": "paper", "max_tokens": 4, "regex": "a+"}

CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "turns": ("/v1/sessions/s/turns", {"text": "Hello", "sampling": SAMPLING}),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hello"}], **MODEL},
    ),
    "completions": ("/v1/completions", {"prompt": ["Hello", "you"], **MODEL}),
    "responses": ("/v1/responses", {"model": "paper", "input": "Hello", "text": JSON_OBJECT}),
    "generate": (
        "/generate",
        {"text": "Hello", "sampling_params": {"max_new_tokens": 4, "regex": "a+"}},
    ),
}


def num_unfinished(this: Served) -> int:
    stats = this.sessions.stats()
    return stats.live_turns + stats.queued_turns


def held_bytes(this: Served) -> int:
    return this.sessions._quotas.turn_bytes.total


async def freed(this: Served, is_over: asyncio.Event) -> None:
    """Let checks end; nothing is left."""
    is_over.set()
    await this.until(lambda: held_bytes(this) == 0 == this.sessions._quotas.turns.total)


@served()
async def test_a_cancel_on_the_same_socket_finds_the_turn(this: Served) -> None:
    with held_checks() as is_over:
        async with this.socket() as wire:
            for turn_id, named in (("t1", {"turn_id": "t1"}), ("t2", {})):
                await wire.send("turn.create", turn_id=turn_id, text="Hi", sampling=SAMPLING)
                await wire.send("turn.cancel", **named)
                end = await wire.until("turn.cancelled")
                assert (end["turn_id"], end["kept_partial"]) == (turn_id, False)
            assert num_unfinished(this) == 0
            assert (await wire.turn("t3"))["type"] == "turn.completed"
        await freed(this, is_over)


@served()
async def test_turns_of_a_socket_run_in_its_order_whatever_is_checked(this: Served) -> None:
    with held_checks() as is_over:
        async with this.socket() as wire:
            await wire.send("turn.create", turn_id="t1", text="Hi", sampling=SAMPLING)
            await wire.send("turn.create", turn_id="t2", **turn())
            for number in range(20):
                await wire.send("turn.create", turn_id=f"more{number}", **turn())
            for _ in range(18):  # as many wait as may
                assert (await wire.until("error"))["error"]["code"] == "session_busy"
            assert [frame["type"] for frame in wire.frames[1:]] == ["error"] * 18
            is_over.set()
            for turn_id in ("t1", "t2", "more0", "more1"):
                end = await wire.until("turn.completed", "turn.failed")
                assert end["turn_id"] == turn_id
        await freed(this, is_over)


@served()
async def test_an_abort_finds_a_request_whose_grammar_is_checked(this: Served) -> None:
    path, body = CALLS["generate"]
    with held_checks() as is_over:
        asking = asyncio.create_task(this.http.post(path, json=body | {"rid": "r"}))
        await this.until(lambda: num_unfinished(this) == 1)
        await this.http.post("/abort_request", json={"rid": "r"})
        answer = await asking
        assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert (num_unfinished(this), num_sessions(this)) == (0, 0)
        await freed(this, is_over)


@served()
async def test_a_responses_socket_cancels_and_leaves_during_a_check(this: Served) -> None:
    with held_checks() as is_over:
        async with lanes_of(this) as lanes:
            for lane in ("main", "other"):
                await lanes.create(text=JSON_OBJECT, stream_id=lane)
            await this.until(lambda: num_unfinished(this) == 2)
            await lanes.send("response.cancel", stream_id="main")
            end = await lanes.until("response.incomplete", stream_id="main")
            assert end["response"]["status"] == "cancelled"
            assert num_unfinished(this) == 1
        await this.until(lambda: this.sockets.num_attached == 0 == num_sessions(this))
        assert num_unfinished(this) == 0
        await freed(this, is_over)


@pytest.mark.parametrize("name", CALLS)
def test_a_client_that_leaves_during_a_check_leaves_nothing(name: str) -> None:
    @served()
    async def test(this: Served) -> None:
        path, body = CALLS[name]
        await this.open(id="s")
        with held_checks() as is_over:
            asking = asyncio.create_task(this.http.post(path, json=body))
            await this.until(lambda: num_unfinished(this) == 1)
            asking.cancel()
            await this.until(lambda: num_unfinished(this) == 0)
            await this.until(lambda: num_sessions(this) <= 1 + (name == "chat"))
            await freed(this, is_over)

    test()


def test_a_turn_whose_grammar_is_checked_counts_as_one() -> None:
    async def test() -> None:
        quotas = QuotaLimits(turns=10, owner_turns=2)
        with held_checks() as is_over:
            async with serving(quotas=quotas) as this:
                path, body = CALLS["generate"]
                asking = [asyncio.create_task(this.http.post(path, json=body)) for _ in range(3)]
                done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                assert [each.result().status_code for each in done] == [429]
                assert this.sessions._quotas.turn_bytes.held_by(ANONYMOUS) > 0
                is_over.set()
                await asyncio.gather(*asking)

    asyncio.run(test())
