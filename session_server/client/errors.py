"""Define the errors of the client."""

from __future__ import annotations


class ClientError(Exception):
    """Serve as the base class of the client errors."""


class BadAddress(ClientError):
    """Report a text that is not the address of a server."""


class UntrustedServer(ClientError):
    """Report a server whose certificate is signed by nobody that the client trusts."""


class ConnectionLost(ClientError):
    """Report that the server cannot be reached or closed the socket for good; `code` is the close
    code."""

    def __init__(self, message: str, *, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class Refused(ClientError):
    """Report an error that the server answered; `code` names it.

    `retry_after_s`: the seconds after which the same can succeed; None where the server does not
    say so. Of `quota_exceeded` it always does.
    """

    def __init__(self, code: str, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
