"""What a socket that says nothing takes, its session included."""

from __future__ import annotations

import asyncio
import gc
import socket
import tracemalloc

from tests.rig.raw_peer import upgrade
from tests.web.serving import Served, served

NUM_SOCKETS = 64
MAX_BYTES = 29 * 1024
"""What Python allocates; the process holds about 2 KiB more (`make load`)."""


@served()
async def test_an_idle_socket_takes_little(this: Served) -> None:
    idle = [await open_socket(this) for _ in range(8)]
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        idle += [await open_socket(this) for _ in range(NUM_SOCKETS)]
        await asyncio.sleep(0)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        for peer in idle:
            peer.close()
    assert (after - before) / NUM_SOCKETS < MAX_BYTES


async def open_socket(this: Served) -> socket.socket:
    peer = socket.socket()
    peer.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(peer, ("127.0.0.1", this.port))
    await loop.sock_sendall(peer, upgrade("new"))
    received = b""
    while b"session.opened" not in received:
        received += await loop.sock_recv(peer, 4096)
    return peer
