"""A server whose requests a proxy hands on: plain ASGI messages, and no connection behind them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import Message

from session_server.protocol.session_protocol import CloseCode
from session_server.web.drain import drain
from session_server.web.relayed import RelayedRequests, RelayedSocket
from tests.web.serving import Served, served

HOST = (b"host", b"127.0.0.1")


class Peer:
    """The proxy's end of one request."""

    def __init__(self, this: Served, kind: str, path: str, *sent: Message, **scope: Any) -> None:
        self.relayed = RelayedRequests(this.app, max_body_bytes=1000)
        self.told = asyncio.Queue[Message]()
        self.heard = asyncio.Queue[Message]()
        for message in sent:
            self.told.put_nowait(message)
        whole = {
            "type": kind,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [HOST, (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "scheme": "http",
            "http_version": "1.1",
            **scope,
        }
        self.task = asyncio.create_task(
            self.relayed(whole, self.told.get, self.heard.put), name="relayed"
        )

    async def answer(self) -> tuple[int, Any]:
        start, body = await self.heard.get(), b""
        while (part := await self.heard.get()).get("more_body"):
            body += part["body"]
        await self.task
        return start["status"], json.loads(body + part["body"])

    async def frame(self) -> dict[str, Any]:
        async with asyncio.timeout(10):
            message = await self.heard.get()
        assert message["type"] == "websocket.send", message
        frame: dict[str, Any] = json.loads(message["text"])
        return frame

    def say(self, **frame: Any) -> None:
        self.told.put_nowait({"type": "websocket.receive", "text": json.dumps(frame)})


def socket(this: Served, session_id: str = "new") -> Peer:
    connect: Message = {"type": "websocket.connect"}
    offered = {"subprotocols": ["kvsession.v1"], "extensions": {"websocket.http.response": {}}}
    path = f"/v1/sessions/{session_id}/ws"
    return Peer(this, "websocket", path, connect, **offered)


async def accepted(this: Served) -> tuple[Peer, str]:
    peer = socket(this)
    assert (await peer.heard.get())["type"] == "websocket.accept"
    hello = await peer.frame()
    return peer, hello["session_id"]


@served()
async def test_a_turn_runs_over_a_relayed_socket_and_its_frames_are_in_order(this: Served) -> None:
    peer, _ = await accepted(this)
    peer.say(type="turn.create", turn_id="t", input_ids=[7], sampling={"max_tokens": 40})
    seqs, frame = list[int](), dict[str, Any]()
    while frame.get("type") != "turn.completed":
        frame = await peer.frame()
        seqs += [frame["seq"]] if "seq" in frame else []
    assert seqs == sorted(set(seqs))
    assert len(seqs) > 10
    peer.told.put_nowait({"type": "websocket.disconnect", "code": 1000})
    async with asyncio.timeout(10):
        await peer.task


@served()
async def test_a_handshake_is_refused_with_a_response(this: Served) -> None:
    peer = socket(this, "s_none")
    start, body = await peer.heard.get(), await peer.heard.get()
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 404)
    assert json.loads(body["body"])["error"]["code"] == "session_not_found"
    await peer.task


@served()
async def test_a_drain_tells_the_peer_and_closes_with_1012_behind_that(this: Served) -> None:
    peer, _ = await accepted(this)
    await drain(this.services, this.sockets)
    kinds = list[str]()
    while (message := await peer.heard.get())["type"] != "websocket.close":
        kinds.append(json.loads(message["text"])["type"])
    assert message["code"] == CloseCode.RESTART
    assert "session.draining" in kinds
    async with asyncio.timeout(10):
        await peer.task


@served()
async def test_a_frame_that_is_too_long_is_refused(this: Served) -> None:
    peer, _ = await accepted(this)
    text = "x" * (this.services.settings.max_message_bytes + 1)
    peer.told.put_nowait({"type": "websocket.receive", "text": text})
    frame = await peer.frame()
    assert (frame["type"], frame["error"]["message"]) == ("error", "The message is too big.")


@served()
async def test_a_body_in_chunks_is_refused_once_it_is_too_long(this: Served) -> None:
    chunk: Message = {"type": "http.request", "body": b" " * 600, "more_body": True}
    peer = Peer(this, "http", "/v1/sessions", chunk, chunk, method="POST")
    status, body = await peer.answer()
    assert (status, body["error"]["code"]) == (413, "payload_too_large")


@served()
async def test_a_request_is_answered_as_by_the_server_itself(this: Served) -> None:
    whole: Message = {"type": "http.request", "body": b"{}"}
    peer = Peer(this, "http", "/v1/sessions", whole, method="POST")
    status, body = await peer.answer()
    assert status == 201
    assert (await this.http.get(f"/v1/sessions/{body['id']}")).status_code == 200


@served()
async def test_what_ends_with_its_reader_only_is_ended_by_whoever_stops(this: Served) -> None:
    peer, _ = await accepted(this)
    peer.relayed.end_all()
    async with asyncio.timeout(10):
        await peer.task
    assert not peer.task.cancelled(), "the proxy is told of no error"


@served()
async def test_a_request_that_others_cancel_stays_canceled(this: Served) -> None:
    peer, _ = await accepted(this)
    peer.task.cancel()
    await asyncio.wait([peer.task])
    assert peer.task.cancelled()


def test_texts_of_a_peer_that_has_gone_are_dropped() -> None:
    async def gone(message: Message) -> None:
        raise RuntimeError("New messages cannot be sent after the queue is closed.")

    async def run() -> None:
        socket = RelayedSocket(asyncio.Queue[Message]().get, gone)
        socket.send_texts([b"1", b"2"])
        assert not socket.is_drained
        await socket.drain()
        assert socket.is_drained

    asyncio.run(run())
