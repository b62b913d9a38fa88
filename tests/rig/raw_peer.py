"""A peer that speaks TCP and no more: sends what it is given, reads as much as it wants, vanishes.

It lives on the server's own event loop and lets the engine take a step only when nothing is left to
read, so that every byte the peer has seen stands for one moment of the server.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import socket
import struct
from collections.abc import Callable
from typing import Any

SILENT_ROUNDS = 40
"""Rounds of the event loop without a byte, the engine at rest: probably nothing more will come."""

PAUSE_S = 0.01
"""On a busy machine even loopback may take a while, so silence is believed after some pauses."""

FEW_PAUSES = 2
MANY_PAUSES = 3000


class RawPeer:
    """One connection; what it has received so far is in `received`."""

    def __init__(self, connection: socket.socket, step: Callable[[], bool]) -> None:
        self._socket = connection
        self._step = step
        self.received = bytearray()

    async def send(self, payload: bytes) -> None:
        """Send all of it."""
        await asyncio.get_running_loop().sock_sendall(self._socket, payload)

    async def drip(self, payload: bytes, size: int, *, pause_s: float) -> bool:
        """Send `size` bytes at a time until the server answers or closes; whether it ever did."""
        for start in range(0, len(payload), size):
            try:
                await self.send(payload[start : start + size])
                await asyncio.sleep(pause_s)
                self.received += self._socket.recv(1 << 16)
            except BlockingIOError:
                continue
            except ConnectionError:
                return True
            return True
        return False

    async def read_to(self, num_bytes: int) -> bool:
        """Have `num_bytes` received in all; False when fewer ever come."""
        return await self._read(num_bytes, lambda: len(self.received) >= num_bytes, FEW_PAUSES)

    async def read_until(
        self, mark: bytes, *, at_most: int = 1 << 30, max_pauses: int = MANY_PAUSES
    ) -> bool:
        """Have received this somewhere in the first `at_most` bytes; False when it never comes."""

        def is_enough() -> bool:
            return mark in self.received or len(self.received) >= at_most

        await self._read(at_most, is_enough, max_pauses)
        return mark in self.received

    async def _read(self, num_bytes: int, is_enough: Callable[[], bool], max_pauses: int) -> bool:
        num_silent = num_pauses = 0
        while not is_enough():
            try:
                data = self._socket.recv(num_bytes - len(self.received))
            except BlockingIOError:
                num_silent = 0 if num_silent % 4 == 3 and self._step() else num_silent + 1
                is_pausing = num_silent > SILENT_ROUNDS
                num_pauses += is_pausing
                if num_pauses > max_pauses:
                    return False
                await asyncio.sleep(PAUSE_S if is_pausing else 0)
                continue
            except ConnectionError:
                return False
            if not data:
                return False
            num_silent = num_pauses = 0
            self.received += data
        return True

    async def response(self) -> tuple[int, bytes]:
        """The next whole response of plain HTTP, taken out of `received`: its status and body."""
        assert await self.read_until(b"\r\n\r\n"), bytes(self.received)
        head, _, _ = bytes(self.received).partition(b"\r\n\r\n")
        found = re.search(rb"content-length: (\d+)", head)
        assert found is not None, head
        end = len(head) + 4 + int(found[1])
        assert await self.read_to(end)
        body = bytes(self.received[len(head) + 4 : end])
        del self.received[:end]
        return int(head.split(b" ", 2)[1]), body

    def vanish(self, *, hard: bool) -> None:
        """Go: with a reset, or like a peer that says goodbye."""
        if hard:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()


def upgrade(session_id: str, query: str = "") -> bytes:
    """The head of a WebSocket handshake."""
    key = base64.b64encode(bytes(16)).decode()
    return (
        f"GET /v1/sessions/{session_id}/ws{query} HTTP/1.1\r\nHost: localhost\r\n"
        f"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: kvsession.v1\r\n\r\n"
    ).encode()


def text_frame(message: dict[str, Any]) -> bytes:
    """A masked text frame of JSON; the mask is zero, and so the same bytes each time."""
    return raw_frame(json.dumps(message).encode())


def raw_frame(payload: bytes, *, opcode: int = 1, final: bool = True, reserved: int = 0) -> bytes:
    """A masked frame of any payload; `reserved`: the bits that no extension was agreed for."""
    first = (0x80 if final else 0) | reserved << 4 | opcode
    if len(payload) < 126:
        head = struct.pack(">BB", first, 0x80 | len(payload))
    elif len(payload) < 1 << 16:
        head = struct.pack(">BBH", first, 0x80 | 126, len(payload))
    else:
        head = struct.pack(">BBQ", first, 0x80 | 127, len(payload))
    return head + bytes(4) + payload


def post(path: str, body: dict[str, Any], *, accept: str = "application/json") -> bytes:
    """A request with a JSON body."""
    return request("POST", path, json.dumps(body).encode(), accept=accept)


def request(method: str, path: str, body: bytes, *, accept: str = "application/json") -> bytes:
    """A request whose body says it is JSON."""
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Accept: {accept}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def frames_in(received: bytes) -> list[dict[str, Any]]:
    """The JSON frames a WebSocket server has sent behind its handshake; a close is of type `close`,

    with its `code`.
    """
    _, _, rest = bytes(received).partition(b"\r\n\r\n")
    frames: list[dict[str, Any]] = []
    while len(rest) >= 2:
        length, start = rest[1], 2
        if length == 126:
            length, start = int.from_bytes(rest[2:4], "big"), 4
        elif length == 127:
            length, start = int.from_bytes(rest[2:10], "big"), 10
        if len(rest) < start + length:
            break
        payload, opcode = rest[start : start + length], rest[0] & 0x0F
        if opcode == 1:
            frames.append(json.loads(payload))
        elif opcode == 8:
            frames.append({"type": "close", "code": int.from_bytes(payload[:2], "big")})
        rest = rest[start + length :]
    return frames
