"""Readers that stop reading: bounded, let go, able to come back; and nobody waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from session_server.local_server import LocalServer
from tests.depth import at_depth
from tests.rig.decisions import Decisions
from tests.rig.echo_server import echo_server
from tests.rig.history import ENDS
from tests.rig.processes import memory_mib
from tests.rig.recovery import Reckoning
from tests.rig.scene import echo_turn
from tests.web.wire_client import http_client, narrow_socket, open_wire

NUM_STALLED = at_depth(6, proof=12)
NUM_OTHERS = 4
NUM_UPDATES = 900
"""Of 8 kB each: about twice what the kernel takes for a reader that takes nothing."""

MAX_GROWTH_MIB = 12.0
"""Per stalled session: its journal of 1 MiB, as strings and as frames, and what is in flight."""

THINKS_S = 0.05
"""Between the turns of the others, who would otherwise keep three processes busy until the last."""


class Stalled:
    """A session whose owner says much and reads nothing of it, on a socket and on a stream."""

    def __init__(self, server: LocalServer, session_id: str) -> None:
        self.server = server
        self.session_id = session_id
        self.may_read = asyncio.Event()
        self.has_spoken = asyncio.Event()
        self.heard: Counter[str] = Counter()

    async def socket(self) -> None:
        """Speak, wait to be let go, hear what is left, come back for the rest."""
        narrow = await narrow_socket(int(self.server.url.rpartition(":")[2]))
        async with open_wire(self.server.url, self.session_id, sock=narrow, max_queue=1) as wire:
            for number in range(NUM_UPDATES):
                await wire.send("session.update", metadata=metadata(number))
            self.has_spoken.set()
            await self.may_read.wait()
            narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)  # quick once awake
            code = await wire.close_code()
        self.heard[f"closed {code}"] += 1
        hello, *frames = wire.frames
        last_seq = self.follow(0, frames)
        assert last_seq < NUM_UPDATES, "the kernel took everything: nobody stalled"
        query = f"?after={last_seq}&epoch={hello['epoch']}"
        async with open_wire(self.server.url, self.session_id, query) as again:
            self.heard["resumed" if (await again.receive())["resumed"] else "not resumed"] += 1
            while last_seq < NUM_UPDATES:
                last_seq = self.follow(last_seq, [await again.receive()])
            await again.send("session.close")
            assert await again.close_code() == 4410

    def follow(self, last_seq: int, frames: Sequence[Mapping[str, Any]]) -> int:
        """Where a reader stands after these frames: one after the other, or told what it missed."""
        for frame in frames:
            if frame["type"] == "session.snapshot":
                self.heard["snapshots"] += 1
                last_seq = frame["seq"]
            elif frame["type"] != "session.resume_failed":
                assert frame["seq"] == last_seq + 1, "a silent gap"
                last_seq = frame["seq"]
        return last_seq

    async def stream(self) -> None:
        """The same session as events."""
        loop, port = asyncio.get_running_loop(), int(self.server.url.rpartition(":")[2])
        narrow = await narrow_socket(port)
        head = f"GET /v1/sessions/{self.session_id}/events?after=0 HTTP/1.1"
        await loop.sock_sendall(narrow, f"{head}\r\nHost: localhost\r\n\r\n".encode())
        await self.may_read.wait()
        heard = b""
        with contextlib.suppress(ConnectionError):
            while received := await loop.sock_recv(narrow, 65_536):
                heard += received
        narrow.close()
        *whole, _ = heard.split(b"\n\n")
        data = [event.partition(b"data: ")[2] for event in whole]
        last_seq = self.follow(0, [json.loads(frame) for frame in data if frame])
        assert 0 < last_seq < NUM_UPDATES, "the kernel took everything: nobody stalled"
        self.heard["streams cut"] += 1


def metadata(number: int) -> dict[str, str]:
    """8 kB."""
    return {f"{key}": f"{number:04}" + "x" * 508 for key in range(16)}


async def other(url: str, number: int, turns: list[int], is_over: asyncio.Event) -> None:
    """Somebody else's conversation, every answer checked."""
    chance, known, count = Decisions(9, number), Reckoning(), 0
    async with open_wire(url) as wire:
        await wire.receive()
        while not is_over.is_set() and len(known.tokens) < 480:
            count += 1
            body = echo_turn(chance, f"t{count}", max_tokens=3, max_inputs=1)
            await wire.send("turn.create", **body)
            end = await wire.until(*ENDS, "error")
            assert end["type"] == "turn.completed", end
            known.hear(body, end)
            turns.append(number)
            await asyncio.sleep(THINKS_S)
    if not is_over.is_set():
        await other(url, number, turns, is_over)


async def num_connections(http: httpx.AsyncClient, kind: str) -> int:
    """Readers of this kind now."""
    text = (await http.get("/metrics")).text
    name = f'session_server_connections{{kind="{kind}"}} '
    return int(float(next(ln for ln in text.splitlines() if ln.startswith(name)).split()[-1]))


async def scenario(server: LocalServer) -> None:
    turns, is_over = list[int](), asyncio.Event()
    others = [asyncio.create_task(other(server.url, n, turns, is_over)) for n in range(NUM_OTHERS)]
    async with http_client(server.url) as http:
        ids = [(await http.post("/v1/sessions", json={})).json()["id"] for _ in range(NUM_STALLED)]
        stalled = [Stalled(server, session_id) for session_id in ids]
        while len(turns) < 5 * NUM_OTHERS:
            await asyncio.sleep(0.01)
        before_mib = memory_mib(server.pid)
        readers = [asyncio.create_task(one.stream()) for one in stalled]
        readers += [asyncio.create_task(one.socket()) for one in stalled]
        await asyncio.gather(*(one.has_spoken.wait() for one in stalled))
        for session_id in ids:
            while (await http.get(f"/v1/sessions/{session_id}")).json()["seq"] < NUM_UPDATES:
                await asyncio.sleep(0.01)
        grown_mib = memory_mib(server.pid) - before_mib
        before = Counter(turns)
        while await num_connections(http, "sse") or await num_connections(http, "websocket") > len(
            others
        ):
            await asyncio.sleep(0.1)
        progress = Counter(turns) - before
        for one in stalled:
            one.may_read.set()
        await asyncio.gather(*readers)
        is_over.set()
        await asyncio.gather(*others)
    heard = sum((one.heard for one in stalled), Counter())
    print(dict(heard), dict(progress), f"{grown_mib:.1f} MiB")
    assert len(progress) == NUM_OTHERS, "everybody else went on"
    assert heard["streams cut"] == NUM_STALLED
    # Who wakes up before the line is cut reads everything and why; the others see it cut.
    assert heard["closed 1013"] + heard["closed 1006"] == NUM_STALLED
    assert heard["closed 1013"] >= 1
    assert heard["resumed"] + heard["not resumed"] == NUM_STALLED
    assert heard["snapshots"] >= NUM_STALLED
    assert grown_mib < MAX_GROWTH_MIB * NUM_STALLED


def test_readers_that_stall_are_let_go_and_nobody_waits_for_them() -> None:
    lines: list[str] = []
    with echo_server(on_line=lines.append) as server:
        asyncio.run(asyncio.wait_for(scenario(server), 250))
        assert server.stop() == 0
    assert lines == [f"listening on {server.url}"]
