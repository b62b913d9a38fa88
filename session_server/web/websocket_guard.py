"""uvicorn's WebSocket protocol that does not wait for a peer that reads nothing."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from session_server.protocol.session_protocol import CloseCode

LINGER_S: Final = 5.0
"""A WebSocket whose peer reads nothing is cut this long after its handler has returned, or after a
ping has found no answer."""


class GuardedWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol that does not wait for a peer that reads nothing."""

    async def send(self, message: Any) -> None:
        """Send to a peer that is still there; a handshake refused with a whole response is
        complete too.

        uvicorn thinks otherwise, and would log an error whenever a client asks for a session that
        is gone; it also goes on writing to a socket that has failed, until it is told.
        """
        if self.transport.is_closing():
            raise ClientDisconnected
        if message["type"] == "websocket.close":
            # Waiting for a peer that takes nothing would mean to go without a word: the code is
            # owed behind the rest, to one that wakes up before it is cut.
            self.writable.set()
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True

    def send_receive_event_to_app(self) -> None:
        """Hand a message on; one that is not UTF-8 closes with 1007.

        uvicorn does the same, and writes an error with a stack into the log: any client could.
        """
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.frames = []
                self.conn.send_close(CloseCode.NOT_TEXT)
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def keepalive_timeout(self) -> None:
        """The peer answers no ping: nothing it is still owed is waited for."""
        super().keepalive_timeout()
        self.loop.call_later(LINGER_S, self.transport.abort)

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        """The handler is done; what the peer has not taken soon is dropped."""
        super().on_task_complete(task)
        self.loop.call_later(LINGER_S, self.transport.abort)
