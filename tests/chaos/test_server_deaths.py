"""SIGTERM under load, once and twice; SIGKILL; and no engine that outlives its server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections import Counter
from typing import Any

import httpx
import pytest

from session_server.local_server import LocalServer
from tests.rig.decisions import Decisions
from tests.rig.echo_server import PROGRAM, echo_server
from tests.rig.history import ENDS
from tests.rig.processes import ECHO_ENGINE, assert_gone, engines_of
from tests.rig.scene import echo_turn
from tests.web.wire_client import Wire, http_client, open_wire

NUM_CLIENTS = 12
EVENTS = {"accept": "text/event-stream"}


async def socket_client(url: str, number: int, saw: Counter[str], ready: asyncio.Event) -> None:
    """A turn that runs and two that wait, and everything that is told until the line is closed."""
    chance = Decisions(5, number)
    async with open_wire(url) as wire:
        await wire.receive()
        for turn_id in ("t0", "t1", "t2"):
            await wire.send(
                "turn.create", **echo_turn(chance, turn_id, max_tokens=chance.between(60, 100))
            )
        await wire.until("turn.delta")
        saw["running"] += 1
        if saw["running"] == NUM_CLIENTS:
            ready.set()
        code = await wire.close_code()
        saw[f"closed {code}"] += 1
        check_frames(wire, saw)


def check_frames(wire: Wire, saw: Counter[str]) -> None:
    """The running turn ended well or was cut short, those in line never began, all were told."""
    kinds = [frame["type"] for frame in wire.frames]
    assert kinds[-1] == "session.closed"
    assert wire.frames[-1]["reason"] == "draining"
    assert kinds.count("session.draining") == 1
    ends = [frame for frame in wire.frames if frame["type"] in ENDS]
    assert sorted(end["turn_id"] for end in ends) == ["t0", "t1", "t2"]
    for end in ends:
        has_run = end["usage"]["input_tokens"] > 0
        after = kinds.index("session.draining") < wire.frames.index(end)
        saw[f"{end['type']}{' after running' if has_run else ''}"] += after
        if end["type"] == "turn.cancelled":
            assert (end["reason"], end["kept_partial"]) == ("draining", has_run)


async def rest_clients(url: str, saw: Counter[str], ready: asyncio.Event) -> None:
    """One request and one stream that run, and one reader of events of a session without turns."""
    turn = echo_turn(Decisions(6), "t", max_tokens=480)  # more than all others run for
    async with http_client(url) as http:

        async def opened() -> str:
            session_id: str = (await http.post("/v1/sessions", json={})).json()["id"]
            return f"/v1/sessions/{session_id}"

        async def request() -> None:
            answer = await http.post(f"{await opened()}/turns", json=turn)
            saw[f"request {answer.status_code} {answer.json().get('status')}"] += 1

        async def stream(method: str, path: str, **options: Any) -> None:
            kinds = []
            async with http.stream(method, path, headers=EVENTS, **options) as answer:
                async for line in answer.aiter_lines():
                    kinds += [line.removeprefix("event: ")] if line.startswith("event") else []
            saw[f"stream ended with {kinds[-1]}"] += 1

        work = [
            asyncio.create_task(request()),
            asyncio.create_task(stream("POST", f"{await opened()}/turns", json=turn)),
            asyncio.create_task(stream("GET", f"{await opened()}/events")),
        ]
        await ready.wait()
        await asyncio.gather(*work)


async def load(server: LocalServer, *signals: signal.Signals) -> Counter[str]:
    """All the clients; the signals come when every socket has a turn that runs."""
    saw: Counter[str] = Counter()
    ready = asyncio.Event()
    sockets = [socket_client(server.url, n, saw, ready) for n in range(NUM_CLIENTS)]
    clients = [asyncio.create_task(client) for client in sockets]
    clients.append(asyncio.create_task(rest_clients(server.url, saw, ready)))
    await ready.wait()
    for number in signals:
        os.kill(server.pid, number)
    await asyncio.gather(*clients)
    return saw


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_under_load_lets_what_runs_end_and_tells_everybody(number: signal.Signals) -> None:
    lines: list[str] = []
    with echo_server(["--drain-timeout", "120"], on_line=lines.append) as server:
        saw = asyncio.run(asyncio.wait_for(load(server, number), 200))
        assert server.wait(timeout_s=60) == 0
    assert saw["closed 1012"] == NUM_CLIENTS
    assert saw["turn.completed after running"] >= NUM_CLIENTS // 2
    assert saw["turn.cancelled after running"] == 0
    assert saw["turn.cancelled"] >= NUM_CLIENTS // 2, "those in line"
    assert saw["request 200 completed"] == 1
    assert saw["stream ended with turn.completed"] == 1
    assert saw["stream ended with session.closed"] == 1
    assert lines == [f"listening on {server.url}"]


def test_turns_that_outlast_the_drain_are_cut_short_and_kept() -> None:
    lines: list[str] = []
    with echo_server(["--drain-timeout", "0"], on_line=lines.append) as server:
        saw = asyncio.run(asyncio.wait_for(load(server, signal.SIGTERM), 200))
        assert server.wait(timeout_s=60) == 0
    assert saw["closed 1012"] == NUM_CLIENTS
    assert saw["turn.cancelled after running"] >= NUM_CLIENTS // 2
    assert saw["stream ended with turn.cancelled"] == 1
    assert lines == [f"listening on {server.url}"]


async def endless_turns(url: str, ready: asyncio.Event) -> None:
    """A socket, a request and a stream with turns that do not end in time; none of them hangs."""
    chance = Decisions(7)

    async def socket() -> None:
        async with open_wire(url) as wire:
            await wire.send("turn.create", **echo_turn(chance, "t", max_tokens=400))
            for _ in range(20):
                await wire.until("turn.delta")
            ready.set()
            code = await wire.close_code()
            assert code in (1006, 1012)
            assert not any(frame["type"] == "turn.completed" for frame in wire.frames)

    async def request(**options: Any) -> None:
        async with http_client(url) as http:
            with contextlib.suppress(httpx.TransportError):
                session_id = (await http.post("/v1/sessions", json={})).json()["id"]
                path = f"/v1/sessions/{session_id}/turns"
                await http.post(path, json=echo_turn(chance, "t", max_tokens=400), **options)

    await asyncio.gather(request(), request(headers=EVENTS), socket())


def test_a_second_signal_under_load_does_not_wait_and_is_no_error() -> None:
    lines: list[str] = []

    async def twice(server: LocalServer) -> None:
        ready = asyncio.Event()
        clients = asyncio.create_task(endless_turns(server.url, ready))
        await ready.wait()
        async with http_client(server.url) as http:
            os.kill(server.pid, signal.SIGTERM)
            while (await http.get("/ready")).status_code == 200:
                pass
        os.kill(server.pid, signal.SIGTERM)
        await clients

    # Nobody waits an hour: a test that did not end by itself would be killed.
    with echo_server(["--drain-timeout", "3600"], on_line=lines.append) as server:
        asyncio.run(asyncio.wait_for(twice(server), 100))
        assert server.wait(timeout_s=60) == 0
    assert lines == [f"listening on {server.url}"]


def test_a_signal_while_the_engine_is_away_ends_the_server_all_the_same() -> None:
    async def scenario(server: LocalServer) -> None:
        async with open_wire(server.url) as wire:
            await wire.send("turn.create", **echo_turn(Decisions(8), "t", max_tokens=400))
            await wire.until("turn.delta")
            for pid in engines_of(server.pid, ECHO_ENGINE):
                os.kill(pid, signal.SIGKILL)
            os.kill(server.pid, signal.SIGTERM)
            assert await wire.close_code() == 1012
            ends = [frame for frame in wire.frames if frame["type"] in ENDS]
            assert [end["type"] for end in ends] == ["turn.failed"]

    with echo_server(["--drain-timeout", "60"]) as server:
        asyncio.run(asyncio.wait_for(scenario(server), 100))
        assert server.wait(timeout_s=60) == 0


def test_a_killed_server_leaves_no_engine_behind() -> None:
    async def lose(server: LocalServer) -> list[int]:
        ready = asyncio.Event()
        clients = asyncio.create_task(endless_turns(server.url, ready))
        await ready.wait()
        engines = engines_of(server.pid, ECHO_ENGINE)
        os.kill(server.pid, signal.SIGKILL)
        await clients
        return engines

    with echo_server() as server:
        engines = asyncio.run(asyncio.wait_for(lose(server), 100))
        assert server.wait(timeout_s=60) == -signal.SIGKILL
    assert len(engines) == 1
    assert_gone(engines)


def test_a_server_killed_while_its_engine_starts_leaves_no_engine_behind() -> None:
    argv = [*PROGRAM, "--port", "0"]
    for number in (signal.SIGKILL, signal.SIGTERM):
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as server:
            while not (engines := engines_of(server.pid, ECHO_ENGINE)):
                time.sleep(0.002)
            server.send_signal(number)
            assert server.wait(60) in (-number, 0)
        assert_gone(engines)
