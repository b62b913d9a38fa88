"""Waves of chaotic clients against one server process, and what is left of them afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from session_server.local_server import LocalServer
from tests.rig.audit import audit
from tests.rig.library_client import LibraryClient
from tests.rig.processes import engine_pid, memory_mib
from tests.rig.proxy import ChaosProxy, Weather
from tests.rig.rest_client import RestClient
from tests.rig.scene import Client, Scene
from tests.rig.socket_client import SocketClient
from tests.web.wire_client import http_client

FLAGS = (
    *("--threads", "1", "--log-level", "warning", "--memory-check", "warn"),
    *("--context-length", "1024", "--max-total-tokens", "16384"),
    *("--chunked-prefill-size", "64", "--replay-ttl", "3600"),
)
"""A pool too small for a wave's sessions: turns are admitted, cooled and retracted all the time."""

CLIENT_BOUND_S = 240.0
"""A client that has not ended by then is stuck. Its turns take milliseconds; losses, seconds."""

WAVE = 200
NUM_AUDITORS = 24
HELD = ("tree_protected", "session_held", "active", "fenced", "spill", "quarantine")


def client_of(scene: Scene, number: int) -> Client:
    """Client `number`: most speak the socket's protocol by hand, some through the library."""
    kinds = (SocketClient, SocketClient, SocketClient, LibraryClient, RestClient)
    return kinds[number % len(kinds)](scene, number)


@dataclass(frozen=True)
class Holdings:
    """What a server holds at a moment of rest."""

    sessions: int
    tasks: int
    descriptors: int
    held_pages: int
    rows_free: int
    server_mib: float
    engine_mib: float


@dataclass
class Report:
    """One run: what it met, what the proxy did, and what the server held before and after.

    `settled_s`: from the last close to a memory report that shows no page held. `mib_by_wave`:
    resident memory of the server and of the engine after each wave.
    """

    connections: int
    seconds: float
    before: Holdings
    after: Holdings
    settled_s: float
    checks: dict[str, Any]
    pages_after_flush: tuple[int, int]
    saw: dict[str, int]
    did: dict[str, int]
    problems: list[str]
    mib_by_wave: list[tuple[float, float]] = field(default_factory=list)


async def run_load(server: LocalServer, *, connections: int, seed: int) -> Report:
    """Send waves of clients through a proxy until it has carried so many connections."""
    scene = Scene(url="", direct_url=server.url, seed=seed)
    started_s, mib, number = time.monotonic(), [], 0
    before = await settled(server)
    async with http_client(server.url) as http:
        async with ChaosProxy(server.url, Weather(), seed=seed) as proxy:
            scene.url = proxy.url
            while proxy.did["connections"] < connections:
                clients = [client_of(scene, number + index) for index in range(WAVE)]
                number += WAVE
                await asyncio.gather(*(_live(scene, client) for client in clients))
                async with asyncio.timeout(CLIENT_BOUND_S):
                    while proxy.num_open:
                        await asyncio.sleep(0.02)
                await _audit_all(scene, http, clients)
                mib.append((memory_mib(server.pid), memory_mib(engine_pid(server))))
        scene.saw["ghosts"] = await _close_ghosts(http)
        closed_s = time.monotonic()
        first = await holdings(server, http)
        settled_s = time.monotonic() - closed_s
    after = await settled(server)
    async with http_client(server.url) as http:
        flushed = await http.post("/flush_cache")
        report = (await http.get("/v1/admin/memory", params={"full": 1})).json()
    pool = report["pools"]["full"]
    if first.held_pages != before.held_pages:
        scene.problems.append(f"pages held after the last close: {first}")
    scene.problems += [] if flushed.status_code == 200 else [f"flush: {flushed.text}"]
    return Report(
        connections=proxy.did["connections"],
        seconds=time.monotonic() - started_s,
        before=before,
        after=after,
        settled_s=settled_s,
        checks=report["checks"],
        pages_after_flush=(pool["free"], pool["pages"]),
        saw=dict(sorted(scene.saw.items())),
        did=dict(sorted(proxy.did.items())),
        problems=scene.problems,
        mib_by_wave=mib,
    )


async def holdings(server: LocalServer, http: httpx.AsyncClient) -> Holdings:
    """What the server holds now; `http` has one connection open."""
    report = (await http.get("/v1/admin/memory", params={"full": 1})).json()
    metrics = dict(
        line.rsplit(maxsplit=1)
        for line in (await http.get("/metrics")).text.splitlines()
        if line[0] != "#"
    )
    return Holdings(
        sessions=int(float(metrics["session_server_sessions"])),
        tasks=int(float(metrics["session_server_event_loop_tasks"])),
        descriptors=len(list(Path(f"/proc/{server.pid}/fd").iterdir())),
        held_pages=sum(pool[name] for pool in report["pools"].values() for name in HELD),
        rows_free=report["rows_free"],
        server_mib=memory_mib(server.pid),
        engine_mib=memory_mib(engine_pid(server)),
    )


async def settled(server: LocalServer) -> Holdings:
    """What the server holds once that stays the same; closed sockets may linger for seconds."""
    async with http_client(server.url) as http:
        recent = [await holdings(server, http)]
        while len({(now.tasks, now.descriptors) for now in recent[-4:]}) > 1 or len(recent) < 4:
            await asyncio.sleep(0.25)
            recent.append(await holdings(server, http))
    return recent[-1]


async def _live(scene: Scene, client: Client) -> None:
    try:
        async with asyncio.timeout(CLIENT_BOUND_S):
            await client.run()
    except Exception as error:  # noqa: BLE001 - whatever a client dies of is a finding
        kind = type(error).__name__
        scene.problems.append(f"{client.name} {client.log.session_id}: {kind}: {error}")


async def _audit_all(scene: Scene, http: httpx.AsyncClient, clients: Sequence[Client]) -> None:
    queue = [client for client in clients if client.log.session_id]

    async def auditor() -> None:
        while queue:
            client = queue.pop()
            try:
                async with asyncio.timeout(CLIENT_BOUND_S):
                    await audit(scene, http, client.name, client.log)
            except Exception as error:  # noqa: BLE001 - a session that cannot be audited is one
                where = f"{client.name} {client.log.session_id}"
                scene.problems.append(f"audit of {where}: {type(error).__name__}: {error}")

    await asyncio.gather(*(auditor() for _ in range(NUM_AUDITORS)))


async def _close_ghosts(http: httpx.AsyncClient) -> int:
    """Close the sessions whose opening was answered to nobody; how many there were."""
    num_closed = 0
    while data := (await http.get("/v1/sessions", params={"limit": 1000})).json()["data"]:
        num_closed += len([view for view in data if view["state"] != "closing"])
        for view in data:
            await http.delete(f"/v1/sessions/{view['id']}")
    return num_closed
