"""All sockets together: ended a few at a time."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from session_server.core.owner import ANONYMOUS
from session_server.protocol.session_protocol import CloseCode
from session_server.web.sockets import ENDED_AT_ONCE, Sockets


@pytest.mark.parametrize("num_sockets", [ENDED_AT_ONCE + step for step in (-1, 0, 1)])
def test_sockets_are_ended_in_slices(num_sockets: int) -> None:
    ended: list[CloseCode] = []

    class Socket:
        def end(self, code: CloseCode) -> None:
            ended.append(code)

    async def check() -> None:
        sockets = Sockets(num_sockets)
        with contextlib.ExitStack() as open_now:
            for number in range(num_sockets):
                socket = Socket()
                is_attached = number % 2 == 0
                open_now.enter_context(
                    sockets.attach(ANONYMOUS, str(number), socket)
                    if is_attached
                    else sockets.join(socket)
                )
            ending = asyncio.create_task(sockets.end_all(CloseCode.RESTART))
            await asyncio.sleep(0)
            assert len(ended) == min(num_sockets, ENDED_AT_ONCE)
            await ending
        assert ended == [CloseCode.RESTART] * num_sockets

    asyncio.run(check())
