"""The listening socket, and what every connection inherits from it."""

from __future__ import annotations

import asyncio
import socket

import pytest

from session_server.web.server import bind


def test_accepted_connections_send_small_frames_at_once() -> None:
    async def nodelay_of_accepted() -> int:
        accepted: asyncio.Queue[int] = asyncio.Queue()

        async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection: socket.socket = writer.get_extra_info("socket")
            await accepted.put(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = bind("127.0.0.1", 0)
        server = await asyncio.start_server(on_connection, sock=listener)
        async with server:
            _, writer = await asyncio.open_connection(*listener.getsockname())
            value = await accepted.get()
            writer.close()
            await writer.wait_closed()
        return value

    assert asyncio.run(nodelay_of_accepted()) != 0


def test_an_address_in_use_is_refused_before_anything_else() -> None:
    first = bind("127.0.0.1", 0)
    first.listen()
    with pytest.raises(OSError, match="in use"):
        bind("127.0.0.1", first.getsockname()[1])
    first.close()
