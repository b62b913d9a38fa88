"""A real WebSocket server on a real port that plays one script per connection, or refuses it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol


@dataclass
class Peer:
    """The server's end of one connection, speaking JSON."""

    socket: ServerConnection

    @property
    def path(self) -> str:
        """What the client asked for, with its query."""
        assert self.socket.request is not None
        return self.socket.request.path

    async def send(self, kind: str, **fields: object) -> None:
        """One frame."""
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def receive(self) -> dict[str, Any]:
        """The client's next frame."""
        frame: dict[str, Any] = json.loads(await self.socket.recv())
        return frame

    async def hello(self, seq: int = 0, *, resumed: bool = False, epoch: str = "e1") -> None:
        """The first frame of a connection."""
        await self.send(
            "session.opened", seq=seq, session_id="s_1", epoch=epoch, resumed=resumed, limits={}
        )

    async def complete(
        self, seq: int, turn_id: str, text: str, *, durable: bool | None = None, **item: object
    ) -> None:
        """The end of a turn that went well; `durable` None: by a server without a store."""
        await self.send(
            "turn.completed",
            seq=seq,
            turn_id=turn_id,
            finish_reason="stop",
            item={"id": "i_1", "role": "assistant", "content": text, **item},
            usage={
                "input_tokens": 10,
                "cached_tokens": 7,
                "cache_write_tokens": 3,
                "output_tokens": 2,
                "total_tokens": 12,
            },
            timings={"ttft_ms": 1.5},
            **({} if durable is None else {"durable": durable}),
        )

    async def left(self) -> None:
        """Wait until the client goes, which closes no session."""
        await self.socket.wait_closed()
        async for frame in self.socket:
            raise AssertionError(frame)

    async def closed(self, seq: int) -> None:
        """Wait for the client's close and confirm it."""
        assert (await self.receive())["type"] == "session.close"
        await self.send("session.closed", seq=seq, reason="client")

    async def begin_and_cut(self, text: str) -> str:
        """Begin the first turn and say some text, which arrives before the line is dropped. Return
        the turn's id."""
        await self.hello()
        turn_id: str = (await self.receive())["turn_id"]
        await self.send("turn.created", seq=1, turn_id=turn_id, position=0)
        await self.send("turn.delta", seq=2, turn_id=turn_id, text=text, n=1)
        await (await self.socket.ping())
        self.cut()
        return turn_id

    def cut(self) -> None:
        """Drop the line without a word."""
        self.socket.transport.abort()


def denial(status: int, error: dict[str, Any] | None = None, **headers: str) -> Response:
    """What a server says that refuses a handshake; without `error` it is not one of ours."""
    body = b"busy" if error is None else json.dumps({"error": error}).encode()
    told = {name.replace("_", "-"): value for name, value in headers.items()}
    return Response(status, "", Headers({"Content-Length": str(len(body))} | told), body)


def document(body: dict[str, Any]) -> Response:
    """What a server answers to GET."""
    data = json.dumps(body).encode()
    # Said, so that no client sends its next request on a connection that is being closed.
    headers = {"Content-Length": str(len(data)), "Connection": "close"}
    return Response(200, "", Headers(headers), data)


Script = Callable[[Peer], Awaitable[None]] | Response


@dataclass
class Played:
    """Where the server listens, and what went wrong inside scripts."""

    url: str
    failures: list[BaseException] = field(default_factory=list)
    num_connections: int = 0


@asynccontextmanager
async def playing(*scripts: Script) -> AsyncIterator[Played]:
    """Serve: connection k is handled by script k, or refused with it. Failures inside scripts fail
    the test."""
    waiting = list(scripts)
    played = Played("")

    def refuse(socket: ServerConnection, request: Request) -> Response | None:
        played.num_connections += 1
        return waiting.pop(0) if waiting and isinstance(waiting[0], Response) else None

    async def handle(socket: ServerConnection) -> None:
        try:
            script = waiting.pop(0)
            assert not isinstance(script, Response)
            await script(Peer(socket))
        except (AssertionError, IndexError, KeyError) as failure:
            played.failures.append(failure)

    protocols = [Subprotocol("kvsession.v1")]
    async with serve(
        handle, "127.0.0.1", 0, subprotocols=protocols, process_request=refuse
    ) as server:
        played.url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
        async with asyncio.timeout(20):
            yield played
    if played.failures:
        raise played.failures[0]
    assert not waiting, f"{len(waiting)} scripts were not reached"
