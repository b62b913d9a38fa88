"""A server whose memory holds few of its sessions: clients see it by nothing but an epoch."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from session_server.local_server import LocalServer
from tests.web.wire_client import greeted, http_client
from tests.wire.test_restart import GREEDY, QUESTIONS, ask, said, scraped

NUM_SESSIONS, NUM_LOADED = 10, 3


def small(store: Path | None) -> LocalServer:
    kept = [] if store is None else ["--store", str(store), "--max-sessions", str(NUM_LOADED)]
    return LocalServer(["--log-level", "warning", "--port", "0", *kept])


async def turns(http: httpx.AsyncClient, number: int) -> list[tuple[Any, ...]]:
    """A turn of each session, one after the other."""
    ends = []
    for name in range(NUM_SESSIONS):
        text = f"{QUESTIONS[number]} I am client {name}."
        body = {
            "turn_id": f"t{number}",
            "input": [{"role": "user", "content": text}],
            "sampling": GREEDY,
        }
        answer = await http.post(f"/v1/sessions/n{name}/turns", json=body)
        assert answer.status_code == 200, answer.text
        ends.append(said(answer.json()))
    return ends


async def opened(http: httpx.AsyncClient) -> None:
    for name in range(NUM_SESSIONS):
        answer = await http.post(
            "/v1/sessions", json={"id": f"n{name}", "metadata": {"n": str(name)}}
        )
        assert answer.status_code == 201, answer.text


async def plain(url: str) -> list[list[tuple[Any, ...]]]:
    async with http_client(url) as http:
        await opened(http)
        return [await turns(http, number) for number in range(4)]


@pytest.mark.timeout(240)
def test_more_sessions_than_the_memory_holds(tmp_path: Path) -> None:
    async def first_part(url: str) -> list[list[tuple[Any, ...]]]:
        async with http_client(url) as http, greeted(url) as held:
            await opened(http)
            assert await scraped(http, "sessions") == NUM_LOADED
            assert await scraped(http, "store_sessions_unread") == NUM_SESSIONS + 1 - NUM_LOADED
            usage = (await http.get("/v1/usage")).json()["quotas"]["max_sessions"]
            assert usage["held"] == NUM_SESSIONS + 1
            ends = [await turns(http, number) for number in range(2)]
            # The one that a socket reads has stayed.
            assert (await ask(held, "mine", QUESTIONS[0]))["durable"] is True
            listed = (await http.get("/v1/sessions")).json()["data"]
            assert len(listed) == NUM_SESSIONS + 1
            await comes_back(url, http)
            assert (await http.delete("/v1/sessions/n9")).status_code == 200
            assert (await http.get("/v1/sessions/n9")).status_code == 404
            assert (await http.post("/v1/sessions", json={"id": "n9"})).status_code == 201
            return ends

    async def comes_back(url: str, http: httpx.AsyncClient) -> None:
        """A client goes, its session leaves the memory, and it comes back with what it knows."""
        async with greeted(url, "n0") as wire:
            epoch, seq = wire.hello["epoch"], wire.hello["seq"]
        for name in range(1, NUM_SESSIONS):
            await http.get(f"/v1/sessions/n{name}")
        async with greeted(url, "n0", f"?after={seq}&epoch={epoch}") as wire:
            assert wire.hello["epoch"] != epoch
            failed = await wire.until("session.resume_failed")
            assert failed["reason"] == "epoch_changed"
            snapshot = await wire.until("session.snapshot")
            assert len(snapshot["items"]) == 4

    async def second_part(url: str) -> list[list[tuple[Any, ...]]]:
        async with http_client(url) as http:
            assert len((await http.get("/v1/sessions")).json()["data"]) == NUM_SESSIONS + 1
            return [await turns(http, number) for number in range(2, 4)]

    with small(None) as server:
        reference = asyncio.run(plain(server.url))
    with small(tmp_path / "store") as server:
        first = asyncio.run(first_part(server.url))
        os.kill(server.pid, signal.SIGKILL)
        server.wait(timeout_s=60)
    with small(tmp_path / "store") as server:
        second = asyncio.run(second_part(server.url))
    for part, wanted in zip((*first, *second), reference, strict=True):
        assert part[:9] == wanted[:9]
