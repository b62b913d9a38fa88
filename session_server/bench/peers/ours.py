"""Run our server, and hold its sessions with a client that does little between two tokens.

The client shares the cores with the servers, so it only notes when frames come; they are decoded
when the turn is over.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as open_socket
from websockets.typing import Subprotocol

from session_server.bench.peers.system import PeerFailed, ServedSystem, ServerSize, TurnTrace
from session_server.local_server import SERVE, LocalServer

SUBPROTOCOL: Final = Subprotocol("kvsession.v1")
DTYPE_FLAGS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "float32": ("--dtype", "float32"),
        "bfloat16": ("--dtype", "bfloat16"),
        "int8": ("--dtype", "bfloat16", "--quantize", "int8"),
    }
)
"""Flags of our server by row."""

_TERMINAL: Final = (b'"turn.completed"', b'"turn.failed"', b'"turn.cancelled"', b'"error"')
_HEAD_BYTES: Final = 64
"""Of a frame: its type stands there."""


class OurServer(ServedSystem):
    """Run `session-server serve`; a `System`."""

    def __init__(self, checkpoint: Path, row: str, size: ServerSize) -> None:
        num_tokens = size.num_sessions * size.context_len
        server = LocalServer(
            [
                *("--model-path", str(checkpoint), *DTYPE_FLAGS[row]),
                *("--threads", str(size.num_threads), "--max-total-tokens", str(num_tokens)),
                *("--log-level", "warning"),
            ]
        )
        super().__init__("session-server", server)

    async def open(self, slot: int) -> OurConversation:
        """Open a session over a WebSocket of its own."""
        return await open_conversation(self.url)


async def open_conversation(url: str) -> OurConversation:
    """Open a session of the server at `url`."""
    address = f"ws{url.removeprefix('http')}/v1/sessions/new/ws"
    socket = await open_socket(
        address,
        subprotocols=[SUBPROTOCOL],
        compression=None,
        ping_interval=None,  # a paused server answers none
        max_size=None,
        proxy=None,
    )
    await socket.recv()  # session.opened
    return OurConversation(socket)


class OurConversation:
    """Hold one session; a `PeerConversation`. `last_end` is the last frame of the latest turn."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self.last_end: Mapping[str, Any] = {}

    async def prefill(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the history without an answer."""
        await self._run({"input_ids": token_ids, "generate": False})

    async def turn(self, token_ids: Sequence[int], num_output: int) -> TurnTrace:
        """Add new tokens and generate `num_output`, greedily."""
        sampling = {"temperature": 0, "max_tokens": num_output, "ignore_eos": True}
        trace = await self._run({"input_ids": token_ids, "sampling": sampling})
        if trace.num_tokens != num_output:
            raise PeerFailed(f"wanted {num_output} tokens, session-server sent {trace.num_tokens}")
        return trace

    async def close(self) -> None:
        """Close the session, which gives its memory back."""
        await self._socket.send(b'{"type":"session.close"}', text=True)
        await self._socket.wait_closed()

    async def _run(self, fields: Mapping[str, Any]) -> TurnTrace:
        message = msgspec.json.encode({"type": "turn.create", **fields})
        frames: list[tuple[float, bytes]] = []
        begun_s = time.perf_counter()
        await self._socket.send(message, text=True)
        while True:
            frame = await self._socket.recv(decode=False)
            frames.append((time.perf_counter(), frame))
            if any(kind in frame[:_HEAD_BYTES] for kind in _TERMINAL):
                break
        self.last_end = msgspec.json.decode(frame)
        if self.last_end["type"] != "turn.completed":
            raise PeerFailed(f"session-server: {self.last_end.get('error')}")
        decoded = ((at, msgspec.json.decode(each)) for at, each in frames)
        deltas = ((at, each["n"]) for at, each in decoded if each["type"] == "turn.delta")
        # The last may say what was held back, with no token.
        return TurnTrace(begun_s, tuple((at, count) for at, count in deltas if count))


def can_quantize() -> bool:
    """Return whether this build's server has `--quantize`."""
    asked = subprocess.run([*SERVE, "--help"], capture_output=True, text=True, check=True)  # noqa: S603
    return "--quantize" in asked.stdout
