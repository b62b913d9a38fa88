"""End an HTTP request whose key is taken back while it runs, as if its client had left.

The turn it waits for is canceled or runs on as it would be then. A request that was not answered
yet is answered with 401; a stream ends with an event that says so, lest it look complete.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from session_server.core.errors import Unauthorized
from session_server.protocol.errors import error_body
from session_server.protocol.session_protocol import CloseCode
from session_server.web.authenticator import Authenticator
from session_server.web.event_stream import EVENT_STREAM, error_event
from session_server.web.keys import Credential
from session_server.web.refusals import error_response
from session_server.web.slim_exit_stack import SlimExitStack

REVOCABLE_REQUEST: Final = "session_server.revocable_request"


class RevocableRequests:
    """Give every HTTP request a `RevocableRequest`, as ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve the request, or the beginning of it; an idle socket keeps no frame for that."""
        serve = self._serve if scope["type"] == "http" else self._app
        return serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = RevocableRequest(scope, receive, send)
        scope.setdefault("state", {})[REVOCABLE_REQUEST] = request
        with request.scope, request.resources:
            await self._app(scope, request.receive, request.send)
        await request.finish()


class RevocableRequest:
    """Stand between a route and the connection of its request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._request = scope
        self._receive = receive
        self._send = send
        self._end: asyncio.Future[None] | None = None
        self._has_started = self._is_complete = self._is_stream = False
        self.scope = contextlib.ExitStack()
        self.resources = SlimExitStack()
        """What its route holds while it waits for turns; see `Call.resources`."""

    def begin(self, authenticator: Authenticator, credential: Credential) -> None:
        """Begin to run on a key, until the request ends or the key is taken back."""
        if credential.digest is not None and self._end is None:
            self._end = asyncio.get_running_loop().create_future()
            self.scope.enter_context(authenticator.track(credential, self))

    def end(self, code: CloseCode) -> None:
        """Tell the route that its client has left."""
        if self._end is not None and not self._end.done():
            self._end.set_result(None)

    @property
    def _is_ended(self) -> bool:
        return self._end is not None and self._end.done()

    async def receive(self) -> Message:
        """Return the next message of the client, or that it has left."""
        if self._end is None:
            return await self._receive()
        receiving = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait((receiving, self._end), return_when=asyncio.FIRST_COMPLETED)
            return {"type": "http.disconnect"} if self._end.done() else receiving.result()
        finally:
            receiving.cancel()

    async def send(self, message: Message) -> None:
        """Send a part of the answer, unless the answer is a refusal by now."""
        if self._is_ended and not self._has_started:
            return
        self._has_started = True
        if message["type"] == "http.response.start":
            self._is_stream = EVENT_STREAM in Headers(raw=message["headers"]).get(
                "content-type", ""
            )
        is_body = message["type"] == "http.response.body"
        self._is_complete |= is_body and not message.get("more_body", False)
        if self._is_complete:
            self.resources.close()  # the client may send its next request when it has all of this
        await self._send(message)

    async def finish(self) -> None:
        """Complete the answer to a request that was ended."""
        if not self._is_ended or self._is_complete:
            return
        error = Unauthorized("This key was taken back.")
        if self._has_started:
            told = error_event(error_body(error)) if self._is_stream else b""
            await self._send({"type": "http.response.body", "body": told, "more_body": False})
            return
        await error_response(error)(self._request, self._receive, self._send)


def revocable_request(connection: HTTPConnection) -> RevocableRequest:
    """Return what stands between the route and the connection of its request."""
    request = connection.scope["state"][REVOCABLE_REQUEST]
    assert isinstance(request, RevocableRequest), "`RevocableRequests` set it"
    return request
