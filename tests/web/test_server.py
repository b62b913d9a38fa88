"""The listening socket, and what every connection inherits from it."""

from __future__ import annotations

import asyncio
import errno
import io
import signal
import socket
from unittest import mock

import pytest

from session_server.web import listener as listening
from session_server.web.listener import bind, connection_limits_for, max_readers_for
from session_server.web.server import serve
from tests.web.serving import Served, served


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


def test_without_descriptors_accept_fails_once_and_is_tried_again_later() -> None:
    exhausted = OSError(errno.EMFILE, "too many open files")
    with (
        bind("127.0.0.1", 0) as listener,
        mock.patch.object(socket.socket, "accept", side_effect=exhausted) as accept,
        mock.patch.object(listening.time, "monotonic", return_value=100.0) as now_s,
    ):
        with pytest.raises(OSError, match="too many open files"):
            listener.accept()
        for _ in range(100):
            with pytest.raises(BlockingIOError):
                listener.accept()
        assert accept.call_count == 1
        now_s.return_value = 101.0
        with pytest.raises(OSError, match="too many open files"):
            listener.accept()


def test_the_kernel_holds_many_connections_however_few_are_accepted_at_once() -> None:
    with bind("127.0.0.1", 0) as listener:
        listener.listen(1)
        peers = [socket.create_connection(listener.getsockname(), timeout=5) for _ in range(50)]
        for peer in peers:
            peer.close()


@pytest.mark.parametrize(
    ("descriptors", "readers", "connections", "per_address"),
    [(1 << 20, 10_000, 10_256, 5_128), (1024, 672, 896, 448), (64, 3, 4, 2)],
)
def test_connections_fit_into_the_descriptors_with_room_for_plain_requests(
    descriptors: int, readers: int, connections: int, per_address: int
) -> None:
    assert max_readers_for(10_000, descriptors=descriptors) == readers
    limits = connection_limits_for(
        readers,
        descriptors=descriptors,
        max_per_address=None,
        input_bytes=10 << 20,
        max_message_bytes=1 << 20,
    )
    assert (limits.connections, limits.connections_per_address) == (connections, per_address)
    assert (limits.input_bytes, limits.input_bytes_per_address) == (10 << 20, 5 << 20)


def test_one_message_fits_whatever_the_bounds_are() -> None:
    limits = connection_limits_for(
        1, descriptors=1024, max_per_address=7, input_bytes=1 << 20, max_message_bytes=1 << 20
    )
    assert limits.connections_per_address == 7
    assert limits.input_bytes == limits.input_bytes_per_address == 2 << 20


@served()
async def test_a_third_signal_leaves_no_task_to_be_canceled_with_the_loop(this: Served) -> None:
    def num_lifespans() -> int:
        return sum(task.get_name() == "tick" for task in asyncio.all_tasks())

    before, listener = num_lifespans(), bind("127.0.0.1", 0)
    serving = asyncio.create_task(
        serve(this.app, this.services, listeners=[listener], ready=io.StringIO())
    )
    await this.until(lambda: num_lifespans() > before)
    for _ in range(3):
        signal.raise_signal(signal.SIGINT)
    await serving
    assert num_lifespans() == before
