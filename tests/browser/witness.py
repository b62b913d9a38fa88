"""What a tab did that nobody saw: errors, requests, and the frames of its sockets."""

from __future__ import annotations

import json
import re
from typing import Any

from playwright.sync_api import ConsoleMessage, Error, Page, Request, WebSocket

VIOLATIONS = """
addEventListener('securitypolicyviolation', (event) =>
  console.error(`policy ${event.violatedDirective}: ${event.blockedURI} ${event.sample}`));
"""
LEFT = "WebSocket is closed before the connection is established"
"""Said of a socket that the page leaves for another conversation's: no trouble."""

LOCAL = ("data:", "blob:", "about:")


class Witness:
    """Watches one page from its opening on.

    `troubles` are what must not have happened: errors of scripts, of the console and of the content
    policy, and requests that left the origin. `allow` excuses what a test provokes. `sockets` are
    their addresses, `sent` and `heard` the frames of all of them in order.
    """

    def __init__(self, page: Page, origin: str) -> None:
        self.origin = origin
        self.requests: list[Request] = []
        self.sockets: list[str] = []
        self.sent: list[dict[str, Any]] = []
        self.heard: list[dict[str, Any]] = []
        self._told: list[str] = []
        self._allowed: list[str] = []
        page.add_init_script(VIOLATIONS)
        page.on("console", self._console)
        page.on("pageerror", self._page_error)
        page.on("request", self._request)
        page.on("websocket", self._websocket)

    def allow(self, pattern: str) -> None:
        """Excuse troubles in which this regular expression is found."""
        self._allowed.append(pattern)

    @property
    def troubles(self) -> list[str]:
        """What must not have happened."""
        return [
            said for said in self._told if not any(re.search(each, said) for each in self._allowed)
        ]

    def frames(self, kind: str) -> list[dict[str, Any]]:
        """All frames of a type, sent and heard."""
        return [frame for frame in (*self.sent, *self.heard) if frame.get("type") == kind]

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"} and LEFT not in message.text:
            where = message.location.get("url", "")
            self._told.append(f"console {message.type}: {message.text} ({where})")

    def _page_error(self, error: Error) -> None:
        self._told.append(f"uncaught: {error}")

    def _request(self, request: Request) -> None:
        self.requests.append(request)
        if not request.url.startswith((self.origin + "/", *LOCAL)):
            self._told.append(f"left the origin: {request.method} {request.url}")

    def _websocket(self, socket: WebSocket) -> None:
        self.sockets.append(socket.url)
        if not socket.url.startswith(self.origin.replace("http", "ws", 1) + "/"):
            self._told.append(f"left the origin: {socket.url}")
        socket.on("framesent", lambda data: self.sent.append(json.loads(data)))
        socket.on("framereceived", lambda data: self.heard.append(json.loads(data)))
