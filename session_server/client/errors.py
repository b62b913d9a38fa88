"""Define the errors of the client."""

from __future__ import annotations


class ClientError(Exception):
    """Serve as the base class of the client errors."""


class BadAddress(ClientError):
    """Report a text that is not the address of a server."""


class ConnectionLost(ClientError):
    """Report that the server cannot be reached or closed the socket for good; `code` is the close
    code."""

    def __init__(self, message: str, *, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class Refused(ClientError):
    """Report an error that the server answered; `code` names it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
