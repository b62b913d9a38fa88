"""What a session promises, proved from outside: a real process, real sockets, a real model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from itertools import pairwise
from typing import Any

import httpx
import pytest

from session_server.local_server import LocalServer
from tests.web.wire_client import Wire, greeted, open_wire
from tests.wire.conftest import CONTEXT_LEN

DEADLINE_S = 120.0
LONG_INPUT = [20 + index % 1000 for index in range(1500)]


def run(test: Awaitable[None]) -> None:
    """One scenario on a loop of its own, within a deadline."""

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await test

    asyncio.run(bounded())


def ids(*token_ids: int, max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """A greedy turn of token ids whose length is exact: nothing ends it early."""
    sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return {"input_ids": list(token_ids), "sampling": sampling, **fields}


async def ask(wire: Wire, turn_id: str, fields: dict[str, Any]) -> dict[str, Any]:
    """One turn to its end."""
    await wire.send("turn.create", turn_id=turn_id, **fields)
    while True:
        frame = await wire.until("turn.completed", "turn.cancelled", "turn.failed", "error")
        if (frame.get("turn_id") or frame["error"]["turn_id"]) == turn_id:
            return frame


def assert_continues(before: dict[str, Any], after: dict[str, Any], *, num_new: int) -> None:
    """The cached-tokens rule: all of the history but perhaps its last token has KV."""
    total = before["usage"]["total_tokens"]
    assert after["usage"]["input_tokens"] == total + num_new
    assert after["usage"]["cached_tokens"] in (total, total - 1)


def test_each_turn_computes_its_new_tokens_only(server: LocalServer) -> None:
    async def scenario() -> None:
        async with greeted(server.url) as wire:
            before = await ask(wire, "t0", ids(10, 11, 12))
            assert before["usage"]["input_tokens"] == 3
            for index in range(1, 12):
                new = [13 + index] * (1 + index % 5)
                after = await ask(wire, f"t{index}", ids(*new, max_tokens=1 + index))
                assert_continues(before, after, num_new=len(new))
                before = after

    run(scenario())


def test_a_chat_remembers_across_turns_and_sockets(server: LocalServer) -> None:
    def say(text: str) -> dict[str, Any]:
        message = {"role": "user", "content": text}
        return {"input": [message], "sampling": {"temperature": 0, "max_tokens": 48}}

    async def scenario() -> None:
        async with greeted(server.url) as wire:
            session_id = wire.hello["session_id"]
            before = await ask(wire, "t0", say("My name is Ada."))
        async with greeted(server.url, session_id) as wire:
            after = await ask(wire, "t1", say("What is my name?"))
            assert "Ada" in after["item"]["content"]
            assert after["usage"]["cached_tokens"] >= before["usage"]["total_tokens"] - 2

    run(scenario())


@pytest.mark.parametrize("keep_partial", [True, False])
def test_a_cancel_while_decoding_leaves_what_it_promises(
    server: LocalServer, keep_partial: bool
) -> None:
    async def scenario() -> None:
        async with greeted(server.url) as wire:
            first = await ask(wire, "t0", ids(10, 11, 12))
            await wire.send("turn.create", turn_id="t1", **ids(20, 21, max_tokens=1500))
            for _ in range(3):
                await wire.until("turn.delta")
            await wire.send("turn.cancel", turn_id="t1", keep_partial=keep_partial)
            end = await wire.until("turn.cancelled")
            assert end["kept_partial"] is keep_partial
            after = await ask(wire, "t2", ids(30))
            if keep_partial:
                assert end["usage"]["output_tokens"] == len(end["item"]["token_ids"]) >= 3
                assert_continues(end, after, num_new=1)
            else:
                assert end["item"]["token_ids"] == []
                assert after["usage"]["input_tokens"] == first["usage"]["total_tokens"] + 1

    run(scenario())


@pytest.mark.parametrize("keep_partial", [True, False])
def test_a_cancel_while_prefilling_leaves_what_it_promises(
    server: LocalServer, keep_partial: bool
) -> None:
    async def scenario() -> None:
        async with greeted(server.url) as wire:
            first = await ask(wire, "t0", ids(10, 11, 12))
            total = first["usage"]["total_tokens"]
            await wire.send("turn.create", turn_id="t1", **ids(*LONG_INPUT, max_tokens=400))
            while True:
                progress = await wire.until("turn.progress")
                if total < progress["processed"] < progress["total"]:
                    break
            await wire.send("turn.cancel", keep_partial=keep_partial)
            end = await wire.until("turn.cancelled", "turn.completed")
            assert end["type"] == "turn.cancelled"
            assert end["usage"]["output_tokens"] == 0, "the prefill was over before the cancel"
            after = await ask(wire, "t2", ids(30))
            kept = len(LONG_INPUT) if keep_partial else 0
            assert after["usage"]["input_tokens"] == total + kept + 1

    run(scenario())


def test_a_refused_turn_disturbs_nothing_and_nor_does_the_next(server: LocalServer) -> None:
    async def scenario() -> None:
        async with greeted(server.url) as wire:
            first = await ask(wire, "t0", ids(10, 11, 12))
            await wire.send("turn.create", turn_id="t1", **ids(20, max_tokens=300))
            await wire.until("turn.delta")
            for turn_id in ("t2", "t3"):
                await wire.send("turn.create", turn_id=turn_id, **ids(30, queue=False))
                refused = await wire.until("error")
                assert refused["error"]["code"] == "session_busy"
                assert refused["error"]["turn_id"] == turn_id
            running = await wire.until("turn.completed")
            assert_continues(first, running, num_new=1)
            assert running["usage"]["output_tokens"] == 300
            assert_continues(running, await ask(wire, "t4", ids(40)), num_new=1)

    run(scenario())


def test_turns_sent_ahead_run_in_order(server: LocalServer) -> None:
    async def scenario() -> None:
        async with greeted(server.url) as wire:
            for index in range(4):
                await wire.send("turn.create", turn_id=f"t{index}", **ids(10 + index))
            ends = [await wire.until("turn.completed") for _ in range(4)]
            assert [end["turn_id"] for end in ends] == ["t0", "t1", "t2", "t3"]
            for before, after in pairwise(ends):
                assert_continues(before, after, num_new=1)

    run(scenario())


def test_closing_while_a_turn_runs_cancels_it_and_ends_the_session(server: LocalServer) -> None:
    async def scenario() -> None:
        async with greeted(server.url) as wire:
            await wire.send("turn.create", turn_id="t0", **ids(10, max_tokens=1500))
            await wire.until("turn.delta")
            await wire.send("session.close")
            end = await wire.until("turn.cancelled")
            assert end["reason"] == "session_closed"
            await wire.until("session.closed")
            assert await wire.close_code() == 4410
        async with open_wire(server.url, wire.hello["session_id"], origin=server.url) as late:
            assert await late.close_code() == 4404

    run(scenario())


def test_a_lost_socket_resumes_mid_turn_with_identical_text(server: LocalServer) -> None:
    fields = ids(10, 11, 12, max_tokens=300)

    async def scenario() -> None:
        async with greeted(server.url) as wire:
            whole = await ask(wire, "t0", fields)
        for num_deltas in (0, 1, 5):
            async with greeted(server.url) as wire:
                session_id, epoch = wire.hello["session_id"], wire.hello["epoch"]
                await wire.send("turn.create", turn_id="t0", **fields)
                seen = [await wire.until("turn.created")]
                seen += [await wire.until("turn.delta") for _ in range(num_deltas)]
                last_seq = wire.frames[-1]["seq"]
                wire.socket.transport.abort()
            async with httpx.AsyncClient(base_url=server.url) as http:
                while (await http.get(f"/v1/sessions/{session_id}")).json()["seq"] < last_seq + 2:
                    pass  # the turn goes on while nobody listens
            async with greeted(server.url, session_id, f"?after={last_seq}&epoch={epoch}") as wire:
                assert wire.hello["resumed"] is True
                end = await wire.until("turn.completed")
                seen += wire.frames
            text = "".join(frame["text"] for frame in seen if frame["type"] == "turn.delta")
            assert text == end["item"]["content"] == whole["item"]["content"]
            assert end["item"]["token_ids"] == whole["item"]["token_ids"]

    run(scenario())


@pytest.mark.parametrize("on_disconnect", ["detach", "cancel"])
def test_a_turn_right_after_a_lost_socket_sees_the_exact_history(
    server: LocalServer, on_disconnect: str
) -> None:
    async def scenario() -> None:
        async with greeted(server.url) as wire:
            session_id, epoch = wire.hello["session_id"], wire.hello["epoch"]
            fields = ids(10, 11, max_tokens=300, on_disconnect=on_disconnect)
            await wire.send("turn.create", turn_id="t0", **fields)
            await wire.until("turn.delta")
            wire.socket.transport.abort()
        async with greeted(server.url, session_id, f"?after=0&epoch={epoch}") as wire:
            after = await ask(wire, "t1", ids(30))
            ends = [f for f in wire.frames if f["type"] in ("turn.completed", "turn.cancelled")]
            before = ends[0]
            assert before["turn_id"] == "t0"
            if on_disconnect == "detach":
                assert before["type"] == "turn.completed"
            assert_continues(before, after, num_new=1)

    run(scenario())


def test_the_same_turn_id_is_the_same_turn(server: LocalServer) -> None:
    async def scenario() -> None:
        async with greeted(server.url) as wire:
            await wire.send("turn.create", turn_id="t0", **ids(10, max_tokens=100))
            await wire.until("turn.delta")
            first = await ask(wire, "t0", ids(10, max_tokens=100))
            again = await ask(wire, "t0", ids(10, max_tokens=100))
            assert again["item"] == first["item"]
            other = await ask(wire, "t0", ids(11, max_tokens=100))
            assert other["error"]["code"] == "turn_conflict"
            assert_continues(first, await ask(wire, "t1", ids(30)), num_new=1)

    run(scenario())


def test_a_turn_too_long_is_refused_and_the_session_intact(server: LocalServer) -> None:
    async def scenario() -> None:
        async with greeted(server.url) as wire:
            assert wire.hello["limits"]["max_context"] == CONTEXT_LEN
            first = await ask(wire, "t0", ids(10, 11, 12))
            room = CONTEXT_LEN - first["usage"]["total_tokens"]
            for num_new in (room, room + 1):
                refused = await ask(wire, f"long{num_new}", ids(*([20] * num_new)))
                assert refused["error"]["code"] == "context_too_long", refused
            fits = await ask(wire, "fits", ids(*([20] * (room - 1)), max_tokens=64))
            assert fits["type"] == "turn.completed"
            assert fits["usage"]["total_tokens"] == CONTEXT_LEN
            assert_continues(first, fits, num_new=room - 1)

    run(scenario())


def test_cancel_and_create_back_to_back_never_trip(server: LocalServer) -> None:
    async def scenario() -> None:
        async with greeted(server.url) as wire:
            for index in range(60):
                turn_id = f"t{index}"
                await wire.send("turn.create", turn_id=turn_id, **ids(10, max_tokens=40))
                await wire.send("turn.cancel", turn_id=turn_id, keep_partial=index % 2 == 0)
            ends: set[str] = set()
            while len(ends) < 60:
                frame = await wire.receive()
                if frame["type"] == "error":
                    assert frame["error"]["code"] == "turn_not_active", frame
                elif frame["type"] in ("turn.completed", "turn.cancelled"):
                    ends.add(frame["turn_id"])
            last = [f for f in wire.frames if f["type"] in ("turn.completed", "turn.cancelled")]
            assert len(last) == 60
            assert (await ask(wire, "after", ids(30)))["type"] == "turn.completed"

    run(scenario())


def test_many_sessions_at_once_do_not_see_each_other(server: LocalServer) -> None:
    async def talk(seed: int) -> list[int]:
        tokens: list[int] = []
        async with greeted(server.url) as wire:
            for index in range(3):
                end = await ask(wire, f"t{index}", ids(seed, seed + index, max_tokens=12))
                tokens += end["item"]["token_ids"]
        return tokens

    async def scenario() -> None:
        alone = [await talk(seed) for seed in (100, 200, 300)]
        together = await asyncio.gather(*(talk(seed) for seed in (100, 200, 300) * 4))
        assert list(together) == alone * 4

    run(scenario())
