"""What operators see of all owners: the sessions table and what may be done to them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from session_server.core.ids import SessionId, TurnId
from session_server.sessions.turn_names import MAX_NAMED_TURNS, TurnName, TurnNames
from session_server.web.admin_sessions import MAX_ADMIN_PAGE, MAX_MATCH_CHARS
from tests.web.serving import Served, served, serving, turn
from tests.web.test_keys import ring_of

DEADLINE_S = 60.0
URL = "/v1/admin/sessions"
KEYS = {key: {"authorization": f"Bearer {key}"} for key in ("alices", "bobs", "operators")}


async def rows(this: Served, **params: Any) -> list[dict[str, Any]]:
    """Every page of the table, put together."""
    found: list[dict[str, Any]] = []
    while True:
        answer = await this.http.get(URL, params=params, headers=KEYS["operators"])
        page = answer.raise_for_status().json()
        found += page["data"]
        if page["next_after"] is None:
            return found
        params["after"] = page["next_after"]


@served()
async def test_a_row_says_what_a_session_holds_and_how_it_was_served(this: Served) -> None:
    session_id = await this.open(id="mine")
    for _ in range(2):
        assert (await this.http.post(f"/v1/sessions/{session_id}/turns", json=turn())).is_success
    async with this.socket("mine"):
        (row,) = await rows(this)
        assert await rows(this, match=row["id"]) == [row | {"idle_s": pytest.approx(0, abs=60)}]
    shown = (await this.http.get("/v1/sessions/mine")).json()
    assert (row["session_id"], row["tokens"], row["turns"]) == ("mine", shown["tokens"], 2)
    assert (row["state"], row["running_turn"], row["readers"]) == ("resident", None, 1)
    assert row["id"].startswith("s_")
    assert row["owner"] != "anonymous"
    assert len(row["owner"]) == 8
    assert row["idle_s"] >= 0
    assert 0 < row["cached_share"] < 1
    assert 0 <= row["ttft_p50_ms"] <= row["ttft_p95_ms"]


@served()
async def test_pages_have_each_session_once_in_every_order(this: Served) -> None:
    names = [f"session-{number}" for number in range(7)]
    for number, name in enumerate(names):
        await this.open(id=name)
        for _ in range(number % 3):
            assert (await this.http.post(f"/v1/sessions/{name}/turns", json=turn())).is_success
    for sort in ("opened", "active", "tokens", "turns", "cached", "ttft"):
        for limit in (1, 3, 6, 7, 8):
            found = await rows(this, sort=sort, limit=limit)
            assert sorted(row["session_id"] for row in found) == names, (sort, limit)
            whole = await rows(this, sort=sort, limit=MAX_ADMIN_PAGE)
            if sort != "active":
                assert [row["id"] for row in found] == [row["id"] for row in whole]
    assert [row["session_id"] for row in await rows(this, sort="opened")] == names
    by_tokens = [row["tokens"] for row in await rows(this, sort="tokens", limit=2)]
    assert by_tokens == sorted(by_tokens, reverse=True)
    slowest = [row["ttft_p95_ms"] for row in await rows(this, sort="ttft") if row["turns"]]
    assert slowest == sorted(slowest, reverse=True)
    assert [row["session_id"] for row in await rows(this, match="session-4")] == ["session-4"]
    assert len(await rows(this, match="new")) == 3, "sessions without a turn"


@served()
async def test_what_is_no_page_is_refused(this: Served) -> None:
    for params, param in (
        ({"limit": 0}, "limit"),
        ({"limit": MAX_ADMIN_PAGE + 1}, "limit"),
        ({"sort": "owner"}, "sort"),
        ({"match": "x" * (MAX_MATCH_CHARS + 1)}, "match"),
        ({"after": "mine"}, "after"),
        ({"after": "nan~1"}, "after"),
        ({"after": "1~" + "1" * 21}, "after"),
    ):
        answer = await this.http.get(URL, params=params)
        assert answer.status_code == 400, params
        assert answer.json()["error"]["param"] == param
    for params in (
        {"limit": MAX_ADMIN_PAGE},
        {"match": "x" * MAX_MATCH_CHARS},
        {"after": "-1.0~1"},
    ):
        assert (await this.http.get(URL, params=params)).status_code == 200


def test_operators_act_on_the_sessions_of_every_owner_and_others_on_none(tmp_path: Path) -> None:
    ring = ring_of(tmp_path / "keys", "alice alices\nbob bobs\nops operators admin=1\n")

    async def check() -> None:
        async with serving(keys=ring) as this:
            for key in ("alices", "bobs"):
                opened = await this.http.post(
                    "/v1/sessions", json={"id": "same"}, headers=KEYS[key]
                )
                assert opened.status_code == 201
                run = await this.http.post(
                    "/v1/sessions/same/turns", json=turn(), headers=KEYS[key]
                )
                assert run.is_success
            alices, bobs = await rows(this, sort="opened")
            assert alices["session_id"] == bobs["session_id"] == "same"
            assert len({alices["owner"], bobs["owner"], alices["id"], bobs["id"]}) == 4
            assert [row["id"] for row in await rows(this, match=bobs["owner"])] == [bobs["id"]]

            async def act(session_id: str, action: str, key: str = "operators") -> Any:
                return await this.http.post(f"{URL}/{session_id}/{action}", headers=KEYS[key])

            for action in ("close", "cool", "warm", "pin", "unpin", "fork"):
                assert (await act(bobs["id"], action, "bobs")).status_code == 403
                for unknown in ("same", "s_" + "0" * 32):
                    refused = await act(unknown, action)
                    assert refused.status_code == 404
                    assert refused.json()["error"]["code"] == "session_not_found"
            assert (await this.http.get(URL, headers=KEYS["bobs"])).status_code == 403
            assert (await act(bobs["id"], "rename")).status_code == 400

            cooled = await act(bobs["id"], "cool")
            assert (cooled.json()["id"], cooled.json()["state"]) == (bobs["id"], "cold")
            warmed = await act(bobs["id"], "warm")
            assert (warmed.json()["id"], warmed.json()["state"]) == (bobs["id"], "cold")
            for action, is_pinned in (("pin", True), ("unpin", False)):
                assert (await act(bobs["id"], action)).json()["pinned"] is is_pinned

            forked = (await act(bobs["id"], "fork")).json()
            assert forked["owner"] == bobs["owner"]
            assert forked["tokens"] == bobs["tokens"]
            his = (await this.http.get("/v1/sessions", headers=KEYS["bobs"])).json()["data"]
            assert forked["session_id"] in [session["id"] for session in his]

            closed = await act(bobs["id"], "close")
            assert closed.json()["state"] == "closing"
            assert (await act(bobs["id"], "close")).status_code == 404
            left = await rows(this, sort="opened")
            assert [row["id"] for row in left] == [alices["id"], forked["id"]]

    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))


@served()
async def test_a_session_in_which_a_turn_runs_is_closed_and_nothing_else(this: Served) -> None:
    session_id = await this.open(id="busy")
    this.is_held = True
    running = asyncio.create_task(
        this.http.post(f"/v1/sessions/{session_id}/turns", json=turn(max_tokens=50))
    )
    await this.until(lambda: this.sessions.get(owner_of(this), "busy").running_turn is not None)
    turn_id = this.sessions.get(owner_of(this), "busy").running_turn
    internal = this.app.state.overview.show_of(owner_of(this), "busy").id
    for action in ("cool", "fork", "unpin"):
        answer = await this.http.post(f"{URL}/{internal}/{action}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_busy")
    warmed = await this.http.post(f"{URL}/{internal}/warm")
    assert (warmed.status_code, warmed.json()["running_turn"]) == (200, turn_id)
    closed = await this.http.post(f"{URL}/{internal}/close")
    assert closed.json()["state"] == "closing"
    this.is_held = False
    assert (await running).json()["status"] == "cancelled"


def owner_of(this: Served) -> Any:
    """The owner of everything where no key is required."""
    return this.services.settings.keys.credential_of(None).owner


@served()
async def test_without_an_engine_the_table_has_what_the_server_knows(this: Served) -> None:
    await this.open(id="mine")
    this.engine.die()
    (row,) = await rows(this)
    assert (row["session_id"], row["pages"], row["kv_bytes"]) == ("mine", None, None)


@pytest.mark.parametrize("num_more", [-1, 0, 1])
def test_the_names_of_turns_are_bounded_and_those_looked_for_stay(num_more: int) -> None:
    names = TurnNames()
    for number in range(MAX_NAMED_TURNS + num_more):
        names.add(TurnId(f"t{number}"), TurnName(SessionId("s"), str(number), is_draft=False))
        if number == MAX_NAMED_TURNS - 2:
            assert names.find(TurnId("t0")) is not None
    assert len(names) == MAX_NAMED_TURNS + min(num_more, 0)
    assert names.find(TurnId("t0")) is not None
    assert (names.find(TurnId("t1")) is None) == (num_more > 0)
