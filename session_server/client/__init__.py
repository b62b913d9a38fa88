"""Connect to `kvsession.v1`: one session over one WebSocket that reconnects and resumes by itself.

    async with await connect("http://127.0.0.1:30000") as session:
        turn = await session.start("My name is Ada.")
        async for event in turn:
            ...
        result = await turn.result()

A turn's life is its journal's on the server, not the socket's. When the socket is lost the client
connects again with the last sequence number it saw, and the server replays what it missed; turns
whose acceptance was not seen are sent again under the same id, which is an idempotency key. What
was lost for good ends the turn with an error; nothing is skipped silently.

`Refused` and the `error` of a turn's result have `retry_after_s`, the seconds after which the same
can succeed, where a quota is used up. Turns are not tried again by themselves; a connection that
the server refuses for now is, when the server says so.
"""

from __future__ import annotations

from session_server.client.address import key_header, server_address
from session_server.client.errors import (
    BadAddress,
    ClientError,
    ConnectionLost,
    Refused,
    UntrustedServer,
)
from session_server.client.session import ClientOptions, ConnectionState, SessionClient, connect
from session_server.client.turn import (
    TurnEvent,
    TurnHandle,
    TurnPrefill,
    TurnReplaced,
    TurnResult,
    TurnText,
    WireFailure,
)

__all__ = [
    "BadAddress",
    "ClientError",
    "ClientOptions",
    "ConnectionLost",
    "ConnectionState",
    "Refused",
    "SessionClient",
    "TurnEvent",
    "TurnHandle",
    "TurnPrefill",
    "TurnReplaced",
    "TurnResult",
    "TurnText",
    "UntrustedServer",
    "WireFailure",
    "connect",
    "key_header",
    "server_address",
]
