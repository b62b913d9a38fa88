"""What a client of the native protocol can run into.

ClientError
├── BadAddress       what was given is no address of a server
├── ConnectionLost   the server cannot be reached, or closed the socket for good
└── Refused          the server answered with an error of its table
"""

from __future__ import annotations


class ClientError(Exception):
    """Root of what this module raises."""


class BadAddress(ClientError):
    """What was given is no address of a server."""


class ConnectionLost(ClientError):
    """The server cannot be reached, or closed the socket for good; `code` is the close code."""

    def __init__(self, message: str, *, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class Refused(ClientError):
    """The server answered with an error of its table; `code` names it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
