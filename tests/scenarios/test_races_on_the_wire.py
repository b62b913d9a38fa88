"""R, seen from outside: the same races over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

from session_server.core.commands import CancelTurn
from session_server.core.owner import ANONYMOUS
from session_server.core.session_events import TurnCancelled, TurnCompleted
from tests.mutants.guards import (
    ALL_TURNS_LOOK_ALIKE,
    CANCELLED_STAYS_IN_LINE,
    CLOSING_ID_IS_FREE,
    DISCONNECT_STOPS_NOBODY,
    DISCONNECT_STOPS_WHO_RUNS,
    ENGINE_KNOWS_CLIENTS_IDS,
    FIRST_LIMITS_STAY,
    REFUSAL_FREES_THE_SESSION,
    RID_IS_FORGOTTEN_BY_NAME,
    RID_MATCHES_A_PREFIX,
)
from tests.mutants.in_sessions import BUSY_SESSION_EXPIRES
from tests.scenarios.registry import scenario
from tests.web.serving import Served, served, turn

OWNER = ANONYMOUS
SOON_S = 20.0
"""Long enough for what happens at once; a story that waits longer has failed."""


@contextlib.asynccontextmanager
async def posted(this: Served, path: str, body: dict[str, Any]) -> AsyncIterator[None]:
    """A request whose client hangs up at the end of the block."""
    async with httpx.AsyncClient(base_url=this.url, trust_env=False) as client:
        asking = asyncio.create_task(client.post(path, json=body, timeout=60))
        yield
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def ended(this: Served, session_id: str, turn_id: str) -> Any:
    """The end of a turn, which comes soon."""
    async with asyncio.timeout(SOON_S):
        await this.until(lambda: this.sessions.turn(OWNER, session_id, turn_id).end is not None)
    return this.sessions.turn(OWNER, session_id, turn_id).end


@scenario("R1", REFUSAL_FREES_THE_SESSION)
@served()
async def test_r1_a_refused_turn_does_not_open_the_door_to_the_next(this: Served) -> None:
    this.is_held = True
    async with this.socket() as wire:
        await wire.send("turn.create", turn_id="t1", **turn(input_ids=[7]))
        await wire.until("turn.created")
        for name in ("t2", "t3"):
            await wire.send("turn.create", turn_id=name, queue=False, **turn(input_ids=[8]))
            answer = await wire.until("error", "turn.created")
            assert answer["type"] == "error"
            assert answer["error"]["code"] == "session_busy"
        this.is_held = False
        assert (await wire.until("turn.completed"))["turn_id"] == "t1"
        assert this.sessions.get(OWNER, wire.hello["session_id"]).num_turns == 1


@scenario("R2", CANCELLED_STAYS_IN_LINE)
@served()
async def test_r2_a_turn_cancelled_in_line_ends_once_and_the_next_one_runs(this: Served) -> None:
    this.is_held = True
    async with this.socket() as wire:
        for name in ("t1", "t2", "t3"):
            await wire.send("turn.create", turn_id=name, **turn(input_ids=[7]))
            await wire.until("turn.created")
        await wire.send("turn.cancel", turn_id="t2")
        ends = [await wire.until("turn.cancelled")]
        this.is_held = False
        ends += [await wire.until("turn.completed", "turn.cancelled") for _ in range(2)]
        assert [end["turn_id"] for end in ends] == ["t2", "t1", "t3"]


@scenario("R3", DISCONNECT_STOPS_NOBODY)
@served()
async def test_r3_the_turn_after_a_lost_socket_builds_on_what_the_lost_one_kept(
    this: Served,
) -> None:
    async with this.socket() as wire:
        session_id = wire.hello["session_id"]
        fields = turn(input_ids=[7, 8], max_tokens=900, on_disconnect="cancel")
        await wire.send("turn.create", turn_id="t1", **fields)
        for _ in range(3):
            await wire.until("turn.delta")
        this.is_held = True
        wire.socket.transport.abort()
    async with asyncio.timeout(SOON_S):
        await this.until(lambda: this.sockets.num_attached == 0)
    async with this.socket(session_id) as wire:
        await wire.send("turn.create", turn_id="t2", **turn(input_ids=[9]))
        this.is_held = False
        end = await wire.until("turn.completed")
        lost = await ended(this, session_id, "t1")
        assert isinstance(lost, TurnCancelled)
        assert (lost.reason, lost.kept_partial) == ("disconnected", True)
        num_kept = len(lost.outcome.token_ids)
        assert 3 <= num_kept < 900
        assert end["usage"]["input_tokens"] == 2 + num_kept + 1
        assert end["usage"]["cached_tokens"] in (2 + num_kept, 1 + num_kept)


@scenario("R4", ENGINE_KNOWS_CLIENTS_IDS)
@served()
async def test_r4_two_sessions_may_use_one_turn_id(this: Served) -> None:
    sessions = [await this.open(), await this.open()]
    this.is_held = True
    async with this.socket(sessions[0]) as one, this.socket(sessions[1]) as two:
        for wire in (one, two):
            await wire.send("turn.create", turn_id="t", **turn(input_ids=[7], max_tokens=50))
            await wire.until("turn.created")
        await two.send("turn.cancel", turn_id="t")
        await two.send("ping", t=1)
        await two.until("pong")
        this.is_held = False
        assert isinstance(await ended(this, sessions[1], "t"), TurnCancelled)
        async with asyncio.timeout(SOON_S):
            await this.until(lambda: not this.engine.is_busy)
        view = this.sessions.turn(OWNER, sessions[0], "t")
        assert isinstance(view.end, TurnCompleted)
        assert len(view.end.outcome.token_ids) == 50


@scenario("R4", RID_IS_FORGOTTEN_BY_NAME)
@served()
async def test_r4_a_request_that_ends_does_not_take_the_name_of_the_one_after_it(
    this: Served,
) -> None:
    this.is_held = True
    asking = []
    for num_tokens in (3, 900):
        sampling = {"max_new_tokens": num_tokens, "ignore_eos": True}
        body = {"input_ids": [7], "rid": "r", "sampling_params": sampling}
        asking.append(asyncio.create_task(this.http.post("/generate", json=body)))
        await this.until(lambda: this.sessions.stats().live_turns == len(asking))
    this.is_held = False
    assert (await asking[0]).json()["meta_info"]["finish_reason"]["type"] == "length"
    await this.http.post("/abort_request", json={"rid": "r"})
    assert (await asking[1]).json()["meta_info"]["finish_reason"]["type"] == "abort"


@scenario("R5", BUSY_SESSION_EXPIRES)
@served()
async def test_r5_a_session_does_not_expire_under_its_turn(this: Served) -> None:
    this.is_held = True
    async with this.socket() as wire:
        await wire.send("turn.create", turn_id="t", **turn(input_ids=[7]))
        await wire.until("turn.created")
        this.sessions.tick(time.monotonic() + 1e6)
        this.is_held = False
        end = await wire.until("turn.completed", "turn.cancelled")
        assert end["type"] == "turn.completed"
        assert (await wire.turn("u", input_ids=[8]))["type"] == "turn.completed"


@scenario("R6", CLOSING_ID_IS_FREE)
@served()
async def test_r6_the_id_of_a_session_that_closes_is_taken_until_it_is_gone(this: Served) -> None:
    await this.open(id="x")
    this.is_held = True
    async with this.socket("x") as wire:
        await wire.send("turn.create", turn_id="t", **turn(input_ids=[7], max_tokens=900))
        await wire.until("turn.created")
        for _ in range(2):
            closing = await this.http.delete("/v1/sessions/x")
            assert (closing.status_code, closing.json()["state"]) == (200, "closing")
        refused = await this.http.post("/v1/sessions", json={"id": "x"})
        assert refused.status_code == 409, refused.text
        assert refused.json()["error"]["code"] == "session_exists"
        late = await this.http.post("/v1/sessions/x/turns", json=turn(input_ids=[7]))
        assert late.json()["error"]["code"] == "session_closing"
        this.is_held = False
        assert (await wire.until("turn.cancelled"))["reason"] == "session_closed"
        assert await wire.close_code() == 4410
    assert (await this.http.delete("/v1/sessions/x")).status_code == 404
    assert await this.open(id="x") == "x"
    answer = await this.http.post("/v1/sessions/x/turns", json=turn(input_ids=[7, 8]))
    assert answer.json()["usage"]["input_tokens"] == 2


@scenario("R7", DISCONNECT_STOPS_WHO_RUNS)
@served()
async def test_r7_a_client_that_leaves_the_line_does_not_stop_the_one_that_runs(
    this: Served,
) -> None:
    session_id = await this.open()
    path = f"/v1/sessions/{session_id}/turns"
    this.is_held = True
    async with posted(this, path, turn(input_ids=[7], turn_id="a", on_disconnect="detach")):
        await this.until(lambda: this.sessions.stats().live_turns == 1)
    async with posted(this, path, turn(input_ids=[8], turn_id="b")):
        await this.until(lambda: this.sessions.stats().queued_turns == 1)
    async with asyncio.timeout(SOON_S):
        await this.until(
            lambda: (
                this.sessions.turn(OWNER, session_id, "b").status == "cancelled"
                or any(isinstance(command, CancelTurn) for command in this.engine.commands)
            )
        )
    this.is_held = False
    assert isinstance(await ended(this, session_id, "a"), TurnCompleted)
    assert isinstance(await ended(this, session_id, "b"), TurnCancelled)


@scenario("R8", RID_MATCHES_A_PREFIX)
@served()
async def test_r8_an_abort_names_one_request_exactly(this: Served) -> None:
    this.is_held = True
    body = {"input_ids": [7], "rid": "r12", "sampling_params": {"max_new_tokens": 9}}
    asking = asyncio.create_task(this.http.post("/generate", json=body))
    await this.until(lambda: this.sessions.stats().live_turns == 1)
    for rid in ("", "r", "r1", "r123"):
        assert (await this.http.post("/abort_request", json={"rid": rid})).status_code == 200
    this.is_held = False
    assert (await asking).json()["meta_info"]["finish_reason"]["type"] == "length"


@scenario("R9", ALL_TURNS_LOOK_ALIKE)
@served()
async def test_r9_whoever_waits_behind_another_turn_hears_its_own_end(this: Served) -> None:
    path = f"/v1/sessions/{await this.open()}/turns"
    this.is_held = True
    asking = []
    for index, num_tokens in enumerate((900, 5, 6)):
        body = turn(input_ids=[7], turn_id=f"t{index}", max_tokens=num_tokens)
        asking.append(asyncio.create_task(this.http.post(path, json=body)))
        await this.until(lambda: sum_of_turns(this) == len(asking))
    await this.http.post(f"{path}/t0/cancel", json={"keep_partial": False})
    this.is_held = False
    answers = [(await one).json() for one in asking]
    assert [answer["id"] for answer in answers] == ["t0", "t1", "t2"]
    assert [answer["status"] for answer in answers] == ["cancelled", "completed", "completed"]
    assert [answer["usage"]["output_tokens"] for answer in answers] == [0, 5, 6]


@scenario("R11", FIRST_LIMITS_STAY)
@served()
async def test_r11_every_turn_is_as_long_as_it_asked_to_be(this: Served) -> None:
    async with this.socket() as wire:
        for name, num_tokens in (("t1", 2), ("t2", 9), ("t3", 4)):
            end = await wire.turn(name, input_ids=[7], max_tokens=num_tokens)
            assert end["usage"]["output_tokens"] == num_tokens


def sum_of_turns(this: Served) -> int:
    stats = this.sessions.stats()
    return stats.live_turns + stats.queued_turns
