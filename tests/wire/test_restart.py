"""Sessions of the embedded model outlive the server: killed, restarted, token for token."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from session_server.client import ClientOptions, connect
from session_server.local_server import LocalServer
from tests.web.wire_client import Wire, greeted, http_client

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
QUESTIONS = ("My name is Ada.", "I live in Paris.", "What is my name?", "Where do I live?")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def served(store: Path, port: int, *flags: str) -> LocalServer:
    kept = ["--store", str(store)]
    return LocalServer(["--log-level", "warning", "--port", str(port), *kept, *flags])


async def ask(wire: Wire, turn_id: str, text: str) -> dict[str, Any]:
    content = [{"role": "user", "content": text}]
    end = await wire.turn(turn_id, input=content, sampling=GREEDY)
    assert end["type"] == "turn.completed", end
    return end


async def talk(url: str, session_id: str, first: int, last: int) -> list[dict[str, Any]]:
    async with greeted(url, session_id) as wire:
        return [await ask(wire, f"t{n}", QUESTIONS[n]) for n in range(first, last)]


def said(end: dict[str, Any]) -> tuple[Any, ...]:
    item, usage = end["item"], end["usage"]
    return item["id"], item["content"], tuple(item["token_ids"]), usage["input_tokens"]


@pytest.mark.timeout(180)
def test_a_conversation_goes_on_token_for_token_after_a_kill_and_after_an_end(
    tmp_path: Path, plain: LocalServer
) -> None:
    async def first_part(url: str) -> tuple[str, list[tuple[Any, ...]]]:
        async with http_client(url) as http:
            session_id = (await http.post("/v1/sessions", json={"metadata": {"a": "b"}})).json()[
                "id"
            ]
        return session_id, await durably(url, session_id, 0, 2)

    async def next_part(url: str, session_id: str, number: int) -> list[tuple[Any, ...]]:
        async with http_client(url) as http:
            (listed,) = (await http.get("/v1/sessions")).json()["data"]
            assert (listed["id"], listed["metadata"]) == (session_id, {"a": "b"})
            last = number - 1
            body = {"turn_id": f"t{last}", "input": [{"role": "user", "content": QUESTIONS[last]}]}
            path = f"/v1/sessions/{session_id}/turns"
            again = (await http.post(path, json=body | {"sampling": GREEDY})).json()
            assert (again["status"], again["durable"]) == ("completed", True)
        return await durably(url, session_id, number, number + 1)

    async def durably(url: str, *turns: Any) -> list[tuple[Any, ...]]:
        ends = await talk(url, *turns)
        assert all(end["durable"] is True for end in ends)
        return [said(end) for end in ends]

    reference = [said(end) for end in asyncio.run(talk(plain.url, "new", 0, 4))]
    with served(tmp_path, 0) as server:
        session_id, told = asyncio.run(first_part(server.url))
        os.kill(server.pid, signal.SIGKILL)
        server.wait(timeout_s=60)
    for number in (2, 3):
        with served(tmp_path, 0) as server:
            told += asyncio.run(next_part(server.url, session_id, number))
            assert server.stop(timeout_s=60) == 0
    assert told == reference


@pytest.mark.timeout(180)
def test_a_client_of_the_package_goes_on_by_itself(tmp_path: Path) -> None:
    port = free_port()

    async def scenario() -> None:
        server = served(tmp_path, port)
        await asyncio.to_thread(server.__enter__)
        patience = ClientOptions(max_attempts=60)  # a start takes long beside other tests
        async with await connect(server.url, options=patience) as session:
            first = await session.ask(QUESTIONS[0], sampling=GREEDY)
            assert first.is_durable
            for number in (signal.SIGTERM, signal.SIGKILL):
                os.kill(server.pid, number)
                await asyncio.to_thread(server.wait, timeout_s=60)
                server = served(tmp_path, port)
                await asyncio.to_thread(server.__enter__)
                after = await session.ask(QUESTIONS[2], sampling=GREEDY)
                assert after.usage.input_tokens > first.usage.total_tokens
                assert after.is_durable
        assert await asyncio.to_thread(server.stop) == 0

    asyncio.run(scenario())


def test_two_servers_do_not_share_a_store(tmp_path: Path) -> None:
    with served(tmp_path, 0) as first:
        second = served(tmp_path, 0)
        with pytest.raises(Exception, match="another server has it open"), second:
            pass
        assert second.returncode == 2
        assert httpx.get(f"{first.url}/ready").status_code == 200


@pytest.mark.timeout(180)
def test_a_disk_that_is_full_ends_nothing_and_the_server_says_so(tmp_path: Path) -> None:
    async def scenario(server: LocalServer) -> tuple[str, list[tuple[Any, ...]]]:
        process = psutil.Process(server.pid)
        _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
        async with http_client(server.url) as http, greeted(server.url) as wire:
            ends = [await ask(wire, "t0", QUESTIONS[0])]
            assert (await http.get("/health")).json() == {"status": "ok"}
            process.rlimit(psutil.RLIMIT_FSIZE, (4096, hard))  # no file may grow
            ends.append(await ask(wire, "t1", QUESTIONS[1]))
            assert [end["durable"] for end in ends] == [True, False]
            opened = (await http.post("/v1/sessions", json={})).status_code
            assert opened == 201
            health = await http.get("/health")
            assert (health.status_code, health.json()) == (200, {"status": "store_failing"})
            assert await scraped(http, "store_failing") == 1.0
            assert await scraped(http, "store_sessions_behind") == 2.0
            assert await scraped(http, 'store_writes_total{outcome="failed"}') >= 2.0
            process.rlimit(psutil.RLIMIT_FSIZE, (hard, hard))
            while await scraped(http, "store_sessions_behind"):
                await asyncio.sleep(0.1)
            assert (await http.get("/health")).json() == {"status": "ok"}
            ends.append(await ask(wire, "t2", QUESTIONS[2]))
            assert ends[-1]["durable"] is True
            assert await scraped(http, "store_commit_seconds_count") >= 3.0
            return wire.hello["session_id"], [said(end)[:2] for end in ends]

    async def read(url: str, session_id: str) -> list[tuple[Any, ...]]:
        async with http_client(url) as http:
            items = (await http.get(f"/v1/sessions/{session_id}/items")).json()["data"]
        return [(item["id"], item["content"]) for item in items if item["role"] == "assistant"]

    with served(tmp_path, 0) as server:
        session_id, told = asyncio.run(scenario(server))
        os.kill(server.pid, signal.SIGKILL)
        server.wait(timeout_s=60)
    with served(tmp_path, 0) as server:
        assert asyncio.run(read(server.url, session_id)) == told


async def scraped(http: httpx.AsyncClient, name: str) -> float:
    """One sample of the metrics."""
    lines = (await http.get("/metrics")).text.splitlines()
    (line,) = [line for line in lines if line.startswith(f"session_server_{name} ")]
    return float(line.rpartition(" ")[2])
