"""A cluster of replicas that the command line has started, seen from outside."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from session_server.deploy.head import Record, read_record

COMMAND = (sys.executable, "-m", "session_server", "cluster")
UP_S = 240.0
FLAGS = ("--max-engine-restarts", "0", "--max-running-requests", "4", "--drain-timeout", "5")


@dataclass
class Cluster:
    """Replicas behind one port, and the commands about them."""

    port: int
    program: tuple[str, ...]
    seen: set[int] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self, action: str, *flags: str) -> tuple[str, ...]:
        return (*self.program, action, "--port", str(self.port), *flags)

    def run(self, action: str, *flags: str) -> subprocess.CompletedProcess[str]:
        argv = self.command(action, *flags)
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=UP_S)

    def up(self, *flags: str) -> None:
        done = self.run("up", *FLAGS, *flags)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"listening on {self.url}\n"
        self.seen |= self.processes()

    def status(self) -> list[dict[str, Any]]:
        done = self.run("status", "--json")
        assert done.stdout, done.stderr
        rows: list[dict[str, Any]] = json.loads(done.stdout)["replicas"]
        return rows

    def tags(self) -> set[str]:
        """The replicas that serve."""
        return {row["replica"] for row in self.status() if row["engine"] == "running"}

    def record(self) -> Record:
        record = read_record(self.port)
        assert record is not None
        return record

    def processes(self) -> set[int]:
        """Every process of this cluster: that of Ray which was started first, and all below it."""
        head = self.record().head
        assert head is not None
        first = psutil.Process(head.pid)
        return {head.pid, *(each.pid for each in first.children(recursive=True))}

    def wait_for(self, tags: int, *, without: frozenset[str] = frozenset()) -> set[str]:
        """Wait until so many replicas serve, and none of some others."""
        deadline_s = time.monotonic() + UP_S
        while len(found := self.tags()) != tags or found & without:
            assert time.monotonic() < deadline_s, self.status()
            time.sleep(1)
        self.seen |= self.processes()
        return found


@contextlib.contextmanager
def running_cluster(state: Path, program: tuple[str, ...] = COMMAND) -> Iterator[Cluster]:
    """A cluster that is not up yet, and is gone after the block."""
    before, os.environ["XDG_STATE_HOME"] = os.environ.get("XDG_STATE_HOME"), str(state)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        cluster = Cluster(free.getsockname()[1], program)
    try:
        yield cluster
    finally:
        cluster.run("down")
        if before is not None:
            os.environ["XDG_STATE_HOME"] = before


@dataclass
class Socket:
    """A session over a WebSocket: the frames it got, by type, and how it was closed."""

    connection: ClientConnection
    session_id: str = ""
    kinds: Counter[str] = field(default_factory=Counter)
    ends: list[str] = field(default_factory=list)
    close_code: int | None = None

    async def receive(self) -> dict[str, Any]:
        frame: dict[str, Any] = json.loads(await self.connection.recv())
        self.kinds[frame["type"]] += 1
        return frame

    async def start(self, turn_id: str, max_tokens: int) -> None:
        frame = {
            "type": "turn.create",
            "turn_id": turn_id,
            "text": "Tell me more.",
            "sampling": {"max_tokens": max_tokens, "ignore_eos": True},
        }
        await self.connection.send(json.dumps(frame))

    async def ask(self, turn_id: str, max_tokens: int = 4) -> dict[str, Any]:
        await self.start(turn_id, max_tokens)
        while (frame := await self.receive())["type"] not in ("turn.completed", "error"):
            pass
        return frame

    async def talk_until_closed(self) -> None:
        """Ask one thing after the other, until the server closes the connection."""
        ends = ("turn.completed", "turn.cancelled", "turn.failed", "error")
        with contextlib.suppress(ConnectionClosed):
            for number in itertools.count(1):
                self.ends.append("asked")
                await self.start(f"t{number}", 12)
                while (frame := await self.receive())["type"] not in ends:
                    pass
                self.ends[-1] = frame["type"]
        with contextlib.suppress(ConnectionClosed):  # what came before it was closed
            while True:
                await self.receive()
        self.close_code = self.connection.close_code


@contextlib.asynccontextmanager
async def open_socket(cluster: Cluster, session_id: str = "new") -> AsyncIterator[Socket]:
    """A socket that has heard the hello."""
    url = f"ws://127.0.0.1:{cluster.port}/v1/sessions/{session_id}/ws"
    async with asyncio.timeout(UP_S), connect(url, subprotocols=["kvsession.v1"]) as connection:  # type: ignore[list-item]
        opened = Socket(connection)
        opened.session_id = (await opened.receive())["session_id"]
        yield opened
