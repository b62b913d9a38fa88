"""A drain says what it does, and ends in time whatever peers do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal

from websockets.exceptions import ConnectionClosed

from session_server.local_server import LocalServer
from tests.rig.echo_server import PROGRAM
from tests.web.wire_client import greeted, turn

LONG = turn(input_ids=[5, 6], sampling={"max_tokens": 480, "ignore_eos": True})
"""Over a second, longer than the drain waits."""

BEGIN = re.compile(r"draining sessions=(\d+) turns=(\d+) waiting=(\d+) sockets=(\d+) deadline_s=1")
END = re.compile(
    r"drained completed=(\d+) cancelled=(\d+) failed=(\d+) sockets_closed=(\d+) unread=(\d+)"
)


def test_the_log_of_a_drain_counts_what_it_finished_canceled_and_closed() -> None:
    lines: list[str] = []
    flags = ["--drain-timeout", "1"]
    with LocalServer(flags, program=PROGRAM, on_line=lines.append) as server:
        asyncio.run(asyncio.wait_for(drained(server), 60))
        assert server.wait() == 0
    told = "\n".join(lines)
    begin, end = BEGIN.search(told), END.search(told)
    assert begin is not None
    assert end is not None, told
    assert begin.groups() == ("3", "2", "0", "3")
    assert end.groups() == ("0", "2", "0", "3", "0")


async def drained(server: LocalServer) -> None:
    """Two endless turns and an idle socket, at SIGTERM."""
    async with contextlib.AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(greeted(server.url)) for _ in range(3)]
        for wire in wires[:2]:
            await wire.send("turn.create", turn_id="t", **LONG)
            await wire.until("turn.delta", "error")
        os.kill(server.pid, signal.SIGTERM)
        for wire in wires:
            with contextlib.suppress(ConnectionClosed):
                while True:
                    await wire.receive()
            kinds = [frame["type"] for frame in wire.frames]
            assert "session.draining" in kinds
            assert ("turn.cancelled" in kinds) == (wire is not wires[2])
            assert wire.socket.close_code == 1012
